# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Records with two answers become two conversations with one prompt, or are refused by name."""

import random
from collections import Counter

import pytest

from energon_ext.chats.preferences import read_preference
from energon_ext.errors import SampleError


def user(text):
    return {"role": "user", "content": text}


def answer(text, **fields):
    return {"role": "assistant", "content": text, **fields}


def human(text, speaker="human"):
    return {"from": speaker, "value": text}


SYSTEM = {"role": "system", "content": "Be kind."}
EARLIER = [user("Hi"), answer("Hello!"), user("And?")]
UNTRAINED = [user("Hi"), answer("Hello!", weight=0), user("And?")]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}

#: Name -> (record, messages of the chosen and of the rejected conversation)
RECORDS = {
    "text": (
        {"prompt": "2+2=", "chosen": "4", "rejected": "5", "score": 1.5},
        [user("2+2="), answer("4")],
        [user("2+2="), answer("5")],
    ),
    "messages": (
        {"prompt": [user("q")], "chosen": [answer("a")], "rejected": [answer("b")]},
        [user("q"), answer("a")],
        [user("q"), answer("b")],
    ),
    "messages and text": (
        {"prompt": EARLIER, "chosen": "a", "rejected": "b"},
        [*UNTRAINED, answer("a")],
        [*UNTRAINED, answer("b")],
    ),
    "whole conversations": (
        {"chosen": [*EARLIER, answer("a")], "rejected": [*EARLIER, answer("b")]},
        [*UNTRAINED, answer("a")],
        [*UNTRAINED, answer("b")],
    ),
    "whole conversations after different numbers of turns": (
        {"chosen": [*EARLIER, CALL, user("c"), answer("a")], "rejected": [*EARLIER, answer("b")]},
        [*UNTRAINED, CALL, user("c"), answer("a")],
        [*UNTRAINED, answer("b")],
    ),
    "whole conversations that repeat the prompt": (
        {"prompt": EARLIER, "chosen": [*EARLIER, answer("a")], "rejected": [*EARLIER, answer("b")]},
        [*UNTRAINED, answer("a")],
        [*UNTRAINED, answer("b")],
    ),
    "whole conversations, their question, and the chosen one for fine-tuning": (
        {
            "prompt": "q",
            "messages": [SYSTEM, user("q"), answer("a")],
            "chosen": [SYSTEM, user("q"), answer("a")],
            "rejected": [SYSTEM, user("q"), answer("b")],
        },
        [SYSTEM, user("q"), answer("a")],
        [SYSTEM, user("q"), answer("b")],
    ),
    "whole conversations with nulls of Arrow": (
        {"chosen": [{**user("q"), "x": None}, answer("a")], "rejected": [user("q"), answer("b")]},
        [user("q"), answer("a")],
        [user("q"), answer("b")],
    ),
    "whole conversations beside an empty prompt": (
        {"prompt": [], "chosen": [*EARLIER, answer("a")], "rejected": [*EARLIER, answer("b")]},
        [*UNTRAINED, answer("a")],
        [*UNTRAINED, answer("b")],
    ),
    "whole texts": (
        {"chosen": "Human: q\n\nAssistant: It is.", "rejected": "Human: q\n\nAssistant: No!"},
        [user("Human: q\n\nAssistant:"), answer(" It is.")],
        [user("Human: q\n\nAssistant:"), answer(" No!")],
    ),
    "whole texts whose answers begin with the same words": (
        {"chosen": "Q: q\nI think so.", "rejected": "Q: q\nI thought so.", "index": 1},
        [user("Q: q\nI th"), answer("ink so.")],
        [user("Q: q\nI th"), answer("ought so.")],
    ),
    "whole texts, of which one begins the other": (
        {"chosen": "say a", "rejected": "say a b", "question": "say"},
        [user("say"), answer(" a")],
        [user("say"), answer(" a b")],
    ),
    "whole texts whose answers follow a line break": (
        {"chosen": "2 + 2\n4", "rejected": "2 + 2\n5", "score": 3},
        [user("2 + 2\n"), answer("4")],
        [user("2 + 2\n"), answer("5")],
    ),
    "whole texts without spaces": (
        {"chosen": "问：好吗？答：好", "rejected": "问：好吗？答：不好"},
        [user("问：好吗？答："), answer("好")],
        [user("问：好吗？答："), answer("不好")],
    ),
    "ShareGPT": (
        {
            "conversations": [human("q"), human("m", "gpt"), human("w")],
            "chosen": human("a", "gpt"),
            "rejected": human("b", "gpt"),
        },
        [user("q"), answer("m", weight=0), user("w"), answer("a")],
        [user("q"), answer("m", weight=0), user("w"), answer("b")],
    ),
    "ShareGPT as whole conversations": (
        {"chosen": [human("q"), human("a", "gpt")], "rejected": [human("q"), human("b", "gpt")]},
        [user("q"), answer("a")],
        [user("q"), answer("b")],
    ),
    "ShareGPT and text": (
        {"conversations": [human("q")], "chosen": "a", "rejected": "b"},
        [user("q"), answer("a")],
        [user("q"), answer("b")],
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "2 2", "chosen": "4", "rejected": "5"},
        [user("Add.\n2 2"), answer("4")],
        [user("Add.\n2 2"), answer("5")],
    ),
}


