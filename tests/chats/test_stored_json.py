# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Messages, tools and calls stored as JSON text are read like the lists; other text is text."""

import json

import pytest

from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.messages import check_messages
from energon_ext.chats.preferences import read_preference
from energon_ext.chats.records import read_conversation, read_prompt
from energon_ext.chats.templates import PlainChatTemplate
from energon_ext.errors import SampleError
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.chats.conversations import TOOLS, answer, call, user

ASKED, SAID, OTHER = [user("2 + 2")], [answer("4")], [answer("5")]
SHAREGPT = [{"from": "human", "value": "2 + 2"}, {"from": "gpt", "value": "4"}]


def as_text(messages):
    return json.dumps(messages)


def as_object_text(messages):
    return json.dumps({"messages": messages, "id": None})


def as_texts(messages):
    return [json.dumps(message) for message in messages]


def as_one_text(messages):
    return json.dumps(*messages) if len(messages) == 1 else json.dumps(messages, indent=2)


def as_text_twice(messages):
    return json.dumps(json.dumps(messages))


FORMS = [as_text, as_object_text, as_texts, as_one_text, as_text_twice]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "record",
    [
        {"messages": ASKED + SAID},
        {"conversations": ASKED + SAID},
        {"conversations": SHAREGPT},
        {"prompt": ASKED, "completion": SAID},
        {"prompt": ASKED, "response": SAID},
    ],
)
def test_messages_as_json_text_are_the_same_conversation(record, form):
    expected = read_conversation(record)
    stored = {name: form(value) for name, value in record.items()}
    found = read_conversation(stored)
    assert (found.messages, found.is_pair) == (expected.messages, False)
    texts = {f"messages given as JSON text: {name}": 1 for name in record}
    assert found.notes == {**expected.notes, **texts}
    if "completion" not in record and "response" not in record:
        with pytest.raises(SampleError, match="belongs to a preference"):
            read_conversation({**stored, "chosen": form(OTHER)})
        assert read_conversation({**stored, "chosen": form(ASKED + SAID), "rejected": ""})


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "record",
    [
        {"prompt": ASKED, "chosen": SAID, "rejected": OTHER},
        {"chosen": ASKED + SAID, "rejected": ASKED + OTHER},
        {"prompt": ASKED, "chosen": ASKED + SAID, "rejected": ASKED + OTHER},
        {"chosen": SHAREGPT, "rejected": [SHAREGPT[0], {"from": "gpt", "value": "5"}]},
    ],
)
def test_pairs_as_json_text_are_the_same_pairs(record, form):
    expected = read_preference(record)
    found = read_preference({name: form(value) for name, value in record.items()})
    for conversation, other in zip(found, expected):
        assert (conversation.messages, conversation.is_pair) == (other.messages, False)
        texts = {name for name in conversation.notes if "given as JSON text" in name}
        assert texts == {f"messages given as JSON text: {name}" for name in record}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["prompt", "messages", "conversations"])
def test_prompts_for_sampling_as_json_text_are_messages(name, form):
    found, metadata = read_prompt({name: form(ASKED), "answer": "4", "response": as_text(SAID)})
    assert (found.messages, found.is_pair) == (ASKED, False)
    assert metadata == {"answer": "4", "response": as_text(SAID)}


def test_an_answer_may_be_text_and_its_prompt_messages_as_json_text():
    found = read_conversation({"prompt": as_text(ASKED), "response": "4"})
    assert found.messages == ASKED + SAID
    with pytest.raises(SampleError, match="`prompt` is text, so `response` must be text as well"):
        read_conversation({"prompt": "2 + 2", "response": as_text(SAID)})


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2, 3]",
        "[",
        "[INST] 2 + 2 [/INST]",
        "{",
        "{}",
        "[]",
        '{"from": "Lisbon", "to": "Porto"}',
        '[{"from": "Lisbon", "to": "Porto"}]',
        '[{"from": "human", "to": "Porto"}]',
        '[{"role": "user", "name": "Ana"}]',
        '[{"role": "Hamlet", "content": "To be"}]',
        '[{"role": "user", "content": "Hi"}, 7]',
        '{"messages": "none"}',
        '{"messages": ["a", "b"]}',
        '{"messages": [{"id": 7}], "total": 1}',
        '"[]"',
        "[" * 5000,
        '[{"role":' * 5000,
    ],
)
def test_any_other_text_that_begins_like_json_is_text(text):
    found = read_conversation({"prompt": text, "response": text})
    assert (found.is_pair, found.messages) == (True, [user(text), answer(text)])
    assert read_prompt({"prompt": text})[0].is_pair
    pairs = read_preference({"prompt": "q", "chosen": text, "rejected": "5"})
    assert [pair.messages[-1]["content"] for pair in pairs] == [text, "5"]


