# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One suite that every packer passes, and what each packer promises beyond it."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_ext.errors import ConfigError, SampleError, StateFormatError
from energon_ext.packing import (
    BinPacker,
    SequentialPacker,
    best_fit_decreasing,
    cut_into_pieces,
    fill_bins,
    first_fit_decreasing,
)

PACKERS = {
    "sequential": lambda row_length: SequentialPacker(row_length),
    "bin": lambda row_length: BinPacker(row_length, buffer_docs=5),
    "bin, at most 2 a row": lambda row_length: BinPacker(row_length, 4, max_docs_per_bin=2),
    "bin, one document": lambda row_length: BinPacker(row_length, buffer_docs=1),
    "bin, most are carried": lambda row_length: BinPacker(row_length, buffer_docs=8, carry=0.9),
}
every_packer = pytest.mark.parametrize("make", PACKERS.values(), ids=PACKERS)
lengths_lists = st.lists(st.integers(0, 30), max_size=25)


def pack_all(packer, lengths, start=0):
    """All rows of documents ``0..n-1``; ``start`` is the first one to add."""
    plans = []
    for document, length in enumerate(lengths[start:], start):
        while (plan := packer.pop()) is not None:
            plans.append(plan)
        packer.add(document, length)
    while (plan := packer.pop()) is not None:
        plans.append(plan)
    return plans + list(packer.flush())


def transitions(plans):
    """How often each transition (document, position of the input) lies in a row."""
    return Counter(
        (piece.document, position)
        for plan in plans
        for piece in plan.pieces
        for position in range(piece.start, piece.stop - 1)
    )


@every_packer
@given(lengths=lengths_lists, row_length=st.integers(2, 12))
def test_every_transition_of_every_document_comes_exactly_once(make, lengths, row_length):
    plans = pack_all(make(row_length), lengths)
    expected = {(doc, pos) for doc, length in enumerate(lengths) for pos in range(length - 1)}
    counts = transitions(plans)
    assert set(counts) == expected
    assert set(counts.values()) <= {1}


@every_packer
@given(lengths=lengths_lists, row_length=st.integers(2, 12))
def test_no_row_overflows_and_every_document_ends_once(make, lengths, row_length):
    plans = pack_all(make(row_length), lengths)
    for plan in plans:
        sizes = [piece.stop - piece.start for piece in plan.pieces]
        assert 1 <= sum(sizes) <= row_length + 1
        assert min(sizes) >= 1
    assert sum(plan.documents for plan in plans) == sum(length > 0 for length in lengths)


@every_packer
@settings(max_examples=30)
@given(lengths=lengths_lists, row_length=st.integers(2, 12))
def test_a_state_continues_at_every_step_through_json(make, lengths, row_length):
    expected = pack_all(make(row_length), lengths)
    packer, done, position = make(row_length), 0, 0
    while True:
        resumed = make(row_length)
        state = json.loads(json.dumps(packer.save_state()))
        resumed.restore_state(state, packer.held_documents())
        assert pack_all(resumed, lengths, position) == expected[done:]
        if packer.pop() is not None:
            done += 1
        elif position < len(lengths):
            packer.add(position, lengths[position])
            position += 1
        else:
            break


@every_packer
def test_a_state_of_another_packer_is_refused(make):
    state = {**make(8).save_state(), "kind": "OtherPacker"}
    with pytest.raises(StateFormatError, match="OtherPacker"):
        make(8).restore_state(state, [])


@every_packer
@pytest.mark.parametrize("row_length", [1, 0, -3, True, 2.5])
def test_a_row_without_a_transition_is_refused(make, row_length):
    with pytest.raises(ConfigError, match="row_length"):
        make(row_length)


def test_a_stream_of_three_documents_is_cut_into_windows_by_hand():
    plans = pack_all(SequentialPacker(4), [5, 4, 6])
    windows = [[(p.document, p.start, p.stop) for p in plan.pieces] for plan in plans]
    assert windows == [
        [(0, 0, 5)],
        [(0, 4, 5), (1, 0, 4)],
        [(1, 3, 4), (2, 0, 4)],
        [(2, 3, 6)],
    ]
    assert [plan.documents for plan in plans] == [1, 1, 0, 1]


