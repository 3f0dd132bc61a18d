# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Special and sparse files neither block nor exhaust memory; links at outputs are not followed."""

import os
import shutil

import pytest

from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.cli.runs import write_run
from tests.support import write_dataset, write_mix, write_tokens, write_weights

pytest.importorskip("tokenizers")
import tokenizers  # noqa: E402


def pipe(path):
    os.mkfifo(path)  # without a writer


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


@pytest.fixture(scope="module")
def samples_once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    write_dataset(folder / "d", ["some text"] * 9)
    vocabulary = {chr(letter): letter - 97 for letter in range(97, 123)}
    model = tokenizers.models.BPE(vocab=vocabulary | {"</s>": 26}, merges=[])
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    (folder / "run").mkdir()
    (folder / "text.txt").write_text("some text " * 99)
    (folder / "o").mkdir()
    return folder


@pytest.fixture
def samples(tmp_path, samples_once):
    return shutil.copytree(samples_once, tmp_path, dirs_exist_ok=True)


#: What replaces which file, and the error of the command that reads it.
OF_PAIRS = [
    (pipe, "mix.yaml", "does not exist"),
    (sparse, "mix.yaml", "has more than 4,194,304 bytes"),
    (pipe, "a.idx", "not a Megatron index"),
    (pipe, "a.bin", "has 0 bytes"),
    (pipe, "a.weights.bin", "has 0 bytes; 27 tokens"),
    (pipe, "a.meta.json", "is not a regular file"),
    (device, "a.meta.json", "is not a regular file"),
    (sparse, "a.meta.json", "has more than 1,048,576 bytes"),
]


@pytest.mark.parametrize("put, name, message", OF_PAIRS)
def test_a_special_or_sparse_file_in_a_pair_is_refused(put, name, message, pair):
    (pair / name).unlink()
    put(pair / name)
    assert message in error_line(energon_ext("peek", pair / "mix.yaml"))


PLAN = ("plan", "d", "--tokenizer", "tokenizer.json")
FORECAST = ("plan", "d", "--steps", "1")
DIFF = ("checkpoint", "diff", "run", "d")
PREPARE = ("prepare", "o", "--text", "text.txt", "--tokenizer", "bytes", "--val", "0")
IMPORT = ("import", "o.yaml", "--data-args-path", "list")
OF_SAMPLES = [
    (
        pipe,
        "d/shard_000.tar",
        ("plan", "d", "--steps", "1"),
        "shard_000.tar: is not a regular file",
    ),
    (pipe, "d/shard_000.tar.idx", ("plan", "d", "--steps", "1"), "not an index of 9 samples"),
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
    (pipe, "run/metrics.jsonl", ("report", "run"), "does not exist"),
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
def test_a_special_or_sparse_file_is_refused(put, name, command, message, samples, monkeypatch):
    monkeypatch.chdir(samples)
    monkeypatch.setattr("energon_ext.prepare.inputs.MAX_CHARACTERS", 2**20)
    monkeypatch.setattr("energon_ext.tokenizers.files.MAX_FILE_BYTES", 2**20)
    monkeypatch.setattr("energon_ext.metrics.file.MAX_LINE_BYTES", 2**20)
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
def test_a_link_at_an_output_path_is_replaced_not_followed(name, command, pair, monkeypatch):
    monkeypatch.chdir(pair)
    write_run(pair / "run", steps=20)
    (pair / "text.txt").write_text("some text")
    (pair / "precious").mkdir()
    target = pair / "precious" / "prepared.json"
    target.write_text("precious")
    is_folder = name == ".o.unfinished"
    (pair / name).symlink_to(target.parent if is_folder else target)
    result = energon_ext(*command)
    assert result.exit_code == 0, result.output
    assert target.read_text() == "precious" and len(list(target.parent.iterdir())) == 1


def test_a_claim_file_that_is_a_link_is_not_followed(samples):
    (samples / "target").write_text("precious")
    (samples / ".o.claim").symlink_to("target")
    text = samples / "text.txt"
    energon_ext("prepare", samples / "o", "--text", text, "--tokenizer", ByteTokenizer.name)
    assert (samples / "target").read_text() == "precious"
