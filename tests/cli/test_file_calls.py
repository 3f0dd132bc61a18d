# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext plan --start`` counts what a start asks the file system."""

import os
from pathlib import Path

from energon_ext.cli.file_calls import BYTES, LISTS, OPENS, STATS, count_file_calls
from energon_ext.tokens import opening
from tests.cli.command import energon_ext
from tests.support import write_mix, write_tokens


def test_calls_are_counted_by_kind(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(5000))

    def ask():
        os.stat(file)
        os.path.isfile(file)
        Path(file).exists()
        os.lstat(file)
        os.close(os.open(file, os.O_RDONLY))
        os.listdir(tmp_path)
        [*os.scandir(tmp_path)]
        return file.read_bytes()

    stat = os.stat
    content, counted = count_file_calls(ask)
    assert len(content) == 5000 and os.stat is stat
    assert (counted[STATS], counted[OPENS], counted[LISTS]) == (4, 2, 2)
    assert 5000 <= counted[BYTES] < 6000
    assert count_file_calls(lambda: None)[1][STATS] == 0


def test_a_start_on_more_ranks_asks_about_fewer_files(tmp_path, monkeypatch):
    monkeypatch.setattr(opening, "FEW_PAIRS", 1)
    for number in range(40):
        write_tokens(tmp_path / "web" / f"{number:02}", [[1, 2, 3]])
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)])

    def start(ranks):
        options = ("--ranks", ranks, "--tokenizer", "bytes", "--seq-length", 8)
        header, dataset, batch = energon_ext("plan", mix, "--start", *options).stdout.splitlines()
        assert header.split()[:2] == ["stat", "open"]
        assert dataset.startswith("dataset") and batch.startswith("first batch")
        return int(dataset.split()[1])

    start(1)
    # One file of each of 40 pairs, or two of each of 10 and 1.
    assert start(1) - start(4) == 20
    assert start(4) - start(40) == 18
