# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pairs by number equal the pairs listed by plain loops."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from energon_ext.errors import ConfigError
from energon_ext.splice import MultiSpliceConfig, SpliceConfig
from energon_ext.splice.config import CHOICES
from energon_ext.splice.pairs import PairTable
from tests.splice import slow


def listed(doc_len, seq_len, content_length=None, **fields):
    """Return every (t, s) of one document."""
    config = SpliceConfig(content_length=content_length, **fields)
    table = PairTable(np.array([doc_len]), seq_len, config)
    numbers = np.arange(int(table.totals[0]))
    pairs = table.locate(np.zeros_like(numbers), numbers)
    return list(zip(pairs.starts.tolist(), pairs.offsets.tolist()))


def test_the_thirteen_pairs_of_the_worked_example():
    pairs = listed(5, 5, content_length=3)
    assert pairs == [
        *[(t, s) for t in (0, 1, 2) for s in (0, 1, 2)],
        *[(3, 0), (3, 1), (3, 2), (3, 3)],
    ]
    assert (pairs[4], pairs[9], pairs[12]) == ((1, 1), (3, 0), (3, 3))


def test_the_frame_end_cuts_contents_if_allowed():
    """L = S = 5, K as many as fit: the frames 01234, -0123, --012 and ---01 of t = 0, and so on."""
    assert listed(5, 5) == [(t, s) for t in range(4) for s in range(t + 1)]
    cut = {"cut_at_frame_end": True}
    assert listed(5, 5, **cut) == [(t, s) for t in range(4) for s in range(4)]
    table = PairTable(np.array([5, 50]), 5, SpliceConfig(**cut))
    # 5 + 4 + 3 + 2, 4 + 4 + 3 + 2, 3 + 3 + 3 + 2, 2 + 2 + 2 + 2 tokens.
    assert table.tokens.tolist() == [14 + 13 + 11 + 8, 46 * 14 + 13 + 11 + 8]
    # A long document has one offset for every start without it, and S - 1 with it.
    assert PairTable(np.array([50]), 5, SpliceConfig()).totals[0] == 46 + 2 + 3 + 4
    assert table.totals[1] == 49 * 4
    assert listed(5, 5, 4, **cut, content_stride=2, offset_stride=2, min_copy_len=3) == [
        *[(t, s) for t in (0, 2) for s in (0, 2)]
    ]


def test_strides_of_two():
    pairs = listed(6, 6, content_length=4, content_stride=2, offset_stride=2)
    assert pairs == [(0, 0), (0, 2), (2, 0), (2, 2), (4, 0), (4, 2), (4, 4)]


def test_a_stride_just_below_the_content_leaves_a_short_tail():
    """L = 16, K = S = 7: whole contents at 0 and 6, and the last four tokens at 12."""
    pairs = listed(16, 7, content_stride=6)
    assert pairs == [(0, 0), (6, 0), (12, 0), (12, 1), (12, 2), (12, 3)]


def test_without_a_content_length_all_that_fits_is_copied():
    assert len(listed(3, 5)) == 7


def test_the_left_anchored_suffix_is_among_the_pairs():
    assert [pair for pair in listed(5, 5, content_length=2) if pair[0] == 1] == [
        *[(1, 0), (1, 1), (1, 2), (1, 3)]
    ]


def test_anchor_start_moves_the_whole_document_across_the_frame():
    assert listed(3, 6, content_start_mode="anchor_start") == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_cyclic_roll_has_a_full_content_at_every_start():
    pairs = listed(3, 4, content_start_mode="cyclic_roll")
    assert pairs == [(t, s) for t in (0, 1, 2) for s in (0, 1)]


def test_coverage_balanced_contents_touch_the_frame_end():
    assert listed(7, 8, 4, content_start_mode="coverage_balanced") == [(t, 4) for t in range(4)]
    short = {"content_start_mode": "coverage_balanced"}
    assert listed(3, 8, 4, **short) == [(0, 5)]
    assert listed(3, 8, 4, adaptive_k=False, **short) == []


