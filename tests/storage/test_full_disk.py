# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A full disk: what is written once is whole or absent, and the error names the path.

Every test runs with a limit on the size of files (RLIMIT_FSIZE, which needs no rights), and on a
real full disk: a tmpfs of 64 kB, which only root can mount; it is skipped where it cannot.
"""

import contextlib
import os
import resource
import subprocess

import numpy as np
import pytest

from energon_ext.errors import ConfigError
from energon_ext.storage.claim import UnwritableError, claim, claim_of, make_once
from energon_ext.storage.whole_file import open_whole
from energon_ext.tokens.formats import open_documents
from tests.tokens.test_parquet import write_parquet


@contextlib.contextmanager
def limit_files(folder, num_bytes=0):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def fill(folder):
    """Fill the disk, but for the entries of folders."""
    filler = folder / "filler"
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    try:
        yield
    finally:
        filler.unlink()


@pytest.fixture(params=["limited", "full"])
def disk(request, tmp_path):
    """Yield a folder, and a context in which nothing can be written to a file in it."""
    if request.param == "limited":
        yield tmp_path, limit_files
        return
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except FileNotFoundError:
        pytest.skip("there is no command mount")
    if mounted.returncode:
        pytest.skip(f"a small tmpfs cannot be mounted here ({mounted.stderr.strip()})")
    try:
        yield folder, fill
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


REASONS = r"(File too large|No space left on device)"


def test_a_claim_that_cannot_be_written_is_not_left_behind(disk):
    folder, full = disk
    with full(folder), pytest.raises(OSError, match=rf"{REASONS}: '{folder}/.out.claim'"):
        claim(folder / "out").__enter__()
    assert os.listdir(folder) == []
    with claim(folder / "out", wait_seconds=0.0):  # nobody has to wait
        assert claim_of(folder / "out").stat().st_size > 0


def test_what_is_made_once_is_whole_or_absent(disk):
    folder, full = disk

    def make(beat):
        with full(folder), open_whole(folder / "made") as file:
            for _ in range(40):
                file.write(bytes(4096))

    with pytest.raises(OSError, match=rf"{REASONS}: '{folder}/made'"):
        make_once(folder / "made", lambda: None, make)
    assert os.listdir(folder) == []
    with full(folder), pytest.raises(UnwritableError, match=rf"{REASONS}: '{folder}/.made.claim'"):
        make_once(folder / "made", lambda: None, make)
    assert os.listdir(folder) == []


def test_lengths_that_cannot_be_kept_name_the_folder(disk, tmp_path, monkeypatch):
    folder, full = disk
    path = write_parquet(tmp_path / "a.parquet", [[1, 2], [3]])
    monkeypatch.setenv("ENERGON_EXT_CACHE", str(folder))
    with (
        full(folder),
        pytest.raises(ConfigError, match=rf"{folder}: cannot be written to .*{REASONS}"),
    ):
        len(open_documents(path))
    left = [name for name in os.listdir(folder) if "lengths" in name or "claim" in name]
    assert left == []


def test_leftovers_of_killed_processes_are_removed_by_the_next_that_makes_the_file(tmp_path):
    old, new, other = (tmp_path / f".{name}.tmp" for name in ("made.1-a", "made.2-b", "other.3-c"))
    for path in (old, new, other):
        path.write_bytes(b"half")
    for path in (old, other):
        os.utime(path, (1, 1))

    def make(beat):
        with open_whole(tmp_path / "made") as file:
            file.write(np.arange(3).tobytes())
        return "made"

    assert make_once(tmp_path / "made", lambda: None, make) == "made"
    assert sorted(os.listdir(tmp_path)) == [new.name, other.name, "made"]
