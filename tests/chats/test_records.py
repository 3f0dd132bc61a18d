# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Records of each format, with the messages worked out by hand, and the fields that refuse one."""

import json
import re
from pathlib import Path

import pytest

from energon_ext.chats.labels import DATA_SETS, GENERAL
from energon_ext.chats.messages import check_answers, check_messages
from energon_ext.chats.preferences import read_preference
from energon_ext.chats.records import read_conversation, read_prompt
from energon_ext.errors import SampleError
from tests.chats.conversations import CONVERSATIONS, TOOLS, answer, call, result, user

SYSTEM = {"role": "system", "content": "Be brief."}
TURN = [user("2 + 2"), answer("4")]


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"messages": TURN}, TURN),
        ({"conversations": TURN}, TURN),
        (
            {
                "conversations": [
                    {"from": "human", "value": "2 + 2"},
                    {"from": "gpt", "value": "4", "weight": 0.5},
                ],
                "system": "Be brief.",
            },
            [SYSTEM, user("2 + 2"), answer("4", weight=0.5)],
        ),
        (
            {
                "conversations": [
                    {"from": "system", "value": "Be brief."},
                    {"from": "user", "value": "Ring."},
                    {"from": "function_call", "value": '{"name": "ring", "arguments": {"n": 2}}'},
                    {"from": "observation", "value": "done"},
                    {"from": "assistant", "value": "Rung."},
                ]
            },
            [
                SYSTEM,
                user("Ring."),
                {"role": "assistant", "tool_calls": [{"name": "ring", "arguments": '{"n": 2}'}]},
                result("done"),
                answer("Rung."),
            ],
        ),
        (
            {"instruction": "Add.", "input": "2 + 2", "output": "4"},
            [user("Add.\n2 + 2"), answer("4")],
        ),
        ({"instruction": "2 + 2", "input": "", "output": "4"}, TURN),
        (
            {
                "instruction": "2 + 2",
                "input": None,
                "output": "4",
                "system": "Be brief.",
                "history": [["Hi", "Hello"], ["1 + 1", "2"]],
            },
            [SYSTEM, user("Hi"), answer("Hello"), user("1 + 1"), answer("2"), *TURN],
        ),
        ({"prompt": "2 + 2", "response": "4"}, TURN),
        ({"prompt": "2 + 2", "completion": "4"}, TURN),
        ({"prompt": [user("2 + 2")], "completion": [answer("4")]}, TURN),
        ({"prompt": [SYSTEM, user("2 + 2")], "response": "4"}, [SYSTEM, *TURN]),
        (
            {"prompt": [user("Hi"), answer("Hello"), user("2 + 2")], "completion": [answer("4")]},
            [user("Hi"), answer("Hello", weight=0), *TURN],
        ),
    ],
)
def test_each_format_gives_its_messages(record, messages):
    found = read_conversation(record)
    assert found.messages == messages
    texts = [value for value in (record.get("prompt"), record.get("response")) if value]
    assert found.is_pair == (len(texts) > 0 and all(isinstance(v, str) for v in texts))