def test_slide_cuts_whole_windows_out_of_long_documents():
    assert listed(10, 4, content_stride=3, mode="slide") == [(0, 0), (3, 0), (6, 0)]
    assert listed(4, 4, mode="slide") == [(0, 0)]
    assert listed(3, 4, mode="slide") == []


@settings(max_examples=4 * settings().max_examples)
@given(
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=4),
    seq_len=st.integers(4, 14),
    content_length=st.none() | st.integers(2, 20),
    content_stride=st.integers(1, 7) | st.just(10**9),
    offset_stride=st.integers(1, 5),
    mode=st.sampled_from([*CHOICES["content_start_mode"], "slide"]),
    min_copy_len=st.integers(2, 4),
    adaptive_k=st.booleans(),
    cut=st.booleans(),
)
def test_pairs_equal_those_of_plain_loops(
    lengths,
    seq_len,
    content_length,
    content_stride,
    offset_stride,
    mode,
    min_copy_len,
    adaptive_k,
    cut,
):
    assume(content_length is None or content_length >= min_copy_len)
    slide = mode == "slide"
    assume(content_length is None or not slide)
    assume(not cut or mode not in ("slide", "coverage_balanced"))
    start_mode = "slide_within" if slide else mode
    config = SpliceConfig(
        content_length=content_length,
        content_stride=content_stride,
        offset_stride=offset_stride,
        content_start_mode=start_mode,
        min_copy_len=min_copy_len,
        adaptive_k=adaptive_k,
        cut_at_frame_end=cut,
        mode="slide" if slide else "splice",
    )
    table = PairTable(np.array(lengths), seq_len, config)
    for document, length in enumerate(lengths):
        expected = slow.pairs(
            *(length, seq_len, content_length, content_stride, offset_stride, start_mode),
            *(min_copy_len, adaptive_k, slide, cut),
        )
        assert table.totals[document] == len(expected)
        numbers = np.arange(len(expected))
        places = table.locate(np.full_like(numbers, document), numbers)
        assert list(zip(places.starts.tolist(), places.offsets.tolist())) == expected
        copied = places.copy_lens
        if cut:
            whole = min(content_length or seq_len, seq_len)
            left = length if mode == "cyclic_roll" else np.array([length - t for t, _ in expected])
            room = [seq_len - s for _, s in expected]
            assert copied.tolist() == np.minimum(np.minimum(whole, left), room).tolist()
        assert table.tokens[document] == copied.sum()
        assert (copied >= min_copy_len).all() and (places.offsets + copied <= seq_len).all()
        if mode != "cyclic_roll":
            assert (places.starts + copied <= length).all()
        # Every start in turn, with its number of offsets.
        counts = np.unique(places.starts, return_counts=True)[1]
        assert table.row_counts(document).tolist() == counts.tolist()


