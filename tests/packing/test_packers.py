# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One suite for every packer."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_ext.errors import ConfigError
from energon_ext.packing import PACKERS as REGISTRY
from energon_ext.packing import (
    BestFitPacker,
    Pieces,
    SequentialPacker,
    make_packer,
    pack_apart,
)
from energon_ext.samples.packers import OwnPacker, WholePacker
from tests.packing.buffers import (
    documents,
    has_copies,
    pack_all,
    plans_of,
    rows_of,
    transitions,
)

PACKERS = {
    "sequential": SequentialPacker,
    "best fit": BestFitPacker,
    "best fit, at most 2 per row": lambda seq_len: BestFitPacker(seq_len, max_docs_per_bin=2),
    "best fit, nothing is carried": lambda seq_len: BestFitPacker(seq_len, carry=0),
    "best fit, most is carried": lambda seq_len: BestFitPacker(seq_len, carry=0.9),
    "best fit, aligned": lambda seq_len: BestFitPacker(2 * seq_len, alignment=2),
}


class Taker:
    """Selects samples in their order until a row is full, and leaves the rest for later."""

    length_attribute = "length"

    def __init__(self, seq_len, leaves_rest):
        self.seq_len, self._leaves_rest = seq_len, leaves_rest

    def select_samples_to_pack(self, samples):
        rows, row = [], []
        for sample in samples:
            if sum(each.length for each in row) + sample.length > self.seq_len:
                rows.append(row)
                row = []
            row.append(sample)
        return rows if self._leaves_rest else [*rows, row]


def own(seq_len, leaves_rest):
    return OwnPacker(seq_len, encoder=Taker(seq_len, leaves_rest))


#: Packers of samples, which are not longer than a row.
SAMPLE_PACKERS = {
    "whole samples": WholePacker,
    "select_samples_to_pack": lambda seq_len: own(seq_len, False),
    "select_samples_to_pack, the rest waits": lambda seq_len: own(seq_len, True),
}
every_packer = pytest.mark.parametrize("make", PACKERS.values(), ids=PACKERS)
lengths_lists = st.lists(st.integers(0, 30), min_size=1, max_size=25)
buffers = st.integers(1, 9)


@every_packer
@given(lengths=lengths_lists, seq_len=st.integers(2, 12), buffer_docs=buffers)
def test_every_transition_is_packed_exactly_once(make, lengths, seq_len, buffer_docs):
    counts = transitions(pack_all(make(seq_len), lengths, buffer_docs))
    expected = {(doc, pos) for doc, length in enumerate(lengths) for pos in range(length - 1)}
    assert set(counts) == expected
    assert set(counts.values()) <= {1}


@every_packer
@given(lengths=lengths_lists, seq_len=st.integers(2, 12), buffer_docs=buffers)
def test_no_row_overflows_and_every_document_ends_once(make, lengths, seq_len, buffer_docs):
    packer, ended = make(seq_len), 0
    for plan in plans_of(packer, lengths, buffer_docs):
        assert len(plan) == len(plan.tokens) == len(plan.documents)
        assert (plan.carried.stops > plan.carried.starts).all()
        for (spans, ends), tokens in zip(rows_of(plan), plan.tokens.tolist()):
            sizes = [stop - start for _, start, stop in spans]
            assert min(sizes) >= 1
            assert 1 <= sum(sizes) <= packer.seq_len + 1
            assert tokens == min(sum(sizes), packer.seq_len)
            ended += ends
    assert ended == sum(length > 0 for length in lengths)


@every_packer
@given(lengths=lengths_lists, seq_len=st.integers(2, 12), buffer_docs=buffers)
def test_pieces_keep_the_length_of_their_document(make, lengths, seq_len, buffer_docs):
    for plan in plans_of(make(seq_len), lengths, buffer_docs):
        for pieces in (plan.pieces, plan.carried):
            assert pieces.lengths.tolist() == [lengths[n] for n in pieces.documents.tolist()]


