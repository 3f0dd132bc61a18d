# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reasoning in the words of a family of one's own: its tags, its field, its switch."""

import pytest

from energon_ext.errors import SampleError
from tests.chats.conversations import answer, user
from tests.chats.test_answers import encode, pieces

QUESTION = user("3*7?")
PLAIN = answer("Heron.")
REASONED = answer("21.", reasoning_content="Three sevens.")


def family(opening, closing, *, field="reasoning_content", prompt="", empty=""):
    """Return a template that writes a block in an answer, and one at the end of a prompt.

    Args:
        prompt: the end of a prompt, after the header.
        empty: what stands before an answer without reasoning.
    """
    return (
        "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.role == 'assistant' %}"
        f"{{% if m.{field} %}}{opening}{{{{ m.{field} }}}}{closing}\n{{% else %}}{empty}"
        "{% endif %}{% endif %}{{ m.content }}<|/turn|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n" + prompt + "{% endif %}"
    )


def trained(template, *messages, **record):
    """Return the trained texts of each sample of a conversation."""
    found = pieces(template, {"messages": [QUESTION, *messages], **record})
    return [[text for text, weight in sample if weight] for sample in found]


TAGS = pytest.mark.parametrize(
    ("opening", "closing"),
    [
        ("<|reason|>\n", "<|/reason|>"),
        ("<scratchpad>\n", "</scratchpad>"),
        ("[PLAN]\n", "[/PLAN]"),
        ("Thoughts:\n", "\nReply:"),
        ("<think>\n", "</think>"),
    ],
)


@TAGS
def test_an_answer_without_reasoning_is_asked_for_none_whatever_the_tags(opening, closing):
    off = f"{{% if reflect is defined and not reflect %}}{closing}\n{{% endif %}}"
    text = family(opening, closing, prompt=opening + off, empty=f"{opening}{closing}\n")
    assert trained(text, REASONED) == [[f"Three sevens.{closing}\n21.<|/turn|>"]]
    found = encode(text, {"messages": [QUESTION, PLAIN]})
    assert found.notes["answers without reasoning, prompted with reflect false"] == 1
    assert trained(text, PLAIN) == [["Heron.<|/turn|>"]]


@TAGS
def test_without_a_switch_an_open_block_is_not_trained_to_end_at_once(opening, closing):
    text = family(opening, closing, prompt=opening, empty=f"{opening}{closing}\n")
    assert trained(text, REASONED) == [[f"Three sevens.{closing}\n21.<|/turn|>"]]
    with pytest.raises(SampleError, match="the generation prompt opens a block of it"):
        trained(text, PLAIN)


@pytest.mark.parametrize("opening", ["<|assistant|>", "Assistant:\n"])
def test_the_header_of_every_answer_is_no_tag_of_reasoning(opening):
    text = (
        "{% for m in messages %}{% if m.role == 'user' %}<|user|>{{ m.content }}{% else %}"
        + opening
        + "{% if m.thinking %}{{ m.thinking }}<|final|>{% endif %}{{ m.content }}<|end|>{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}" + opening + "{% endif %}"
    )
    assert trained(text, PLAIN) == [["Heron.<|end|>"]]
    assert trained(text, REASONED) == [["Three sevens.<|final|>21.<|end|>"]]


@pytest.mark.parametrize("field", ["reflection", "thoughts", "reasoning_trace"])
def test_reasoning_goes_into_the_field_that_the_template_reads(field):
    text = family("<|reason|>", "<|/reason|>", field=field)
    assert trained(text, REASONED) == [["<|reason|>Three sevens.<|/reason|>\n21.<|/turn|>"]]
    found = encode(text, {"messages": [QUESTION, REASONED]})
    assert found.notes[f"`reasoning_content` of answers, written as `{field}`"] == 1


def test_a_field_that_is_written_under_a_condition_only_is_named():
    text = family("<r>", "</r>", field="reflection").replace(
        "{% if m.reflection %}", "{% if m.reflection and m.level == 9 %}"
    )
    with pytest.raises(SampleError, match="as the template reads it, perhaps as reflection"):
        trained(text, REASONED)


PLAIN_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def test_two_names_of_one_text_are_written_once():
    both = {**REASONED, "reasoning": REASONED["reasoning_content"]}
    assert trained(PLAIN_TEMPLATE, both) == [["<think>\nThree sevens.\n</think>\n\n21.</s>"]]


