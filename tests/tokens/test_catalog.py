# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A catalog saves the check of all indices at a start, and never hides a file that has changed."""

import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import struct
import tempfile
import time
from pathlib import Path

import numpy as np
import pytest

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.data_files import CACHE_VARIABLE, DEFAULT_CACHE
from energon_ext.errors import ConfigError
from energon_ext.storage.claim import make_once
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.tokens import index as token_index
from energon_ext.tokens import opening, unchanged
from energon_ext.tokens.catalog import catalog_path
from energon_ext.tokens.file_set import TokenFiles, open_token_files
from energon_ext.tokens.index import read_pair
from energon_ext.tokens.paths import list_pairs
from tests.prepare.runs import memory_unit, run
from tests.support import (
    batch_hash,
    config,
    loader_for,
    take,
    write_mix,
    write_tokens,
    write_weights,
)

CONTENTS = [[[n, n + 1], [n + 2]] for n in range(10, 100, 10)]
NOBODY = 65534


@pytest.fixture(autouse=True)
def _every_source_has_a_catalog(monkeypatch):
    monkeypatch.setattr(opening, "FEW_PAIRS", 1)
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)


@pytest.fixture
def folder(tmp_path):
    return write_folder(tmp_path / "web", CONTENTS)


def write_folder(folder, contents):
    for number, documents in enumerate(contents):
        write_tokens(folder / f"part-{number}", documents)
    return folder


def documents(files):
    return [files.document(number).tolist() for number in range(len(files))]


def lengths_of(folder):
    (path,) = (folder / DEFAULT_CACHE).glob("*.lengths.u4")
    return path


def with_digest(line):
    return f"{line}\n{hashlib.sha256(line.encode()).hexdigest()}\n"


def catalog_of(folder):
    (path,) = (folder / DEFAULT_CACHE).glob("*.catalog.json")
    return path


def was_checked(caplog):
    """Return whether all indices were checked since the last call."""
    found = "checked its" in caplog.text
    caplog.clear()
    return found


def set_times(path, seconds):
    os.utime(path, (seconds, seconds))


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.INFO)
    return caplog


def test_only_the_first_start_checks_all_indices(folder, log):
    first = open_token_files(folder)
    assert was_checked(log)
    second = open_token_files(folder)
    assert not was_checked(log)
    assert documents(first) == documents(second) == sum(CONTENTS, [])
    assert first.fingerprint() == second.fingerprint()


def test_a_catalog_holds_what_the_files_say(tmp_path, log):
    folder = tmp_path / "mixed"
    write_tokens(folder / "a", [[1, 2], [], [70_000]], np.int32)
    write_tokens(folder / "below" / "b", [])
    write_tokens(folder / "c", [[3, 4, 5]])
    write_weights(folder / "c", [[0, 0.5, 1]], "float32")
    write_tokens(folder / "d", [[6]])
    (folder / "d.meta.json").write_text(json.dumps({"tokenizer": {"kind": "other"}}))
    plain = TokenFiles(list(list_pairs(folder)))
    open_token_files(folder)
    assert was_checked(log)
    files = open_token_files(folder)
    assert not was_checked(log)
    assert documents(files) == documents(plain) == [[1, 2], [], [70_000], [3, 4, 5], [6]]
    assert files.label_weights(3, 0, 3).tolist() == [0, 0.5, 1]
    assert files.fingerprint() == plain.fingerprint()
    assert files.written_with("tokenizer") == plain.written_with("tokenizer")
    assert not files.names_tokenizer


def test_documents_of_several_sequences_are_known_as_such(tmp_path):
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for name, lengths in (("a", [1, 2]), ("b", [3])):
        builder = IndexedDatasetBuilder(f"{tmp_path}/{name}.bin", dtype=np.uint16)
        builder.add_document(torch.tensor([1, 2, 3]), lengths)
        builder.finalize(f"{tmp_path}/{name}.idx")
    for _ in range(2):
        pairs, _, _ = opening.open_pairs(str(tmp_path), list_pairs(tmp_path), (0, 1))
        assert [pair.one_sequence_each for pair in pairs] == [False, True]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.replace("part-3", "part-4"),
        lambda text: text[:-65] + "0" * 64 + "\n",
        lambda text: text + "\n",
        lambda text: "",
        lambda text: text[: len(text) // 2],
    ],
)
def test_a_damaged_catalog_is_made_again(folder, damage, log):
    check_that_it_is_made_again(folder, log, damage)


