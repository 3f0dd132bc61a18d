# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Best-fit packing puts whole documents into full rows."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_ext.errors import ConfigError
from energon_ext.packing import BestFitPacker, Pieces, best_fit
from tests.packing import slow
from tests.packing.buffers import documents, pack_all, pieces_of, plans_of, rows_of

lengths_lists = st.lists(st.integers(0, 30), min_size=1, max_size=25)


def web_lengths(count, seq_len, seed=0):
    """Return log-normal lengths, like those of web documents."""
    lengths = np.random.default_rng(seed).lognormal(6, 1.2, count)
    return np.clip(lengths, 2, 4 * seq_len).astype(int).tolist()


@given(
    lengths=lengths_lists,
    seq_len=st.integers(2, 12),
    buffer_docs=st.integers(1, 9),
    carry=st.sampled_from([0, 0.3, 0.9]),
    most=st.none() | st.integers(1, 3),
    epochs=st.integers(1, 4),
)
def test_rows_equal_the_slow_definition(lengths, seq_len, buffer_docs, carry, most, epochs):
    packer = BestFitPacker(seq_len, carry=carry, max_docs_per_bin=most)
    plans = plans_of(packer, lengths, buffer_docs, epochs)
    assert [sorted(rows_of(plan)) for plan in plans] == list(
        slow.best_fit(lengths, seq_len, buffer_docs, carry, most, epochs=epochs)
    )


def test_row_order_depends_on_earlier_rows_and_never_changes():
    def order(rows_before):
        plan = BestFitPacker(2).plan(
            Pieces.none(), documents(0, [3] * 8), rows_before=rows_before, last=True
        )
        return [spans[0][0] for spans, _ in rows_of(plan)]

    assert order(0) == [0, 2, 1, 5, 4, 3, 6, 7]
    assert order(8) == [4, 3, 1, 6, 7, 2, 5, 0]
    assert order(10**12) == [5, 3, 2, 1, 4, 0, 6, 7]


def test_a_long_document_is_cut_into_pieces_that_share_a_token():
    ten, four, five = (documents(0, [length]).cut(4).ranges() for length in (10, 4, 5))
    assert ten == [(0, 0, 4), (0, 3, 7), (0, 6, 10)] == slow.cut(0, 10, 4)
    assert four == [(0, 0, 4)]
    assert five == [(0, 0, 4), (0, 3, 5)]
    rows = pack_all(BestFitPacker(3), [10])
    assert sorted(rows) == [([(0, 0, 4)], 0), ([(0, 3, 7)], 0), ([(0, 6, 10)], 1)]


def test_a_part_of_a_document_is_cut_from_its_start():
    part = pieces_of([(0, 13, 22)], [30])
    assert part.cut(9).ranges() == [(0, 13, 22)]
    assert part.cut(4).ranges() == [(0, 13, 17), (0, 16, 20), (0, 19, 22)]


@given(lengths=lengths_lists, longest=st.integers(2, 12))
def test_cutting_many_documents_equals_cutting_each(lengths, longest):
    expected = [span for n, length in enumerate(lengths) for span in slow.cut(n, length, longest)]
    pieces = documents(0, lengths).cut(longest)
    assert pieces.ranges() == expected


def test_rows_of_one_long_document_are_spread_out():
    rows = pack_all(BestFitPacker(7), [400] + [5] * 39, buffer_docs=40)
    from_long = [spans[0][0] == 0 for spans, _ in rows]
    runs = sum(before != after for before, after in zip(from_long, from_long[1:]))
    assert runs > 10


def test_a_buffer_counts_documents_and_not_rows():
    """Documents of ten rows each: the first rows come from many documents."""
    rows = pack_all(BestFitPacker(16), [161] * 16, buffer_docs=8)
    first = [spans[0][0] for spans, _ in rows[:20]]
    assert len(set(first)) >= 5
    assert sum(a != b for a, b in zip(first, first[1:])) >= 12


def test_the_next_plan_contains_the_oldest_sixteenth_of_carried_pieces():
    for seq_len, carry in ((64, 0.3), (64, 0.9), (256, 0.6)):
        lengths = np.random.default_rng(1).integers(1, 66, 6000).tolist()
        due, dues = set(), []
        for plan in plans_of(BestFitPacker(seq_len, carry=carry), lengths, buffer_docs=256):
            assert due <= set(plan.pieces.ranges())
            due = set(plan.carried.ranges()[: math.ceil(len(plan.carried) / 16)])
            dues.append(len(due))
        assert max(dues) >= 3


