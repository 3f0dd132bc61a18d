# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A load lists each folder once, and does not ask about each path again and again."""

import gc
import os

import pytest

from energon_ext import ConfigError, ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.cli.file_calls import LISTS, OPENS, STATS, count_file_calls
from energon_ext.storage.folders import list_folders_once, names_in, walk_folders
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import config, write_mix, write_tokens

SOURCES = 40


def load(mix):
    encoder = PackedTaskEncoder(ByteTokenizer(), 8)
    return get_train_dataset(mix, worker_config=config(), batch_size=2, task_encoder=encoder)


def tokens_of(mix):
    """Return the distinct tokens of the first batch, without padding."""
    batch = next(iter(ExactDataLoader(load(mix))))
    return {*batch.tokens.tolist()} - {ByteTokenizer().pad_id}


@pytest.fixture
def mixes(tmp_path):
    """Return metadatasets of one source and of many sources in one folder, by number."""
    names = [f"web/part-{number:02}" for number in range(SOURCES)]
    for name in names:
        write_tokens(tmp_path / name, [[5, 6, 7], [8, 9]])
    counts = 1, SOURCES
    return {
        count: write_mix(tmp_path / f"{count}.yaml", [(each, 1) for each in names[:count]])
        for count in counts
    }


def test_a_load_asks_about_the_files_of_a_pair_once(mixes):
    load(mixes[1])  # imports
    one = count_file_calls(lambda: load(mixes[1]))[1]
    many = count_file_calls(lambda: load(mixes[SOURCES]))[1]
    more = {kind: many[kind] - one[kind] for kind in (STATS, OPENS, LISTS)}
    # The sizes of .idx and .bin; the files themselves, the .idx for its header and as a whole.
    assert more[STATS] <= 2 * (SOURCES - 1)
    assert more[OPENS] <= 4 * (SOURCES - 1)
    assert more[LISTS] == 0


def test_folders_below_a_source_are_listed_once(tmp_path):
    for name in ("a/x", "b/c/y", "z"):
        write_tokens(tmp_path / "web" / name, [[5, 6, 7]])
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)])
    load(mix)
    folders = 1 + 4  # of the metadataset, and web, web/a, web/b, web/b/c
    assert count_file_calls(lambda: load(mix))[1][LISTS] <= folders


def test_a_name_that_a_listing_lacks_is_asked_for(mixes, monkeypatch):
    """A folder whose contents a file system mounts on access is listed as empty."""
    scan = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: scan(os.devnull + "/nothing"))
    assert tokens_of(mixes[1]) == {5, 6, 7, 8, 9}


def test_a_pair_in_a_folder_that_may_not_be_listed_is_read(mixes, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", refuse)
    assert tokens_of(mixes[1]) == {5, 6, 7, 8, 9}
    with pytest.raises(ConfigError, match=r"web: cannot be read \(Permission denied\)"):
        names_in(os.path.dirname(mixes[1]) + "/web")


def test_a_second_load_sees_what_was_written_since(mixes, tmp_path):
    mix = write_mix(tmp_path / "new.yaml", [("web/new", 1)])
    with pytest.raises(ConfigError, match="web/new"):
        load(mix)
    write_tokens(tmp_path / "web" / "new", [[5, 6, 7]])
    assert list(load(mix).run.sources) == ["web/new"]


def test_a_folder_is_listed_anew_outside_a_load(tmp_path):
    with list_folders_once():
        assert set(names_in(f"{tmp_path}/new")) == set()
        (tmp_path / "new").mkdir()
        (tmp_path / "new" / "early").touch()
        assert set(names_in(f"{tmp_path}/new")) == {"early"}
        (tmp_path / "new" / "late").touch()
        assert set(names_in(f"{tmp_path}/new")) == {"early"}
    assert set(names_in(f"{tmp_path}/new")) == {"early", "late"}


def test_links_to_folders_are_walked_and_hidden_folders_are_not(tmp_path):
    for name in ("a", "a/.hidden", "elsewhere"):
        (tmp_path / name).mkdir()
    (tmp_path / "a" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "a" / "broken").symlink_to(tmp_path / "nowhere")
    found = {path: set(names) for path, names in walk_folders(str(tmp_path / "a"))}
    assert found == {
        f"{tmp_path}/a": {".hidden", "link", "broken"},
        f"{tmp_path}/a/link": set(),
    }


def test_the_garbage_collector_runs_again_after_a_load_that_failed(tmp_path):
    assert gc.isenabled()
    with pytest.raises(ConfigError):
        load(write_mix(tmp_path / "mix.yaml", [("nothing", 1)]))
    assert gc.isenabled()
