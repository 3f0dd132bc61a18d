# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where answers begin and end, with texts worked out by hand."""

import itertools
from types import SimpleNamespace

import pytest

from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.reasoning import block_at_end
from energon_ext.chats.records import read_conversation
from energon_ext.chats.templates import HFChatTemplate, PlainChatTemplate
from energon_ext.errors import SampleError
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.chats.conversations import CONVERSATIONS, TOOLS, answer, call, user
from tests.chats.refusals import TEMPLATES

BYTES = ByteTokenizer()


def template_of(text, **options):
    owner = SimpleNamespace(
        chat_template=None, special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"}
    )
    return HFChatTemplate(owner, template=text, **options)


def encode(template, record, **options):
    """Encode one record with one of the templates, or with the text of one."""
    encoder = ConversationEncoder(BYTES, template_of(TEMPLATES.get(template, template)), **options)
    (found,) = encoder.encode([read_conversation(record)])
    if isinstance(found, SampleError):
        raise found
    return found


def pieces(template, record, **options):
    """Return for each sample its text in pieces of equal weight: [(text, weight)]."""
    return [
        [
            (BYTES.decode([token for token, _ in run]), weight)
            for weight, run in itertools.groupby(
                zip(tokens.tolist(), weights.tolist()), key=lambda pair: pair[1]
            )
        ]
        for tokens, weights in encode(template, record, **options).samples
    ]


def test_an_answer_is_trained_from_the_end_of_its_prompt_with_its_weight():
    assert pieces("ChatML", CONVERSATIONS["weights"]) == [
        [
            (
                "<|im_start|>user\nFirst?<|im_end|>\n<|im_start|>assistant\n"
                "Never trained.<|im_end|>"
                "\n<|im_start|>user\nSecond?<|im_end|>\n<|im_start|>assistant\n",
                0,
            ),
            ("Half as much.<|im_end|>\n", 0.5),
            ("<|im_start|>user\nThird?<|im_end|>\n<|im_start|>assistant\n", 0),
            ("In full.<|im_end|>\n", 1),
        ]
    ]


def test_answers_without_weight_after_the_last_trained_one_are_kept_and_not_trained():
    assert pieces("ChatML", CONVERSATIONS["weight 0 at the end"]) == [
        [
            ("<|im_start|>user\nFirst?<|im_end|>\n<|im_start|>assistant\n", 0),
            ("Trained.<|im_end|>\n", 1),
            (
                "<|im_start|>user\nSecond?<|im_end|>\n<|im_start|>assistant\n"
                "Not trained.<|im_end|>\n",
                0,
            ),
        ]
    ]
    found = encode("ChatML", CONVERSATIONS["weight 0 at the end"])
    assert found.notes["messages after the last answer, left out"] == 1


TWO = {"messages": [user("a?"), answer("A"), user("b?"), answer("B")]}


@pytest.mark.parametrize(
    ("choice", "trained"),
    [
        (None, [["A\n", "B\n"]]),
        ("all", [["A\n", "B\n"]]),
        ("last", [["B\n"]]),
        ("each", [["A\n"], ["B\n"]]),
    ],
)
def test_the_choice_of_answers_decides_what_is_a_sample(choice, trained):
    found = pieces(
        "{% for m in messages %}{{ m.role }}:{{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
        TWO,
        answers=choice,
    )
    assert [[text for text, weight in sample if weight] for sample in found] == trained


