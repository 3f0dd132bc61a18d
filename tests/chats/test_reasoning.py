# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A prompt asks for reasoning just if its answer has some, however a template is asked for it."""

import pytest

from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.records import read_conversation
from energon_ext.errors import SampleError
from tests.chats.conversations import TOOLS, answer, call, result, user
from tests.chats.refusals import TEMPLATES
from tests.chats.test_answers import BYTES, encode, pieces, template_of

QUESTION = user("Is 91 prime?")
PLAIN = answer("No.")
REASONED = answer("No.", reasoning_content="7 times 13.")
INLINE = answer("<think>\n7 times 13.\n</think>\n\nNo.")


def opening(prompt, answers, begin=""):
    """Return a template that writes questions as <user>..., and answers by a text for ``m``."""
    return (
        begin + "{% for m in messages %}{% if m.role == 'assistant' %}" + answers + "{% else %}"
        "<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<bot>" + prompt + "{% endif %}"
    )


#: How templates decide that a prompt opens a block, or has one that is closed or its end alone.
SWITCHES = {
    "enable_thinking": (
        "<think>{% if enable_thinking is defined and not enable_thinking %}</think>{% endif %}",
        "enable_thinking false",
    ),
    "reasoning": (
        "<think>{% if reasoning is defined and not reasoning %}</think>{% endif %}",
        "reasoning false",
    ),
    "reasoning_effort": (
        "<think>{% if reasoning_effort == 'none' %}</think>{% endif %}",
        "reasoning_effort none",
    ),
    "a value of its own": (
        "<think>{% if effort == 'no_think' %}</think>{% endif %}",
        "effort no_think",
    ),
    "the end alone": (
        "{% if thinking is defined and not thinking %}</think>{% else %}<think>{% endif %}",
        "thinking false",
    ),
    "a command": (
        "<think>{% if messages[0].content == '/no_think' %}</think>{% endif %}",
        "/no_think in the system message",
    ),
}


@pytest.mark.parametrize("name", SWITCHES)
def test_an_answer_without_reasoning_is_prompted_by_what_asks_for_none(name):
    prompt, switch = SWITCHES[name]
    found = encode(opening(prompt, "<bot>{{ m.content }}</s>"), {"messages": [QUESTION, PLAIN]})
    assert found.notes[f"answers without reasoning, prompted with {switch}"] == 1
    (sample,) = pieces(opening(prompt, "<bot>{{ m.content }}</s>"), {"messages": [QUESTION, PLAIN]})
    system = "<system>/no_think" if name == "a command" else ""
    block = "</think>" if name == "the end alone" else "<think></think>"
    assert sample == [(f"{system}<user>Is 91 prime?<bot>{block}", 0), ("No.</s>", 1)]


@pytest.mark.parametrize(
    "prompt",
    [
        "{% if thinking %}<think>{% else %}</think>{% endif %}",
        "<think>{% if not reasoning_effort or reasoning_effort == 'low' %}</think>{% endif %}",
    ],
)
@pytest.mark.parametrize("said", [REASONED, INLINE], ids=["field", "content"])
def test_an_answer_with_reasoning_is_prompted_by_what_asks_for_it(prompt, said):
    """DeepSeek V3.1 and later, Hunyuan: the content is written after the end of the block."""
    answers = "<bot></think>{{ m.content.split('</think>')[-1].strip() }}</s>"
    (sample,) = pieces(opening(prompt, answers), {"messages": [QUESTION, said]})
    between = "\n</think>\n\n" if said is INLINE else "</think>"
    assert sample == [("<user>Is 91 prime?<bot><think>", 0), (f"7 times 13.{between}No.</s>", 1)]


def test_what_the_user_asks_for_is_not_changed():
    prompt, _ = SWITCHES["enable_thinking"]
    template = opening(prompt, "<bot>{{ m.content }}</s>")
    for variables, said, reason in (
        ({"enable_thinking": True}, PLAIN, "has no reasoning, but the generation prompt opens"),
        ({"enable_thinking": False}, INLINE, "has reasoning, but the generation prompt closes"),
    ):
        record = {"messages": [QUESTION, said], "chat_template_kwargs": variables}
        with pytest.raises(SampleError, match=f"message 1 {reason}"):
            encode(template, record)
        encoder = ConversationEncoder(BYTES, template_of(template, template_kwargs=variables))
        (found,) = encoder.encode([read_conversation({"messages": [QUESTION, said]})])
        assert reason in str(found)


def test_an_answer_without_reasoning_is_refused_if_nothing_asks_for_none():
    template = opening("<think>\n", "<bot>{{ m.content }}</s>")
    with pytest.raises(SampleError, match="no reasoning, but .* use a template that opens none"):
        encode(template, {"messages": [QUESTION, PLAIN]})