def test_fields_that_an_object_has_next_to_its_messages_are_not_lost():
    for stored in ({"messages": ASKED, "tools": TOOLS}, json.dumps({"messages": ASKED, "id": 7})):
        with pytest.raises(
            SampleError, match=r"`prompt` has '(tools|id)' next to `messages`; make"
        ):
            read_conversation({"prompt": stored, "response": "4"})


@pytest.mark.parametrize("name", ["messages", "conversations"])
@pytest.mark.parametrize("text", ["hi", "", "{}", "[" * 5000])
def test_what_is_never_text_is_refused_unless_it_is_a_list_as_json(name, text):
    for read in (read_conversation, read_prompt):
        with pytest.raises(SampleError, match=f"`{name}` must be a list of messages, or that"):
            read({name: text})
    with pytest.raises(SampleError, match="message 0 has role 'critic'"):
        check_messages(read_conversation({name: '[{"role": "critic", "content": "4"}]'}).messages)


@pytest.mark.parametrize(
    "stored", [TOOLS, as_text(TOOLS), as_texts(TOOLS), as_text(as_texts(TOOLS))]
)
def test_tools_may_be_json_text_or_a_list_of_it(stored):
    assert read_conversation({"messages": ASKED + SAID, "tools": stored}).tools == TOOLS
    assert read_prompt({"messages": ASKED, "tools": stored})[0].tools == TOOLS


@pytest.mark.parametrize("text", ["ring_bell", "[]", "{", ""])
def test_a_tool_or_call_that_is_other_text_is_refused(text):
    encoder = ConversationEncoder(ByteTokenizer(), PlainChatTemplate())
    record = {"messages": ASKED + SAID, "tools": [*as_texts(TOOLS), text]}
    (error,) = encoder.encode([read_conversation(record)])
    assert "tools[2] must be a function as a JSON schema" in str(error)
    with pytest.raises(SampleError, match="message 1: `tool_calls` must be a list of objects"):
        check_messages([*ASKED, answer("", tool_calls=[*as_texts(CALLS), text])])


CALLS = [call("ring", {"n": 1, "unit": None}), call("tide", {})]


@pytest.mark.parametrize("stored", [as_text(CALLS), as_texts(CALLS), as_text(as_texts(CALLS))])
def test_calls_may_be_json_text_and_keep_their_nulls(stored):
    checked = check_messages([*ASKED, answer("", tool_calls=stored)])
    assert checked.rendered[1]["tool_calls"] == CALLS
    assert checked.original_calls[1][0]["function"]["arguments"] == '{"n": 1, "unit": null}'


@pytest.mark.parametrize("stored", ["", " ", "[]", "null"])
def test_no_calls_may_be_json_text(stored):
    assert "tool_calls" not in check_messages([*ASKED, answer("4", tool_calls=stored)]).rendered[1]


def test_arguments_within_messages_as_json_text_keep_their_nulls():
    called = {"role": "assistant", "content": None, "tool_calls": CALLS}
    for form in FORMS:
        found = read_conversation({"messages": form([*ASKED, called])})
        assert check_messages(found.messages).rendered[1]["tool_calls"] == CALLS
        assert not any("null" in note for note in found.notes)
    bare = {"role": "assistant", "tool_calls": [CALLS[0]["function"]]}
    found = read_conversation({"messages": as_text([*ASKED, bare])})
    assert check_messages(found.messages).rendered[1]["tool_calls"] == [CALLS[0]["function"]]


