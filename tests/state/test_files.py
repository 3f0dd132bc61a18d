# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Small files: written atomically and read with a limit."""

import os
import re
import resource
from pathlib import Path

import pytest

from energon_ext.errors import StateFormatError, first_line
from energon_ext.state.files import read_small_file, read_small_json, write_file
from tests.prepare.runs import memory_unit, run


@pytest.fixture
def events(monkeypatch):
    """Record what is flushed and renamed, in order."""
    events = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor):
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}")).name
        events.append(("fsync", re.sub("[0-9]+-[0-9a-f]{8}", "PROCESS", name)))
        fsync(descriptor)

    def recorded_replace(source, target):
        events.append(("rename", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return events


def test_content_is_flushed_before_the_rename_and_the_folder_after(tmp_path, events):
    write_file(tmp_path / "a", b"new")
    assert events == [("fsync", ".a.PROCESS.tmp"), ("rename", "a"), ("fsync", tmp_path.name)]
    assert (tmp_path / "a").read_bytes() == b"new"


def test_units_added_to_an_output_are_flushed_before_the_file_that_lists_them(tmp_path, events):
    """A power failure that keeps prepared.json must keep what it lists."""
    run([memory_unit(["one"])], tmp_path / "out")
    events.clear()
    run([memory_unit(["one"]), memory_unit(["two"], "more")], tmp_path / "out")
    *_, begin, end = (n for n, event in enumerate(events) if event == ("rename", "prepared.json"))
    moved = [("rename", f"part-00001{suffix}") for suffix in (".bin", ".idx", ".meta.json")]
    assert [event for event in events[begin:end] if event in moved] == moved
    assert events[end - 1] == ("fsync", "train") and events[end + 1] == ("fsync", "out")


def test_a_link_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "elsewhere").write_bytes(b"precious")
    (tmp_path / "a").symlink_to("elsewhere")
    write_file(tmp_path / "a", b"new")
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "elsewhere"]
    assert not (tmp_path / "a").is_symlink() and (tmp_path / "a").read_bytes() == b"new"


def test_a_full_disk_keeps_the_old_file_and_leaves_no_leftovers(tmp_path):
    write_file(tmp_path / "a", b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(OSError, match=f"File too large: '{tmp_path}/a'"):
            write_file(tmp_path / "a", bytes(1 << 16))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").read_bytes() == b"old"


def missing(path):
    return r"cannot be read \(No such file or directory\)"


def folder(path):
    path.mkdir()
    return "is not a regular file"


def pipe(path):
    os.mkfifo(path)  # nobody writes to it
    return "is not a regular file"


def device(path):
    path.symlink_to("/dev/zero")
    return "is not a regular file"


def large(path):
    path.write_bytes(b"12345")
    return "has more than 4 bytes"


@pytest.mark.parametrize("make", [missing, folder, pipe, device, large])
def test_special_and_large_files_are_refused_in_one_line(make, tmp_path):
    message = make(tmp_path / "a")
    with pytest.raises(StateFormatError, match=f"^{tmp_path}/a:? {message}") as caught:
        read_small_file(tmp_path / "a", max_bytes=4)
    assert "\n" not in str(caught.value)


def test_a_file_of_exactly_the_limit_is_read(tmp_path):
    (tmp_path / "a").write_bytes(b"1234")
    assert read_small_file(tmp_path / "a", max_bytes=4) == b"1234"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000, b"9" * 5000])
def test_invalid_json_is_refused_in_one_line(content, tmp_path):
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(StateFormatError, match=f"^{tmp_path}/a: is damaged") as caught:
        read_small_json(tmp_path / "a", max_bytes=1 << 20)
    assert "\n" not in str(caught.value)


def test_the_first_line_of_an_error_has_no_full_stop_and_is_never_empty():
    assert first_line(ValueError("\none.\ntwo")) == "one"
    assert first_line(KeyboardInterrupt()) == "KeyboardInterrupt"
