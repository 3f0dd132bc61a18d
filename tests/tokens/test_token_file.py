# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pairs by number: what megatron-core wrote is what is read, from one pair or thousands."""

import contextlib
import gc
import json
import os
import pickle
import random
import struct

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.errors import ConfigError
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.tokens import index as token_index
from energon_ext.tokens.file_set import TokenFiles, open_token_files
from tests.support import config, write_mix, write_tokens, write_weights

FIRST = [[11, 12, 13], [14], [15, 16]]
SECOND = [[21, 22, 23, 24, 25], [26]]


def read(files, number, start=0, stop=None):
    """Return the tokens of one document."""
    stop = int(files.lengths(np.array([number]))[0]) if stop is None else stop
    return files.tokens(number, start, stop).tolist()


def all_documents(files):
    return [read(files, number) for number in range(len(files))]


@pytest.fixture
def two(tmp_path):
    return [write_tokens(tmp_path / "a", FIRST), write_tokens(tmp_path / "b", SECOND)]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_a_pair_matches_what_megatron_wrote_and_reads(tmp_path, dtype):
    builder = IndexedDatasetBuilder(f"{tmp_path}/web.bin", dtype=dtype)
    builder.add_document(torch.tensor([5, 6, 7, 8, 9]), [2, 3])
    builder.add_document(torch.tensor([], dtype=torch.int64), [0])
    builder.add_document(torch.tensor([100, 101]), [1, 1])
    builder.add_document(torch.tensor([], dtype=torch.int64), [])
    builder.finalize(f"{tmp_path}/web.idx")
    file = TokenFiles([tmp_path / "web"])
    assert (len(file), file.num_tokens) == (4, 7)
    assert file.tokens(0, 0, 2).dtype == dtype
    assert all_documents(file) == [[5, 6, 7, 8, 9], [], [100, 101], []]
    assert file.places(np.arange(4)).tolist() == [0, 5, 5, 7]
    sequences = IndexedDataset(f"{tmp_path}/web")
    assert file.tokens(0, 0, 7).tolist() == np.concatenate(sequences[0 : len(sequences)]).tolist()


def test_a_slice_is_a_view_into_the_document(two):
    file = TokenFiles([two[1]])
    assert read(file, 0, 1, 3) == [22, 23]
    assert np.shares_memory(file.tokens(0, 1, 3), file.tokens(0, 0, 5))
    with pytest.raises(ValueError, match="read-only"):
        file.tokens(0, 0, 1)[0] = 1


def test_pairs_are_concatenated(two):
    files = TokenFiles(two)
    assert (len(files), files.num_tokens) == (5, 12)
    numbers = np.array([4, 0, 3, 1, 3])
    assert files.places(numbers).tolist() == [11, 0, 6, 3, 6]
    assert files.lengths(numbers).tolist() == [1, 3, 5, 1, 5]
    assert all_documents(files) == FIRST + SECOND
    assert files.lengths(np.zeros(0, np.int64)).tolist() == []
    assert files.read([], [], []) == {"tokens": [], "label_weights": []}


def test_pairs_of_several_types_and_without_documents_are_one_source(tmp_path):
    contents = [[], [[1, 2], [3]], [], [], [[70_000], []], []]
    prefixes = [
        write_tokens(tmp_path / f"{number}", documents, np.int32 if number == 4 else np.uint16)
        for number, documents in enumerate(contents)
    ]
    files = TokenFiles(prefixes)
    assert all_documents(files) == [[1, 2], [3], [70_000], []]
    assert len(TokenFiles(prefixes[:1])) == TokenFiles(prefixes[:1]).num_tokens == 0