DEEP = "[" * 300 + "]" * 300
TOO_DEEP = "[" * 100_000


@pytest.mark.parametrize("text", [DEEP, TOO_DEEP])
@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs"])
def test_json_text_with_too_many_levels_is_refused_in_one_line(name, text):
    for read in (read_conversation, read_prompt):
        with pytest.raises(SampleError, match="has more than 100 lists and objects") as error:
            read({"messages": ASKED, name: text})
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", [DEEP, TOO_DEEP])
def test_calls_with_too_many_levels_are_refused_in_one_line(text):
    for calls in (text, [text], [call("f", text)]):
        with pytest.raises(SampleError, match="^message 1: .* has more than 100 lists") as error:
            check_messages([*ASKED, answer("", tool_calls=calls)])
        assert "\n" not in str(error.value)


def test_a_pair_with_too_many_levels_is_refused():
    deep = json.loads(DEEP)
    for record in ({"prompt": "q", "chosen": "a"}, {"chosen": "q a"}):
        with pytest.raises(SampleError, match="has more than 100 lists and objects"):
            read_preference({**record, "rejected": "q b", "note": deep})


TWICE = '{"role": "assistant", "content": "4", "content": "5"}'


@pytest.mark.parametrize(
    "record",
    [
        {"messages": f'[{{"role": "user", "content": "2 + 2"}}, {TWICE}]'},
        {"messages": [json.dumps(ASKED[0]), TWICE]},
        {"messages": f'{{"messages": [{json.dumps(ASKED[0])}, {TWICE}]}}'},
        {"prompt": ASKED, "completion": TWICE},
    ],
)
def test_messages_as_json_text_with_a_key_twice_are_refused(record):
    """One of the two values would be dropped; a text that is not messages is only a text."""
    with pytest.raises(SampleError, match="`(messages|completion)`: the key 'content' is there tw"):
        read_conversation(record)
    text = '{"a": 1, "a": 2}'
    assert read_conversation({"prompt": text, "completion": "4"}).messages[0]["content"] == text


def as_lines(messages):
    return "\n".join(json.dumps(message) for message in messages)


def as_numpy_prints(messages):
    return "[" + "\n ".join(repr(message) for message in messages) + "]"


def as_pandas_prints(messages):
    return f"[array({messages!r}, dtype=object)]"


def cut_off(messages):
    return json.dumps(messages)[:-3]


@pytest.mark.parametrize("form", [repr, as_lines, as_numpy_prints, as_pandas_prints, cut_off])
@pytest.mark.parametrize(
    "several",
    [ASKED + SAID, SHAREGPT, [{"weight": 0, **ASKED[0]}, *SAID], [{"messages": SAID}] * 2],
)
def test_messages_as_text_that_is_not_json_are_refused(form, several):
    """They would be trained as the text that they are."""
    text = form(several)
    for read, record in (
        (read_conversation, {"prompt": text, "completion": "4"}),
        (read_conversation, {"prompt": "2 + 2", "response": text}),
        (read_prompt, {"prompt": text}),
        (read_preference, {"prompt": "2 + 2", "chosen": text, "rejected": "5"}),
        (read_preference, {"chosen": text, "rejected": text + " "}),
    ):
        with pytest.raises(SampleError, match="is text that begins like messages, but is not JSON"):
            read(record)


@pytest.mark.parametrize(
    "text",
    [
        '"4"',
        '"[4]" is a list',
        "[INST] 'role': 'user' [/INST]",
        "{'content': 'Seven'}",
        "{'role': 'king', 'content': 'Seven'}",
        "[{'role': 'user'}]",
        '{"from": "user", "to": "Ann"}',
        "In Python: [{'role': 'user', 'content': '2 + 2'}]",
    ],
)
def test_other_text_with_brackets_and_quotes_is_text(text):
    found = read_conversation({"prompt": text, "completion": text})
    assert [message["content"] for message in found.messages] == [text, text]