@pytest.mark.parametrize("given", [TOOLS, '[{"type": "function"}]', "", None, []])
def test_tools_and_variables_may_be_json_text(given):
    import json

    found = read_conversation(
        {"messages": TURN, "tools": given, "chat_template_kwargs": '{"enable_thinking": false}'}
    )
    assert found.tools == (json.loads(given) if isinstance(given, str) and given else given or None)
    assert found.template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        *(
            ({name: True}, f"`{name}` of a record is not understood; give answers a `weight`")
            for name in ("train", "loss", "trainable", "loss_mask", "weight", "weights")
        ),
        *(
            (
                {name: "Speak."},
                f"`{name}` next to OpenAI messages would not become part of the text",
            )
            for name in ("system", "system_prompt", "response", "completion", "context", "thinking")
        ),
        ({"history": [["a", "b"]]}, "`history` next to OpenAI messages"),
        ({"functions": [{"name": "f"}]}, "`functions` next to OpenAI messages"),
        ({"images": ["a.png"]}, "`images` next to OpenAI messages"),
        ({"mask_history": True}, "`mask_history` of a record is not understood"),
        ({"train_on_prompt": True}, "`train_on_prompt` of a record is not understood"),
        ({"label": False}, "`label` belongs to a preference"),
        ({"kto_tag": False}, "`kto_tag` belongs to a preference"),
        ({"chosen": answer("Ja"), "rejected": answer("No")}, "`chosen` belongs to a preference"),
        ({"system": TURN[0]["content"]}, "`system` next to OpenAI messages"),  # of another role
        ({"enable_thinking": False}, "`enable_thinking` is a variable .* chat_template_kwargs"),
        ({"tools": {"name": "f"}}, "tools is a dict, a list is needed"),
        ({"tools": "f("}, "tools is text, but not JSON"),
        ({"chat_template_kwargs": "[]"}, "chat_template_kwargs is a list, an object is needed"),
        ({"conversations": TURN}, "`messages` and `conversations` are both given"),
    ],
)
def test_a_field_that_belongs_to_the_text_or_its_training_refuses_a_record(fields, message):
    with pytest.raises(SampleError, match=message):
        read_conversation({"messages": TURN, **fields})


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([TURN], "the record is a list, a JSON object is needed; put the list under `messages`"),
        ("text", "the record is a str, a JSON object is needed"),
        ({"text": "a"}, r"needs `messages`.*; it has \['text'\]"),
        ({"prompt": "a"}, r"needs `messages`.*; it has \['prompt'\]"),
        ({"chosen": TURN, "rejected": TURN}, "are a preference pair"),
        ({"prompt": "a", "completion": "b", "label": True}, "`label` belongs to a preference"),
        ({"prompt": 3, "response": "b"}, "`prompt` must be text or a list of messages"),
        ({"prompt": "a", "response": ["b"]}, "`prompt` is text, so `response` must be text"),
        ({"prompt": "a", "response": "b", "tools": TOOLS}, "need `messages`, not a text `prompt`"),
        ({"messages": [{"from": "human", "value": "a"}]}, "name the list `conversations`"),
        ({"conversations": [{"from": "narrator", "value": "a"}]}, "message 0 is from 'narrator'"),
        ({"conversations": [{"from": "human"}, "b"]}, "message 1 must have `from` and `value`"),
        (
            {
                "conversations": [
                    {"from": "human", "value": "a"},
                    {"from": "function_call", "value": "f("},
                ]
            },
            "message 1: the tool call is text, but not JSON",
        ),
        (
            {"instruction": "a", "output": "b", "history": ["c"]},
            "`history` must be a list of pairs",
        ),
        ({"instruction": 3, "output": "b"}, "`instruction` and `input` must be text"),
        ({"messages": "hi"}, "`messages` must be a list of messages"),
    ],
)
def test_a_record_of_no_known_format_is_refused_with_the_remedy(record, message):
    with pytest.raises(SampleError, match=message):
        read_conversation(record)


def test_a_nesting_that_no_data_has_is_refused():
    value = "deep"
    for _ in range(500):
        value = [value]
    for read in (read_conversation, read_prompt):
        with pytest.raises(SampleError, match="has more than 100 lists and objects within each"):
            read({"messages": TURN, "note": value})


def test_metadata_and_text_that_the_messages_contain_are_ignored_and_counted():
    notes = read_conversation(
        {"messages": [SYSTEM, *TURN], "id": 7, "system": "Be brief.", "source": "me", "images": []}
    ).notes
    assert notes == {
        "format: OpenAI messages": 1,
        **{f"ignored field: {name}": 1 for name in ("id", "system", "source", "images")},
    }