def test_random_documents_of_many_pairs_match_a_list(tmp_path):
    rng = np.random.default_rng(0)
    contents = [
        [rng.integers(0, 1000, rng.integers(0, 9)).tolist() for _ in range(rng.integers(0, 7))]
        for _ in range(30)
    ]
    files = TokenFiles([write_tokens(tmp_path / f"{n:02d}", c) for n, c in enumerate(contents)])
    expected = [document for documents in contents for document in documents]
    starts = np.cumsum([0, *map(len, expected)])
    numbers = rng.integers(0, len(expected), 500)
    places, lengths = files.places(numbers), files.lengths(numbers)
    assert places.tolist() == starts[numbers].tolist()
    assert lengths.tolist() == [len(expected[number]) for number in numbers]
    assert all_documents(files) == expected
    for first, stop in [(0, len(expected)), *np.sort(rng.integers(0, len(expected), (50, 2)))]:
        if first < stop:
            assert files.tokens_in(first, stop) == sum(map(len, expected[first:stop]))


def test_an_unpickled_source_reads_the_same_files(two):
    for files in (TokenFiles([two[0]]), TokenFiles(two)):
        again = pickle.loads(pickle.dumps(files))
        assert type(again) is type(files)
        assert all_documents(again) == all_documents(files)


def test_fingerprint_covers_contents_and_order_but_not_paths(tmp_path, two):
    def fingerprint(*contents, folder):
        prefixes = [write_tokens(tmp_path / folder / f"{n}", c) for n, c in enumerate(contents)]
        return TokenFiles(prefixes).fingerprint()

    original = TokenFiles(two).fingerprint()
    assert (original["documents"], original["tokens"]) == (5, 12)
    assert json.loads(json.dumps(original)) == original
    assert fingerprint(FIRST, SECOND, folder="moved") == original
    same_counts = [[1, 1, 1], [1, 1], [1]]
    changed = [
        fingerprint([[17, 18, 19], [14], [15, 16]], SECOND, folder="tokens"),
        fingerprint(SECOND, FIRST, folder="order"),
        fingerprint(same_counts, SECOND, folder="lengths"),
        fingerprint(FIRST, [*SECOND, [1]], folder="grown"),
    ]
    assert len({str(value) for value in [original, *changed]}) == 5
    empty = TokenFiles([write_tokens(tmp_path / "empty", [])]).fingerprint()
    assert (empty["documents"], empty["tokens"]) == (0, 0)


@pytest.mark.parametrize("weighted", [False, True])
def test_fingerprint_does_not_depend_on_division_into_pairs(tmp_path, weighted):
    documents = [[n % 200 + 1] * (n % 9) for n in range(400)]

    def fingerprint(pairs, dtype=np.uint16):
        prefixes = []
        for number in range(pairs):
            part = documents[400 * number // pairs : 400 * (number + 1) // pairs]
            prefix = write_tokens(
                tmp_path / f"{pairs}{dtype.__name__}" / f"{number:02}", part, dtype
            )
            if weighted:
                write_weights(prefix, [[n % 2 for n in each] for each in part])
            prefixes.append(prefix)
        return TokenFiles(prefixes).fingerprint()

    assert fingerprint(1) == fingerprint(3) == fingerprint(20) == fingerprint(2, np.int32)


HEADER = struct.Struct("<9sQBQQ")


def rewrite_header(pair, **changes):
    """Change fields of the header of its ``.idx``."""
    index = pair.with_suffix(".idx")
    content = index.read_bytes()
    names = ("magic", "version", "code", "sequences", "bounds")
    fields = dict(zip(names, HEADER.unpack(content[: HEADER.size])))
    index.write_bytes(HEADER.pack(*{**fields, **changes}.values()) + content[HEADER.size :])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pair: os.remove(f"{pair}.idx"), "b.idx: does not exist; a pair needs"),
        (lambda pair: os.remove(f"{pair}.bin"), "b.bin: does not exist; a pair needs"),
        (lambda pair: os.truncate(f"{pair}.bin", 10), "b.bin has 10 bytes, its .idx describes 12"),
        (lambda pair: os.truncate(f"{pair}.idx", 20), "b.idx: not a Megatron index"),
        (
            lambda pair: os.truncate(f"{pair}.idx", 81),
            "81 bytes, but 2 sequences and 2 documents take 82",
        ),
        (lambda pair: rewrite_header(pair, magic=b"MMIDIDX\x00\x01"), "begins with b'MMIDIDX"),
        (lambda pair: rewrite_header(pair, version=2), "version 2"),
        (lambda pair: rewrite_header(pair, code=7), "type 7 is not an integer type"),
        (lambda pair: rewrite_header(pair, code=99), "type 99 is not an integer type"),
        (lambda pair: rewrite_header(pair, sequences=2**62), "bytes, but .* take"),
        (lambda pair: rewrite_header(pair, code=4), "has 12 bytes, its .idx describes 14"),
        (lambda pair: rewrite_header(pair, bounds=0), "it has 0 bounds of documents, which"),
    ],
)
def test_opening_a_damaged_pair_names_it(two, damage, message):
    pair = two[1]
    damage(pair)
    with pytest.raises(ConfigError, match=message) as error:
        open_token_files(pair.parent / "[ab]")
    assert "\n" not in str(error.value)