def test_a_template_that_rewrites_earlier_answers_gives_one_sample_per_answer():
    first, second = pieces("Qwen 3", CONVERSATIONS["reasoning in two turns"])
    assert first == [
        ("<|im_start|>user\nIs 91 prime?<|im_end|>\n<|im_start|>assistant\n", 0),
        ("<think>\n7 times 13 is 91.\n</think>\n\nNo.<|im_end|>\n", 1),
    ]
    assert second == [
        (
            "<|im_start|>user\nIs 91 prime?<|im_end|>\n<|im_start|>assistant\nNo.<|im_end|>\n"
            "<|im_start|>user\nAnd 97?<|im_end|>\n<|im_start|>assistant\n",
            0,
        ),
        ("<think>\nNot by 2, 3, 5 or 7.\nSo it is.\n</think>\n\nYes.<|im_end|>\n", 1),
    ]
    found = encode("Qwen 3", CONVERSATIONS["reasoning in two turns"])
    assert found.notes["conversations with one sample per answer, since the template rewrites"] == 1
    assert found.notes["earlier `reasoning_content` of role assistant, dropped or changed"] == 1
    with pytest.raises(SampleError, match="rewrites earlier text.* use answers='each'"):
        encode("Qwen 3", CONVERSATIONS["reasoning in two turns"], answers="all")


def test_earlier_reasoning_that_disappears_once_the_answer_follows_stays_in_its_prompt():
    """A server that continues the tool calls of one turn has shown it, as in gpt-oss."""
    samples = pieces("gpt-oss", CONVERSATIONS["reasoning before a call"])
    *_, prompt, trained = [text for text, _ in samples[-1]]
    assert len(samples) == 3 and prompt.endswith(
        "<|start|>assistant<|channel|>analysis<|message|>It is high.<|end|>"
        '<|start|>assistant to=functions.ring_bell<|channel|>commentary<|message|>{"times": 1}'
        "<|call|>"
        "<|start|>functions to=assistant<|message|>done<|end|><|start|>assistant"
    )
    assert trained == (
        "<|channel|>analysis<|message|>All is done.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>I rang once.<|return|>"
    )


# Prompts that open a block of reasoning -----------------------------------------------------------

ASKED = "<|im_start|>user\nIs 91 prime?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "fields",
    [
        {"content": "No.", "reasoning_content": "7 times 13."},
        {"content": "\n\nNo.", "reasoning_content": "\n7 times 13.\n"},
        {"content": "<think>\n7 times 13.\n</think>\n\nNo."},
        {"content": "7 times 13.\n</think>\n\nNo."},
        {"content": "No.", "reasoning": "7 times 13.", "reasoning_content": "7 times 13."},
    ],
)
def test_reasoning_fills_the_block_that_a_prompt_opens(fields):
    record = {"messages": [user("Is 91 prime?"), {"role": "assistant", **fields}]}
    expected = [(f"{ASKED}<think>\n", 0), ("7 times 13.\n</think>\n\nNo.<|im_end|>\n", 1)]
    assert pieces("QwQ", record) == [expected]


def test_white_space_of_reasoning_and_answer_is_kept():
    record = {"messages": [user("Is 91 prime?"), answer("  No.", reasoning_content="  indent")]}
    assert pieces("QwQ", record)[0][1][0] == "  indent\n</think>\n\n  No.<|im_end|>\n"
    record = {"messages": [user("Is 91 prime?"), answer("<think> so</think>  No.")]}
    assert pieces("QwQ", record)[0][1][0] == " so</think>  No.<|im_end|>\n"


def test_reasoning_before_a_call_fills_the_block():
    messages = [
        user("Ring."),
        answer("", reasoning_content="Ring it.", tool_calls=[call("ring_bell", {"times": 1})]),
    ]
    (_, trained) = pieces("QwQ", {"messages": messages, "tools": TOOLS})[0]
    assert trained == (
        'Ring it.\n</think>\n\n<tool_call>\n{"name": "ring_bell", "arguments": {"times": 1}}\n'
        "</tool_call><|im_end|>\n",
        1,
    )


@pytest.mark.parametrize(
    ("template", "block"),
    [("Qwen 3.5", "<think>\n\n</think>\n\n"), ("Nemotron", "<think></think>")],
)
def test_an_answer_without_reasoning_follows_a_prompt_without_thinking(template, block):
    record = {"messages": [user("Is 91 prime?"), answer("No.")]}
    assert pieces(template, record) == [[(ASKED + block, 0), ("No.<|im_end|>\n", 1)]]
    note = "answers without reasoning, prompted with enable_thinking false"
    assert encode(template, record).notes[note] == 1