def test_nulls_are_left_out_everywhere_but_in_json_text_and_lists():
    calls = [call("ring", {"n": 1, "unit": None, "list": [None]}), call("ring", '{"unit": null}')]
    record = {
        "messages": [
            {**user("Ring."), "tool_calls": None, "name": None},
            {"role": "assistant", "content": None, "tool_calls": calls, "weight": None},
        ],
        "tools": None,
        "extra": None,
    }
    found = read_conversation(record)
    checked = check_messages(found.messages)
    assert found.tools is None and "extra" not in str(found.notes)
    assert checked.rendered[0] == user("Ring.")
    arguments = [each["function"]["arguments"] for each in checked.rendered[1]["tool_calls"]]
    assert arguments == [{"n": 1, "list": [None]}, {"unit": None}]
    assert checked.weights == [0, 1]
    note = "records with null in tools or their arguments, left out (JSON text keeps it)"
    assert found.notes[note] == 1
    assert not any("null" in each for each in read_conversation(CONVERSATIONS["one call"]).notes)


def test_the_chosen_answer_of_a_preference_may_be_the_conversation():
    record = {"messages": TURN, "chosen": TURN, "rejected": [TURN[0], answer("No")], "label": "sum"}
    assert read_conversation(record).messages == TURN


def test_a_call_as_json_text_keeps_its_nulls():
    value = '{"name": "f", "arguments": {"a": null, "b": 1}}'
    turns = [{"from": "human", "value": "Go."}, {"from": "function_call", "value": value}]
    (_, called) = check_messages(read_conversation({"conversations": turns}).messages).rendered
    assert called["tool_calls"][0]["arguments"] == {"a": None, "b": 1}


# Messages -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "refusal"),
    [
        *(
            (answer("4", **{name: False}), f"message 1: `{name}` is not understood; give `weight`")
            for name in ("train", "loss", "trainable", "mask", "learn", "train_detail", "masks")
        ),
        *(
            (
                answer("4", weight=weight),
                "message 1: `weight` is .*, a number from 0 to 1 is needed",
            )
            for weight in (-0.1, 1.5, "1", True, float("nan"))
        ),
        (user("4", weight=1), "message 1: `weight` 1.* on role user; only answers are trained"),
        (user("4", tool_calls=[{}]), "message 1: `tool_calls` of role user; only answers call"),
        (
            answer("4", tool_calls={"name": "f"}),
            "message 1: `tool_calls` is a dict, a list is needed",
        ),
        (answer("4", tool_calls=["f"]), "message 1: `tool_calls` must be a list of objects"),
        (answer("4", tool_calls="f("), "message 1: `tool_calls` is text, but not JSON"),
        (answer("4", tool_calls=[7]), "message 1: `tool_calls` must be a list of objects"),
        (answer("4", image="a.jpg"), "message 1: `image`: images, audio and video are not read"),
        (user("4", audio_path="a.wav"), "message 1: `audio_path`: images, audio and video are"),
        (answer("4", tool_calls=[{"id": "7"}]), "message 1: tool call 0 needs a function with a"),
        (
            answer("4", tool_calls=[{**call("f", "{}"), "thought": "Sum them."}]),
            "message 1: tool call 0: `thought` is not understood",
        ),
        (answer("4", tool_calls=[call("f", "[1]")]), "tool call 0: `arguments` are not a JSON obj"),
        (answer("4", tool_calls=[call("f", "{")]), "tool call 0: `arguments` are not a JSON obj"),
        (answer(None), "message 1 has no `content`; text is needed"),
        (answer(4), "message 1 has a int as `content`; text is needed"),
        (
            answer([{"type": "image", "url": "a.png"}]),
            "message 1: `content` has a part of type 'image'; only parts of type 'text'",
        ),
        (answer(["4"]), "message 1: `content` has a part of type 'str'"),
        *(
            (user([{"type": "text", "text": "4", **fields}]), f"message 1: `{name}` of a part{why}")
            for fields in (
                *({"image": "a.png"}, {"audio_url": {"url": "a"}}),
                *({"refusal": "No."}, {"weight": 0}, {"train": True}, {"more": [{"text": "5"}]}),
            )
            for name in fields
            for is_media in [name in ("image", "audio_url")]
            for why in [": images, audio and video are not read" if is_media else " is not underst"]
        ),
        (
            {"role": "critic", "content": "4"},
            "message 1 has role 'critic'; system, developer, user",
        ),
        ({"content": "4"}, "message 1 must be an object with `role` and `content`"),
        (None, "message 1 must be an object with `role` and `content`"),
    ],
)
def test_a_message_that_is_not_understood_is_named_with_the_remedy(message, refusal):
    with pytest.raises(SampleError, match=refusal):
        check_messages([user("2 + 2"), message])