def test_documents_that_skip_sequences_are_refused(two):
    index = two[1].with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-8] + (1).to_bytes(8, "little"))
    with pytest.raises(ConfigError, match="documents do not cover all its sequences"):
        TokenFiles([two[1]])


@pytest.mark.parametrize(
    ("number", "value", "found"),
    # 3 pointers (0, 6 and 8), 4 first sequences (0, 1, 2, 3)
    [
        (0, -2, "sequence 0"),
        (0, 2, "sequence 0"),
        (1, 100, "sequence 0"),  # out of the file
        (1, 4, "sequence 0"),  # overlaps
        (1, 7, "sequence 0"),  # odd
        (1, -2, "sequence 0"),
        (4, 2**40, "document 1"),
        (4, -1, "document 0"),
        (5, 0, "document 1"),
    ],
)
def test_an_index_with_wrong_pointers_is_refused_on_open(two, number, value, found):
    index = two[0].with_suffix(".idx")
    content = bytearray(index.read_bytes())
    begin = HEADER.size + 4 * 3 + 8 * number
    content[begin : begin + 8] = value.to_bytes(8, "little", signed=True)
    index.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"a.idx: damaged, {found} .*a.bin; write the pair ag"):
        open_token_files(two[0])


@pytest.mark.parametrize("sizes", [(-3, 1, 2), (3, -1, 2), (2, 2, 2)])
def test_an_index_with_wrong_lengths_is_refused_on_open(two, sizes):
    index = two[0].with_suffix(".idx")
    content = bytearray(index.read_bytes())
    content[HEADER.size : HEADER.size + 12] = struct.pack("<3i", *sizes)
    index.write_bytes(content)
    with pytest.raises(ConfigError, match=r"a.idx: damaged, sequence [01] "):
        open_token_files(two[0])


def test_an_index_is_checked_to_its_end_in_chunks(tmp_path, monkeypatch):
    pair = write_tokens(tmp_path / "web", [[n] * (n % 4) for n in range(20)])
    monkeypatch.setattr(token_index, "_CHECKED_SEQUENCES", 8)
    open_token_files(pair)
    whole = pair.with_suffix(".idx").read_bytes()
    for number in range(20):
        content = bytearray(whole)
        begin = HEADER.size + 4 * 20 + 8 * number
        content[begin] += 2
        pair.with_suffix(".idx").write_bytes(content)
        # A wrong last pointer contradicts the size of the .bin file.
        with pytest.raises(ConfigError, match=f"sequence {max(0, number - 1)} over|describes"):
            open_token_files(pair)


