# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import dataclasses
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.packed_batch import DTYPES, PackedBatch
from energon_ext.batch.rows import Row
from energon_ext.errors import ConfigError, SampleError

SOURCES = ("code", "web")


def slow_row(row, seq_len, *, pad_id=0, mask_boundaries=True, masked_label=None, alignment=1):
    """Write one row position by position: an independent model of the contract."""
    places = []  # (token, slice or None, place in its slice)
    for index, tokens in enumerate(row.slices):
        gap = row.gaps[index] if row.gaps else -len(places) % alignment
        places += [(pad_id, None, 0)] * gap
        places += [(int(token), index, place) for place, token in enumerate(tokens)]
    assert len(places) <= seq_len + 1
    places += [(pad_id, None, 0)] * (seq_len + 1 - len(places))
    positions = []
    for (token, owner, place), (label, label_owner, label_place) in zip(places, places[1:]):
        weight = 0.0
        if owner is not None and label_owner is not None:
            per_label = row.label_weights[label_owner] if row.label_weights else None
            weight = 1.0 if per_label is None else float(per_label[label_place])
            if mask_boundaries and owner != label_owner:
                weight = 0.0
        if masked_label is not None and label == masked_label:
            weight = 0.0
        first = row.first_positions[owner] if row.first_positions and owner is not None else 0
        positions.append((token, label, weight, owner, first + place))
    return positions


def slow_segments(owners):
    """Return the runs of equal owners: ``[(owner, length)]``."""
    runs = []
    for owner in owners:
        if runs and runs[-1][0] == owner:
            runs[-1][1] += 1
        else:
            runs.append([owner, 1])
    return runs


def assert_equals_the_slow_model(batch, rows, seq_len, **options):
    batch.validate()
    written = [slow_row(row, seq_len, **options) for row in rows]
    flat = [position for row in written for position in row]
    assert batch.tokens.tolist() == [position[0] for position in flat]
    assert batch.labels.tolist() == [position[1] for position in flat]
    assert batch.token_weights.tolist() == [position[2] for position in flat]
    expected_lengths, expected_sources, expected_positions = [], [], []
    for row, positions in zip(rows, written):
        for owner, length in slow_segments([position[3] for position in positions]):
            expected_lengths.append(length)
            expected_sources.append(-1 if owner is None else SOURCES.index(row.source))
        runs = 0
        for index, position in enumerate(positions):  # padding counts from 0 in each run
            starts = index == 0 or positions[index - 1][3] != position[3]
            runs = 0 if starts else runs + 1
            expected_positions.append(runs if position[3] is None else position[4])
    assert batch.segment_lengths().tolist() == expected_lengths
    assert batch.source_ids.tolist() == expected_sources
    assert batch.position_ids.tolist() == expected_positions
    assert batch.max_seqlen == max(expected_lengths)


@st.composite
def rows_of(draw, seq_len, alignment=1, gaps=False):
    row_list = []
    for _ in range(draw(st.integers(1, 4))):
        lengths, place = [], 0
        with_gaps = []
        while True:
            gap = draw(st.integers(0, 3)) if gaps else -place % alignment
            most = seq_len + 1 - place - gap
            if most < 1 or (lengths and draw(st.integers(0, 4)) == 0):
                break
            lengths.append(draw(st.integers(1, most)))
            with_gaps.append(gap)
            place += gap + lengths[-1]
        if not lengths:
            lengths, with_gaps = [1], [0]
        dtype = draw(st.sampled_from([np.uint16, np.int32, np.int64]))
        tokens = [np.array([draw(st.integers(3, 50)) for _ in range(n)], dtype) for n in lengths]
        weights = None
        if draw(st.booleans()):
            weights = [draw(st.sampled_from([None, np.linspace(-1, 2, n)])) for n in lengths]
            weights = [w if w is None else w.astype(np.float32) for w in weights]
        row_list.append(
            Row(
                tokens,
                source=draw(st.sampled_from(SOURCES)),
                documents=len(lengths),
                label_weights=weights,
                first_positions=[7 * i for i in range(len(lengths))]
                if draw(st.booleans())
                else None,
                gaps=with_gaps if gaps else None,
            )
        )
    return row_list