@every_packer
@given(lengths=lengths_lists, seq_len=st.integers(2, 12), buffer_docs=buffers)
def test_carried_pieces_are_restored_from_documents_and_starts(make, lengths, seq_len, buffer_docs):
    """A state contains nothing else about them but their visits."""
    packer = make(seq_len)
    for plan in plans_of(packer, lengths, buffer_docs):
        numbers, starts = plan.carried.documents, plan.carried.starts
        saved = json.loads(json.dumps([numbers.tolist(), starts.tolist()]))
        numbers, starts = np.array(saved, np.int64).reshape(2, -1)
        whole = np.array(lengths, np.int64)[numbers]
        resumed = packer.with_stops(Pieces(numbers, starts, whole, whole, numbers))
        assert resumed.ranges() == plan.carried.ranges()
        assert resumed.lengths.tolist() == plan.carried.lengths.tolist()


@every_packer
@given(lengths=lengths_lists, seq_len=st.integers(2, 12), rows_before=st.integers(0, 10**9))
def test_a_plan_is_a_pure_function(make, lengths, seq_len, rows_before):
    first, second = make(seq_len), make(seq_len)
    list(plans_of(second, lengths[::-1]))  # earlier plans must not matter
    plans = [
        packer.plan(Pieces.none(), documents(0, lengths), rows_before=rows_before)
        for packer in (first, second)
    ]
    assert rows_of(plans[0]) == rows_of(plans[1])
    assert plans[0].carried.ranges() == plans[1].carried.ranges()


@pytest.mark.parametrize("make", [SequentialPacker, BestFitPacker])
def test_by_default_a_plan_is_the_first_and_not_the_last(make):
    new = documents(0, [3] * 20)
    plan = make(4).plan(Pieces.none(), new)
    same = make(4).plan(Pieces.none(), new, rows_before=0, last=False)
    assert rows_of(plan) == rows_of(same)
    assert plan.carried.ranges() == same.carried.ranges() != []


def test_extents_give_the_pieces_of_each_row():
    # Windows of 5 tokens: 0..4, then 4..5 of the first document and 0..2 of the next.
    plan = SequentialPacker(4).plan(Pieces.none(), documents(0, [6, 7]))
    assert rows_of(plan) == [([(0, 0, 5)], 0), ([(0, 4, 6), (1, 0, 3)], 1), ([(1, 2, 7)], 1)]
    assert [plan.extent(row) for row in range(3)] == [slice(0, 1), slice(1, 3), slice(3, 4)]


@every_packer
def test_the_last_plan_carries_nothing_and_no_documents_make_no_rows(make):
    packer = make(6)
    assert not len(packer.plan(Pieces.none(), documents(0, [4, 9, 2]), last=True).carried)
    for last in (False, True):
        nothing = packer.plan(Pieces.none(), documents(0, [0, 0]), last=last)
        assert len(nothing) == len(nothing.carried) == 0


@pytest.mark.parametrize("make", [SequentialPacker, BestFitPacker])
@pytest.mark.parametrize("seq_len", [1, 0, -3, True, 2.5])
def test_rows_too_short_for_a_transition_are_refused(make, seq_len):
    with pytest.raises(ConfigError, match="seq_len: .* an integer >= 2 is needed"):
        make(seq_len)


# Several epochs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [*PACKERS.values(), *SAMPLE_PACKERS.values()])
@given(data=st.data(), seq_len=st.integers(3, 12), buffer_docs=buffers, epochs=st.integers(1, 4))
def test_no_row_has_copies_if_other_documents_fill_a_row(make, data, seq_len, buffer_docs, epochs):
    packer = make(seq_len)
    longest = packer.seq_len if make in SAMPLE_PACKERS.values() else 30
    lengths = data.draw(st.lists(st.integers(0, longest), min_size=1, max_size=25))
    rows = pack_all(packer, lengths, buffer_docs, epochs)
    assert transitions(rows) == {
        (document, position): epochs
        for document, length in enumerate(lengths)
        for position in range(length - 1)
    }
    assert sum(ended for _, ended in rows) == epochs * sum(length > 0 for length in lengths)
    # A row of a stream may begin with a part of the longest document.
    if sum(lengths) - max(lengths) > packer.seq_len:
        assert not any(has_copies(spans) for spans, _ in rows)