def test_reasoning_that_the_content_has_already_is_not_written_twice():
    both = answer("<think>\nThree sevens.\n</think>\n\n21.", reasoning_content="Three sevens.")
    assert trained(PLAIN_TEMPLATE, both) == [["<think>\nThree sevens.\n</think>\n\n21.</s>"]]
    assert trained(family("<r>", "</r>"), both) == [["<r>Three sevens.</r>\n21.<|/turn|>"]]
    found = encode(family("<r>", "</r>"), {"messages": [QUESTION, both]})
    assert found.notes["reasoning that the content of an answer repeats, written once"] == 1
    other = answer("<think>\nMore.\n</think>\n\n21.", reasoning_content="Three sevens.")
    assert "Three sevens." in trained(PLAIN_TEMPLATE, other)[0][0]


OPEN = family(
    "<think>\n",
    "</think>",
    prompt="<think>\n{% if think is defined and not think %}</think>\n{% endif %}",
    empty="<think>\n</think>\n",
)


def test_tags_that_an_answer_mentions_are_no_reasoning():
    between = answer("Use <think>...</think> around it.")
    assert trained(OPEN, between) == [["Use <think>...</think> around it.<|/turn|>"]]
    found = encode(OPEN, {"messages": [QUESTION, between]})
    assert found.notes["answers without reasoning, prompted with think false"] == 1


def test_a_content_that_ends_reasoning_without_beginning_it_is_counted():
    found = encode(PLAIN_OPEN, {"messages": [QUESTION, answer("A sum.</think>21.")]})
    assert found.notes["contents taken as reasoning up to </think>, without a beginning"] == 1


PLAIN_OPEN = PLAIN_TEMPLATE.replace("<assistant>{% endif", "<assistant><think>\n{% endif")


def test_an_answer_without_content_is_counted():
    found = encode(PLAIN_TEMPLATE, {"messages": [QUESTION, answer("")]})
    assert found.notes["answers without content, of which only the end is trained"] == 1
    assert trained(PLAIN_TEMPLATE, answer("")) == [["</s>"]]


def test_an_empty_block_in_place_of_earlier_reasoning_gives_one_sample_per_answer():
    """The prompt of the next answer has the tags of a block, which are not of the answer before."""
    text = OPEN.replace(
        "{% if m.reasoning_content %}", "{% if m.reasoning_content and loop.last %}"
    )
    again = answer("25.", reasoning_content="Add four.")
    assert trained(text, REASONED, user("Plus 4?"), again) == [
        ["Three sevens.</think>\n21.<|/turn|>"],
        ["Add four.</think>\n25.<|/turn|>"],
    ]


def test_a_developer_is_the_system_where_the_template_rejects_the_role():
    text = PLAIN_TEMPLATE.replace(
        "<{{ m.role }}>",
        "{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('role') }}"
        "{% endif %}<{{ m.role }}>",
    )
    record = {"messages": [{"role": "developer", "content": "Be brief."}, QUESTION, PLAIN]}
    assert pieces(text, record)[0][0][0].startswith("<system>Be brief.</s>")


# Tools and calls in both forms --------------------------------------------------------------------

FUNCTION = {
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
}
CALL = {"name": "add", "arguments": {"a": 1}}


def calls(inner):
    """Return a template that reads calls and tools within ``function``, or as they are."""
    place = ".function" if inner else ""
    return (
        "{% if tools %}{% for t in tools %}<tool>{{ t" + place + ".name }}: {{ t" + place
        + ".description }} {{ t" + place + ".parameters | tojson }}</s>{% endfor %}{% endif %}"
        + PLAIN_TEMPLATE.replace(
            "{{ m.content }}",
            "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c" + place + ".name }}"
            "{{ c" + place + ".arguments | tojson }}{% endfor %}",
        )
    )  # fmt: skip


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("given", [True, False])
def test_tools_and_calls_are_written_with_and_without_the_object_around_them(inner, given):
    tool = {"type": "function", "function": FUNCTION} if given else FUNCTION
    call = {"type": "function", "function": CALL} if given else CALL
    messages = answer("", tool_calls=[call])
    assert trained(calls(inner), messages, tools=[tool]) == [['add{"a": 1}</s>']]
    prompt = pieces(calls(inner), {"messages": [QUESTION, messages], "tools": [tool]})[0][0][0]
    assert prompt.startswith("<tool>add: Adds. {") and '"properties"' in prompt