def check_that_it_is_made_again(folder, log, damage):
    open_token_files(folder)
    path = catalog_of(folder)
    whole = path.read_text()
    assert damage(whole) != whole
    path.write_text(damage(whole))
    log.clear()
    assert documents(open_token_files(folder)) == sum(CONTENTS, [])
    assert was_checked(log)
    assert path.read_text() == whole


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "[]",
        lambda text: "[" * 100_000,
        lambda text: text.replace('"version": 2', '"version": 1'),
        lambda text: text.replace('"part-3"', '"part-33"'),
        lambda text: text.replace('"documents": [2, ', '"documents": ['),
        lambda text: text.replace('"documents": [2, ', '"documents": [-2, '),
        lambda text: text.replace('"documents": [2, ', '"documents": ["2", '),
        lambda text: text.replace('"<u2"', '"O"', 1),
        lambda text: text.replace('"meta": [0, ', '"meta": [7, '),
    ],
)
def test_a_catalog_of_impossible_content_is_made_again(folder, damage, log):
    check_that_it_is_made_again(folder, log, lambda text: with_digest(damage(text.splitlines()[0])))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("tokens", 4, r"part-0.bin: has 6 bytes, but 8 in .*catalog.json; copy it again, or check"),
        ("documents", 1, r"part-0.idx: has 82 bytes, but 74 in"),
        ("sequences", 1, r"part-0.idx: has 82 bytes, but 70 in"),
    ],
)
def test_a_catalog_with_other_counts_than_the_files_is_refused(folder, column, value, message):
    open_token_files(folder)
    path = catalog_of(folder)
    content = json.loads(path.read_text().splitlines()[0])
    content[column][0] = value
    path.write_text(with_digest(json.dumps(content)))
    with pytest.raises(ConfigError, match=message):
        open_token_files(folder)
    # A process that asks about other files finds it when it opens this one.
    with pytest.raises(
        ConfigError, match=r"part-0.idx: has changed|part-0.bin: has 6 bytes, needs 8"
    ):
        documents(open_token_files(folder, (1, 9)))


def test_a_file_that_was_cut_off_is_found_by_the_process_that_asks_about_it(folder):
    open_token_files(folder)
    os.truncate(folder / "part-5.bin", 4)
    for rank in range(4):
        if rank != 5 % 4:
            open_token_files(folder, (rank, 4))
    with pytest.raises(ConfigError, match=r"part-5.bin: has 4 bytes, but 6 in .*; copy it again"):
        open_token_files(folder, (1, 4))
    (folder / "part-5.bin").write_bytes(bytes(6))
    (folder / "part-6.idx").write_bytes((folder / "part-6.idx").read_bytes()[:-8])
    with pytest.raises(ConfigError, match=r"part-6.idx: has 74 bytes, but 82 in"):
        open_token_files(folder, (2, 4))


def test_of_many_pairs_only_the_large_files_are_asked_about(folder, monkeypatch):
    open_token_files(folder)
    monkeypatch.setattr(unchanged, "_BOTH_FILES", 8)
    (folder / "part-6.idx").write_bytes((folder / "part-6.idx").read_bytes()[:-8])
    files = open_token_files(folder)
    with pytest.raises(ConfigError, match=r"part-6.idx: has 74 bytes, needs 82; it was truncated"):
        documents(files)


def test_a_missing_or_added_pair_gives_another_catalog(folder, log):
    open_token_files(folder)
    assert was_checked(log)
    kept = [(folder / f"part-8{suffix}").rename(folder / suffix[1:]) for suffix in (".bin", ".idx")]
    assert len(open_token_files(folder)) == 16
    assert was_checked(log)
    for path in kept:
        path.rename(folder / f"part-8.{path.name}")
    assert len(open_token_files(folder)) == 18
    assert not was_checked(log)


