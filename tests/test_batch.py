# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import pickle

import numpy as np
import pytest
import torch

from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.packed_batch import DTYPES
from energon_ext.batch.rows import Row
from energon_ext.errors import SampleError

LENGTH = 6
SOURCES = ("code", "web")


def row(source="web", segments=(3, 2), start=10, documents=1):
    tokens = np.arange(start, start + sum(segments))
    slices = np.split(tokens, np.cumsum(segments)[:-1])
    return Row(slices, source=source, documents=documents)


@pytest.fixture
def batch():
    rows = [row(), row("code", segments=(6,), start=20, documents=0), row("code", start=30)]
    return BatchAssembler(LENGTH)(rows, SOURCES)


def test_rows_become_flat_tensors_with_named_segments(batch):
    assert batch.validate() is batch
    assert batch.tokens.tolist() == [*range(10, 15), 0, *range(20, 26), *range(30, 35), 0]
    assert batch.labels.tolist() == [*range(11, 15), 0, 0, *range(21, 26), 0, *range(31, 35), 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 6, 12, 15, 17, 18]
    assert batch.max_seqlen == 6
    assert batch.source_ids.tolist() == [1, 1, -1, 0, 0, 0, -1]
    assert batch.tokens_per_source() == {"code": 11, "web": 5}
    assert batch.documents_per_source() == {"code": 1, "web": 1}
    dtypes = {"tokens": torch.int64, "cu_seqlens": torch.int32, "token_weights": torch.float32}
    assert {name: getattr(batch, name).dtype for name in dtypes} == dtypes


def test_the_grid_is_a_view_and_numbers_segments_per_row(batch):
    grid = batch.grid(1, 3, 6)
    assert grid["segment_ids"].tolist() == [
        [[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 0]]
    ]
    assert grid["attention_mask"].tolist()[0][0] == [True] * 5 + [False]
    assert grid["input_ids"].data_ptr() == batch.tokens.data_ptr()
    assert grid["labels"].data_ptr() == batch.labels.data_ptr()
    assert batch.grid(3, 1, 6, dtype=torch.int32)["input_ids"].dtype == torch.int32
    with pytest.raises(SampleError, match="16 positions"):
        batch.grid(2, 2, 4)


def test_megatron_gets_one_packed_sequence(batch):
    megatron = batch.to_megatron()
    assert {name: tuple(value.shape) for name, value in megatron.items()} == {
        "tokens": (1, 18),
        "labels": (1, 18),
        "loss_mask": (1, 18),
        "position_ids": (1, 18),
        "padding_mask": (1, 18),
        "cu_seqlens": (1, 8),
        "max_seqlen": (1,),
    }
    assert megatron["padding_mask"][0].nonzero().flatten().tolist() == [5, 17]
    assert megatron["cu_seqlens"].dtype == megatron["max_seqlen"].dtype == torch.int32
    assert megatron["tokens"].data_ptr() == batch.tokens.data_ptr()


def test_a_batch_survives_pickling_and_a_device_move(batch):
    for copy in (pickle.loads(pickle.dumps(batch)), batch.to("cpu")):
        for name in (name for name in DTYPES if getattr(batch, name, None) is not None):
            assert torch.equal(getattr(copy, name), getattr(batch, name)), name
        assert (copy.sources, copy.max_seqlen) == (batch.sources, batch.max_seqlen)
        copy.validate()
    assert batch.to("meta").labels.device.type == "meta"


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("tokens", torch.zeros(18, dtype=torch.int32), "tokens must be torch.int64"),
        ("labels", torch.zeros(17, dtype=torch.int64), r"labels must be torch.int64 \[18\]"),
        (
            "cu_seqlens",
            torch.tensor([1, 3, 5, 6, 12, 15, 17, 18], dtype=torch.int32),
            "starts at 0",
        ),
        ("cu_seqlens", torch.tensor([0, 3, 5, 6, 12, 15, 17, 19], dtype=torch.int32), "ends at N"),
        (
            "cu_seqlens",
            torch.tensor([0, 5, 3, 6, 12, 15, 17, 18], dtype=torch.int32),
            "one position",
        ),
        ("max_seqlen", 7, "longest"),
        ("source_ids", torch.tensor([1, 1, -1, 0, 0, 2, -1], dtype=torch.int32), "into sources"),
        ("source_ids", torch.tensor([1, 1, -2, 0, 0, 0, -1], dtype=torch.int32), "-1 or an index"),
        ("token_weights", torch.ones(18), "0 on padding"),
        ("cu_seqlens_padded", torch.tensor([0, 6, 12, 18], dtype=torch.int32), "every document"),
        ("cu_seqlens_padded", torch.tensor([0, 3, 6, 12, 15], dtype=torch.int32), "0 to N"),
        ("token_weights", torch.full((18,), float("nan")), "finite"),
    ],
)
def test_validate_names_the_broken_rule(batch, field, value, rule):
    setattr(batch, field, value)
    with pytest.raises(SampleError, match=rule):
        batch.validate()
