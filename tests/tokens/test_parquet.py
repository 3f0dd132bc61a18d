# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parquet files with token ids: the same documents that pyarrow's own rows have, or an error."""

import logging
import os
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from energon_ext import ConfigError
from energon_ext.data_files import CACHE_VARIABLE, DEFAULT_CACHE
from energon_ext.tokens import parquet
from energon_ext.tokens.cut import CutLengths
from energon_ext.tokens.formats import open_documents
from tests.plan.runs import Run, write_split
from tests.support import LargeTokenizer, write_tokens, write_weights
from tests.tokens.stores import steps_of_chats, write_parquet

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10, 11, 12], [13, 14]]
INTS = pa.list_(pa.int64())


def documents_in(path):
    documents = open_documents(path)
    return [documents.document(number).tolist() for number in range(len(documents))]


def rows_of(path, column="input_ids"):
    """Return the rows of a file as pyarrow has them."""
    return pq.read_table(path)[column].to_pylist()


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int32()),
        pa.list_(pa.uint16()),
        pa.large_list(pa.int64()),
        pa.list_(pa.uint32()),
        pa.list_(pa.int8()),
    ],
)
@pytest.mark.parametrize("rows", [1, 2, 99])
def test_lists_of_any_integers_are_documents(tmp_path, kind, rows):
    path = write_parquet(tmp_path / "a.parquet", DOCUMENTS, kind=kind, rows=rows)
    assert documents_in(path) == DOCUMENTS


def test_lists_of_a_fixed_size_are_documents(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [[1, 2], [3, 4]], kind=pa.list_(pa.int32(), 2))
    assert documents_in(path) == [[1, 2], [3, 4]]


def test_random_pieces_are_those_of_the_rows_of_pyarrow(tmp_path, monkeypatch):
    random = np.random.default_rng(3)
    for name in "abc":
        rows = [random.integers(0, 2**31, length).tolist() for length in random.integers(0, 90, 70)]
        write_parquet(tmp_path / f"{name}.parquet", rows, rows=int(random.integers(1, 30)))
    rows = [row for name in "abc" for row in rows_of(tmp_path / f"{name}.parquet")]
    monkeypatch.setattr(parquet, "KEPT_BYTES", 5_000)
    documents = open_documents(tmp_path)
    assert documents.lengths(np.arange(210)).tolist() == list(map(len, rows))
    for _ in range(30):
        numbers = random.integers(0, 210, 12).tolist()
        starts = [int(random.integers(0, len(rows[n]) + 1)) for n in numbers]
        stops = [int(random.integers(start, len(rows[n]) + 1)) for n, start in zip(numbers, starts)]
        found = documents.read(numbers, starts, stops)["tokens"]
        assert [f.tolist() for f in found] == [
            rows[n][a:b] for n, a, b in zip(numbers, starts, stops)
        ]
    kept = parquet._kept
    assert kept._num_bytes == sum(group.num_bytes for group in kept._groups.values())
    largest = max(group.num_bytes for group in kept._groups.values())
    assert kept._num_bytes <= max(5_000, largest)


