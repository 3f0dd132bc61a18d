# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext check`` prints every fault of every pair, and writes the catalog of a sound one."""

import json
import os
import shutil
import struct

import numpy as np
import pytest

from energon_ext.data_files import DEFAULT_CACHE
from energon_ext.tokens import opening
from energon_ext.tokens.file_set import open_token_files
from tests.cli.command import energon_ext, error_line
from tests.prepare.runs import memory_unit, run
from tests.support import write_tokens, write_weights


@pytest.fixture(autouse=True)
def _every_source_has_a_catalog(monkeypatch):
    monkeypatch.setattr(opening, "FEW_PAIRS", 1)


@pytest.fixture
def web(tmp_path):
    for number in range(7):
        write_tokens(tmp_path / "web" / f"{number}", [[10 * number, 1], [2]], np.int32)
    return tmp_path / "web"


def write_at(path, place, content):
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)


def checks_at_a_start(path, monkeypatch):
    """Return whether opening a path checks any index."""
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(opening, "check_all", lambda *arguments: found.append(1) or 1 / 0)
        try:
            open_token_files(path)
        except ZeroDivisionError:
            return True
    return bool(found)


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_sound_source_is_checked_once_and_then_opened_from_its_catalog(web, jobs, monkeypatch):
    assert checks_at_a_start(web, monkeypatch)
    result = energon_ext("check", web, "--jobs", jobs, "--tokens", "--vocab-size", 61)
    assert result.exit_code == 0
    assert f"{web}: 7 pairs, 14 documents, 21 tokens, no fault\n" in result.stdout
    assert f"the catalog is {web}/{DEFAULT_CACHE}/web-" in result.stdout
    assert not checks_at_a_start(web, monkeypatch)
    assert not checks_at_a_start(f"{web}/*", monkeypatch)


def test_parts_together_write_the_catalog_of_the_whole(web, monkeypatch):
    assert energon_ext("check", web).exit_code == 0
    kept = {path: path.read_bytes() for path in (web / DEFAULT_CACHE).iterdir()}
    for path in kept:
        path.unlink()
    for part in ("1/3", "2/3"):
        result = energon_ext("check", web, "--part", part)
        assert f"part {part} is checked, other parts are not" in result.stdout
        assert checks_at_a_start(web, monkeypatch)
    assert "the catalog is" in energon_ext("check", web, "--part", "0/3").stdout
    assert {path: path.read_bytes() for path in (web / DEFAULT_CACHE).iterdir()} == kept
    assert len(kept) == 2
    assert not checks_at_a_start(web, monkeypatch)


def test_parts_may_be_more_than_pairs(web):
    results = [energon_ext("check", web, "--part", f"{part}/9", "--jobs", 2) for part in range(9)]
    assert [result.exit_code for result in results] == [0] * 9
    assert "the catalog is" in results[6].stdout
    assert results[8].stdout == f"{web}: 0 pairs, 0 documents, 0 tokens, no fault\n"


@pytest.mark.parametrize("jobs", [1, 3])
def test_all_faults_of_all_pairs_are_printed(web, jobs):
    os.truncate(web / "0.bin", 8)
    write_at(web / "1.idx", 34, struct.pack("<i", 1))  # the length of the first sequence
    (web / "2.idx").unlink()
    write_weights(web / "3", [[1, 0], [1]])
    os.truncate(web / "3.weights.bin", 2)
    write_weights(web / "4", [[1, np.nan], [-1]], "float32")
    write_at(web / "5.bin", 4, struct.pack("<i", -7))
    write_at(web / "5.idx", 42, struct.pack("<q", 2))  # the first pointer
    (web / "6.meta.json").write_text(json.dumps({"tokenizer": {"kind": "other"}}))
    result = energon_ext("check", web, "--jobs", jobs, "--tokens")
    assert error_line(result) == f"{web}: 8 faults in 7 pairs."
    assert [line.removeprefix(f"{web}/")[:58] for line in result.stdout.splitlines()] == [
        "0.bin has 8 bytes, its .idx describes 12: one of them is i",
        "1.idx: damaged, sequence 0 overlaps another or leaves a ga",
        "2.idx: does not exist; a pair needs both files. If " + f"{web}/2.b"[:7],
        "3.weights.bin: has 2 bytes; 3 tokens need 3 bytes, 1 each;",
        "4.weights.bin: weight nan at token 1 (document 0); a finit",
        "5.idx: damaged, sequence 0 overlaps another or leaves a ga",
        "5.bin: token id -7 at token 1 (document 0); ids from 0 to ",
        "6.meta.json: names a tokenizer other than " + f"{web}/4.meta.json"[:16],
    ]
    assert not (web / DEFAULT_CACHE).exists()


def test_tokens_outside_the_vocabulary_are_named_with_their_document(web):
    assert energon_ext("check", web, "--tokens").exit_code == 0
    assert "7 of them name no vocabulary" in energon_ext("check", web, "--tokens").stdout
    result = energon_ext("check", web, "--tokens", "--vocab-size", 51)
    assert error_line(result) == f"{web}: 1 fault in 7 pairs."
    assert "6.bin: token id 60 at token 0 (document 0); ids from 0 to 50 are" in result.stdout
    write_weights(web / "2", [[1, 1], [1]])
    content = json.loads((web / "2.meta.json").read_text())
    (web / "2.meta.json").write_text(json.dumps({**content, "vocab_size": 20}))
    result = energon_ext("check", web / "2", "--tokens")
    assert "2.bin: token id 20 at token 0 (document 0); ids from 0 to 19 are" in result.stdout


def test_a_prepared_folder_is_compared_with_its_prepared_json(tmp_path):
    run([memory_unit([f"text {n}"], f"{n}") for n in range(3)], tmp_path / "out")
    train = tmp_path / "out" / "train"
    result = energon_ext("check", train, "--tokens")
    assert "3 pairs, 3 documents, 24 tokens, no fault\n  the catalog is " in result.stdout
    shutil.rmtree(train / DEFAULT_CACHE)
    write_tokens(train / "part-00001", [[1, 2, 3], [4, 5, 6, 7]])
    result = energon_ext("check", train)
    assert f"{train}/part-00001.idx: is not the one in {tmp_path}/out/prepared" in result.stdout


def test_a_pair_that_needs_no_catalog_gets_none(web):
    assert energon_ext("check", web / "3").stdout.endswith(
        "1 pair, 2 documents, 3 tokens, no fault\n"
    )
    assert not (web / DEFAULT_CACHE).exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent", "absent: names no .bin/.idx pair; check the path."),
        ("msc://store/web", "indices in an object store are checked when they are copied"),
    ],
)
def test_a_path_without_local_pairs_is_one_error(tmp_path, path, message, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message in error_line(energon_ext("check", path))


def test_a_folder_that_cannot_be_written_needs_a_cache(web, tmp_path, monkeypatch):
    (web / DEFAULT_CACHE).write_text("a file in the way")
    assert "set ENERGON_EXT_CACHE to a wri" in error_line(energon_ext("check", web))
    monkeypatch.setenv("ENERGON_EXT_CACHE", str(tmp_path / "cache"))
    assert f"the catalog is {tmp_path}/cache/web-" in energon_ext("check", web).stdout