@given(lengths=lengths_lists, row_length=st.integers(2, 12))
def test_the_windows_of_a_stream_also_cover_the_transitions_between_documents(lengths, row_length):
    """Against the slow model: concatenate, then slice."""
    stream = [(doc, pos) for doc, length in enumerate(lengths) for pos in range(length)]
    windows = [
        stream[start : start + row_length + 1] for start in range(0, len(stream) - 1, row_length)
    ]
    if len(stream) == 1:
        windows = [stream]
    plans = pack_all(SequentialPacker(row_length), lengths)
    assert windows == [
        [(p.document, position) for p in plan.pieces for position in range(p.start, p.stop)]
        for plan in plans
    ]


def test_a_long_document_is_cut_into_pieces_that_share_a_token():
    assert list(cut_into_pieces(10, 4)) == [(0, 4), (3, 7), (6, 10)]
    assert list(cut_into_pieces(4, 4)) == [(0, 4)]
    assert list(cut_into_pieces(5, 4)) == [(0, 4), (3, 5)]
    plans = pack_all(BinPacker(3, buffer_docs=1), [10])
    rows = sorted((plan.pieces[0].start, plan.pieces[0].stop, plan.documents) for plan in plans)
    assert rows == [(0, 4, 0), (3, 7, 0), (6, 10, 1)]


def test_rows_of_one_long_document_are_not_handed_out_in_a_run():
    plans = pack_all(BinPacker(7, buffer_docs=40), [400] + [5] * 39)
    from_long = [plan.pieces[0].document == 0 for plan in plans]
    runs = sum(before != after for before, after in zip(from_long, from_long[1:]))
    assert runs > 10


@pytest.mark.parametrize("pack", [best_fit_decreasing, first_fit_decreasing])
@given(lengths=st.lists(st.integers(1, 20), max_size=60), capacity=st.integers(20, 40))
def test_bins_hold_every_item_once_and_never_overflow(pack, lengths, capacity):
    bins = pack(lengths, capacity)
    assert sorted(item for items in bins for item in items) == list(range(len(lengths)))
    assert all(sum(lengths[item] for item in items) <= capacity for items in bins)


def slow_decreasing(lengths, capacity, prefer):
    """The definition, in O(items x bins): longest first, into the bin ranked first."""
    bins, spaces = [], []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [b for b, space in enumerate(spaces) if space >= lengths[item]]
        if fitting:
            chosen = min(fitting, key=lambda b: prefer(spaces[b], b))
        else:
            chosen = len(bins)
            bins.append([])
            spaces.append(capacity)
        bins[chosen].append(item)
        spaces[chosen] -= lengths[item]
    return bins


@given(lengths=st.lists(st.integers(1, 20), max_size=60), capacity=st.integers(20, 40))
def test_fast_packing_is_the_slow_definition(lengths, capacity):
    best = slow_decreasing(lengths, capacity, prefer=lambda space, index: (space, index))
    first = slow_decreasing(lengths, capacity, prefer=lambda space, index: index)
    assert best_fit_decreasing(lengths, capacity) == best
    assert first_fit_decreasing(lengths, capacity) == first


def test_best_fit_of_known_items():
    assert best_fit_decreasing([6, 2, 6, 2], 8) == [[0, 1], [2, 3]]
    assert best_fit_decreasing([1, 1, 1, 1], 8) == [[0, 1, 2, 3]]
    assert best_fit_decreasing([], 8) == []
    assert best_fit_decreasing([1] * 4, 8, max_items_per_bin=3) == [[0, 1, 2], [3]]
    # The 2 fits both bins: the first one holds 12 of 20, the fullest one 18.
    assert first_fit_decreasing([12, 9, 9, 2], 20) == [[0, 3], [1, 2]]
    assert best_fit_decreasing([12, 9, 9, 2], 20) == [[0], [1, 2, 3]]


@pytest.mark.parametrize("lengths", [[9], [0], [3, -1]])
def test_an_item_that_fits_no_bin_is_an_error_that_names_it(lengths):
    with pytest.raises(SampleError, match=f"Item {len(lengths) - 1}"):
        best_fit_decreasing(lengths, 8)
    with pytest.raises(ConfigError, match="capacity"):
        best_fit_decreasing([1], 0)


def test_random_lengths_fill_bins_well():
    lengths = np.random.default_rng(0).integers(1, 200, 4000).tolist()
    bins = best_fit_decreasing(lengths, 512)
    assert sum(lengths) / (512 * len(bins)) > 0.995