def test_no_piece_is_carried_over_more_than_53_times():
    """The worst case is the last of 256 pieces if each plan packs only what is due."""
    older, times = 255, 1
    while older >= math.ceil((older + 1) / 16):
        older -= math.ceil((older + 1) / 16)
        times += 1
    assert times == 53
    # New documents never fit better than the carried ones.
    waits = Counter()
    lengths = ([40] * 30 + [33] * 30) * 40
    for plan in plans_of(BestFitPacker(64, carry=0.9), lengths, buffer_docs=60):
        waits.update(plan.carried.ranges())
    assert 3 < max(waits.values()) <= 53


CORPORA = {"web 8k": (8192, 6.2, 1.15), "web 2k": (2048, 6.2, 1.15), "books": (8192, 11.0, 1.0)}


@pytest.mark.parametrize("buffer_docs", [512, 1024, 4096])
@pytest.mark.parametrize(("seq_len", "mean", "spread"), CORPORA.values(), ids=CORPORA)
def test_rows_of_web_pages_and_books_are_full(seq_len, mean, spread, buffer_docs):
    count = 2 if mean > 10 else 5  # buffers, the last of which is not checked
    lengths = np.random.default_rng(0).lognormal(mean, spread, count * buffer_docs).astype(int) + 1
    plans = list(plans_of(BestFitPacker(seq_len), lengths.tolist(), buffer_docs))[:-1]
    sizes = sum(int((plan.pieces.stops - plan.pieces.starts).sum()) for plan in plans)
    rows = sum(map(len, plans))
    assert rows > 100
    assert sizes / (rows * (seq_len + 1)) >= 0.9995


def test_the_end_of_a_source_costs_little():
    seq_len = 4096
    rows = pack_all(BestFitPacker(seq_len), web_lengths(4096, seq_len), 512)
    sizes = [sum(stop - start for _, start, stop in spans) for spans, _ in rows]
    assert sum(sizes) / (len(sizes) * (seq_len + 1)) >= 0.997


def test_at_most_256_pieces_are_carried_over_with_any_buffer():
    lengths = web_lengths(20_000, 512)
    carried = [len(plan.carried) for plan in plans_of(BestFitPacker(512), lengths, 4096)]
    assert best_fit.MAX_CARRIED == 256
    assert 240 < max(carried) <= 256  # bins are carried over whole
    small = [len(plan.carried) for plan in plans_of(BestFitPacker(512), lengths[:2000], 100)]
    assert 10 < max(small) <= 256


def test_aligned_documents_take_whole_units_of_a_row():
    packer = BestFitPacker(16, carry=0, alignment=8)
    # These take 1 unit, 2 units, and 2 units and a label.
    plan = packer.plan(Pieces.none(), documents(0, [3, 9, 17]), last=True)
    assert sorted([span[0] for span in spans] for spans, _ in rows_of(plan)) == [[0], [1], [2]]
    plan = packer.plan(Pieces.none(), documents(0, [3, 9, 8]), last=True)
    assert sorted([span[0] for span in spans] for spans, _ in rows_of(plan)) == [[0, 2], [1]]


@given(lengths=lengths_lists, buffer_docs=st.integers(1, 9))
def test_aligned_documents_never_need_more_units_than_a_row_has(lengths, buffer_docs):
    for spans, _ in pack_all(BestFitPacker(12, alignment=4), lengths, buffer_docs):
        positions = [min(stop - start, 12) for _, start, stop in spans]
        assert sum(-(-count // 4) for count in positions) <= 3


@pytest.mark.parametrize("carry", [1, -0.1, 2.0, "0.3", None])
def test_an_invalid_carry_is_refused(carry):
    with pytest.raises(ConfigError, match="packing_carry"):
        BestFitPacker(8, carry=carry)


def test_an_invalid_limit_of_documents_is_refused():
    for most in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="packing_max_docs_per_bin"):
            BestFitPacker(8, max_docs_per_bin=most)