def test_an_answer_follows_a_closed_block_that_the_template_does_not_repeat():
    messages = [user("Is 91 prime?"), answer("No.")]
    record = {"messages": messages, "chat_template_kwargs": {"enable_thinking": False}}
    for template, block in (("SmolLM3", "<think>\n\n</think>\n"), ("Nemotron", "<think></think>")):
        assert pieces(template, record) == [[(ASKED + block, 0), ("No.<|im_end|>\n", 1)]]


def test_a_prompt_of_deepseek_with_thinking_closes_the_block_once():
    record = {
        "messages": [user("Is 91 prime?"), answer("No.", reasoning_content="7 times 13.")],
        "chat_template_kwargs": {"thinking": True},
    }
    assert pieces("DeepSeek V3.1", record) == [
        [
            ("<s><｜User｜>Is 91 prime?<｜Assistant｜><think>", 0),
            ("7 times 13.</think>No.<｜end▁of▁sentence｜>", 1),
        ]
    ]


@pytest.mark.parametrize(
    ("template", "kwargs", "fields", "message"),
    [
        (
            "QwQ",
            {},
            {},
            "message 1 has no reasoning, but the generation prompt opens a block of it",
        ),
        ("Nemotron", {"enable_thinking": True}, {}, "message 1 has no reasoning"),
        (
            "Qwen 3.5",
            {"enable_thinking": False},
            {"reasoning_content": "Why."},
            "message 1 has reasoning, but the generation prompt closes the block of it",
        ),
    ],
)
def test_reasoning_that_does_not_fit_its_prompt_is_refused(template, kwargs, fields, message):
    record = {"messages": [user("?"), answer("No.", **fields)], "chat_template_kwargs": kwargs}
    with pytest.raises(SampleError, match=message):
        encode(template, record)


# Generation tags ----------------------------------------------------------------------------------


def test_tags_at_the_end_of_a_prompt_say_where_an_answer_ends():
    assert [text for text, weight in pieces("tags at the prompt's end", TWO)[0] if weight] == [
        "A<|im_end|>",
        "B<|im_end|>",
    ]


def test_tags_elsewhere_are_counted_and_not_used():
    found = encode("tags with the header", TWO)
    assert found.notes["answers whose generation tag does not begin where the prompt ends"] == 2
    trained = [text for text, weight in pieces("tags with the header", TWO)[0] if weight]
    assert trained == ["A<|im_end|>\n", "B<|im_end|>\n"]


def test_a_tag_of_an_answer_without_weight_is_not_trained():
    """Only tags say where a rewritten answer ends, and the next tag is another answer's."""
    messages = [user("a?"), answer("A"), user("b?"), answer("B", weight=0), user("c?"), answer("C")]
    found = pieces("tags around rewritten answers", {"messages": messages})
    assert [[text for text, weight in sample if weight] for sample in found] == [
        ['"A"<|im_end|>', "C<|im_end|>"]
    ]


# Ends ---------------------------------------------------------------------------------------------


def test_an_answer_without_an_end_is_ended_with_the_end_of_text_token():
    record = {"messages": [user("a?"), answer("A")]}
    ((tokens, weights),) = encode("no end", record).samples
    assert (BYTES.show(tokens), weights[-2:].tolist()) == ("Q: a?\nA: A<eos>", [1, 1])
    note = "answers ended with the end-of-text token, since nothing else ends them"
    assert encode("no end", record).notes[note] == 1
    ((tokens, _),) = encode("no end", record, answer_end="allow").samples
    assert BYTES.show(tokens) == "Q: a?\nA: A"


def test_each_of_several_answers_without_an_end_is_a_sample_with_one():
    found = encode("no end", TWO)
    assert [BYTES.show(tokens) for tokens, _ in found.samples] == [
        "Q: a?\nA: A<eos>",
        "Q: a?\nA: AQ: b?\nA: B<eos>",
    ]
    note = "conversations with one sample per answer, since earlier answers have no end"
    assert found.notes[note] == 1
    assert len(encode("no end", TWO, answer_end="allow").samples) == 1
    with pytest.raises(SampleError, match="does not end an answer before the last"):
        encode("no end", TWO, answers="all")