@pytest.mark.parametrize("name", ["bin", "sequential"])
def test_copies_of_known_documents_are_in_different_rows(name):
    """One document is carried over from the first epoch, and is the first of the second."""
    packer = make_packer(name, 4)
    epochs = [documents(0, [5, 5, 5, 2]), documents(3, [2]), documents(0, [5, 2, 1])]
    carried = packer.plan(Pieces.none(), epochs[0]).carried
    assert carried.documents.tolist()[-1] == 3
    plan = pack_apart(packer, carried, epochs[1] + epochs[2], rows_before=3, last=True)
    assert not any(has_copies(spans) for spans, _ in rows_of(plan))


def test_a_copy_waits_for_another_document_until_there_is_a_third():
    packer, copy = SequentialPacker(4), documents(3, [3])
    waiting = pack_apart(packer, copy, copy, rows_before=0, last=False)
    assert rows_of(waiting) == [] and waiting.carried.ranges() == [(3, 0, 3), (3, 0, 3)]
    other = pack_apart(packer, waiting.carried, documents(0, [3]), rows_before=0, last=False)
    assert rows_of(other) == [([(3, 0, 3), (0, 0, 2)], 1), ([(0, 1, 3), (3, 0, 3)], 2)]
    third = pack_apart(packer, waiting.carried, copy, rows_before=0, last=False)
    assert rows_of(third) == [([(3, 0, 3), (3, 0, 2)], 1), ([(3, 1, 3), (3, 0, 3)], 2)]


def test_copies_of_a_source_smaller_than_a_row_share_rows_of_a_stream():
    rows = pack_all(SequentialPacker(9), [2, 3], epochs=4)
    assert [spans for spans, _ in rows] == [
        [(0, 0, 2), (1, 0, 3), (0, 0, 2), (1, 0, 3)],
        [(1, 2, 3), (0, 0, 2), (1, 0, 3), (0, 0, 2), (1, 0, 2)],
        [(1, 1, 3)],
    ]


# The registry -------------------------------------------------------------------------------------


def test_a_packer_is_built_from_its_name_and_options():
    assert make_packer("sequential", 8) == SequentialPacker(8)
    assert make_packer("bin", 8) == BestFitPacker(8)
    options = {"max_docs_per_bin": 3, "carry": 0.5, "alignment": 2}
    assert make_packer("bin", 8, **options) == BestFitPacker(8, **options)
    assert {name: packer.cuts_documents for name, packer in REGISTRY.items()} == {
        "bin": False,
        "sequential": True,
    }


@pytest.mark.parametrize("name", REGISTRY)
def test_a_packer_is_rebuilt_from_its_json(name):
    packer = make_packer(name, 8)
    saved = json.loads(json.dumps(packer.to_json()))
    assert saved["name"] == name
    assert make_packer(saved.pop("name"), 8, **saved) == packer
    options = {"carry": 0.25, "max_docs_per_bin": 4} if name == "bin" else {}
    other = make_packer(name, 8, **options)
    assert other.to_json() == {**packer.to_json(), **options}


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("bim", {}, "packing: 'bim' found, choose from bin, sequential; did you mean bin?"),
        (["bin"], {}, r"packing: \['bin'\] found, choose from bin, sequential."),
        ("sequential", {"carry": 0.1}, "packing='sequential' has no option 'carry'; it has none."),
        ("bin", {"cary": 0.1}, "packing='bin' has no option 'cary'; .*; did you mean carry?"),
        ("bin", {"alignment": 0}, "alignment: 0 found, an integer >= 1 is needed."),
    ],
)
def test_an_unknown_packer_or_option_is_refused(name, options, words):
    with pytest.raises(ConfigError, match=words.replace("?", "[?]")):
        make_packer(name, 8, **options)


def test_packers_are_immutable():
    packer = BestFitPacker(8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        packer.carry = 0.5
