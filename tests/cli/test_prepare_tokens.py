# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``prepare`` from Energon datasets and conversations: tokens, splits and weights."""

import json

import numpy as np
import pytest
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from energon_ext.tokens.file_set import open_token_files
from tests.cli.command import energon_ext, error_line
from tests.support import CRUDE, OtherText, write_dataset, write_mix, write_records, write_tokens

SPLIT_PARTS = [("train", "shard_00[01].tar"), ("val", "shard_002.tar")]
TEXTS = [f"document {number} with an é" for number in range(25)]


def byte_ids(text):
    return [1, *(byte + 4 for byte in text.encode()), 2]


def documents(pair):
    """Return the tokens of every document of a pair, in order."""
    files = open_token_files(pair)
    return [files.document(number).tolist() for number in range(len(files))]


def weights(pair):
    """Return the label weights of every document of a pair, in order."""
    files = open_token_files(pair)
    numbers = np.arange(len(files))
    found = files.read(numbers.tolist(), [0] * len(files), files.lengths(numbers).tolist())[
        "label_weights"
    ]
    return [each.tolist() for each in found]


def to_tokens(out, *inputs):
    """Call ``prepare`` with the byte tokenizer; it must succeed."""
    result = energon_ext("prepare", out, "--tokenizer", "bytes", "--force", *inputs)
    assert result.exit_code == 0, result.stderr
    return result.stdout


def write_jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# Energon datasets -------------------------------------------------------------------------------


@pytest.fixture
def prepared(tmp_path):
    return write_dataset(tmp_path / "web", TEXTS, split_parts=SPLIT_PARTS, shard_size=10)


def test_a_prepared_dataset_keeps_its_splits_and_the_order_of_its_files(tmp_path, prepared):
    out = to_tokens(tmp_path / "out", "--dataset", prepared)
    assert documents(tmp_path / "out" / "train") == [byte_ids(text) for text in TEXTS[:20]]
    assert documents(tmp_path / "out" / "val") == [byte_ids(text) for text in TEXTS[20:]]
    assert [line.split()[:2] for line in out.splitlines()[2:4]] == [["train", "20"], ["val", "5"]]


def test_one_split_of_a_dataset_is_divided_like_any_text(tmp_path, prepared):
    to_tokens(tmp_path / "out", "--dataset", prepared, "--split", "train", "--val", 0.3)
    jsonl = write_jsonl(tmp_path / "web.jsonl", [{"text": text} for text in TEXTS[:20]])
    to_tokens(tmp_path / "from_jsonl", "--jsonl", jsonl, "--val", 0.3)
    for split in ("train", "val"):
        assert documents(tmp_path / "out" / split) == documents(tmp_path / "from_jsonl" / split)


def test_every_source_of_a_metadataset_is_read_once_in_turn(tmp_path, prepared):
    lines = write_jsonl(tmp_path / "more.jsonl", [{"text": text} for text in ("one", "two")])
    crude = write_dataset(tmp_path / "crude", ["three", "four"], dataset_config=CRUDE)
    CrudeJsonlDatasetFactory.prepare_dataset(EPath(lines))
    mix = write_mix(
        tmp_path / "mix.yaml", [(lines, {"step": {0: 0, 9: 3}}), (prepared, 7), (crude, 1)]
    )
    to_tokens(tmp_path / "out", "--dataset", mix, "--split", "train", "--val", 0)
    expected = ["one", "two", *TEXTS[:20], "three", "four"]
    assert documents(tmp_path / "out" / "train") == [byte_ids(text) for text in expected]


def test_a_missing_split_is_named(tmp_path):
    only_train = write_dataset(tmp_path / "web", TEXTS)
    call = ("prepare", tmp_path / "out", "--tokenizer", "bytes", "--dataset", only_train)
    assert "val" in error_line(energon_ext(*call))
    assert energon_ext(*call, "--split", "train", "--val", 0).exit_code == 0
    wrong = error_line(energon_ext(*call, "--split", "train", "--split", "test", "--force"))
    assert "--split train test: give one, or train and val" in wrong


