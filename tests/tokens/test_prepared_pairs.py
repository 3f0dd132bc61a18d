# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Prepared pairs are those that their prepared.json describes, or the run does not start."""

import logging
import multiprocessing
import os
import shutil

import pytest
from click.testing import CliRunner

from energon_ext.cli.main import main
from energon_ext.data_files import CACHE_VARIABLE, DEFAULT_CACHE
from energon_ext.errors import ConfigError
from energon_ext.tokens import catalog as catalogs
from energon_ext.tokens import opening, unchanged
from energon_ext.tokens.file_set import TokenFiles, open_token_files
from tests.prepare.runs import memory_unit, run
from tests.tokens.test_catalog import as_nobody, documents, readable, set_times

__all__ = ["readable"]  # a fixture

TEXTS = ["some text", "more", "a"]


@pytest.fixture(autouse=True)
def _every_source_has_a_catalog(monkeypatch):
    monkeypatch.setattr(opening, "FEW_PAIRS", 1)
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)


def prepare(output, units=5, texts=TEXTS):
    """Prepare pairs whose first document names them, and return the folder of the split."""
    run([memory_unit([*texts, f"part {n}"], f"{n}") for n in range(units)], output)
    return output / "train"


@pytest.fixture
def train(tmp_path):
    return prepare(tmp_path / "out")


def replace_pair(train, number, texts=TEXTS[::-1]):
    """Replace a pair by that of another preparation, with as many documents and bytes."""
    other = prepare(train.parent.parent / "other", texts=texts)
    for suffix in (".bin", ".idx"):
        path = train / f"part-0000{number}{suffix}"
        size = path.stat().st_size
        shutil.copy(other / path.name, path)
        assert path.stat().st_size == size


@pytest.fixture
def hashed(monkeypatch):
    """Return the indices whose digests were computed in this process, by name."""
    found, digest_of = [], catalogs.digest_of

    def record(path, *arguments):
        found.append(os.path.basename(path))
        return digest_of(path, *arguments)

    for module in (catalogs, opening, unchanged):
        monkeypatch.setattr(module, "digest_of", record)
    return found


NAMES = [f"part-0000{n}.idx" for n in range(5)]


@pytest.mark.parametrize("number", range(5))
def test_a_pair_of_another_preparation_is_refused_at_the_first_start(train, number):
    replace_pair(train, number)
    with pytest.raises(
        ConfigError,
        match=rf"part-0000{number}.idx: has changed since .*prepared.json was written; copy it "
        rf"again, or prepare it again",
    ):
        open_token_files(train, (0, 4))  # whatever its share of the files is


def test_digests_are_compared_at_the_first_start_only(train, hashed):
    files = open_token_files(train)
    assert sorted(hashed) == NAMES
    hashed.clear()
    for rank in range(3):
        assert documents(open_token_files(train, (rank, 3))) == documents(files)
    assert not hashed


def test_a_pair_that_is_replaced_later_is_found_by_its_time(train, hashed):
    open_token_files(train)
    hashed.clear()
    replace_pair(train, 3)
    for rank in (0, 1):
        open_token_files(train, (rank, 4))
    with pytest.raises(ConfigError, match=r"part-00003.idx: has changed since"):
        open_token_files(train, (3, 4))
    assert hashed == NAMES[3:4]


def test_a_pair_that_is_only_touched_is_accepted(train, hashed):
    files = open_token_files(train)
    hashed.clear()
    set_times(train / "part-00001.bin", 1)
    assert documents(open_token_files(train)) == documents(files)
    assert hashed == NAMES[1:2]


def test_pairs_that_are_prepared_again_are_compared_again(tmp_path, monkeypatch, hashed):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    for texts in (TEXTS, TEXTS[::-1]):  # as many documents and tokens, in another order
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        hashed.clear()
        files = open_token_files(prepare(tmp_path / "out", texts=texts))
        assert sorted(hashed) == NAMES
        assert documents(files) == documents(TokenFiles(files.prefixes))


def test_each_copy_of_the_data_is_compared(train, tmp_path, hashed):
    """Nodes with copies of their own: none of them may rely on what another one has compared."""
    open_token_files(train, (0, 2))
    hashed.clear()
    shutil.copytree(train.parent, tmp_path / "copy", ignore=shutil.ignore_patterns(DEFAULT_CACHE))
    open_token_files(tmp_path / "copy" / "train", (1, 2))
    assert sorted(hashed) == NAMES


def test_check_remembers_what_it_has_compared(train, hashed):
    result = CliRunner().invoke(main, ["check", str(train), "--jobs", "1"])
    assert result.exit_code == 0, result.output
    hashed.clear()
    open_token_files(train)
    assert not hashed


def test_if_all_indices_would_take_long_each_process_compares_its_share(train, monkeypatch, hashed):
    monkeypatch.setattr(opening, "PAIRS_PER_SECOND", 0.01)
    for _ in range(2):  # nothing is remembered
        hashed.clear()
        open_token_files(train, (1, 4))
        assert hashed == NAMES[1:2]
    replace_pair(train, 3)
    with pytest.raises(ConfigError, match=r"part-00003.idx: has changed since"):
        open_token_files(train, (3, 4))


def test_without_a_place_to_remember_each_process_compares_its_share(readable, caplog):
    train = prepare(readable / "out")
    train.chmod(0o555)

    def read():
        files = open_token_files(train, (1, 4))
        return documents(files) == documents(TokenFiles(files.prefixes)), caplog.text

    assert as_nobody(read)[0]
    assert "compared at every start" in as_nobody(read)[1]
    assert CACHE_VARIABLE in as_nobody(read)[1]
    train.chmod(0o755)
    replace_pair(train, 1)
    shutil.rmtree(train / DEFAULT_CACHE, ignore_errors=True)
    train.chmod(0o555)
    with pytest.raises(ConfigError, match=r"part-00001.idx: has changed since"):
        as_nobody(read)


def test_processes_that_start_together_compare_once(train, tmp_path):
    context = multiprocessing.get_context("fork")

    def start(rank):
        logging.basicConfig(level=logging.INFO, filename=tmp_path / f"log-{rank}", force=True)
        open_token_files(train, (rank, 4))

    processes = [context.Process(target=start, args=(rank,)) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    logs = "".join((tmp_path / f"log-{rank}").read_text() for rank in range(4))
    assert logs.count("compared its 5 indices with") == 1
    assert len([*(train / DEFAULT_CACHE).iterdir()]) == 2  # and no claim or temporary file


@pytest.mark.parametrize("damage", [lambda text: text[:100], lambda text: text.replace("1", "2")])
def test_a_damaged_memory_of_the_comparison_is_made_again(train, damage, hashed):
    open_token_files(train)
    (path,) = (train / DEFAULT_CACHE).glob("*.catalog.json")
    whole = path.read_text()
    path.write_text(damage(whole))
    hashed.clear()
    open_token_files(train)
    assert sorted({*hashed}) == NAMES
    assert path.read_text() == whole


def test_a_file_system_that_does_not_answer_about_a_content_is_named(train, monkeypatch):
    open_token_files(train)
    monkeypatch.setattr(unchanged, "DEADLINE_SECONDS", 0.2)
    set_times(train / "part-00002.idx", 1)
    answers = multiprocessing.Event()
    monkeypatch.setattr(unchanged, "digest_of", lambda *_: answers.wait())
    try:
        with pytest.raises(ConfigError, match="part-00002.idx: the file system has not answered"):
            open_token_files(train)
    finally:
        answers.set()