def test_files_with_other_times_and_equal_content_are_accepted(folder, log):
    open_token_files(folder)
    for path in folder.glob("part-*"):
        set_times(path, 1)
    log.clear()
    assert documents(open_token_files(folder)) == sum(CONTENTS, [])
    assert "9 pairs have other times than in" in log.text
    assert not was_checked(log)


def test_a_reshuffle_of_equal_sizes_is_refused(folder):
    open_token_files(folder)
    stamp = os.stat(folder / "part-2.idx")
    write_tokens(folder / "part-2", [[32], [30, 31]])
    set_times(folder / "part-2.bin", 1)
    assert os.stat(folder / "part-2.idx").st_size == stamp.st_size
    with pytest.raises(
        ConfigError, match=r"part-2.idx: has changed since .*, or check it again with"
    ):
        open_token_files(folder)
    open_token_files(folder, (0, 9))  # this process asks about another file


def test_a_link_to_the_folder_has_the_same_catalog(folder, tmp_path, log):
    open_token_files(folder)
    assert was_checked(log)
    (tmp_path / "link").symlink_to(folder)
    files = open_token_files(tmp_path / "link")
    assert not was_checked(log)
    assert files.prefixes[0] == f"{tmp_path}/link/part-0"
    assert documents(files) == sum(CONTENTS, [])


def test_links_to_pairs_elsewhere_are_asked_about_at_their_targets(folder, tmp_path):
    links = tmp_path / "links"
    links.mkdir()
    for path in folder.glob("part-*"):
        (links / path.name).symlink_to(path)
    assert documents(open_token_files(links)) == sum(CONTENTS, [])
    os.truncate(folder / "part-1.bin", 2)
    with pytest.raises(ConfigError, match=r"links/part-1.bin: has 2 bytes, but 6 in"):
        open_token_files(links)
    (folder / "part-1.bin").unlink()
    with pytest.raises(ConfigError, match=r"links/part-1.bin: cannot be read \(No such file"):
        open_token_files(links)


def test_a_stale_cache_of_one_node_is_refused(folder, tmp_path, monkeypatch):
    node = tmp_path / "node"
    monkeypatch.setenv(CACHE_VARIABLE, str(node))
    open_token_files(folder)
    assert not (folder / DEFAULT_CACHE).exists()
    for number, content in enumerate(CONTENTS):
        write_tokens(folder / f"part-{number}", [*content, [7]])
    with pytest.raises(ConfigError, match=rf"part-0.bin: has 8 bytes, but 6 in {node}"):
        open_token_files(folder)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "another"))
    assert len(open_token_files(folder)) == 27