def test_an_end_outside_of_the_tags_is_refused_with_the_end():
    for choice in (None, "eos"):
        with pytest.raises(SampleError, match=r"with '<\|im_end\|>\\n', but its generation tags"):
            encode("tags without the end", TWO, answer_end=choice)
    trained = pieces("tags without the end", TWO, answer_end="allow")
    assert [text for text, weight in trained[0] if weight] == ["A", "B"]


def test_an_end_that_the_next_message_begins_with_is_an_end():
    """Each turn is surrounded by newlines, so one follows the end of an answer."""
    text = (
        "{% for m in messages %}{{ '\n' + m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '\nassistant:' }}{% endif %}"
    )
    trained = [text for text, weight in pieces(text, TWO)[0] if weight]
    assert trained == [" A\n", " B\n"]


def test_the_end_of_text_after_an_answer_without_weight_is_not_trained():
    messages = [user("a"), answer("b"), user("c"), answer("wrong", weight=0)]
    (found,) = ConversationEncoder(BYTES, PlainChatTemplate()).encode(
        [read_conversation({"messages": messages})]
    )
    ((tokens, weights),) = found.samples
    trained = BYTES.show([token for token, weight in zip(tokens, weights) if weight])
    assert BYTES.show(tokens).endswith(" wrong\n<eos>")
    assert trained == " b\n"


SPLITS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] }}!{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.mark.parametrize("content", ["<think>Sum.</think>4", "Write </think> to close it."])
def test_an_answer_of_which_the_template_drops_a_part_is_refused(content):
    with pytest.raises(SampleError, match="message 1: .* writes only a part of `content`"):
        encode(SPLITS, {"messages": [user("2 + 2"), answer(content)]})
    assert encode(SPLITS, {"messages": [user("2 + 2"), answer("4")]})


def test_a_system_message_that_is_not_written_in_its_place_is_refused():
    first_two = (
        "{% for m in messages %}{% if m.role != 'system' or loop.index0 < 2 %}"
        "{{ m.role }}:{{ m.content }}!{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    rules = [{"role": "system", "content": f"Rule {n}."} for n in range(3)]
    turn = [user("2 + 2"), answer("4")]
    assert encode(first_two, {"messages": [*rules[:2], *turn]})
    with pytest.raises(SampleError, match="message 2: .* does not write `content` of role system"):
        encode(first_two, {"messages": [*rules, *turn]})


def test_reasoning_within_a_content_that_is_written_whole_is_not_repeated():
    """Servers of such models return an answer without the tag that its prompt opens."""
    opens = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
    )
    record = {"messages": [user("2 + 2"), answer("Add both.\n</think>\n\n4")]}
    assert pieces(opens, record) == [
        [("<user>2 + 2</s><assistant><think>\n", 0), ("Add both.\n</think>\n\n4</s>", 1)]
    ]


def test_a_block_that_a_prompt_closes_is_not_closed_again():
    closes = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}</think>{% endif %}"
        "{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant><think></think>{% endif %}"
    )
    for content in ("4", "<think>\n\n</think>\n\n4"):
        assert pieces(closes, {"messages": [user("2 + 2"), answer(content)]}) == [
            [("<user>2 + 2</s><assistant><think></think>", 0), ("4</s>", 1)]
        ]
    for content in (
        "<think>Sum.</think>4",
        "Sum.</think>4",
        "\n<think>Sum.</think>4",
        "<think>Sum. 4",
    ):
        with pytest.raises(SampleError, match="has reasoning, but the generation prompt closes"):
            encode(closes, {"messages": [user("2 + 2"), answer(content)]})


