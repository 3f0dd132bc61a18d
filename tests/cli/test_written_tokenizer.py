# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Token files name the tokenizer that wrote them, and it is used by default."""

import json

import pytest

from energon_ext import written_tokenizer
from tests.cli.command import energon_ext, error_line
from tests.support import write_mix, write_tokens

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
    line = error_line(energon_ext("plan", mix))
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
    line = error_line(energon_ext("plan", write_mix(tmp_path / "mix.yaml", [("a", 1)])))
    assert "a.meta.json: tokenizer_arguments: " in line and line.endswith("names are needed.")