def test_a_catalog_is_kept_per_folder_not_per_content(folder, tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    shutil.copytree(folder, tmp_path / "copy" / "web")
    paths = {catalog_path(list_pairs(each)) for each in (folder, tmp_path / "copy" / "web")}
    assert len(paths) == 2


def test_a_file_system_that_does_not_answer_is_named(folder, monkeypatch):
    open_token_files(folder)
    monkeypatch.setattr(unchanged, "DEADLINE_SECONDS", 0.2)
    ask, hangs = os.stat, multiprocessing.Event()

    def stat(path, *args, **options):
        if str(path).endswith("part-4.bin"):
            hangs.wait()
        return ask(path, *args, **options)

    monkeypatch.setattr(unchanged.os, "stat", stat)
    try:
        with pytest.raises(ConfigError, match="part-4.bin: the file system has not answered for"):
            open_token_files(folder)
    finally:
        hangs.set()


def as_nobody(function, *arguments):
    """Call a function in a process without rights, and return its result or raise its error."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def act():
        if os.getuid() == 0:
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        try:
            sender.send(function(*arguments))
        except BaseException as error:  # the parent raises it
            sender.send(error)

    process = context.Process(target=act)
    process.start()
    sender.close()
    result = receiver.recv()
    process.join()
    if isinstance(result, BaseException):
        raise result
    return result


@pytest.fixture
def readable():
    """Yield a folder that other users may enter, unlike pytest's own ones."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_a_folder_that_cannot_be_written_is_read_and_left_as_it_is(readable, log):
    folder = write_folder(readable / "web", CONTENTS)
    before = sorted(os.listdir(folder))
    folder.chmod(0o555)
    try:

        def read():
            log.clear()
            return documents(open_token_files(folder)), log.text

        found, text = as_nobody(read)
    finally:
        folder.chmod(0o755)
    assert found == sum(CONTENTS, [])
    assert "its 9 pairs are checked at every start, since the result cannot be kept" in text
    assert CACHE_VARIABLE in text
    assert sorted(os.listdir(folder)) == before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can act as a second user")
@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_a_second_user_reads_with_or_without_the_catalog_of_the_first(readable, mode, log):
    folder = write_folder(readable / "web", CONTENTS)
    open_token_files(folder)
    catalog_of(folder).chmod(mode)

    def read():
        log.clear()
        return documents(open_token_files(folder)), "at every start" in log.text

    assert as_nobody(read) == (sum(CONTENTS, []), mode == 0o600)


def test_processes_that_start_together_check_once(folder, tmp_path):
    context = multiprocessing.get_context("fork")

    def start(rank):
        logging.basicConfig(level=logging.INFO, filename=tmp_path / f"log-{rank}", force=True)
        files = open_token_files(folder, (rank, 6))
        (tmp_path / f"found-{rank}").write_text(json.dumps(documents(files)))

    processes = [context.Process(target=start, args=(rank,)) for rank in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    found = [json.loads((tmp_path / f"found-{rank}").read_text()) for rank in range(6)]
    assert found == [sum(CONTENTS, [])] * 6
    logs = "".join((tmp_path / f"log-{rank}").read_text() for rank in range(6))
    assert logs.count("checked its 9 pairs once") == 1
    assert len([*(folder / DEFAULT_CACHE).iterdir()]) == 2  # and no claim or temporary file


def test_a_process_takes_over_from_one_that_was_killed(folder):
    open_token_files(folder)
    path = catalog_of(folder)
    path.unlink()
    claim = path.with_name(f".{path.name}.claim")
    claim.write_text("another-machine 1")
    hour_ago = time.time() - 3600
    os.utime(claim, (hour_ago, hour_ago))
    assert documents(open_token_files(folder)) == sum(CONTENTS, [])
    assert path.exists()


def test_a_check_that_would_take_long_names_the_command_to_run(folder, monkeypatch):
    monkeypatch.setattr(opening, "PAIRS_PER_SECOND", 0.1)
    with pytest.raises(ConfigError, match=r"web: its 9 indices .* \(about 90 s.* `energon-ext ch"):
        open_token_files(folder)
    assert not list((folder / DEFAULT_CACHE).iterdir())


def test_damage_found_by_the_first_check_is_named_every_time(folder):
    index = folder / "part-3.idx"
    content = bytearray(index.read_bytes())
    content[34:38] = struct.pack("<i", 1)
    index.write_bytes(content)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"part-3.idx: damaged, sequence 0 overlaps another"):
            open_token_files(folder)


def test_prepared_json_is_the_catalog_of_a_prepared_folder(tmp_path, log):
    run([memory_unit([f"some text {n}", "more"], f"{n}") for n in range(5)], tmp_path / "out")
    files = open_token_files(tmp_path / "out" / "train")
    assert not was_checked(log)
    remembered = {path(tmp_path / "out" / "train") for path in (lengths_of, catalog_of)}
    assert {*tmp_path.rglob(f"{DEFAULT_CACHE}/*")} == remembered
    plain = TokenFiles(files.prefixes)
    assert documents(files) == documents(plain)
    assert files.fingerprint() == plain.fingerprint()
    assert files.names_tokenizer
    assert len(open_token_files(f"{tmp_path}/out/train/part-0000[01]")) == 4
    for suffix in (".bin", ".idx"):
        (tmp_path / "out" / "train" / f"part-00003{suffix}").unlink()
    with pytest.raises(
        ConfigError, match=r"train: 1 of the pairs in .*prepared.json are missing, "
    ):
        open_token_files(tmp_path / "out" / "train")
    assert len(open_token_files(f"{tmp_path}/out/train/part-*")) == 8
    os.truncate(tmp_path / "out" / "train" / "part-00001.bin", 2)
    with pytest.raises(ConfigError, match=r"part-00001.bin: has 2 bytes, but .*; copy it again"):
        open_token_files(f"{tmp_path}/out/train/part-*")


@pytest.mark.parametrize("removed", ["part-00000", "part-*"])
def test_prepared_pairs_without_their_meta_files_are_checked_as_others_are(tmp_path, removed, log):
    run([memory_unit([f"some text {n}", "more"], f"{n}") for n in range(5)], tmp_path / "out")
    train = tmp_path / "out" / "train"
    for file in train.glob(f"{removed}.meta.json"):
        file.unlink()
    files = open_token_files(train)
    assert was_checked(log)
    assert not files.names_tokenizer
    assert files.fingerprint() == TokenFiles(files.prefixes).fingerprint()


def test_prepared_pairs_beside_others_are_checked_as_those_are(tmp_path, log):
    run([memory_unit([f"some text {n}", "more"], f"{n}") for n in range(2)], tmp_path / "out")
    train = tmp_path / "out" / "train"
    write_tokens(train / "part-of-others", [[1, 2], [3]])
    files = open_token_files(train)
    assert was_checked(log)
    assert documents(files) == documents(TokenFiles(files.prefixes))
    assert [1, 2] in documents(files) and len(files) == 6


def test_prepared_documents_are_known_to_be_one_sequence_each(tmp_path):
    """Otherwise their whole index would be read to find out."""
    run([memory_unit(["some text", "more"], f"{n}") for n in range(2)], tmp_path / "out")
    train = tmp_path / "out" / "train"
    catalog = opening.prepared_catalog(str(train), list_pairs(train))
    assert [pair.one_sequence_each for pair in catalog.pairs] == [True, True]


def test_a_source_with_the_most_bytes_that_need_no_catalog_has_none(tmp_path, monkeypatch):
    write_tokens(tmp_path / "web", [[1, 2], [3], [4]])
    pairs = [read_pair(str(tmp_path / "web"))]
    num_bytes = (tmp_path / "web.idx").stat().st_size
    for limit, expected in ((num_bytes, False), (num_bytes - 1, True)):
        monkeypatch.setattr(opening, "FEW_BYTES", limit)
        assert opening.needs_catalog(pairs) == expected


def test_a_folder_that_is_prepared_again_is_read_with_its_new_lengths(tmp_path, monkeypatch):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    texts = ["some text", "more", "a"]
    for part in (texts, texts[::-1]):  # as many documents and tokens, in another order
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        run([memory_unit(part, f"{n}") for n in range(5)], tmp_path / "out")
        files = open_token_files(tmp_path / "out" / "train")
        assert documents(files) == documents(TokenFiles(files.prefixes))


def test_rows_and_states_are_equal_with_and_without_a_catalog(folder, tmp_path, monkeypatch):
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)])

    def start():
        encoder = PackedTaskEncoder(ByteTokenizer(), seq_len=5)
        dataset = get_train_dataset(mix, worker_config=config(), batch_size=2, task_encoder=encoder)
        loader = loader_for(dataset)
        return [batch_hash(batch) for batch in take(loader, 20)], loader.state_dict()

    with monkeypatch.context() as patch:
        patch.setattr(opening, "FEW_PAIRS", 64)
        plain = start()
        assert not (folder / DEFAULT_CACHE).exists()
    assert start() == start() == plain
    assert lengths_of(folder).exists()