def test_reasoning_in_some_answers_only_is_prompted_apart():
    prompt, switch = SWITCHES["enable_thinking"]
    template = opening(
        prompt,
        "<bot>{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}{{ m.content }}</s>",
    )
    messages = [QUESTION, PLAIN, user("And 97?"), answer("Yes.", reasoning_content="No factor.")]
    first, second = pieces(template, {"messages": messages})
    assert first == [("<user>Is 91 prime?<bot><think></think>", 0), ("No.</s>", 1)]
    assert second == [
        ("<user>Is 91 prime?<bot>No.</s><user>And 97?<bot><think>", 0),
        ("No factor.</think>Yes.</s>", 1),
    ]
    assert (
        encode(template, {"messages": messages}).notes[
            f"answers without reasoning, prompted with {switch}"
        ]
        == 1
    )


def test_a_block_that_prompt_and_content_open_is_opened_once():
    """Nemotron Nano v2: the last answer is written after the prompt, as it is."""
    template = opening(
        "<think>\n", "<bot>{% if loop.last %}<think>\n{% endif %}{{ m.content }}</s>"
    )
    expected = [("<user>Is 91 prime?<bot><think>\n", 0), ("7 times 13.\n</think>\n\nNo.</s>", 1)]
    for said in (INLINE, REASONED):
        assert pieces(template, {"messages": [QUESTION, said]}) == [expected]


@pytest.mark.parametrize("end", ["\n</think>\n\n", "</think>"])
def test_an_empty_block_is_not_trained_after_a_prompt_that_opens_one(end):
    """Qwen 3.6, Ling and Laguna write an empty block before an answer without reasoning."""
    template = opening(
        "<think>{% if enable_thinking is defined and not enable_thinking %}" + end + "{% endif %}",
        "<bot><think>" + end + "{{ m.content }}</s>",
    ).replace("%}\n", "%}{{ '\\n' }}")
    (sample,) = pieces(template, {"messages": [QUESTION, PLAIN]})
    assert sample == [(f"<user>Is 91 prime?<bot><think>{end}", 0), ("No.</s>", 1)]


def test_two_newlines_of_an_empty_block_are_the_tokens_of_transformers(tokenized):
    tokenizer = tokenized("tiktoken")
    template = tokenizer.template(TEMPLATES["Qwen 3.5"])
    encoder = ConversationEncoder(tokenizer.ours, template)
    (found,) = encoder.encode([read_conversation({"messages": [QUESTION, PLAIN]})])
    theirs = tokenizer.theirs.apply_chat_template(
        [QUESTION, PLAIN], chat_template=TEMPLATES["Qwen 3.5"], return_dict=False
    )
    ((tokens, weights),) = found.samples
    assert tokens.tolist() == theirs
    assert tokenizer.theirs.convert_tokens_to_ids("ĊĊ") in theirs
    assert tokenizer.theirs.decode(tokens[weights > 0]) == "No.<|im_end|>\n"


def test_a_command_that_the_template_obeys_need_not_be_written():
    template = opening(
        "<think>{% if '/no_think' in messages[0].content %}</think>{% endif %}",
        "<bot>{{ m.content }}</s>",
    ).replace("{{ m.content }}{% endif %}", "{{ m.content.replace('/no_think', '') }}{% endif %}")
    for rules, shown in (("/no_think", ""), ("Be brief. /no_think", "Be brief. ")):
        messages = [{"role": "system", "content": rules}, QUESTION, PLAIN]
        assert pieces(template, {"messages": messages}) == [
            [(f"<system>{shown}<user>Is 91 prime?<bot><think></think>", 0), ("No.</s>", 1)]
        ]


# What is trained ----------------------------------------------------------------------------------