def test_labels_and_numbers_of_parts_are_ignored_and_counted():
    labels = dict.fromkeys(GENERAL.part, {"kind": "Some words."})
    part = {"type": "text", "text": "4", **labels, "closed": True, "image_url": "", "audio": []}
    checked = check_messages([answer([part, {"type": "text", "text": "."}])])
    assert checked.rendered[0]["content"] == "4."
    names = {*GENERAL.part, "closed"}
    assert checked.notes == {f"ignored field: messages.content.{name}": 1 for name in names}


def test_parts_as_json_text_are_counted_where_nobody_writes_them_as_text():
    """Results of tools are often such text, which a model has read as it is."""
    text = json.dumps([{"type": "text", "text": "2 + 2"}, {"type": "image_url", "image_url": "a"}])
    tool = {"role": "tool", "content": text}
    for message, count in ((user(text), 1), (answer(text), 1), (tool, 0), (user("[1]"), 0)):
        checked = check_messages([message])
        assert checked.rendered == [message]
        assert checked.notes["contents that are parts as JSON text, kept as that text"] == count


@pytest.mark.parametrize("given", [{"name": "f", "arguments": '{"n": null}'}, '{"name": "f"}'])
def test_a_function_call_in_its_former_form_is_a_tool_call(given):
    message = {"role": "assistant", "content": None, "function_call": given}
    checked = check_messages([user("?"), message])
    (found,) = checked.rendered[1]["tool_calls"]
    assert found["function"]["name"] == "f" and "function_call" not in checked.rendered[1]
    assert checked.notes == {"`function_call` of answers, read as `tool_calls`": 1}
    with pytest.raises(SampleError, match="message 0: `tool_calls` of role user"):
        check_messages([{**message, "role": "user", "content": ""}])


def test_nulls_in_a_function_call_are_counted():
    call = {"name": "f", "arguments": {"a": None}}
    record = {"messages": [*TURN, {"role": "assistant", "function_call": call}]}
    assert any("null in tools" in note for note in read_conversation(record).notes)


@pytest.mark.parametrize("arguments", [None, "", " ", "{}", {}])
def test_missing_arguments_are_empty_objects(arguments):
    checked = check_messages([answer("", tool_calls=[call("f", arguments)])])
    assert checked.rendered[0]["tool_calls"][0]["function"]["arguments"] == {}
    assert checked.original_calls[0][0]["function"]["arguments"] == "{}"


def test_arguments_as_text_keep_their_own_text_for_templates_that_need_it():
    text = '{"city":"Malmö",  "n": 1e3}'
    checked = check_messages([answer("", tool_calls=[call("f", text), call("g", {"c": "ö"})])])
    texts = [each["function"]["arguments"] for each in checked.original_calls[0]]
    assert texts == [text, '{"c": "ö"}']


def test_a_first_message_that_answers_nothing_needs_weight_0():
    greeting = [answer("Hello!"), *TURN]
    with pytest.raises(SampleError, match="message 0 answers no question; give it `we"):
        check_answers(check_messages(greeting))
    check_answers(check_messages([answer("Hello!", weight=0), *TURN]))
    with pytest.raises(SampleError, match="or make its system message one of role user"):
        check_answers(check_messages([{"role": "system", "content": "Say hello."}, greeting[0]]))
    with pytest.raises(SampleError, match="all answers have weight 0"):
        check_answers(check_messages([user("a"), answer("b", weight=0)]))


