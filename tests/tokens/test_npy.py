# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Shards as OLMo-core reads them: the documents that a slow model cuts from them, or an error."""

import gzip
import json

import numpy as np
import pytest

from energon_ext import ConfigError
from energon_ext.tokens import npy
from energon_ext.tokens.formats import open_documents
from tests.support import LargeTokenizer, write_tokens, write_weights
from tests.tokens.stores import steps_of_chats, write_shard, write_table

DOCUMENTS = [[5, 6, 0], [7, 0], [0], [9, 10, 11, 0]]


def documents_in(path):
    documents = open_documents(path)
    return [documents.document(number).tolist() for number in range(len(documents))]


def describe(folder, **fields):
    (folder / "shards.json").write_text(json.dumps(fields))


def cut(tokens, end):
    """Cut tokens after each end token, one by one."""
    documents = [[]]
    for token in tokens:
        documents[-1].append(token)
        if token == end:
            documents.append([])
    return [document for document in documents if document]


@pytest.mark.parametrize("dtype", ["<u1", "<u2", "<u4", "<u8"])
@pytest.mark.parametrize("by", ["table", "token", "both"])
def test_bare_arrays_of_every_type_are_cut_into_their_documents(tmp_path, dtype, by):
    path = write_shard(tmp_path / "part-0-00000.npy", DOCUMENTS, dtype)
    if by != "token":
        write_table(path, DOCUMENTS)
    if by != "table":
        describe(tmp_path, dtype=np.dtype(dtype).name, end_token=0)
    assert documents_in(path) == DOCUMENTS


@pytest.mark.parametrize("dtype", ["<u2", ">u4", "<i4", "<i8"])
def test_arrays_with_a_header_need_no_type(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.concatenate(DOCUMENTS).astype(dtype))
    describe(tmp_path, end_token=0)
    assert documents_in(tmp_path / "a.npy") == DOCUMENTS
    write_table(tmp_path / "a.npy", DOCUMENTS)
    assert documents_in(tmp_path / "a.npy") == DOCUMENTS


def test_random_shards_are_cut_like_a_slow_model_cuts_them(tmp_path, monkeypatch):
    random = np.random.default_rng(1)
    monkeypatch.setattr(npy, "_CHUNK_TOKENS", 7)
    monkeypatch.setattr(npy, "_CHUNK_LINES", 3)
    expected = []
    for number in range(20):
        tokens = [0, *random.integers(0, 6, int(random.integers(0, 60))).tolist()]
        documents = cut(tokens, end=0)
        expected += documents
        for by, folder in (("token", tmp_path / "a"), ("table", tmp_path / "b")):
            path = write_shard(folder / f"{number:03d}.npy", documents, "<u2")
            if by == "table":
                write_table(path, documents)
    describe(tmp_path / "a", dtype="uint16", end_token=0)
    assert documents_in(tmp_path / "a") == documents_in(tmp_path / "b") == expected


def test_the_last_document_of_a_shard_needs_no_end(tmp_path):
    path = write_shard(tmp_path / "a.npy", [[5, 0], [6, 7]])
    describe(tmp_path, dtype="uint32", end_token=0)
    assert documents_in(path) == [[5, 0], [6, 7]]


def test_another_end_token_gives_other_documents_at_the_next_start(tmp_path):
    path = write_shard(tmp_path / "a.npy", [[5, 0, 6, 1, 0]])
    describe(tmp_path, dtype="uint32", end_token=0)
    assert documents_in(path) == [[5, 0], [6, 1, 0]]
    (tmp_path / "shards.json").write_text('{"end_token": 1, "dtype": "uint32"} ')
    assert documents_in(path) == [[5, 0, 6, 1], [0]]


def test_empty_shards_have_no_documents(tmp_path):
    write_shard(tmp_path / "a.npy", [])
    describe(tmp_path, dtype="uint32", end_token=0)
    write_shard(tmp_path / "b.npy", DOCUMENTS)
    assert documents_in(tmp_path) == DOCUMENTS


