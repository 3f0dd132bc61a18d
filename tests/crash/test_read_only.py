# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Folders on a read-only file system can be read; every failed write is reported."""

import shutil

import pytest

from tests.cli.command import energon_ext, error_line
from tests.cli.runs import write_run
from tests.crash.starved import mount_for_itself, outcome, said
from tests.crash.test_starved_workers import new_loader
from tests.example_checkpoints import Checkpoints
from tests.saves import newest_cursor, save_cursor
from tests.support import batch_hash, take, write_dataset, write_mix, write_tokens

SEQ_LEN = 64


def save(folder):
    Checkpoints(folder).save(7, write_model=lambda folder: None, run={}, cursor={"row": 1})


def hashes(loader, count):
    return [batch_hash(batch) for batch in take(loader, count)]


@pytest.fixture
def folder(tmp_path):
    """Everything a run reads and writes, and a state after three of six batches."""
    folder = tmp_path / "data"
    write_tokens(folder / "tokens", [[n % 200] * (5 + n % 40) for n in range(90)])
    write_dataset(folder / "texts", [f"document {n} " * 9 for n in range(30)])
    (folder / "bare.jsonl").write_text('{"text": "a line"}\n' * 9)
    shutil.copy(folder / "bare.jsonl", folder / "lines.jsonl")
    write_mix(folder / "bare.yaml", [("bare.jsonl", 1)])
    write_mix(folder / "mix.yaml", [("tokens", 2), ("texts", 1), ("lines.jsonl", 1)])
    write_mix(folder / "planned.yaml", [("tokens", 1)])
    write_run(folder / "run", steps=5)
    new_loader(folder / "mix.yaml", 0, SEQ_LEN)  # writes the index of lines.jsonl
    loader = new_loader(folder / "planned.yaml", 0, SEQ_LEN)
    take(loader, 3)
    save_cursor(folder / "run", 3, loader.state_dict())
    return folder


def use(folder):
    mount_for_itself("--bind", folder, folder)
    mount_for_itself("-o", "remount,ro,bind", folder)
    resumed = new_loader(folder / "planned.yaml", 0, SEQ_LEN)
    resumed.load_state_dict(newest_cursor(folder / "run"))
    text, bytes_ = ("--jsonl", folder / "bare.jsonl"), ("--tokenizer", "bytes")
    planned = folder / "planned.yaml"
    return {
        "read": hashes(new_loader(folder / "mix.yaml", 0, SEQ_LEN), 6),
        "resumed": hashes(resumed, 3),
        "saving": said(save, folder / "run"),
        "no index": said(new_loader, folder / "bare.yaml", 0),
        "commands": [
            error_line(energon_ext(*command))
            for command in (
                ("prepare", folder / "new", *text, *bytes_),
                ("prepare", folder / "deep/new", *text, *bytes_),
                ("import", folder / "new.yaml", 1, folder / "tokens"),
                ("report", folder / "run"),
                ("plan", planned, "--steps", 5, "--png", folder / "new.png"),
                ("plan", planned, "--steps", 5, "--html", folder / "new.html"),
                ("plan", folder / "bare.yaml"),
            )
        ],
        "trace": energon_ext("trace", folder / "run", planned, "--step", 1).exit_code,
    }


def test_a_read_only_file_system_can_be_read_and_failed_writes_are_reported(folder, tmp_path):
    before = sorted(folder.rglob("*"))
    found = outcome(use, folder, stderr=tmp_path / "stderr")
    assert sorted(folder.rglob("*")) == before
    assert found["read"] == hashes(new_loader(folder / "mix.yaml", 0, SEQ_LEN), 6)
    assert found["resumed"] == hashes(new_loader(folder / "planned.yaml", 0, SEQ_LEN), 6)[3:]
    assert found["trace"] == 0
    assert found["saving"].startswith(
        f"EnergonExtError: {folder}/run/iter_0000007: the save failed ([Errno 30] "
    )
    assert found["no index"] == (
        f"ConfigError: {folder}/bare.yaml: splits.train.blend[0]: {folder}/bare.jsonl: cannot "
        f"write an index next to it (Read-only file system); run `energon prepare "
        f"{folder}/bare.jsonl` where its folder is writable."
    )
    *writing, planning = found["commands"]
    assert planning == found["no index"].removeprefix("ConfigError: ")
    names = ["data/.new", "data/deep", "data/.new.yaml", "run/mix.png", "new.png", "new.html"]
    for line, name in zip(writing, names, strict=True):
        assert line.startswith(f"[Errno 30] Read-only file system: '{folder.parent}/")
        assert name in line