@given(
    lengths=st.lists(st.integers(1, 20), max_size=80),
    capacity=st.integers(20, 40),
    keep=st.integers(0, 40),
    most=st.one_of(st.none(), st.integers(1, 5)),
)
def test_filled_bins_hold_items_once_and_leave_as_many_as_they_were_told(
    lengths, capacity, keep, most
):
    items, ends = fill_bins(np.array(lengths, int), capacity, keep=keep, max_items_per_bin=most)
    bins = [part.tolist() for part in np.split(items, ends[:-1])] if ends else []
    assert len(set(items.tolist())) == len(items)
    assert all(sum(lengths[item] for item in part) <= capacity for part in bins)
    assert all(len(part) <= (most or 1000) for part in bins)
    left = set(range(len(lengths))) - set(items.tolist())
    assert len(left) <= max(keep, 0)
    # No bin was filled that was not needed for that.
    assert not bins or len(left) + len(bins[-1]) > keep


@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=80), capacity=st.integers(20, 40))
def test_every_filled_bin_begins_with_the_oldest_item_that_is_left(lengths, capacity):
    items, ends = fill_bins(np.array(lengths), capacity)
    left = list(range(len(lengths)))
    for part in np.split(items, ends[:-1]):
        assert part[0] == left[0]
        left = [item for item in left if item not in part]


def test_a_bin_ends_with_the_pair_that_fills_it_exactly():
    # After 10, the longest that fits leaves 1 empty; 5 and 4 leave nothing.
    items, ends = fill_bins(np.array([10, 5, 8, 4]), 19, keep=1)
    assert items.tolist() == [0, 1, 3]
    assert ends == [3]
    # Two of one length are a pair, one of them is not.
    assert fill_bins(np.array([10, 4, 7, 4]), 18, keep=1)[0].tolist() == [0, 1, 3]
    assert fill_bins(np.array([10, 4, 7]), 18, keep=1)[0].tolist() == [0, 2]


def test_a_buffer_that_keeps_a_choice_fills_bins_to_the_last_token():
    random = np.random.default_rng(0)
    packer = BinPacker(4096, buffer_docs=512)
    held = rows = 0
    for document, length in enumerate(np.clip(random.lognormal(6, 1.2, 8000), 2, 4097).astype(int)):
        packer.add(document, int(length))
        while (plan := packer.pop()) is not None:
            rows += 1
            held += sum(piece.stop - piece.start for piece in plan.pieces)
    assert held / (4097 * rows) > 0.9995


def test_a_buffer_counts_documents_however_many_rows_each_fills():
    """Ten rows each: the first rows are of many documents, not of one after the other."""
    packer = BinPacker(16, buffer_docs=8)
    for document in range(8):
        assert packer.pop() is None
        packer.add(document, 161)
    first = [packer.pop().pieces[0].document for _ in range(20)]
    assert len(set(first)) >= 5
    changes = sum(a != b for a, b in zip(first, first[1:]))
    assert changes >= 12


def test_no_document_waits_for_more_rows_than_twice_the_buffer():
    random = np.random.default_rng(1)
    packer, rows, added, longest_wait = BinPacker(64, buffer_docs=32, carry=0.8), 0, {}, 0
    for document in range(3000):
        packer.add(document, int(random.integers(1, 66)))
        added[document] = rows
        while (plan := packer.pop()) is not None:
            rows += 1
            waits = [rows - added.pop(piece.document) for piece in plan.pieces]
            longest_wait = max(longest_wait, *waits)
    assert 16 < longest_wait <= 64


def test_aligned_documents_take_whole_units_of_a_row():
    packer = BinPacker(16, buffer_docs=3, carry=0, alignment=8)
    for document, length in enumerate([3, 9, 17]):  # 1 unit, 2 units, 2 units and a label
        packer.add(document, length)
    rows = sorted([p.document for p in plan.pieces] for plan in packer.flush())
    assert rows == [[0], [1], [2]]


@pytest.mark.parametrize("carry", [1, -0.1, 2.0])
def test_a_carry_that_would_leave_everything_is_refused(carry):
    with pytest.raises(ConfigError, match="packing_carry"):
        BinPacker(8, 4, carry=carry)
