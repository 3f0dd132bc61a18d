# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whole documents in full rows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_ext.errors import ConfigError
from energon_ext.packing import BestFitPacker, Pieces, best_fit
from tests.packing import slow
from tests.packing.buffers import documents, pack_all, plans_of, rows_of

lengths_lists = st.lists(st.integers(0, 30), min_size=1, max_size=25)


def web_lengths(count, seq_len, seed=0):
    """Log-normal, as documents of the web are."""
    lengths = np.random.default_rng(seed).lognormal(6, 1.2, count)
    return np.clip(lengths, 2, 4 * seq_len).astype(int).tolist()


@given(
    lengths=lengths_lists,
    seq_len=st.integers(2, 12),
    buffer_docs=st.integers(1, 9),
    carry=st.sampled_from([0, 0.3, 0.9]),
    most=st.none() | st.integers(1, 3),
)
def test_rows_are_those_of_pieces_in_lists(lengths, seq_len, buffer_docs, carry, most):
    packer = BestFitPacker(seq_len, carry=carry, max_docs_per_bin=most)
    plans = plans_of(packer, lengths, buffer_docs)
    assert [sorted(rows_of(plan)) for plan in plans] == list(
        slow.best_fit(lengths, seq_len, buffer_docs, carry, most)
    )


def test_the_order_of_rows_depends_on_the_rows_before_and_never_changes_between_versions():
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


def test_a_part_of_a_document_is_cut_from_where_it_begins():
    part = Pieces.of_ranges([(0, 13, 22)], np.array([30]))
    assert part.cut(9).ranges() == [(0, 13, 22)]
    assert part.cut(4).ranges() == [(0, 13, 17), (0, 16, 20), (0, 19, 22)]


@given(lengths=lengths_lists, longest=st.integers(2, 12))
def test_documents_are_cut_as_one_by_one(lengths, longest):
    expected = [span for n, length in enumerate(lengths) for span in slow.cut(n, length, longest)]
    pieces = documents(0, lengths).cut(longest)
    assert pieces.ranges() == expected
    assert pieces.places.tolist() == [7 * document for document, _, _ in expected]


def test_rows_of_one_long_document_are_not_handed_out_in_a_run():
    rows = pack_all(BestFitPacker(7), [400] + [5] * 39, buffer_docs=40)
    from_long = [spans[0][0] == 0 for spans, _ in rows]
    runs = sum(before != after for before, after in zip(from_long, from_long[1:]))
    assert runs > 10


def test_a_buffer_counts_documents_however_many_rows_each_fills():
    """Ten rows each: the first rows are of many documents, not of one after the other."""
    packer = BestFitPacker(16)
    assert not packer.is_enough(7, 7 * 161, buffer_docs=8)
    assert packer.is_enough(8, 8 * 161, buffer_docs=8)
    rows = pack_all(packer, [161] * 16, buffer_docs=8)
    first = [spans[0][0] for spans, _ in rows[:20]]
    assert len(set(first)) >= 5
    assert sum(a != b for a, b in zip(first, first[1:])) >= 12


def test_a_buffer_of_long_documents_is_full_by_its_tokens():
    """256 rows, and at least 2^20 tokens."""
    for seq_len, most in ((1024, 2**20), (8192, 256 * 8192)):
        packer = BestFitPacker(seq_len)
        assert not packer.is_enough(3, most - 1, buffer_docs=512)
        assert packer.is_enough(3, most, buffer_docs=512)


def test_no_document_waits_for_more_rows_than_twice_the_buffer():
    """A row begins with the oldest piece, so one that has n before it is in one of n + 1 rows."""
    lengths = np.random.default_rng(1).integers(1, 66, 3000).tolist()
    packer, rows, arrived, waits = BestFitPacker(64, carry=0.8), 0, {}, []
    for plan in plans_of(packer, lengths, buffer_docs=32):
        found = [*plan.pieces.documents.tolist(), *plan.carried.documents.tolist()]
        for document in found:
            arrived.setdefault(document, rows)
        for spans, _ in rows_of(plan):
            rows += 1
            waits += [rows - arrived[document] for document, _, _ in spans]
    assert 16 < max(waits) <= 64


@pytest.mark.parametrize("buffer_docs", [512, 4096])
def test_web_documents_fill_rows_to_the_last_token_but_for_the_end(buffer_docs):
    seq_len = 4096
    plans = list(plans_of(BestFitPacker(seq_len), web_lengths(16_384, seq_len), buffer_docs))[:-1]
    tokens = np.concatenate([plan.tokens for plan in plans])
    assert len(tokens) > 1000
    assert tokens.mean() / seq_len >= 0.999
    # Nor does the end cost much.
    whole = pack_all(BestFitPacker(seq_len), web_lengths(4096, seq_len), buffer_docs)
    sizes = [sum(stop - start for _, start, stop in spans) for spans, _ in whole]
    assert sum(sizes) / (len(sizes) * (seq_len + 1)) >= 0.997


def test_no_more_than_256_pieces_are_carried_however_large_the_buffer_is():
    lengths = web_lengths(20_000, 512)
    carried = [len(plan.carried) for plan in plans_of(BestFitPacker(512), lengths, 4096)]
    assert max(carried) == best_fit.MOST_CARRIED == 256
    small = [len(plan.carried) for plan in plans_of(BestFitPacker(512), lengths[:2000], 100)]
    assert 10 < max(small) <= 256


def test_aligned_documents_take_whole_units_of_a_row():
    packer = BestFitPacker(16, carry=0, alignment=8)
    # 1 unit, 2 units, 2 units and a label
    plan = packer.plan(Pieces.none(), documents(0, [3, 9, 17]), last=True)
    assert sorted([span[0] for span in spans] for spans, _ in rows_of(plan)) == [[0], [1], [2]]
    plan = packer.plan(Pieces.none(), documents(0, [3, 9, 8]), last=True)
    assert sorted([span[0] for span in spans] for spans, _ in rows_of(plan)) == [[0, 2], [1]]


@given(lengths=lengths_lists, buffer_docs=st.integers(1, 9))
def test_aligned_documents_never_need_more_units_than_a_row_has(lengths, buffer_docs):
    for spans, _ in pack_all(BestFitPacker(12, alignment=4), lengths, buffer_docs):
        positions = [min(stop - start, 12) for _, start, stop in spans]
        assert sum(-(-count // 4) for count in positions) <= 3


@pytest.mark.parametrize("carry", [1, -0.1, 2.0])
def test_a_carry_that_would_leave_everything_is_refused(carry):
    with pytest.raises(ConfigError, match="packing_carry"):
        BestFitPacker(8, carry=carry)


def test_a_limit_of_documents_below_1_is_refused():
    for most in (0, -1, 1.5, True):
        with pytest.raises(ConfigError, match="packing_max_docs_per_bin"):
            BestFitPacker(8, max_docs_per_bin=most)