def test_a_row_group_is_decoded_once_for_a_batch(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", [[n] for n in range(12)], rows=4)
    monkeypatch.setattr(parquet, "KEPT_BYTES", 0)  # keeps the last one only
    decoded, decode = [], parquet._decode
    monkeypatch.setattr(parquet, "_decode", lambda s, n, *c: decoded.append(n) or decode(s, n, *c))
    found = open_documents(path).read([9, 0, 5, 10, 1, 6], [0] * 6, [1] * 6)["tokens"]
    assert [f.tolist() for f in found] == [[9], [0], [5], [10], [1], [6]]
    assert decoded == [0, 1, 2]


def test_the_column_is_found_by_name_or_named_by_the_entry(tmp_path):
    for name, column in (("a", "tokens"), ("b", "ids")):
        write_parquet(tmp_path / f"{name}.parquet", [[n] * 65 for n in range(8)], column=column)
    entries = [{"path": "a.parquet"}, {"path": "b.parquet", "key": "ids"}]
    run = Run(write_split(tmp_path / "mix.yaml", {"interleave": entries}), rows=2)
    (tokens, *_), (others, *_) = run.step()
    assert len(set(tokens)) == len(set(others)) == 1
    keys = run.loaders[0].dataset.run.keys
    assert sorted(keys) == ["a.parquet", "b.parquet@ids"]


def test_of_two_known_columns_only_the_first_is_read(tmp_path):
    text = ([["a"], ["b"]], pa.list_(pa.string()))
    path = write_parquet(tmp_path / "a.parquet", [[1, 2], [3]], tokens=text)
    assert documents_in(path) == [[1, 2], [3]]


def test_the_key_may_be_on_the_entry_of_a_metadataset(tmp_path):
    write_parquet(tmp_path / "b.parquet", [[n] * 65 for n in range(8)], column="ids")
    write_split(tmp_path / "inner.yaml", {"blend": [{"path": "b.parquet"}]})
    outer = {"blend": [{"path": "inner.yaml", "key": "ids"}]}
    assert Run(write_split(tmp_path / "mix.yaml", outer), rows=1).step()


@pytest.mark.parametrize(
    ("columns", "key", "message"),
    [
        (
            {"text": (["a"],)},
            None,
            r"no column input_ids or tokens of token ids; it has text \(",
        ),
        ({"text": (["a"],)}, None, r"`energon-ext prepare FOLDER --parquet .*a.parquet --tok"),
        ({"text": (["a"],)}, "text", "column text is string; lists of integers are needed"),
        ({"tokens": ([[1]], INTS)}, "ids", "no column ids of token ids; it has tokens"),
        ({"tokens": ([[[1]]], pa.list_(INTS))}, None, "column tokens is list<.*list<"),
        ({"tokens": ([[0.5]], pa.list_(pa.float32()))}, None, "column tokens is list<.*float>"),
        ({"tokens": ([7], pa.int64())}, None, "column tokens is int64"),
        (  # the packed rows of Megatron-Bridge
            {
                "input_ids": ([[5, 6, 7, 8]], INTS),
                "loss_mask": ([[1, 1, 1, 1]], INTS),
                "seq_start_id": ([[0, 2]], INTS),
            },
            None,
            "seq_start_id marks packed documents; give one per row",
        ),
        ({"tokens": ([[1], None], INTS)}, None, "row 1 of tokens is null or contains a null"),
        (
            {"tokens": ([[1], [], [2, None]], INTS)},
            None,
            "row 2 of tokens is null or contains a null",
        ),
        (
            {"tokens": ([[1]], INTS), "labels": ([[1]], INTS), "loss_mask": ([[1]], INTS)},
            None,
            "both loss_mask and labels say what is trained",
        ),
        ({"tokens": ([[1]], INTS), "labels": (["a"],)}, None, "column labels is string; lists"),
        (
            {"tokens": ([[1], [1, 2]], INTS), "loss_mask": ([[1], [1]], INTS)},
            None,
            "row 1 of loss_mask is not as long as its tokens",
        ),
        (
            {"tokens": ([[1], [5, 6, 7]], INTS), "labels": ([[1], [6, 7, -100]], INTS)},
            None,
            "row 1 of labels has a label that is neither its token nor -100; labels must not be",
        ),
        (
            {"tokens": ([[1, 0]], INTS), "attention_mask": ([[1, 0]], INTS)},
            None,
            "row 0 of attention_mask has padding",
        ),
        (
            {
                "tokens": ([[], [1, 2]], INTS),
                "loss_mask": ([[], [1.0, float("nan")]], pa.list_(pa.float32())),
            },
            None,
            "row 1 of loss_mask has a weight that is not a finite number >= 0",
        ),
        (
            {
                "tokens": ([[], [1, 2]], INTS),
                "loss_mask": ([[], [1.0, -2.0]], pa.list_(pa.float32())),
            },
            None,
            "row 1 of loss_mask has a weight that is not a finite number >= 0",
        ),
    ],
)
def test_what_cannot_be_trained_as_it_is_stored_is_refused(tmp_path, columns, key, message):
    table = pa.table({name: pa.array(*values) for name, values in columns.items()})
    pq.write_table(table, tmp_path / "a.parquet")
    entry = {"path": "a.parquet"} if key is None else {"path": "a.parquet", "key": key}
    with pytest.raises(ConfigError, match=rf"a\.parquet: .*{message}"):
        Run(write_split(tmp_path / "mix.yaml", {"blend": [entry]}))
    assert not list((tmp_path / DEFAULT_CACHE).glob("*"))  # nothing half made is left


@pytest.mark.parametrize("weights", ["loss_mask", "labels", "booleans"])
def test_chats_train_the_labels_that_a_column_names(tmp_path, weights):
    tokens = [[n, n + 1, n + 2, n + 3] for n in range(10, 90, 4)]
    masks = [[0, 0, n // 4 % 2, 1] for n in range(10, 90, 4)]
    columns = {
        "loss_mask": {"loss_mask": (masks, pa.list_(pa.uint8()))},
        "booleans": {"loss_mask": ([list(map(bool, m)) for m in masks], pa.list_(pa.bool_()))},
        "labels": {
            "labels": ([[t if m else -100 for t, m in zip(*p)] for p in zip(tokens, masks)], INTS)
        },
    }[weights]
    columns["attention_mask"] = ([[1] * 4] * 20, pa.list_(pa.int8()))
    write_parquet(tmp_path / "a" / "chat" / "0.parquet", tokens, **columns)
    pair = write_tokens(tmp_path / "b" / "chat" / "0", tokens, np.int32)
    write_weights(pair, masks, tokenizer=LargeTokenizer())

    assert steps_of_chats(tmp_path / "a") == steps_of_chats(tmp_path / "b")


@pytest.mark.parametrize("untrained", [None, 3])
def test_chats_are_cut_as_in_token_files(tmp_path, untrained):
    random = np.random.default_rng(8)
    tokens = [random.integers(0, 5, n).tolist() for n in random.integers(0, 12, 1500)]
    masks = [(random.random(len(each)) < 0.3).astype(int).tolist() for each in tokens]
    write_weights(write_tokens(tmp_path / "pair", tokens), masks)
    path = write_parquet(tmp_path / "a.parquet", tokens, loss_mask=(masks, INTS), rows=40)
    cut = [
        CutLengths(documents, source="a", max_tokens=6, over_long="cut", untrained=untrained)
        for documents in (open_documents(tmp_path / "pair"), open_documents(path))
    ]
    expected, found = (each.lengths(np.arange(1500)).tolist() for each in cut)
    assert found == expected
    assert 0 in [length for length, each in zip(found, tokens) if len(each) > 6]


def test_a_file_without_weights_next_to_one_with_weights_is_named(tmp_path):
    mask = {"loss_mask": ([[1]], INTS)}
    write_parquet(tmp_path / "chat" / "a.parquet", [[1]], **mask)
    bare = write_parquet(tmp_path / "chat" / "b.parquet", [[1]])
    assert open_documents(tmp_path / "chat").unweighted == str(bare)
    bare.unlink()
    assert open_documents(tmp_path / "chat").unweighted is None


# Damage -----------------------------------------------------------------------------------------


def test_damaged_and_truncated_files_are_named(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", [[n] * 50 for n in range(40)])
    content = path.read_bytes()
    for damaged in (content[:-9], b"", b"no parquet", content[:4] + b"\xff" * 60 + content[64:]):
        path.write_bytes(damaged)
        with pytest.raises(ConfigError, match=r"a\.parquet: cannot be read as Parquet \(.*copy it"):
            len(open_documents(path))


def test_a_file_that_is_replaced_during_a_run_is_named(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", DOCUMENTS)
    first, second = open_documents(path), open_documents(path)
    assert len(first) == len(second) == 5
    size, time = path.stat().st_size, path.stat().st_mtime_ns
    parquet._open_in.cache_clear()
    parquet._first_rows.cache_clear()
    write_parquet(path, [[1] * 500])
    with pytest.raises(ConfigError, match=rf"a\.parquet: has \d+ bytes, but had {size} when"):
        first.document(0)
    with pytest.raises(ConfigError, match=rf"but had {size} when it was opened"):
        first.check_files()
    write_parquet(path, [DOCUMENTS[0], DOCUMENTS[3], *DOCUMENTS[1:3], DOCUMENTS[4]])
    if path.stat().st_size == size:  # other documents in as many bytes
        os.utime(path, ns=(time, time))
        with pytest.raises(ConfigError, match="was replaced since its lengths were found"):
            second.document(0)


def test_a_replaced_file_is_measured_again_at_the_next_start(tmp_path):
    path = write_parquet(tmp_path / "a.parquet", DOCUMENTS)
    assert documents_in(path) == DOCUMENTS
    other = DOCUMENTS[::-1]
    write_parquet(path, other)
    os.utime(path, ns=(1, 1))
    assert documents_in(path) == other


# The pass over the column -----------------------------------------------------------------------


def test_lengths_are_found_once_and_kept_next_to_the_data_or_in_the_cache(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "data" / "a.parquet", DOCUMENTS)
    len(open_documents(path))
    (kept,) = (tmp_path / "data" / DEFAULT_CACHE).iterdir()
    assert kept.name.startswith("a.parquet-") and kept.suffix == ".lengths"
    # Ends of the five documents, and the first document of the file and after it.
    assert np.fromfile(kept, "<i8", 8).tolist() == [0, 3, 3, 4, 8, 10, 0, 5]
    with monkeypatch.context() as patch:
        patch.setattr(parquet.ParquetTokens, "scan", None)
        assert documents_in(path) == DOCUMENTS
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    assert documents_in(path) == DOCUMENTS
    assert len(list((tmp_path / "cache").iterdir())) == 1
    monkeypatch.delenv(CACHE_VARIABLE)
    whole = kept.read_bytes()
    kept.write_bytes(whole[:-3])
    assert documents_in(path) == DOCUMENTS and kept.read_bytes() == whole


def test_lengths_that_were_lost_are_named_and_found_again(tmp_path):
    path = write_parquet(tmp_path / "data" / "a.parquet", DOCUMENTS * 800)
    len(open_documents(path))
    (kept,) = (tmp_path / "data" / DEFAULT_CACHE).iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:4096] + bytes(4096) + whole[8192:])
    found = open_documents(path)
    assert found.lengths(np.arange(5)).tolist() == [3, 0, 1, 4, 2]  # in the first page
    with pytest.raises(ConfigError, match=rf"{kept}: .*damaged .page 1 .*the next start makes it"):
        found.lengths(np.arange(700, 710))
    assert len(open_documents(path)) == 4000 and kept.read_bytes() == whole


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", DOCUMENTS)
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(ConfigError, match=f"cannot be written to .*; set {CACHE_VARIABLE} to a"):
        len(open_documents(path))


def test_processes_that_start_at_once_read_the_column_once(tmp_path, monkeypatch):
    path = write_parquet(tmp_path / "a.parquet", DOCUMENTS)
    passes, measure = [], parquet.ParquetTokens.scan

    def counted(self, file):
        passes.append(file)
        return measure(self, file)

    monkeypatch.setattr(parquet.ParquetTokens, "scan", counted)
    found = []
    threads = [
        threading.Thread(target=lambda: found.append(len(open_documents(path)))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [5] * 6 and passes == [0]


def test_row_groups_that_are_slow_or_too_large_are_reported(tmp_path, monkeypatch, caplog):
    path = write_parquet(tmp_path / "a.parquet", [[n] * 10 for n in range(8)], rows=4)
    monkeypatch.setattr(parquet, "_SLOW_GROUP_BYTES", 100)
    with caplog.at_level(logging.WARNING):
        assert len(open_documents(path)) == 8
    assert not caplog.text  # all of it may be kept
    (tmp_path / DEFAULT_CACHE).rename(tmp_path / "former")
    monkeypatch.setattr(parquet, "KEPT_BYTES", 100)
    with caplog.at_level(logging.WARNING):
        assert len(open_documents(path)) == 8
    assert "are decoded to read one document at random; write the files with" in caplog.text
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 8 * 40 - 1)
    path = write_parquet(tmp_path / "b.parquet", [[n] * 10 for n in range(8)], rows=4)
    with pytest.raises(ConfigError, match=r"b.parquet: a row group decodes to up to 320 bytes"):
        len(open_documents(path))