@pytest.mark.parametrize(
    ("write_input", "expected"),
    [
        (lambda folder: write_tokens(folder / "pair", [[1]]), "pair: is already tokenized"),
        (lambda folder: folder / "absent", "absent: does not exist"),
        (lambda folder: write_jsonl(folder / "a.jsonl", [{}]), "read it with --jsonl"),
        (lambda folder: mix_with_tokens(folder), "pair: is already tokenized; remove it from"),
        (lambda folder: write_dataset(folder / "i", ["a"], dataset_config=IMAGES), "ImageSample"),
    ],
)
def test_non_text_datasets_are_refused(tmp_path, write_input, expected):
    call = ("--tokenizer", "bytes", "--split", "train", "--val", 0)
    line = error_line(
        energon_ext("prepare", tmp_path / "o", "--dataset", write_input(tmp_path), *call)
    )
    assert expected in line
    assert not (tmp_path / "o").exists()


IMAGES = {
    "sample_type": {"__module__": "megatron.energon", "__class__": "ImageSample"},
    "field_map": {"image": "txt"},
}


def mix_with_tokens(folder):
    write_tokens(folder / "pair", [[1]])
    return write_mix(folder / "mix.yaml", [("pair", 1)])


def test_a_custom_sample_type_is_read_only_from_a_trusted_module(tmp_path):
    sample_type = {"__module__": OtherText.__module__, "__class__": "OtherText"}
    config = {"sample_type": sample_type, "field_map": {"text": "txt"}}
    folder = write_dataset(tmp_path / "web", ["one"], dataset_config=config)
    call = ("--dataset", folder, "--split", "train", "--val", 0)
    refused = energon_ext("prepare", tmp_path / "out", "--tokenizer", "bytes", *call)
    assert "tests.support" in error_line(refused)
    to_tokens(tmp_path / "out", *call, "--trusted-module", "tests.support")
    assert documents(tmp_path / "out" / "train") == [byte_ids("one")]


def test_a_damaged_sample_is_an_error(tmp_path):
    folder = write_dataset(tmp_path / "web", ["one", "two"], dataset_config=CRUDE)
    shard = folder / "shard_000.tar"
    shard.write_bytes(shard.read_bytes().replace(b"two", b"\xff\xff\xff"))
    call = ("--dataset", folder, "--split", "train", "--val", 0, "--tokenizer", "bytes")
    assert "web: Sample 000001: UnicodeDecodeError (" in error_line(
        energon_ext("prepare", tmp_path / "out", *call)
    )


# Conversations ----------------------------------------------------------------------------------

QUESTION = {"role": "user", "content": "2+2"}
ANSWER = {"role": "assistant", "content": "4"}
CHAT = ("--chat", "--val", 0)
PART = "train/part-00000"
RECORDS = [{"prompt": "ab", "response": "c"}, {"messages": [QUESTION, ANSWER], "id": 5}]

#: The answers are "c" and EOS, and " 4\n" and EOS of "user: 2+2\nassistant: 4\n".
TOKENS = [byte_ids("abc"), byte_ids("user: 2+2\nassistant: 4\n")]
WEIGHTS = [[0, 0, 0, 1, 1], [0] * 21 + [1, 1, 1, 1]]