@pytest.mark.parametrize("name", RECORDS)
def test_each_form_of_a_record_gives_two_conversations(name):
    record, chosen, rejected = RECORDS[name]
    found = read_preference({"__key__": "7", **record})
    assert [conversation.messages for conversation in found] == [chosen, rejected]
    is_text = isinstance(record["chosen"], str) and not {"conversations", "instruction"} & {*record}
    is_pair = is_text and isinstance(record.get("prompt", ""), str)
    assert [conversation.is_pair for conversation in found] == [is_pair] * 2
    is_whole = is_pair and "prompt" not in record
    assert [conversation.is_whole for conversation in found] == [is_whole] * 2


def test_a_prompt_whose_messages_say_where_they_are_from_is_no_sharegpt():
    question = {"role": "user", "content": "Hi", "from": "web"}
    chosen, rejected = read_preference({"prompt": [question], "chosen": "yes", "rejected": "no"})
    for found, text in ((chosen, "yes"), (rejected, "no")):
        assert found.messages == [question, {"role": "assistant", "content": text}]


def test_ignored_fields_are_counted_on_both_sides():
    for conversation in read_preference(RECORDS["text"][0]):
        assert conversation.notes == {"format: prompt and response": 1, "ignored field: score": 1}


def test_tools_and_variables_belong_to_both_conversations():
    tools, variables = [{"name": "f"}], {"enable_thinking": False}
    record = {**RECORDS["messages"][0], "tools": tools, "chat_template_kwargs": variables}
    for conversation in read_preference(record):
        assert (conversation.tools, conversation.template_kwargs) == (tools, variables)


def test_labels_next_to_whole_texts_are_no_prompt():
    labels = {"id": "a-1", "source": "helpful-base", "subset": "train"}
    texts = {"chosen": "It is so.", "rejected": "It is not so."}
    found = read_preference({**labels, **texts})
    assert [each.messages for each in found] == [each.messages for each in read_preference(texts)]
    assert {f"ignored field: {name}" for name in labels} <= {*found[0].notes}


WHOLE = RECORDS["whole conversations"][0]

