# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sequential packing cuts one stream into windows."""

from hypothesis import given
from hypothesis import strategies as st

from energon_ext.packing import Pieces, SequentialPacker
from tests.packing import slow
from tests.packing.buffers import documents, pack_all, pieces_of, plans_of, rows_of

lengths_lists = st.lists(st.integers(0, 30), min_size=1, max_size=25)


def test_a_stream_of_three_documents_is_cut_into_windows_by_hand():
    windows = [
        ([(0, 0, 5)], 1),
        ([(0, 4, 5), (1, 0, 4)], 1),
        ([(1, 3, 4), (2, 0, 4)], 0),
        ([(2, 3, 6)], 1),
    ]
    for buffer_docs in (1, 2, 3, 9):
        assert pack_all(SequentialPacker(4), [5, 4, 6], buffer_docs) == windows
    assert slow.sequential([5, 4, 6], 4) == windows


@given(lengths=lengths_lists, seq_len=st.integers(2, 12), buffer_docs=st.integers(1, 9))
def test_windows_equal_the_slow_definition(lengths, seq_len, buffer_docs):
    found = pack_all(SequentialPacker(seq_len), lengths, buffer_docs)
    assert found == slow.sequential(lengths, seq_len)


@given(lengths=lengths_lists, seq_len=st.integers(2, 12))
def test_windows_also_cover_the_transitions_between_documents(lengths, seq_len):
    """The windows equal slices of the concatenated documents."""
    stream = [(doc, pos) for doc, length in enumerate(lengths) for pos in range(length)]
    windows = [stream[start : start + seq_len + 1] for start in range(0, len(stream) - 1, seq_len)]
    if len(stream) == 1:
        windows = [stream]
    assert windows == [
        [(document, position) for document, start, stop in spans for position in range(start, stop)]
        for spans, _ in pack_all(SequentialPacker(seq_len), lengths)
    ]


def test_the_rest_of_a_stream_is_at_most_a_row():
    packer = SequentialPacker(8)
    for plan in list(plans_of(packer, [1, 3, 30, 2, 2, 2, 2, 2, 25, 1, 1], buffer_docs=2))[:-1]:
        # The first token is the last one of the last window.
        assert 1 <= (plan.carried.stops - plan.carried.starts).sum() <= 8


def test_one_token_is_a_row_unless_it_was_already_a_label():
    one = documents(3, [1])
    plan = SequentialPacker(8).plan(Pieces.none(), one, rows_before=5, last=True)
    assert rows_of(plan) == [([(3, 0, 1)], 1)]
    # As the rest of a stream it was the last label of the window before, and counted there.
    rest = pieces_of([(0, 8, 9)], [9])
    assert rows_of(SequentialPacker(8).plan(rest, documents(1, []), rows_before=1, last=True)) == []