def test_random_index_damage_is_a_typed_error_with_clean_stderr(two, capfd):
    index, chance = two[0].with_suffix(".idx"), random.Random(0)
    whole = index.read_bytes()
    for _ in range(200):
        content = bytearray(whole)
        for _ in range(chance.randint(1, 3)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        index.write_bytes(content[: chance.choice([None, None, chance.randrange(len(content))])])
        with contextlib.suppress(ConfigError):
            all_documents(open_token_files(two[0]))
    gc.collect()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_truncated_before_mapping_is_named(two, suffix):
    files = TokenFiles(two)
    token_index.open_index.cache_clear()
    os.truncate(two[0].with_suffix(suffix), 4)
    with pytest.raises(ConfigError, match=rf"a{suffix}: has 4 bytes, needs \d+; it was"):
        all_documents(files)


def test_tokens_of_another_tokenizer_are_refused(tmp_path, two):
    files = TokenFiles(two)
    files.check_tokenizer("mine", {"kind": "bytes"}, 27)
    negative = TokenFiles([write_tokens(tmp_path / "negative", [[5, -3]], np.int32)])
    with pytest.raises(
        ConfigError, match="negative: contains token id -3, but the tokenizer mine has 27"
    ):
        negative.check_tokenizer("mine", {"kind": "bytes"}, 27)
    with pytest.raises(ConfigError, match="b: contains token id 26, but the tokenizer mine has 26"):
        files.check_tokenizer("mine", {"kind": "bytes"}, 26)
    (tmp_path / "b.meta.json").write_text(json.dumps({"tokenizer": {"kind": "hf"}}))
    TokenFiles(two).check_tokenizer("mine", {"kind": "hf"}, 27)
    with pytest.raises(
        ConfigError,
        match=r"b: written with a different tokenizer, but mine .* \(kind hf, now bytes\)",
    ):
        TokenFiles(two).check_tokenizer("mine", {"kind": "bytes"}, 27)
    for content in ("[" * 100_000, "{}"):
        (tmp_path / "b.meta.json").write_text(content)
        with pytest.raises(ConfigError, match=r"b.meta.json: not written by `energon-ext prepare`"):
            TokenFiles(two)


def test_thousands_of_pairs_stay_closed_while_they_are_read(tmp_path):
    write_tokens(tmp_path / "0000", [[n] * (n + 1) for n in range(20)])
    for number in range(1, 3000):
        for suffix in (".bin", ".idx"):
            os.link(tmp_path / f"0000{suffix}", tmp_path / f"{number:04d}{suffix}")
    open_before = len(os.listdir("/proc/self/fd"))
    files = open_token_files(tmp_path)
    assert (len(files), files.num_tokens) == (60_000, 630_000)
    numbers = np.arange(0, 60_000, 7)
    places, lengths = files.places(numbers), files.lengths(numbers)
    expected = numbers % 20 + 1
    assert lengths.tolist() == expected.tolist()
    assert places.tolist() == (numbers // 20 * 210 + expected * (expected - 1) // 2).tolist()
    read_tokens = [files.tokens(number, 0, 1)[0] for number in numbers.tolist()]
    assert read_tokens == (numbers % 20).tolist()
    assert len(os.listdir("/proc/self/fd")) <= open_before


def test_ids_are_not_read_where_the_files_name_their_tokenizer(tmp_path, two):
    (tmp_path / "b.meta.json").write_text(json.dumps({"tokenizer": {"kind": "bytes"}}))
    files = TokenFiles(two)
    (tmp_path / "b.bin").unlink()
    files.check_tokenizer("mine", {"kind": "bytes"}, 27)
    with pytest.raises(ConfigError, match="a: contains token id 16, but the tokenizer mine has 16"):
        files.check_tokenizer("mine", {"kind": "bytes"}, 16)


@pytest.mark.parametrize("multiplier", [-1, 2])
def test_token_files_have_a_new_order_in_every_epoch(tmp_path, multiplier):
    write_tokens(tmp_path / "web", [[1, 2], [3]])
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)])
    content = json.loads(mix.read_text())
    content["splits"]["train"]["blend"][0]["shuffle_over_epochs_multiplier"] = multiplier
    mix.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"web: shuffle_over_epochs_multiplier: -?\d is for web"):
        get_train_dataset(
            mix,
            worker_config=config(),
            batch_size=1,
            task_encoder=PackedTaskEncoder(ByteTokenizer(), 8),
        )