@pytest.mark.parametrize("start", ["labels_mask_part_", "labels_mask_"])
def test_masks_of_chats_say_which_labels_are_trained(tmp_path, start):
    tokens = [[n, n + 1, n + 2, n + 3] for n in range(10, 90, 4)]
    masks = [[0, 0, n // 4 % 2, 1] for n in range(10, 90, 4)]
    chat = tmp_path / "a" / "chat"
    write_table(write_shard(chat / "token_ids_part_0000.npy", tokens), tokens)
    write_shard(chat / f"{start}0000.npy", masks, "bool")
    pair = write_tokens(tmp_path / "b" / "chat" / "0", tokens, np.int32)
    write_weights(pair, masks, tokenizer=LargeTokenizer())

    assert steps_of_chats(tmp_path / "a") == steps_of_chats(tmp_path / "b")
    npy._open_mask.cache_clear()
    write_shard(chat / f"{start}0000.npy", [[2] * 80], "u1")
    with pytest.raises(ConfigError, match=r"0000.npy: has a byte other than 0 and 1"):
        len(open_documents(chat))
    write_shard(chat / f"{start}0000.npy", masks, "bool")
    (stray := chat / f"{start}0007.npy").write_bytes(b"1")
    with pytest.raises(ConfigError, match=r"0007.npy: is not the mask of a shard that"):
        open_documents(chat)
    stray.unlink()
    npy._open_mask.cache_clear()
    write_shard(chat / f"{start}0000.npy", masks[1:], "bool")
    with pytest.raises(ConfigError, match=r"0000.npy: has 76 bytes; 80 tokens need one byte each"):
        len(open_documents(chat))


def test_the_weights_of_one_document_are_read_alone(tmp_path):
    path = write_shard(tmp_path / "token_ids_part_0000.npy", DOCUMENTS)
    write_table(path, DOCUMENTS)
    write_shard(tmp_path / "labels_mask_part_0000.npy", [[0, 1, 1, 0, 1, 1, 0, 0, 1, 1]], "bool")
    documents = open_documents(path)
    assert documents.label_weights(0, 0, 3).tolist() == [0, 1, 1]
    assert documents.label_weights(3, 1, 4).tolist() == [0, 1, 1]


def test_masks_alone_are_no_shards(tmp_path):
    write_shard(tmp_path / "labels_mask_part_0000.npy", [[0, 1]], "bool")
    with pytest.raises(ConfigError, match="names masks only"):
        open_documents(tmp_path)


def table(path, text):
    with gzip.open(path.with_suffix(".csv.gz"), "wt") as file:
        file.write(text)


def cut_off(path):
    write_table(path, [[1] * 300 for _ in range(3000)])
    packed = path.with_suffix(".csv.gz")
    packed.write_bytes(packed.read_bytes()[:-20])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: None, r"a\.npy: nothing says where its documents end\. Put the .*a\.csv\.gz"),
        (lambda p: table(p, "0,3\n3,6\n"), r"a\.npy: has 40 bytes for 6 tokens; the shard or its "),
        (lambda p: table(p, "0,3\n3,9\n"), r"a\.npy: has 40 bytes for 9 tokens"),
        (lambda p: table(p, "0,3\n4,10\n"), r"a\.csv\.gz:2: 4 to 10 after a document .* at 3"),
        (lambda p: table(p, "0,3\n3,3\n"), r"a\.csv\.gz:2: 3 to 3 after"),
        (lambda p: table(p, "start,end\n0,10\n"), r"a\.csv\.gz:1: invalid literal"),
        (lambda p: table(p, "7\n"), r"a\.csv\.gz:1: not enough values"),
        (cut_off, r"a\.csv\.gz:\d+: Compressed file ended"),
        (lambda p: p.with_suffix(".csv.gz").write_text("0,10\n"), r"a\.csv\.gz:0: Not a gzipped"),
        (lambda p: describe(p.parent, dtype="uint32"), r"shards\.json: end_token: None found"),
        (
            lambda p: describe(p.parent, end_token=0),
            r"shards\.json: dtype: None found, uint8, uint",
        ),
        (lambda p: describe(p.parent, dtype="float32", end_token=0), "dtype: 'float32' found"),
        (lambda p: describe(p.parent, dtype="uint32", eos=0), "an object with `dtype` and `end_t"),
        (lambda p: (p.parent / "shards.json").write_text("["), r"shards\.json: not JSON"),
        (
            lambda p: describe(p.parent, dtype="uint16", end_token=100_257),
            r"a\.npy: none of its 20 tokens is the end_token 100257 of shards\.json",
        ),
        (
            lambda p: (p.write_bytes(p.read_bytes()[:-2]), describe(p.parent, **DESCRIBED)),
            r"a\.npy: 38 bytes are no whole number of uint32; it is incomplete",
        ),
        (
            lambda p: (np.save(p, np.zeros(3)), describe(p.parent, **DESCRIBED)),
            r"a\.npy: its header is .*<f8.*; that of an array with one row of integers",
        ),
        (
            lambda p: (np.save(p, np.zeros((2, 2), int)), describe(p.parent, **DESCRIBED)),
            r"a\.npy: its header is .*'shape': \(2, 2\)",
        ),
        (
            lambda p: (np.save(p, np.arange(9)), truncate(p), describe(p.parent, **DESCRIBED)),
            r"a\.npy: has 190 bytes, its header describes 200; copy it again",
        ),
        (
            lambda p: (
                p.write_bytes(b"\x93NUMPY\x01\x00\xff\xff"),
                describe(p.parent, **DESCRIBED),
            ),
            r"a\.npy: its header is ''; that of an array",
        ),
        (
            lambda p: (np.save(p, np.arange(9)), table(p, "0,8\n")),
            r"a\.npy: has 9 tokens, but 8 in .*a\.csv\.gz",
        ),
    ],
)
def test_damaged_shards_are_named(tmp_path, damage, message):
    path = write_shard(tmp_path / "a.npy", DOCUMENTS)
    damage(path)
    with pytest.raises(ConfigError, match=message):
        len(open_documents(path))


DESCRIBED = {"dtype": "uint32", "end_token": 0}


def truncate(path):
    path.write_bytes(path.read_bytes()[:-10])


def test_a_shard_that_was_truncated_after_the_start_is_named(tmp_path):
    path = write_shard(tmp_path / "a.npy", DOCUMENTS)
    write_table(path, DOCUMENTS)
    len(open_documents(path))
    npy._open_shard.cache_clear()
    documents = open_documents(path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"a\.npy: has 36 bytes, needs 40; it was truncated"):
        documents.document(0)
    with pytest.raises(ConfigError, match=r"a\.npy: has 36 bytes, but had 40 when it was opened"):
        documents.check_files()