def test_a_billion_pairs_are_indexed_by_number():
    table = PairTable(np.array([10**6]), 1100, SpliceConfig(content_length=100))
    # 999 901 starts with 1001 offsets; then 99, 98, .. 2 tokens are left, with 1002 .. 1099.
    assert table.totals[0] == 999_901 * 1001 + sum(range(1002, 1100))
    numbers = np.array([0, 1001, 999_901 * 1001 - 1, 999_901 * 1001, int(table.totals[0]) - 1])
    places = table.locate(np.zeros_like(numbers), numbers)
    assert places.starts.tolist() == [0, 1, 999_900, 999_901, 999_998]
    assert places.offsets.tolist() == [0, 0, 1000, 0, 1098]
    assert places.copy_lens.tolist() == [100, 100, 100, 99, 2]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"content_length": 1}, "content_length: 1 found, an integer >= 2"),
        ({"content_length": True}, "content_length: True found"),
        ({"content_length": 3, "min_copy_len": 4}, "below min_copy_len: 4"),
        ({"content_stride": 0}, "content_stride: 0 found, an integer >= 1"),
        ({"offset_stride": None}, "offset_stride: None found"),
        ({"min_copy_len": 1}, "min_copy_len: 1 found, an integer >= 2"),
        ({"content_start_mode": "anchor"}, "'anchor' found, one of anchor_start, slide_within"),
        ({"mode": "both"}, "one of splice, slide is needed"),
        ({"doc_select_mode": "best"}, "one of longest, shortest, first, random"),
        ({"min_doc_length": 9, "max_doc_length": 8}, "above max_doc_length: 8"),
        ({"doc_index": -1}, "doc_index: -1 found, an integer >= 0"),
        ({"alpha": 0.5}, "it belongs to content_start_mode: coverage_balanced"),
        ({"offset_jitter": 2}, "it belongs to content_start_mode: coverage_balanced"),
        ({"offset_jitter": -1}, "offset_jitter: -1 found"),
        ({"alpha": float("nan")}, "alpha: nan found, a finite number >= 0"),
        ({"restrict_to_training_subset": True}, "also set initial_batch_size and max_train"),
        (
            {"restrict_to_training_subset": True, "max_train_batches": 2},
            "also set initial_batch_size and max_train",
        ),
        ({"shuffle_offsets": -2}, "shuffle_offsets: -2 found"),
        ({"attend_prefix": True, "pack_contents": True}, "contents have no prefix; remove it"),
        ({"eos_token_id": 2}, "eos_token_id: 2 found with attend_prefix: false"),
        ({"eos_token_id": 0}, "eos_token_id: 0 found with attend_prefix: false"),
        ({"attend_prefix": "false"}, "attend_prefix: 'false' found, true or false is needed"),
        ({"adaptive_k": 1}, "adaptive_k: 1 found, true or false"),
        ({"dataset_name": 5}, "dataset_name: 5 found, text is needed"),
        ({"doc_key": 5}, "doc_key: 5 found, text is needed"),
        ({"shuffle_content": "yes"}, "shuffle_content: 'yes' found, an integer >= 0"),
        ({"shuffle_offsets": 1.5}, "shuffle_offsets: 1.5 found"),
        ({"mode": "slide", "content_length": 5}, "content_length: 5 found with mode: slide"),
        ({"mode": "slide", "pack_contents": True}, "pack_contents: True found with mode: slide"),
        ({"mode": "slide", "cut_at_frame_end": True}, "cut_at_frame_end: True found with mode"),
        (
            {"content_start_mode": "coverage_balanced", "cut_at_frame_end": True},
            "contents end with the frame",
        ),
    ],
)
def test_an_out_of_range_field_is_refused_by_name(fields, message):
    with pytest.raises(ConfigError, match=message):
        SpliceConfig(**fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_docs": 0}, "num_docs: 0 found, an integer >= 1"),
        ({"balance_mode": "even"}, "one of by_coverage, by_document, by_temperature, every_"),
        ({"balance_mode": "every_pair", "epoch_length": 9}, "epoch_length: 9 found with balance_m"),
        ({"balance_mode": "every_pair", "alpha": 1.0}, "alpha: 1.0 found with balance_mode: every"),
        ({"balance_mode": "every_pair", "doc_weights": [1.0]}, "which shows each pair once"),
        ({"balance_tau": 1.5}, "balance_tau: 1.5 found, a number >= 0 and <= 1"),
        ({"epoch_length": 0}, "epoch_length: 0 found"),
        ({"doc_weights": [1.0, -1.0]}, r"doc_weights\[1\]: -1.0 found"),
        ({"doc_weights": [0.0, 0.0]}, "at least one > 0"),
        ({"doc_weights": 5}, "doc_weights: 5 found, a list of numbers"),
        ({"shuffle_per_epoch": 2}, "shuffle_per_epoch: 2 found, true or false"),
        ({"jitter_mode": "sobol"}, "one of uniform, low_discrepancy"),
        ({"seed": "a"}, "seed: 'a' found"),
    ],
)
def test_an_out_of_range_multi_document_field_is_refused_by_name(fields, message):
    with pytest.raises(ConfigError, match=message):
        MultiSpliceConfig(**fields)


def test_a_frame_too_short_or_an_empty_document_is_refused():
    with pytest.raises(
        ConfigError, match="seq_len: 1 found with offset_jitter: 0; a content needs 2"
    ):
        listed(5, 1)
    with pytest.raises(ConfigError, match="every document needs at least one token"):
        listed(0, 5)
