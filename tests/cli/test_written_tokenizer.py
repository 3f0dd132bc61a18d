# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Token files name the tokenizer that wrote them, and it is used by default."""

import json

import numpy as np
import pytest

from energon_ext import written_tokenizer
from tests.cli.command import energon_ext, error_line
from tests.support import write_dataset, write_mix, write_tokens

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture
def folder(tmp_path):
    """A folder with a word tokenizer and text."""
    words = {"<|end|>": 0, "<|other|>": 1, "one": 2, "two": 3}
    model = tokenizers.models.WordLevel(words, unk_token="one")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "two one two"}) + "\n")
    return tmp_path


def prepare(folder, monkeypatch, *options):
    monkeypatch.chdir(folder)
    given = ("--jsonl", "a.jsonl", "--val", "0", "--tokenizer", "words.json", *options)
    result = energon_ext("prepare", "out", *given)
    assert result.exit_code == 0, result.output
    return write_mix(folder / "mix.yaml", [("out/train", 1)])


def test_the_tokenizer_is_found_from_any_folder_with_its_special_tokens(folder, monkeypatch):
    mix = prepare(folder, monkeypatch, "--eos-token", "<|other|>")
    monkeypatch.chdir("/")
    assert written_tokenizer(mix).encode("one") == [2, 1]
    shown = energon_ext("peek", mix, "--rows", 1, "--seq-length", 4)
    assert "«two»one two <|other|>" in shown.output
    assert energon_ext("plan", mix).exit_code == 0


def test_a_given_tokenizer_is_used_and_a_wrong_one_is_refused(folder, monkeypatch):
    mix = prepare(folder, monkeypatch, "--eos-token", "<|end|>")
    options = ("--tokenizer", "words.json", "--eos-token", "<|end|>")
    assert energon_ext("plan", mix, *options).exit_code == 0
    line = error_line(energon_ext("plan", mix, "--tokenizer", "bytes"))
    assert f"written with the tokenizer {folder}/words.json, but bytes is used" in line
    assert line.endswith(f"pass --tokenizer {folder}/words.json, as it was written.")


def test_a_sentencepiece_model_is_found_the_same_way(folder, monkeypatch):
    library = pytest.importorskip("sentencepiece")
    library.SentencePieceTrainer.train(
        sentence_iterator=iter(["two one two", "one two"] * 20),
        model_prefix=str(folder / "pieces"),
        vocab_size=30,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    mix = prepare(folder, monkeypatch, "--tokenizer", "pieces.model")
    monkeypatch.chdir("/")
    shown = energon_ext("peek", mix, "--rows", 1, "--seq-length", 12)
    assert "«two»one two" in shown.output, shown.output
    line = error_line(energon_ext("plan", mix, "--tokenizer", "bytes"))
    assert f"written with the tokenizer {folder}/pieces.model, but bytes is used" in line


def test_a_missing_tokenizer_is_reported_with_the_file_that_names_it(folder, monkeypatch):
    mix = prepare(folder, monkeypatch, "--eos-token", "<|end|>")
    (folder / "words.json").unlink()
    line = error_line(energon_ext("peek", mix))
    assert f"part-00000.meta.json names the tokenizer {folder}/words.json: " in line
    assert line.endswith("Give the one it was written with as --tokenizer.")


def test_files_without_a_tokenizer_name_are_bytes(tmp_path):
    write_tokens(tmp_path / "a", [[5, 6]] * 9)
    assert written_tokenizer(write_mix(tmp_path / "mix.yaml", [("a", 1)])).name == "bytes"


@pytest.mark.parametrize("found", ["words.json", {"path": "x"}, {"name_or_path": 5}, [1]])
def test_an_invalid_tokenizer_name_is_refused(found, tmp_path):
    write_tokens(tmp_path / "a", [[5, 6]] * 9)
    meta = {"tokenizer": {"kind": "hf"}, "tokenizer_arguments": found}
    (tmp_path / "a.meta.json").write_text(json.dumps(meta))
    line = error_line(energon_ext("peek", write_mix(tmp_path / "mix.yaml", [("a", 1)])))
    assert "a.meta.json: tokenizer_arguments: " in line and line.endswith("names are needed.")


# Plans, which need none ---------------------------------------------------------------------------

SPLICE = '{"num_docs": 2, "content_length": 8, "pad_token_id": 150000}'
PLANS = [
    ["plan"],
    ["plan", "--at", "0,5"],
    ["plan", "--steps", 20],
    ["plan", "--train-tokens", "10k", "--balance"],
    ["plan", "--splice", SPLICE, "--steps", 20],
]


@pytest.fixture
def pairs(tmp_path):
    """Two pairs of a model with 150 000 ids; one names its tokenizer, which is gone."""
    documents = [[149_000 + n] * (20 + n) for n in range(40)]
    for name in ("bare", "named"):
        write_tokens(tmp_path / name, documents, dtype=np.int32)
    (tmp_path / "named.weights.bin").write_bytes(b"\1" * sum(map(len, documents)))
    meta = {
        "label_weights": {"dtype": "uint8"},
        "tokenizer": {"kind": "hf"},
        "tokenizer_arguments": {"name_or_path": "/gone/1"},
        "chat_template": {"kind": "of another"},
    }
    (tmp_path / "named.meta.json").write_text(json.dumps(meta))
    return write_mix(tmp_path / "mix.yaml", [("bare", 1), ("named", {"linear": {0: 1, 5: 2}})])


@pytest.mark.parametrize("words", PLANS, ids=lambda words: " ".join(map(str, words))[:40])
def test_token_files_are_planned_without_their_tokenizer(pairs, words):
    command, *options = words
    result = energon_ext(command, pairs, "--seq-length", 64, *options)
    assert result.exit_code == 0, result.output
    assert "bare" in result.stdout and "named" in result.stdout


def test_prepared_chats_are_planned_without_tokenizer_and_template(pairs):
    mix = write_mix(pairs.parent / "chats.yaml", [("named", 1)])
    options = ("--task", "chat", "--steps", 20, "--seq-length", 64)
    result = energon_ext("plan", mix, *options)
    assert result.exit_code == 0, result.output


def test_steps_are_traced_without_a_tokenizer(pairs, tmp_path):
    (tmp_path / "run").mkdir()
    options = ("--seq-length", 64, "--global-batch-size", 2)
    result = energon_ext("trace", tmp_path / "run", pairs, "--step", 3, *options)
    assert result.exit_code == 0 and "bare" in result.stdout, result.output


def test_shares_of_text_need_no_tokenizer_and_its_forecast_does(pairs):
    write_dataset(pairs.parent / "text", ["some text"] * 9)
    mix = write_mix(pairs.parent / "both.yaml", [("text", 1), ("named", 1)])
    assert energon_ext("plan", mix).exit_code == 0
    assert "names the tokenizer /gone/1" in error_line(energon_ext("plan", mix, "--steps", 3))


def test_a_tokenizer_that_is_named_is_still_compared(pairs):
    line = error_line(energon_ext("plan", pairs, "--tokenizer", "bytes"))
    assert "contains token id 149" in line


def test_reading_needs_the_tokenizer(pairs):
    assert "tokenizer" in error_line(energon_ext("peek", pairs))