def test_a_plan_takes_the_lengths_of_many_pairs_from_one_file(folder, monkeypatch):
    open_token_files(folder)
    assert lengths_of(folder).stat().st_size == 4 * 18 + 4  # and a checksum
    files = open_token_files(folder)
    monkeypatch.setattr(token_index, "map_file", None)  # no index can be opened
    assert files.lengths(np.arange(18)).tolist() == [len(each) for each in sum(CONTENTS, [])]


@pytest.mark.parametrize("content", [b"", bytes(4 * 18 - 1), bytes(4 * 20)])
def test_lengths_of_another_size_are_written_again(folder, content):
    open_token_files(folder)
    path = lengths_of(folder)
    whole = path.read_bytes()
    path.write_bytes(content)
    assert documents(open_token_files(folder)) == sum(CONTENTS, [])
    assert path.read_bytes() == whole


@pytest.mark.parametrize("count", [1, 18])
def test_lengths_that_were_lost_are_named_and_written_again(folder, count):
    """A page of zeros, as after a power failure, or a single length that would drop a document."""
    open_token_files(folder)
    path, whole = lengths_of(folder), lengths_of(folder).read_bytes()
    overwrite(path, 0, bytes(4 * count))
    files = open_token_files(folder)
    with pytest.raises(ConfigError, match=rf"{path}: .*damaged .page 0 .*the next start makes it"):
        files.lengths(np.arange(4))
    assert documents(open_token_files(folder)) == sum(CONTENTS, [])
    assert path.read_bytes() == whole