def test_only_answers_have_weight(tmp_path):
    lines = write_jsonl(tmp_path / "chat.jsonl", RECORDS)
    out = to_tokens(tmp_path / "out", *CHAT, "--jsonl", lines)
    assert documents(tmp_path / "out" / "train") == TOKENS
    assert weights(tmp_path / "out" / "train") == WEIGHTS
    assert (tmp_path / "out" / f"{PART}.weights.bin").stat().st_size == 30
    characters = str(11 + 75)  # of ["ab", "c"] and of the messages, as JSON
    assert out.splitlines()[2].split() == ["train", "2", characters, "30"]
    meta = json.loads((tmp_path / "out" / f"{PART}.meta.json").read_text())
    assert meta == {
        "tokenizer": {"kind": "bytes", "add_bos": True, "add_eos": True},
        "vocab_size": 260,
        "chat_template": {"kind": "plain"},
        "answers": None,
        "answer_end": None,
        "rules": 4,
        "tokenizer_arguments": {"name_or_path": "bytes"},
        "label_weights": {"dtype": "uint8"},
    }


def test_text_has_no_weights(tmp_path):
    lines = write_jsonl(tmp_path / "web.jsonl", [{"text": "one"}])
    to_tokens(tmp_path / "out", "--jsonl", lines, "--val", 0)
    assert open_token_files(tmp_path / "out" / "train").label_weights(0, 0, 5) is None
    assert not (tmp_path / "out" / f"{PART}.weights.bin").exists()


def test_hugging_face_conversations_are_read(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "local").mkdir()
    write_jsonl(tmp_path / "local" / "train.jsonl", [{"messages": [QUESTION, ANSWER]}] * 2)
    for streaming in ((), ("--hf-streaming",)):
        to_tokens(tmp_path / "out", *CHAT, "--hf-dataset", tmp_path / "local", *streaming)
        assert documents(tmp_path / "out" / "train") == TOKENS[1:] * 2
        assert weights(tmp_path / "out" / "train") == WEIGHTS[1:] * 2


def test_energon_conversations_are_read(tmp_path):
    crude = write_records(tmp_path / "crude", RECORDS)
    to_tokens(tmp_path / "out", *CHAT, "--dataset", crude, "--split", "train")
    assert documents(tmp_path / "out" / "train") == TOKENS
    assert weights(tmp_path / "out" / "train") == WEIGHTS
    wrong = energon_ext(
        *("prepare", tmp_path / "text", "--tokenizer", "bytes", "--dataset", crude),
        *("--split", "train"),
    )
    assert "no `text`; it has ['prompt', 'response']" in error_line(wrong)


def test_equal_conversations_stay_in_one_split(tmp_path):
    records = [{"prompt": f"{number}", "response": "yes", "id": number} for number in range(40)]
    again = [{**record, "id": 99} for record in records]
    lines = write_jsonl(tmp_path / "chat.jsonl", [*records, *again])
    to_tokens(tmp_path / "out", "--chat", "--val", 0.3, "--jsonl", lines)
    train, val = (documents(tmp_path / "out" / split) for split in ("train", "val"))
    assert sorted(train + val) == sorted([byte_ids(f"{n}yes") for n in range(40)] * 2)
    assert len(val) > 4
    assert not {str(tokens) for tokens in train} & {str(tokens) for tokens in val}


def test_conversations_are_written_whole_and_refused_ones_are_counted(tmp_path):
    records = [
        {"prompt": "ab", "response": "c" * 5000},
        {"messages": [ANSWER]},
        {"prompt": "a", "response": "b"},
    ]
    lines = write_jsonl(tmp_path / "chat.jsonl", records)
    out = to_tokens(tmp_path / "out", *CHAT, "--jsonl", lines)
    assert documents(tmp_path / "out" / "train") == [byte_ids("ab" + "c" * 5000), byte_ids("ab")]
    assert weights(tmp_path / "out" / "train") == [[0] * 3 + [1] * 5001, [0, 0, 1, 1]]
    assert out.splitlines()[2].split()[:2] == ["train", "2"]
    assert "skipped as invalid: 1" in out
    assert f"the first: Sample {lines}:2: message 0 answers no question" in out