@pytest.mark.parametrize("block", ["", "<think>\n"])
def test_the_header_of_a_second_answer_in_a_row_is_not_trained(block):
    """The template writes no generation prompt after an answer."""
    only_after_questions = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt and messages[-1].role != 'assistant' %}<assistant>"
        "BLOCK{% endif %}"
    )
    thought = "So.\n</think>" if block else ""
    messages = [user("Count."), answer(f"{thought}1"), answer("2")]
    template = only_after_questions.replace("BLOCK", block)
    found = pieces(template, {"messages": messages}, answers="each" if block else None)
    if block:
        assert found[1][-2:] == [
            (f"<user>Count.</s><assistant>{thought}1</s><assistant>", 0),
            ("2</s>", 1),
        ]
        return
    assert found == [
        [("<user>Count.</s><assistant>", 0), ("1</s>", 1), ("<assistant>", 0), ("2</s>", 1)]
    ]


@pytest.mark.parametrize("end", ["", "<done>"])
def test_a_generation_prompt_that_nobody_asked_for_is_refused(end):
    unasked = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.role == 'assistant' %}END"
        "{% endif %}</s>{% endfor %}<assistant>"
    ).replace("END", end)
    messages = [user("2 + 2"), answer("4")]
    with pytest.raises(
        SampleError, match="the next generation prompt, or a part of it, whether or not it is"
    ):
        encode(unasked, {"messages": messages})
    asked = unasked.replace("<assistant>", "{% if add_generation_prompt %}<assistant>{% endif %}")
    assert pieces(asked, {"messages": messages})[0][1] == (f"4{end}</s>", 1)


@pytest.mark.parametrize(
    "block",
    ["<|channel>thought\n<channel|>", "<|START_THINKING|><|END_THINKING|>", "[THINK][/THINK]"],
)
def test_an_answer_follows_an_empty_block_with_other_tags(block):
    """Gemma 4, Command R and Mistral."""
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>" + block + "{% endif %}"
    )
    assert pieces(template, {"messages": [user("2 + 2"), answer("4")]}) == [
        [(f"<user>2 + 2</s><assistant>{block}", 0), ("4</s>", 1)]
    ]


def test_messages_after_the_last_trained_answer_are_counted_where_they_are_left_out():
    left_out = "messages after the last trained answer, left out"
    record = CONVERSATIONS["weight 0 at the end"]
    assert encode("ChatML", record).notes[left_out] == 0
    assert encode("ChatML", record, answers="each").notes[left_out] == 2  # a question and an answer
    assert encode("ChatML", record, answers="last").notes[left_out] == 2


OPENS_AND_WRITES_ALL = (
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}HEAD{% endif %}"
    "{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)


def test_white_space_before_a_block_does_not_repeat_it():
    template = OPENS_AND_WRITES_ALL.replace("HEAD", "")
    record = {"messages": [user("2 + 2"), answer("\n<think>\nSum.</think>4")]}
    assert pieces(template, record) == [
        [("<user>2 + 2</s><assistant><think>\n", 0), ("Sum.</think>4</s>", 1)]
    ]


def test_a_block_that_a_template_writes_after_other_text_is_refused():
    template = OPENS_AND_WRITES_ALL.replace("HEAD", "[text]")
    record = {"messages": [user("2 + 2"), answer("<think>Sum.</think>4")]}
    with pytest.raises(SampleError, match="after other text of an answer"):
        encode(template, record)


def test_a_greeting_without_weight_does_not_hide_the_header_of_answers():
    after_questions = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt and messages and messages[-1].role == 'user' %}<assistant>"
        "{% endif %}"
    )
    greeting = {**answer("Welcome."), "weight": 0}
    messages = [greeting, user("Count."), answer("1"), answer("2")]
    (found,) = pieces(after_questions, {"messages": messages})
    assert [text for text, weight in found if weight] == ["1</s>", "2</s>"]


def test_a_block_that_follows_the_end_of_another_is_found():
    block = block_at_end("Sum.</think>\n<think>\n")
    assert (block.opening, block.closing, block.is_closed) == ("<think>", "</think>", False)
    assert block_at_end("Sum.</think>\nassistant:") is None
