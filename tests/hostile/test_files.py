# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files that are no data block nobody and fill no memory; links where we write are not followed."""

import os

import pytest

from energon_ext.encoders.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.cli.runs import write_run
from tests.support import write_dataset, write_mix, write_tokens, write_weights

pytest.importorskip("tokenizers")
import tokenizers  # noqa: E402


def pipe(path):
    os.mkfifo(path)  # nobody writes to it


def device(path):
    path.symlink_to("/dev/zero")


def sparse(path):
    with path.open("wb") as file:
        file.truncate(2**36)


@pytest.fixture
def pair(tmp_path):
    write_tokens(tmp_path / "a", [[5, 6, 7]] * 9)
    write_weights(tmp_path / "a", [[1, 1, 1]] * 9)
    write_mix(tmp_path / "mix.yaml", [("a", 1)])
    return tmp_path


@pytest.fixture
def samples(tmp_path):
    write_dataset(tmp_path / "d", ["some text"] * 9)
    vocabulary = {chr(letter): letter - 97 for letter in range(97, 123)}
    model = tokenizers.models.BPE(vocab=vocabulary | {"</s>": 26}, merges=[])
    tokenizers.Tokenizer(model).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "run").mkdir()
    (tmp_path / "text.txt").write_text("some text " * 99)
    (tmp_path / "o").mkdir()
    return tmp_path


#: What is in place of which file, and what the command that reads it ends with.
OF_PAIRS = [
    (pipe, "mix.yaml", "does not exist"),
    (sparse, "mix.yaml", "has more than 4,194,304 bytes"),
    (pipe, "a.idx", "not a Megatron index"),
    (pipe, "a.bin", "has 0 bytes"),
    (pipe, "a.weights.bin", "does not exist, 27 tokens"),
    (pipe, "a.meta.json", "is not a regular file"),
    (device, "a.meta.json", "is not a regular file"),
    (sparse, "a.meta.json", "has more than 1,048,576 bytes"),
]


@pytest.mark.parametrize("put, name, message", OF_PAIRS)
def test_a_file_of_a_pair_that_is_no_data_is_refused(put, name, message, pair):
    (pair / name).unlink()
    put(pair / name)
    assert message in error_line(energon_ext("peek", pair / "mix.yaml"))


PLAN = ("plan", "d", "--tokenizer", "tokenizer.json")
DIFF = ("checkpoint", "diff", "run", "d")
PREPARE = ("prepare", "o", "--text", "text.txt", "--tokenizer", "bytes", "--val", "0")
IMPORT = ("import", "o.yaml", "--data-args-path", "list")
OF_SAMPLES = [
    (pipe, "d/shard_000.tar", ("plan", "d"), "shard_000.tar: is not a regular file"),
    (pipe, "d/shard_000.tar.idx", ("plan", "d"), "not an index of 9 samples"),
    (pipe, "d/.nv-meta/split.yaml", ("plan", "d"), "no .nv-meta/split.yaml"),
    (device, "d/.nv-meta/dataset.yaml", ("plan", "d"), "no .nv-meta/dataset.yaml"),
    (sparse, "d/.nv-meta/split.yaml", ("plan", "d"), "has more than"),
    (pipe, "tokenizer.json", PLAN, "does not exist"),
    (sparse, "tokenizer.json", PLAN, "has more than 1,048,576 bytes"),
    (pipe, "tokenizer_config.json", PLAN, None),
    (pipe, "run/data.json", DIFF, "is not a regular file"),
    (device, "run/data.json", DIFF, "is not a regular file"),
    (pipe, "run/train_dataloader_dprank000.pt", DIFF, "is not a regular file"),
    (pipe, "run/latest_checkpointed_iteration.txt", DIFF, "is not a regular file"),
    (pipe, "run/metrics.jsonl", ("report", "run"), "no such file"),
    (sparse, "run/metrics.jsonl", ("report", "run"), "over 1,048,576 bytes"),
    (pipe, "list", IMPORT, "is not a regular file"),
    (sparse, "list", IMPORT, "has more than"),
    (pipe, "text.txt", PREPARE, "is not a regular file"),
    (device, "text.txt", PREPARE, "is not a regular file"),
    (sparse, "text.txt", PREPARE, "more than 1,048,576 characters"),
    (pipe, "a.jsonl", ("prepare", "o", "--jsonl", "a.jsonl", *PREPARE[4:]), "not a regular file"),
    (pipe, "a.jsonl.gz", ("prepare", "o", "--jsonl", "a.jsonl.gz", *PREPARE[4:]), "not a regular"),
    (pipe, "o/prepared.json", PREPARE, "o: already exists"),
    (device, "o/prepared.json", PREPARE, "o: already exists"),
    (pipe, ".o.claim", PREPARE, "is not a regular file"),
]


@pytest.mark.parametrize("put, name, command, message", OF_SAMPLES)
def test_a_file_that_is_no_data_is_refused(put, name, command, message, samples, monkeypatch):
    monkeypatch.chdir(samples)
    monkeypatch.setattr("energon_ext.prepare.inputs.MAX_CHARACTERS", 2**20)
    monkeypatch.setattr("energon_ext.encoders.tokenizer_files.MAX_FILE_BYTES", 2**20)
    monkeypatch.setattr("energon_ext.cli.metrics.MAX_LINE_BYTES", 2**20)
    (samples / name).unlink(missing_ok=True)
    put(samples / name)
    result = energon_ext(*command)
    if message is None:  # nothing needs it
        assert result.exit_code == 0, result.output
    else:
        assert message in error_line(result)


OUTPUTS = [
    ("run/report.html", ("report", "run")),
    ("run/mix.png", ("report", "run")),
    ("f.html", ("plan", "mix.yaml", "--steps", "3", "--html", "f.html")),
    ("f.png", ("plan", "mix.yaml", "--steps", "3", "--png", "f.png")),
    ("o.yaml", ("import", "o.yaml", "a", "--overwrite")),
    (".o.yaml.new.yaml", ("import", "o.yaml", "a")),
    (".o.unfinished", PREPARE),
]


@pytest.mark.parametrize("name, command", OUTPUTS)
def test_a_link_in_place_of_an_output_is_replaced_not_followed(name, command, pair, monkeypatch):
    monkeypatch.chdir(pair)
    write_run(pair / "run", steps=20)
    (pair / "text.txt").write_text("some text")
    (pair / "precious").mkdir()
    own = pair / "precious" / "prepared.json"
    own.write_text("precious")
    is_folder = name == ".o.unfinished"
    (pair / name).symlink_to(own.parent if is_folder else own)
    result = energon_ext(*command)
    assert result.exit_code == 0, result.output
    assert own.read_text() == "precious" and len(list(own.parent.iterdir())) == 1


def test_a_claim_that_is_a_link_is_not_written_through(samples):
    (samples / "own").write_text("precious")
    (samples / ".o.claim").symlink_to("own")
    text = samples / "text.txt"
    energon_ext("prepare", samples / "o", "--text", text, "--tokenizer", ByteTokenizer.name)
    assert (samples / "own").read_text() == "precious"
