# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parts of type ``thinking`` become what a template writes for them, or reasoning in a field."""

import pytest

from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.messages import check_messages
from energon_ext.chats.records import Conversation, read_conversation
from energon_ext.errors import SampleError
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.chats.conversations import answer, user
from tests.chats.test_answers import pieces, template_of

#: Writes parts, as Mistral's reasoning models do, in system messages and answers.
PARTS = (
    "{% for m in messages %}"
    "{{ '[INST]' if m.role == 'user' else '[SYS]' if m.role == 'system' }}"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}"
    "{% else %}{{ '[THINK]' + part.thinking + '[/THINK]' }}{% endif %}{% endfor %}{% endif %}"
    "{{ '[/INST]' if m.role == 'user' else '[/SYS]' if m.role == 'system' else '</s>' }}"
    "{% endfor %}"
)


def thought(text):
    return {"type": "thinking", "thinking": text}


def said(text):
    return {"type": "text", "text": text}


QUESTION = user("Is 91 prime?")


@pytest.mark.parametrize(
    "first", [thought("7 times 13."), {**thought([said("7 times "), said("13.")]), "closed": True}]
)
def test_a_template_that_reads_parts_gets_their_text_with_its_tags(first):
    conversation = [
        {"role": "system", "content": [said("Think: "), thought("Here."), said(" Then say.")]},
        QUESTION,
        answer([first, said("No.")]),
    ]
    prompt = "[SYS]Think: [THINK]Here.[/THINK] Then say.[/SYS][INST]Is 91 prime?[/INST]"
    trained = "[THINK]7 times 13.[/THINK]No.</s>"
    assert pieces(PARTS, {"messages": conversation}) == [[(prompt, 0), (trained, 1)]]
    assert (
        template_of(PARTS).render(
            [*conversation[:2], answer([thought("7 times 13."), said("No.")])]
        )
        == prompt + trained
    )


def test_thoughts_in_several_answers_and_places_stay_there():
    messages = [
        QUESTION,
        answer([thought("7 times 13."), said("No."), thought("Sure?"), said(" Sure.")]),
        user("And 97?"),
        answer([said("Yes."), thought("It is.")]),
    ]
    assert pieces(PARTS, {"messages": messages}) == [
        [
            ("[INST]Is 91 prime?[/INST]", 0),
            ("[THINK]7 times 13.[/THINK]No.[THINK]Sure?[/THINK] Sure.</s>", 1),
            ("[INST]And 97?[/INST]", 0),
            ("Yes.[THINK]It is.[/THINK]</s>", 1),
        ]
    ]


def test_the_field_is_the_one_that_the_template_reads():
    template = (
        "{% for m in messages %}{{ m.role }}: {% if m.thinking %}({{ m.thinking }}) {% endif %}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{{ part.text if part.type == 'text' else part | tojson }}{% endfor %}{% endif %}<end>"
        "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    messages = [QUESTION, answer([thought("7 times 13."), said("No.")])]
    ((_, (trained, _)),) = pieces(template, {"messages": messages})
    assert trained == "(7 times 13.) No.<end>"


@pytest.mark.parametrize("template", ["Qwen 3", "Magistral", "QwQ"])
def test_any_other_template_gets_the_reasoning_before_an_answer_in_its_field(template):
    parts = answer([thought("7 times 13."), said("No"), said(".")])
    field = answer("No.", reasoning_content="7 times 13.")
    found = pieces(template, {"messages": [QUESTION, parts]})
    assert found == pieces(template, {"messages": [QUESTION, field]})
    assert "7 times 13." in found[0][1][0]


@pytest.mark.parametrize(
    "template",
    ["ChatML", "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"],
    ids=["adds texts", "prints a list as Python does"],
)
def test_a_template_without_reasoning_gets_it_as_from_its_field(template):
    found = pieces(
        template, {"messages": [QUESTION, answer([thought("7 times 13."), said("No.")])]}
    )
    field = answer("No.", reasoning_content="7 times 13.")
    assert found == pieces(template, {"messages": [QUESTION, field]})
    assert "<think>\n7 times 13.\n</think>\n\nNo." in found[0][1][0]


@pytest.mark.parametrize(
    ("message", "role"),
    [
        (answer([said("No."), thought("7 times 13.")]), "assistant"),
        (answer([thought("7."), said("No."), thought("13.")]), "assistant"),
        (answer([thought("7."), said("No.")], reasoning="13."), "assistant"),
        ({"role": "system", "content": [thought("Here."), said("Then.")]}, "system"),
    ],
)
def test_thoughts_elsewhere_need_a_template_that_reads_them(message, role):
    messages = [message, QUESTION, answer("No.")] if role == "system" else [QUESTION, message]
    refusal = f"given as parts of type 'thinking' of role {role}; use a template that does, or make"
    with pytest.raises(SampleError, match=refusal):
        pieces("Qwen 3", {"messages": messages})


def test_a_prompt_for_sampling_has_the_thoughts_of_earlier_answers():
    messages = [QUESTION, answer([thought("7 times 13."), said("No.")]), user("And 97?")]
    encoder = ConversationEncoder(ByteTokenizer(), template_of(PARTS))
    tokens = encoder.encode_prompt(Conversation(messages))
    text = "[INST]Is 91 prime?[/INST][THINK]7 times 13.[/THINK]No.</s>[INST]And 97?[/INST]"
    assert ByteTokenizer().decode(tokens) == text


@pytest.mark.parametrize("part", [thought(7), thought([thought(7)]), thought(None), thought(["a"])])
def test_a_thought_without_text_is_refused(part):
    record = {"messages": [QUESTION, answer([part, said("No.")])]}
    with pytest.raises(SampleError, match="message 1: `content` has a part of type"):
        check_messages(read_conversation(record).messages)
