# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Lines by number: the samples of Energon's reader, without a set of open files per source."""

import os

import pytest
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.ijsonl_reader import IJsonlReader

from energon_ext.errors import ConfigError
from energon_ext.samples import shards
from energon_ext.samples.jsonl_index import ensure_index
from energon_ext.samples.line_reader import LineReader


def write_lines(path, lines):
    path.write_bytes(b"".join(lines))
    ensure_index(EPath(path))
    return EPath(path)


def test_samples_are_those_of_energons_reader(tmp_path):
    lines = [b'{"text": "%s"}\n' % (b"a" * number) for number in (0, 5, 300, 1)]
    path = write_lines(tmp_path / "a.jsonl", [*lines, b'{"text": "no end"}'])
    for sample_filter in (None, lambda key: key != "2"):
        stock = IJsonlReader(path, sample_filter)
        expected = [stock[number] for number in range(5)]
        found = LineReader(IJsonlReader(path, sample_filter))
        assert [found[number] for number in (4, 0, 2, 1, 3)] == [
            expected[number] for number in (4, 0, 2, 1, 3)
        ]
    assert expected[2] is None and expected[4]["json"] == b'{"text": "no end"}'


def test_a_process_keeps_few_of_many_files_open(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "MAX_OPEN", 8)
    names = [f"{number}.jsonl" for number in range(40)]
    readers = [
        LineReader(IJsonlReader(write_lines(tmp_path / name, [b"{}\n", b"{ }\n"])))
        for name in names
    ]
    before = len(os.listdir("/proc/self/fd"))
    for number in (1, 0, 1):
        assert {reader[number]["json"] for reader in readers} == {[b"{}\n", b"{ }\n"][number]}
    assert len(os.listdir("/proc/self/fd")) <= before + 8


def test_a_file_that_was_cut_after_it_was_opened_is_refused(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [b"{}\n", b'{"text": "long"}\n'])
    reader = LineReader(IJsonlReader(path))
    assert reader[0]["json"] == b"{}\n"
    os.truncate(str(path), 9)
    with pytest.raises(ValueError, match="line 2 is cut"):
        reader[1]
    with pytest.raises(ConfigError, match="its index does not match line 1"):
        os.truncate(str(path), 2)
        (tmp_path / "a.jsonl").write_bytes(b"{ }" + b" " * 30)
        reader[0]