def test_most_conversations_refused_are_an_exit_status_unless_that_is_accepted(tmp_path):
    bad = [{"messages": [ANSWER]}, {"prompt": "ab"}]
    twice = '{"prompt": "e", "prompt": "f", "response": "g"}\n'
    lines = write_jsonl(tmp_path / "chat.jsonl", [{"prompt": "a", "response": "b"}, *bad])
    command = ("--tokenizer", "bytes", *CHAT, "--jsonl", lines)
    result = energon_ext("prepare", tmp_path / "out", *command)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].strip() == (
        "Most documents were refused; --on-error skip accepts it."
    )
    assert documents(tmp_path / "out" / "train") == [byte_ids("ab")]
    assert energon_ext("prepare", tmp_path / "out", *command).exit_code == 1  # nothing left to do
    with lines.open("a") as file:
        file.write(twice)
    result = energon_ext("prepare", tmp_path / "more", *command, "--on-error", "skip")
    assert result.exit_code == 0
    assert "skipped as unreadable: 1" in result.stdout
    assert f"{lines}:4: the key 'prompt' is there twice." in result.stdout


def test_an_input_of_refused_conversations_is_an_error(tmp_path):
    few = write_jsonl(tmp_path / "few.jsonl", [{"messages": [ANSWER]}] * 3)
    line = error_line(
        energon_ext("prepare", tmp_path / "out", "--tokenizer", "bytes", *CHAT, "--jsonl", few)
    )
    assert "None of the 3 documents can be used, the first: Sample" in line
    assert "message 0 answers no question" in line
    many = write_jsonl(tmp_path / "many.jsonl", [*RECORDS, *[{"messages": [ANSWER]}] * 100])
    line = error_line(
        energon_ext("prepare", tmp_path / "out", "--tokenizer", "bytes", *CHAT, "--jsonl", many)
    )
    assert "100 documents in a row cannot be trained on, the first: Sample" in line
    assert not (tmp_path / "out").exists()


def test_the_requested_chat_template_is_used(tmp_path):
    tokenizer = chat_tokenizer(tmp_path / "tokenizer")
    lines = write_jsonl(tmp_path / "chat.jsonl", RECORDS[1:])
    call = (*CHAT, "--jsonl", lines, "--tokenizer", tokenizer, "--force")
    kinds = {}
    for name, options in {
        "default": (),
        "plain": ("--chat-template", "plain"),
        "named": ("--chat-template", tokenizer),
    }.items():
        assert energon_ext("prepare", tmp_path / name, *call, *options).exit_code == 0
        meta = json.loads((tmp_path / name / f"{PART}.meta.json").read_text())
        kinds[name] = meta["chat_template"]["kind"], documents(tmp_path / name / "train")[0]
    assert [kind for kind, _ in kinds.values()] == ["hf", "plain", "hf"]
    assert kinds["default"] == kinds["named"] != kinds["plain"]


def chat_tokenizer(folder):
    """Write a folder with a word tokenizer and a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    words = {"[UNK]": 0, "</s>": 1, "<u>": 2, "<a>": 3, "2": 4, "+": 5, "4": 6}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")
    fast.chat_template = (
        "{% for m in messages %}{{ '<u> ' if m.role == 'user' else '<a> ' }}{{ m.content }} "
        "{% endfor %}{% if add_generation_prompt %}<a> {% endif %}"
    )
    fast.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--jsonl", "chat.jsonl"], "--tokenizer is missing"),
        (["--text", "chat.jsonl", "--tokenizer", "bytes"], "--text contains no"),
        (
            ["--jsonl", "text.jsonl", "--tokenizer", "bytes"],
            "text.jsonl:1: needs `messages`, `conversations`, `prompt` and `response`, or",
        ),
    ],
)
def test_user_mistakes_are_one_line(tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "chat.jsonl", RECORDS)
    write_jsonl(tmp_path / "text.jsonl", [{"text": "one"}])
    assert expected in error_line(energon_ext("prepare", "out", "--chat", *arguments))
    assert not (tmp_path / "out").exists()