def test_a_pair_that_was_replaced_by_a_longer_one_is_not_read_at_its_old_places(tmp_path):
    write_tokens(tmp_path / "web", [[1, 2], [3]])
    files = open_token_files(tmp_path / "web")
    write_tokens(tmp_path / "web", [[7, 1, 2], [3]])
    with pytest.raises(ConfigError, match="web.bin: has 8 bytes, needs 6; it was .* replaced"):
        files.document(1)


#: Bytes of the index of two documents that are overwritten, and their new value.
DAMAGES = [
    (17, 1, 3),  # the type of a token
    *((34, 4, value) for value in (1, -2)),  # the first length
    *((42, 8, value) for value in (2, -2)),  # the first pointer
    *((50, 8, value) for value in (2, 2**40)),  # the second one
]


@pytest.mark.parametrize(("place", "size", "value"), DAMAGES)
def test_readers_find_an_index_that_was_damaged_after_its_check(folder, place, size, value):
    open_token_files(folder)
    overwrite(folder / "part-4.idx", place, value.to_bytes(size, "little", signed=True))
    files = open_token_files(folder)
    with pytest.raises(ConfigError, match=r"part-4.idx: (damaged, document [01] has|has changed)"):
        files.read([9, 8], [0, 0], [1, 1])


@pytest.mark.parametrize("value", [-100, 2**40])
def test_readers_find_a_document_that_lies_outside_of_its_file(folder, value):
    write_tokens(folder / "part-4", [[1], [2, 3], [4], [5]])
    open_token_files(folder)
    # Both pointers move, so the length of the document in between stays the same.
    pointers = struct.pack("<2q", value, value + 4)
    overwrite(folder / "part-4.idx", 34 + 4 * 4 + 8, pointers)
    with pytest.raises(ConfigError, match=r"part-4.idx: damaged, document 1 .* is not in .*.bin"):
        open_token_files(folder).document(9)


@pytest.mark.parametrize("value", [-100, 2**40])
def test_readers_of_one_pair_find_a_document_that_lies_outside_of_its_file(tmp_path, value):
    """A single pair is read by its index alone, without lengths from elsewhere."""
    write_tokens(tmp_path / "web", [[1], [2, 3], [4], [5]])
    files = open_token_files(tmp_path / "web")
    pointers = struct.pack("<2q", value, value + 4)
    overwrite(tmp_path / "web.idx", 34 + 4 * 4 + 8, pointers)
    with pytest.raises(ConfigError, match=r"web.idx: damaged, document 1 .* is not in .*.bin"):
        files.document(1)


def overwrite(path, place, content):
    """Overwrite bytes of a file, and keep its time."""
    stamp = os.stat(path)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))


def test_a_file_that_was_made_before_the_claim_is_not_made_again(tmp_path):
    found = iter([None, "made by another process"])
    assert make_once(tmp_path / "file", lambda: next(found), lambda beat: 1 / 0).startswith("made")