def test_reasoning_that_tags_leave_out_of_an_earlier_answer_is_trained_in_a_sample_of_its_own():
    """LFM 2.5: the template drops the reasoning of answers before the last question."""
    template = (
        "{% set found = namespace(asked=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set found.asked = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
        "<{{ m.role }}>{% if m.role == 'assistant' %}{% generation %}{% if m.reasoning_content and "
        "loop.index0 > found.asked %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}</s>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    messages = [QUESTION, REASONED, user("And 97?"), answer("Yes.", reasoning_content="No factor.")]
    trained = [
        [text for text, weight in sample if weight]
        for sample in pieces(template, {"messages": messages})
    ]
    assert trained == [
        ["<think>7 times 13.</think>No.</s>"],
        ["<think>No factor.</think>Yes.</s>"],
    ]
    messages = [QUESTION, PLAIN, user("And 97?"), answer("Yes.")]
    assert len(pieces(template, {"messages": messages})) == 1


@pytest.mark.parametrize("asked", ["<start>", ""])
@pytest.mark.parametrize("question_end", ["</s>", "</q>"])
def test_a_part_of_the_next_prompt_that_nobody_asked_for_is_refused(asked, question_end):
    """Command A: the header of the next answer is always written, its first tag if asked for."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<turn><bot><start>{{ m.content }}"
        "</end></s>{% else %}<turn><user>{{ m.content }}" + question_end + "{% endif %}{% endfor %}"
        "<turn><bot>{% if add_generation_prompt %}" + asked + "{% endif %}"
    )
    greeting = answer("Welcome.", weight=0)
    for messages in ([QUESTION, PLAIN], [greeting, QUESTION, PLAIN]):
        with pytest.raises(SampleError, match="writes the next generation prompt, or a part of it"):
            encode(template, {"messages": messages})


# Forms --------------------------------------------------------------------------------------------

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}" + (
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_reasoning_goes_into_the_content_if_the_template_knows_none():
    (sample,) = pieces(CHATML, {"messages": [QUESTION, REASONED]})
    assert sample == [
        ("<user>Is 91 prime?</s><assistant>", 0),
        ("<think>\n7 times 13.\n</think>\n\nNo.</s>", 1),
    ]
    note = "`reasoning_content` of answers, written as <think> in their content"
    assert encode(CHATML, {"messages": [QUESTION, REASONED]}).notes[note] == 1


def test_reasoning_goes_under_the_name_that_the_template_reads():
    template = CHATML.replace("{{ m.content }}", "{{ m.reasoning }}|{{ m.content }}")
    found = encode(template, {"messages": [QUESTION, REASONED]})
    assert found.notes["`reasoning_content` of answers, written as `reasoning`"] == 1
    (sample,) = pieces(template, {"messages": [QUESTION, REASONED]})
    assert sample[-1] == ("7 times 13.|No.</s>", 1)


def test_reasoning_is_refused_if_the_template_writes_it_under_a_condition_that_is_not_met():
    template = CHATML.replace(
        "{{ m.content }}", "{% if show %}{{ m.reasoning_content }}{% endif %}{{ m.content }}"
    )
    with pytest.raises(SampleError, match="does not write `reasoning_content` of role assistant"):
        encode(template, {"messages": [QUESTION, REASONED]})


def test_reasoning_is_refused_if_the_template_drops_it_from_the_content():
    template = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    with pytest.raises(SampleError, match="does not write `reasoning_content` of role assistant"):
        encode(template, {"messages": [QUESTION, REASONED]})


def test_two_different_texts_of_reasoning_are_not_merged():
    said = {**REASONED, "thinking": "Another text."}
    with pytest.raises(SampleError, match="does not write"):
        encode(CHATML, {"messages": [QUESTION, said]})


def test_a_developer_is_written_as_the_system_if_the_template_knows_none():
    template = CHATML.replace(
        "<{{ m.role }}>{{ m.content }}</s>",
        "{% if m.role != 'developer' %}<{{ m.role }}>{{ m.content }}</s>{% endif %}",
    )
    record = {"messages": [{"role": "developer", "content": "Rules."}, QUESTION, PLAIN]}
    assert pieces(template, record)[0][0][0].startswith("<system>Rules.</s><user>")
    note = "messages of role developer, written as those of role system"
    assert encode(template, record).notes[note] == 1
    assert pieces(CHATML, record)[0][0][0].startswith("<developer>Rules.</s>")


def test_a_result_of_a_function_is_written_as_that_of_a_tool_if_the_template_knows_none():
    template = CHATML.replace(
        "<{{ m.role }}>{{ m.content }}</s>",
        "{% if m.role != 'function' %}<{{ m.role }}>{{ m.content }}</s>{% endif %}",
    )
    record = {"messages": [QUESTION, {"role": "function", "name": "f", "content": "13"}, PLAIN]}
    assert "<tool>13</s>" in pieces(template, record)[0][0][0]
    note = "messages of role function, written as those of role tool"
    assert encode(template, record).notes[note] == 1
    assert "<function>13</s>" in pieces(CHATML, record)[0][0][0]


def test_contents_are_given_as_parts_to_a_template_that_reads_nothing_else():
    """Idefics 3 and SmolVLM."""
    template = CHATML.replace(
        "{{ m.content }}",
        "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}",
    )
    rules = {"role": "system", "content": "Rules."}
    assert pieces(template, {"messages": [rules, QUESTION, PLAIN]}) == [
        [("<system>Rules.</s><user>Is 91 prime?</s><assistant>", 0), ("No.</s>", 1)]
    ]


def test_reasoning_before_a_call_of_a_template_that_writes_no_content_there_is_refused():
    messages = [
        user("Ring."),
        answer("", reasoning_content="They ask.", tool_calls=[call("ring_bell", {"times": 1})]),
        result("done"),
        PLAIN,
    ]
    with pytest.raises(SampleError, match="does not write `reasoning_content`"):
        encode("Llama 3.1", {"messages": messages, "tools": TOOLS})


def test_a_greeting_that_a_template_rejects_alone_does_not_refuse_the_conversation():
    template = (
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ raise_exception('no question') }}{% endif %}" + CHATML
    )
    messages = [answer("Welcome.", weight=0), QUESTION, PLAIN]
    assert pieces(template, {"messages": messages}) == [
        [("<assistant>Welcome.</s><user>Is 91 prime?</s><assistant>", 0), ("No.</s>", 1)]
    ]