#: Record -> message
REFUSED = [
    ([1], "the record is a list, a JSON object is needed"),
    ({"prompt": "q", "chosen": "a"}, r"needs `chosen` and `rejected`; it has \['chosen', 'prompt'"),
    ({"prompt": "q", "chosen": "a", "rejected": None}, "needs `chosen` and `rejected`"),
    ({"prompt": "q", "chosen": 1, "rejected": "b"}, "`chosen` must be text, a message or a list"),
    ({"prompt": "q", "chosen": "a", "rejected": "a"}, "are equal, so neither is preferred"),
    ({"chosen": WHOLE["chosen"], "rejected": WHOLE["chosen"]}, "are equal, so neither"),
    ({"prompt": "q", "chosen": "a", "rejected": " "}, "`rejected` has an empty answer"),
    ({"prompt": "q", "chosen": "", "rejected": "b"}, "`chosen` has an empty answer"),
    (
        {"prompt": [user("q")], "chosen": [answer("a")], "rejected": [answer("")]},
        "`rejected` has an empty answer",
    ),
    ({"prompt": "q", "chosen": "a", "rejected": [answer("b")]}, "is text; both or none must be"),
    ({"prompt": "q", "chosen": [answer("a")], "rejected": [answer("b")]}, "must be text as well"),
    ({"chosen": "a q", "rejected": "b q"}, "do not begin with the same words; give the prompt as"),
    ({"chosen": "answer", "rejected": "another"}, "do not begin with the same words"),
    ({"chosen": "q a", "rejected": ""}, "do not begin with the same words"),
    ({"chosen": "Go on", "rejected": "Go  "}, "`rejected` has an empty answer"),
    (
        {"question": "Why?", "chosen": "It is so.", "rejected": "It is not so."},
        "`question` is text that is not in the words with which `chosen` and `rejected` begin",
    ),
    (
        {"turns": [{"value": "Why?"}], "chosen": "It is so.", "rejected": "It is not so."},
        "`turns` is text that is not in the words",
    ),
    (
        {"prompt": "q", "chosen": "q: a", "rejected": "q: b"},
        "both begin with `prompt`; remove `prompt`, and the words with which both begin are the p",
    ),
    ({"instruction": "q", "chosen": "q: a", "rejected": "q: b"}, "both begin with `instruction`"),
    (
        {
            "prompt": "Why so?",
            "chosen": "Human: Why so? Bot: A",
            "rejected": "Human: Why so? Bot: B",
        },
        "both begin with text that contains `prompt`; remove `prompt`, and the words with which",
    ),
    (
        {"source": "two words", "chosen": "It is so.", "rejected": "It is not so."},
        "`source` is text that is not in the words",
    ),
    (
        {"prompt": [user("q")], "chosen": [user("q"), answer("a")], "rejected": [answer("b")]},
        "`chosen` has no answer as its first message after `prompt`; if it is a whole conversation",
    ),
    (
        {
            "messages": [user("q")],
            "chosen": [SYSTEM, user("q"), answer("a")],
            "rejected": [SYSTEM, user("q"), answer("b")],
        },
        "`chosen` has no answer as its first message after `messages`; if it is a whole conversa",
    ),
    ({"prompt": [user("q")], "chosen": [answer("a")], "rejected": []}, "`rejected` has no answer"),
    ({"prompt": 3, "chosen": "a", "rejected": "b"}, "needs a `prompt`, as text or messages"),
    ({"chosen": [user("q"), answer("a")], "rejected": [user("w"), answer("b")]}, "in common; give"),
    ({**WHOLE, "rejected": EARLIER}, "`rejected` has no answer as message 3, the first that"),
    ({**WHOLE, "rejected": [*EARLIER, user("b")]}, "`rejected` has no answer as message 3"),
    ({**WHOLE, "prompt": "another"}, "`chosen`: `prompt` next to OpenAI messages would not"),
    (
        {"prompt": EARLIER, "messages": [user("w")], "chosen": "a", "rejected": "b"},
        "`prompt` and `messages` are both given",
    ),
    (
        {"prompt": "q", "instruction": "w", "chosen": "a", "rejected": "b"},
        "`prompt` and `instruction` are both given",
    ),
    (
        {"prompt": "q", "completion": "c", "chosen": "a", "rejected": "b"},
        "`completion` beside `chosen` and `rejected` is not used; remove it",
    ),
    (
        {"prompt": "q", "system": "Be kind.", "chosen": "a", "rejected": "b"},
        "`chosen`: `system` next to prompt and response would not become part of the text",
    ),
    ({**WHOLE, "loss_mask": [1]}, "`chosen`: `loss_mask` of a record is not understood"),
]


@pytest.mark.parametrize(("record", "message"), REFUSED)
def test_unclear_records_are_refused_by_name(record, message):
    with pytest.raises(SampleError, match=message):
        read_preference(record)


#: Values that a field of a damaged record may have.
VALUES = [
    *(None, "", " ", "x", 1, True, [], {}, [1], ["x"], [[]], [None], [{}], "\ud800"),
    *({"role": "assistant"}, {"role": 3, "content": []}, {"from": "gpt"}, {"from": 1, "value": 2}),
    *([user("q")], [answer("a")], [user("q"), answer("a")], [human("q")], [answer(None)]),
    [answer([{"type": "text", "text": "a"}])],
]
FIELDS = [
    *("prompt", "chosen", "rejected", "messages", "conversations", "instruction", "input"),
    *("tools", "chat_template_kwargs", "system", "label", "response", "output", "images"),
]


def test_damaged_records_are_refused_or_become_two_different_conversations():
    rng, counts = random.Random(0), Counter()
    for _ in range(4000):
        record = dict(rng.choice([*RECORDS.values()])[0])
        record.update({rng.choice(FIELDS): rng.choice(VALUES) for _ in range(rng.randint(1, 3))})
        try:
            chosen, rejected = read_preference(record)
        except SampleError as error:
            counts["refused"] += 1
            assert "\n" not in str(error)
            continue
        counts["accepted"] += 1
        assert chosen.messages != rejected.messages
    assert min(counts["accepted"], counts["refused"]) > 500