@given(st.data(), st.booleans(), st.sampled_from([None, 7]))
def test_a_batch_matches_a_slow_position_by_position_model(data, mask_boundaries, masked):
    rows = data.draw(rows_of(9, gaps=data.draw(st.booleans())))
    assembler = BatchAssembler(9, pad_id=2, mask_boundary_loss=mask_boundaries, masked_label=masked)
    options = {"pad_id": 2, "mask_boundaries": mask_boundaries, "masked_label": masked}
    assert_equals_the_slow_model(assembler(rows, SOURCES), rows, 9, **options)


@given(st.data())
def test_aligned_segments_start_at_multiples_and_record_padded_ends(data):
    rows = data.draw(rows_of(12, alignment=4))
    batch = BatchAssembler(12, alignment=4)(rows, SOURCES)
    assert_equals_the_slow_model(batch, rows, 12, alignment=4)
    padded = batch.cu_seqlens_padded.tolist()
    assert all(end % 4 == 0 for end in padded)
    starts = batch.cu_seqlens[:-1][batch.source_ids >= 0].tolist()
    assert set(starts) <= set(padded)
    # Each slice is a segment with its padding, or the padding at the end of a row.
    for start, stop in zip(padded, padded[1:]):
        inside = [s for s in starts if start <= s < stop]
        assert inside in ([start], [])


def test_one_aligned_row_by_hand():
    row = Row([np.arange(5, 10), np.arange(20, 23)], source="web")
    batch = BatchAssembler(16, alignment=4)([row], SOURCES)
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 0, 0, 0, 20, 21, 22, 0, 0, 0, 0, 0]
    assert batch.cu_seqlens.tolist() == [0, 5, 8, 11, 16]
    assert batch.cu_seqlens_padded.tolist() == [0, 8, 12, 16]
    assert batch.token_weights.nonzero().flatten().tolist() == [0, 1, 2, 3, 8, 9]


def test_two_documents_in_one_sequence_by_hand():
    hi = np.array([1, 108, 109, 2])
    batch = BatchAssembler(8)([Row([hi, hi], source="web", documents=2)], SOURCES)
    assert batch.tokens.tolist() == [1, 108, 109, 2, 1, 108, 109, 2]
    assert (batch.token_weights == 0).nonzero().flatten().tolist() == [3, 7]
    assert batch.grid(1, 1, 8)["segment_ids"].flatten().tolist() == [1, 1, 1, 1, 2, 2, 2, 2]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3]


def test_the_token_after_the_row_is_only_a_label():
    row = Row([np.array([5, 6, 7]), np.array([8])], source="web", num_tokens=3)
    batch = BatchAssembler(3, mask_boundary_loss=False)([row], SOURCES)
    assert batch.labels.tolist() == [6, 7, 8]
    assert batch.token_weights.tolist() == [1, 1, 1]
    assert batch.cu_seqlens.tolist() == [0, 3]
    assert batch.tokens_per_source() == {"web": 3}


def test_policy_metrics_are_aligned_with_labels():
    row = Row(
        [np.array([5, 6, 7]), np.array([8, 9])],
        source="web",
        log_probs=[np.array([0, -1.5, -2.5]), np.array([0, -3.5])],
        rewards=[1.0, 0.25],
    )
    batch = BatchAssembler(6)([row], SOURCES).validate()
    assert batch.log_probs.tolist() == [-1.5, -2.5, 0.0, -3.5, 0.0, 0.0]
    assert batch.rewards.tolist() == [1.0, 0.25, 0.0]