# Prompts ------------------------------------------------------------------------------------------


def test_prompts_are_text_or_messages_and_the_rest_is_for_the_reward():
    found, metadata = read_prompt({"prompt": "2 + 2", "answer": "4", "note": None, "__key__": "7"})
    assert (found.is_pair, found.messages) == (True, [user("2 + 2")])
    assert metadata == {"answer": "4", "note": None}
    record = {"prompt": [user("2 + 2")], "tools": TOOLS, "solution": "4", "response": "5"}
    found, metadata = read_prompt(record)
    assert (found.is_pair, found.messages, found.tools) == (False, [user("2 + 2")], TOOLS)
    assert metadata == {"solution": "4", "response": "5"}
    sharegpt = {"conversations": [{"from": "human", "value": "2 + 2"}], "system": "Be brief."}
    assert read_prompt(sharegpt)[0].messages == [SYSTEM, user("2 + 2")]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "2 + 2"}, r"needs `prompt` or `messages`; it has \['question'\]"),
        (
            {"prompt": "2 + 2", "tools": TOOLS},
            "`tools`: for messages only, not for a text `prompt`",
        ),
        (
            {"prompt": "2 + 2", "system": "Be brief."},
            "`system` next to the prompt would not become",
        ),
        ({"prompt": [user("a")], "images": ["a.png"]}, "`images` next to the prompt"),
        ({"prompt": [user("a")], "enable_thinking": True}, "put it into chat_template_kwargs"),
    ],
)
def test_a_prompt_that_would_miss_a_field_is_refused(record, message):
    with pytest.raises(SampleError, match=message):
        read_prompt(record)


@pytest.mark.parametrize("question", ["Solve x = 1 please.", "Answer this question."])
@pytest.mark.parametrize("switch", ["on", "off", True])
def test_a_switch_of_reasoning_is_a_label_whatever_the_words(switch, question):
    messages = [user(question), answer("x is 1.")]
    found = read_conversation({"reasoning": switch, "messages": messages})
    assert found.notes["ignored field: reasoning"] == 1


def test_a_text_is_not_said_as_a_part_of_a_word():
    messages = [user("Answer this question."), answer("Because.")]
    with pytest.raises(SampleError, match="`context` next to OpenAI messages"):
        read_conversation({"context": "cause", "messages": messages})
    assert read_conversation({"context": "this question", "messages": messages})


def test_a_prompt_may_have_the_messages_of_sharegpt():
    question, metadata = read_prompt({"prompt": [{"from": "human", "value": "Hi"}], "answer": 7})
    assert question.messages == [user("Hi")]
    assert metadata == {"answer": 7}
    with pytest.raises(SampleError, match="name the list `conversations`"):
        read_prompt({"messages": [{"from": "human", "value": "Hi"}]})


def test_a_part_of_a_text_without_spaces_is_said():
    messages = [user("请翻译这句话"), answer("好的。")]
    for context in ("翻译", ["", "翻译这句话"]):
        assert read_conversation({"context": context, "messages": messages})


# Metadata -----------------------------------------------------------------------------------------


def test_the_native_form_of_dolly_is_read_with_its_category_as_a_label():
    found = read_conversation(
        {"instruction": "Add.", "context": "2 + 2", "response": "4", "category": "closed_qa"}
    )
    assert found.messages == [user("Add.\n2 + 2"), answer("4")]
    assert found.notes == {"format: Alpaca": 1, "ignored field: category": 1}


@pytest.mark.parametrize("data_set", DATA_SETS)
def test_labels_of_well_known_data_sets_are_ignored_and_counted(data_set):
    labels = DATA_SETS[data_set]
    found = read_conversation({**dict.fromkeys(labels.record, "Some words."), "messages": TURN})
    notes = {f"ignored field: {name}" for name in labels.record}
    assert found.notes.keys() - {"format: OpenAI messages"} == notes
    described = {**TURN[0], **{name: {"a": "Some words."} for name in labels.message}}
    checked = check_messages([described, TURN[1]])
    assert checked.rendered == TURN
    assert checked.notes == {f"ignored field: messages.{name}": 1 for name in labels.message}


