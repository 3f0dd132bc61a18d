# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Origins of documents by number."""

from energon_ext.tokens import origins
from energon_ext.tokens.origins import Origins, line_of, origins_of


def test_lines_are_found_across_chunk_boundaries(tmp_path, monkeypatch):
    monkeypatch.setattr(origins, "_CHUNK", 7)
    names = [f"file {n}.jsonl:{n * n}" for n in range(50)] + ["", "é:1"]
    (tmp_path / "web.origins.txt").write_text("".join(map(line_of, names)), encoding="utf-8")
    found = origins_of(str(tmp_path / "web"))
    assert len(found) == 52
    assert [found[number] for number in range(52)] == names


def test_a_name_with_a_newline_stays_on_one_line():
    assert line_of("a\nb.txt") == "a b.txt\n"


def test_origins_are_optional(tmp_path):
    assert origins_of(str(tmp_path / "web")) is None
    (tmp_path / "empty").write_bytes(b"")
    assert len(Origins(tmp_path / "empty")) == 0