@pytest.mark.parametrize("name", ["rewards", "log_probs"])
def test_rewards_and_log_probs_must_cover_all_rows_or_none(name):
    values = {"rewards": [1.0], "log_probs": [np.array([0, -1.5])]}[name]
    with_values, padding = (
        Row([np.array([5, 6])], "web", **{name: values}),
        Row([], slice_sources=[]),
    )
    batch = BatchAssembler(4)([padding, with_values], SOURCES)
    assert (batch.rewards is not None, batch.log_probs is not None) == (
        name == "rewards",
        name == "log_probs",
    )
    with pytest.raises(SampleError, match=f"Only some rows of a batch have {name}"):
        BatchAssembler(4)([with_values, Row([np.array([7])], "web")], SOURCES)


def test_wide_token_ids_are_not_truncated_next_to_narrow_ones():
    narrow, wide = np.array([65535, 3], np.uint16), np.array([70000, 4], np.int32)
    rows = [Row([narrow], source="web"), Row([wide], source="code")]
    assert BatchAssembler(2)(rows, SOURCES).tokens.tolist() == [65535, 3, 70000, 4]
    assert BatchAssembler(3, pad_id=70001)(rows[:1], SOURCES).tokens.tolist() == [65535, 3, 70001]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "at least one row"),
        ([Row([np.arange(8)], source="web")], "8 tokens and gaps; 6 positions take 1 to 7"),
        ([Row([np.arange(3), np.arange(0)], source="web")], "an empty slice"),
        ([Row([], source="web")], "A row has 0 tokens"),
        ([Row([np.arange(3), np.arange(0)], source="web", gaps=[1, 1])], "an empty slice"),
        ([Row([np.arange(3)], source="unknown")], "'unknown'"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, message):
    with pytest.raises(SampleError, match=message):
        BatchAssembler(6)(rows, SOURCES)


def test_a_row_length_must_be_a_multiple_of_the_alignment():
    with pytest.raises(ConfigError, match="alignment: 4 found; the sequence length 10"):
        BatchAssembler(10, alignment=4)


def test_a_replaced_field_is_pickled_with_its_new_value():
    batch = BatchAssembler(8)([Row([np.arange(1, 6)], source="web")], SOURCES)
    batch.labels = torch.full((8,), 9)
    assert isinstance(clone := pickle.loads(pickle.dumps(batch)), PackedBatch)
    assert clone.labels.tolist() == [9] * 8
    assert clone.tokens.tolist() == batch.tokens.tolist()


def test_every_tensor_field_is_pickled():
    fields = {field.name for field in dataclasses.fields(PackedBatch)}
    assert fields - set(DTYPES) == {
        *("sources", "max_seqlen", "columns", "segments", "context_size", "row_tokens")
    }


def test_columns_are_aligned_with_the_labels():
    def row(*lengths, **columns):
        slices = [np.arange(n) for n in lengths]
        return Row(slices, slice_sources=["web"] * len(slices), columns=columns)

    values = [np.array([0, 1.5, 2.5]), np.array([0, 3.5])]
    empty = Row([], slice_sources=[])
    rows = [row(3, 2, values=values), empty]
    batch = BatchAssembler(6)(rows, sources=["web"]).validate()
    assert batch.columns["values"].tolist() == [1.5, 2.5, 0, 3.5, 0, 0, 0, 0, 0, 0, 0, 0]
    assert pickle.loads(pickle.dumps(batch)).columns["values"].equal(batch.columns["values"])
    aligned = BatchAssembler(8, alignment=4)(rows[:1], sources=["web"]).validate()
    assert aligned.columns["values"].tolist() == [1.5, 2.5, 0, 0, 3.5, 0, 0, 0]
    with pytest.raises(SampleError, match="Only some rows of a batch have values"):
        BatchAssembler(6)([rows[0], row(2)], sources=["web"])
    batch.columns["values"] = batch.columns["values"][:-1]
    with pytest.raises(SampleError, match=r"columns\['values'\] must have the shape \[12, ...\]"):
        batch.validate()