WILDCHAT = {
    "conversation_hash": "c1", "model": "gpt-4", "turn": 1, "toxic": False, "country": "Portugal",
    "openai_moderation": [{"flagged": False}],
    "conversation": [
        {**TURN[0], "language": "English", "country": "Portugal", "toxic": False, "header": None},
        {**TURN[1], "language": "English", "redacted": False, "turn_identifier": 7},
    ],
}  # fmt: skip


@pytest.mark.parametrize("as_text", [False, True], ids=["list", "JSON text"])
def test_a_conversation_of_wildchat_is_its_messages_with_its_labels(as_text):
    stored = WILDCHAT["conversation"]
    record = {**WILDCHAT, "conversation": json.dumps(stored) if as_text else stored}
    found = read_conversation(record)
    # A template may write the language, as of any message.
    assert check_messages(found.messages).rendered == [{**m, "language": "English"} for m in TURN]
    ignored = WILDCHAT.keys() - {"conversation"}
    text = {"messages given as JSON text: conversation"} if as_text else set()
    notes = {"format: OpenAI messages", *(f"ignored field: {name}" for name in ignored)}
    assert found.notes.keys() == notes | text
    assert read_prompt({"conversation": TURN[:1], "answer": "4"}) == (
        read_prompt({"messages": TURN[:1]})[0],
        {"answer": "4"},
    )


@pytest.mark.parametrize(
    "record", [{"messages": TURN}, {"prompt": "2 + 2", "response": "4"}], ids=["messages", "pair"]
)
def test_a_conversation_next_to_another_format_is_a_label(record):
    for value in ("c1", [user("Another one."), answer("Yes.")]):
        found = read_conversation({**record, "conversation": value})
        assert found.messages == TURN and found.notes["ignored field: conversation"] == 1


@pytest.mark.parametrize("value", ["c1", [], [{"human": "a", "assistant": "b"}], [1], {"a": TURN}])
def test_a_conversation_that_is_no_list_of_messages_is_refused_with_the_names(value):
    with pytest.raises(SampleError, match="needs `messages`, .*; it has .'conversation'."):
        read_conversation({"conversation": value})


def test_a_text_under_the_name_of_a_label_alone_is_a_text():
    with pytest.raises(SampleError, match="`knowledge` next to OpenAI messages would not become"):
        read_conversation({"messages": TURN, "knowledge": "The harbour is closed."})
    named = {**TURN[0], "state": "Lisbon"}
    assert check_messages([named, TURN[1]]).rendered == [named, TURN[1]]


def test_the_page_has_the_labels_of_the_code():
    page = (Path(__file__).parents[2] / "docs" / "data" / "chats.md").read_text()
    _, found, rest = page.partition(
        "| data set | of a record | of a message | of a part |\n| --- | --- | --- | --- |\n"
    )
    assert found
    rows = [line.strip("|").split("|") for line in rest.partition("\n\n")[0].splitlines()]
    shown = {
        name.strip(): [re.findall("`(.+?)`", names) for names in others] for name, *others in rows
    }
    expected = {"any": GENERAL, **DATA_SETS}
    assert shown == {
        name: [list(labels.record), list(labels.message), list(labels.part)]
        for name, labels in expected.items()
    }


def test_a_completion_that_repeats_the_prompt_is_refused():
    for answer_name in ("completion", "response"):
        with pytest.raises(SampleError, match=f"`{answer_name}` begins with the messages of `prom"):
            read_conversation({"prompt": TURN[:1], answer_name: TURN})
    assert len(read_conversation({"prompt": TURN[:1], "completion": TURN[1:]}).messages) == 2


def test_a_system_message_of_sharegpt_is_written_once():
    system = {"from": "system", "value": "Be brief."}
    turn = [{"from": "human", "value": "2 + 2"}, {"from": "gpt", "value": "4"}]
    record = {"system": "Be brief.", "conversations": [system, *turn]}
    roles = ["system", "user", "assistant"]
    assert [m["role"] for m in read_conversation(record).messages] == roles
    asked = [{"from": "human", "value": "Be brief."}, turn[1]]
    both = read_conversation({**record, "conversations": asked}).messages
    assert [m["role"] for m in both] == roles
    other = read_conversation({**record, "system": "Be kind."}).messages
    assert [m["content"] for m in other[:2]] == ["Be kind.", "Be brief."]


# Media --------------------------------------------------------------------------------------------

MEDIA = {
    **dict.fromkeys(
        ("image", "image_path", "img", "imagePath", "photo_url", "screenshot"), "a.jpg"
    ),
    **dict.fromkeys(("images", "image_paths", "frames", "img_paths", "image_files"), ["a.jpg"]),
    **dict.fromkeys(("audio", "audio_path", "audio_url", "audio_filepath", "speech_path"), "a.wav"),
    **dict.fromkeys(("video", "video_path", "videos", "video_file", "clip_url"), "v.mp4"),
    **{"image_base64": "iVBOR", "images_1": b"\x89PNG", "audioFilePath": "a", "frame_paths": ["a"]},
    **{"image_id": "coco-3", "pixel_values": [[0.5]], "audio": {"array": [0.1], "rate": 16000}},
    **{
        "path": "a.wav",
        "file_name": "b.png",
        "url": "https://a.org/c.jpeg?w=3",
        "files": ["d.mp4"],
    },
    **{"speech": "a.wav", "figure": "https://a.org/f.svg", "media": [{"kind": "x", "at": "b.mp4"}]},
    **{"webp": "c", "visuals": ["d.png"], "page": {"bytes": b"x", "path": None}},
    **{"said": {"array": [0.1], "sampling_rate": 16000}, "scan_2": "e.tiff"},
    **{"attachments": [{"url": "e.pdf"}], "thumb": "data:image/png;base64,iVBOR"},
}
NO_MEDIA = {
    **{"image_id": 3, "num_frames": 16, "has_image": False, "is_video": "no", "images": []},
    **{"image": {"bytes": None, "path": None}, "audio": "", "videos": [None], "path": "a.json"},
    **{"url": "https://a.org/page", "name": "a.png", "speech": "formal", "frame": "story"},
    **{"figure": "The third one.", "media": "press", "page": {"bytes": None, "path": None}},
    **{"imagination": "high", "avatar": "https://a.org/c.png", "source": "photo.txt"},
}


@pytest.mark.parametrize("name", MEDIA)
def test_media_next_to_a_conversation_refuse_it_whatever_their_name(name):
    refusal = f"`{name}` next to .*: images, audio and video are not read.* own TaskEncoder"
    fields = {name: MEDIA[name]}
    for read, record in (
        (read_conversation, {"messages": TURN}),
        (read_conversation, {"conversations": [{"from": "human", "value": "a.jpg"}]}),
        (read_conversation, {"prompt": "2 + 2", "response": "4"}),
        (read_prompt, {"prompt": "2 + 2"}),
        (read_prompt, {"messages": TURN[:1]}),
        (read_preference, {"prompt": "2 + 2", "chosen": "4", "rejected": "5"}),
        (read_preference, {"chosen": "2 + 2: 4", "rejected": "2 + 2: 5"}),
    ):
        with pytest.raises(SampleError, match=refusal):
            read({**record, **fields})
    with pytest.raises(SampleError, match=f"message 0: `{name}`: images, audio and video are not"):
        check_messages([{**TURN[0], **fields}, TURN[1]])


@pytest.mark.parametrize("name", NO_MEDIA)
def test_a_number_or_a_name_that_only_sounds_like_media_is_metadata(name):
    assert read_conversation({"messages": TURN, name: NO_MEDIA[name]}).messages == TURN
    assert read_prompt({"messages": TURN[:1], name: NO_MEDIA[name]})[0].messages == TURN[:1]
