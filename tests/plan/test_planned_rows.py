# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A planned source reads every document as often as it should, from any state."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_ext.encoders.plan_mix import count_buffer_docs
from energon_ext.errors import ConfigError, StateFormatError, StateMismatchError
from energon_ext.packing import PACKERS, Pieces
from energon_ext.plan import packed_rows as plan_rows
from energon_ext.plan.order import EpochOrder
from energon_ext.plan.packed_rows import PackedRows
from energon_ext.samples.packers import OwnPacker
from tests.packing import slow
from tests.plan.memory_documents import (
    MemoryDocuments,
    documents_in,
    pairs,
    planned,
    planned_source,
    read_of,
    state_of,
    take,
    trained,
)

LENGTHS = np.random.default_rng(0).integers(1, 40, 30).tolist()
every_packing = pytest.mark.parametrize("packing", ["bin", "sequential"])


def resumed(state, lengths=LENGTHS, **options):
    rows = planned(lengths, **options)
    rows.restore_state(json.loads(json.dumps(state)))
    return rows


# Rows ---------------------------------------------------------------------------------------------


@every_packing
@pytest.mark.parametrize("epochs", [1, 3])
def test_every_transition_is_read_once_per_epoch(packing, epochs):
    found = take(planned(LENGTHS, packing=packing, epochs=epochs))
    assert trained(found) == pairs(LENGTHS, epochs)
    assert documents_in(found) == epochs * len(LENGTHS)


@every_packing
def test_rows_do_not_depend_on_the_number_taken_at_once(packing):
    at_once = take(planned(LENGTHS, packing=packing), 200)
    rows, found = planned(LENGTHS, packing=packing), []
    for count in [1, 2, 3, 5, 80, 9, 50] + [1] * 50:
        found += take(rows, count)
    assert found == at_once


@every_packing
def test_counts_of_planned_rows_match_the_rows_read(packing):
    rows = planned(LENGTHS, packing=packing, epochs=2)
    while not rows.ended:
        taken = rows.take(7)
        read = [read_of(rows, taken, number) for number in range(len(taken))]
        assert taken.num_tokens == sum(row.num_tokens for row in read)
        assert taken.num_documents == sum(row.documents for row in read)
        for row in read:
            assert row.num_tokens == min(16, sum(map(len, row.slices)))


@every_packing
def test_planned_rows_may_be_read_late_and_in_any_order(packing):
    rows, expected = planned(LENGTHS, packing=packing), take(planned(LENGTHS, packing=packing), 60)
    early, later = rows.take(30), rows.take(30)
    found = [read_of(rows, later, number) for number in reversed(range(30))]
    found += [read_of(rows, early, number) for number in reversed(range(30))]
    assert [[each.tolist() for each in row.slices] for row in found[::-1]] == [
        slices for slices, *_ in expected
    ]


@every_packing
def test_planning_reads_no_token(packing, monkeypatch):
    rows = planned(LENGTHS, packing=packing)
    monkeypatch.setattr(rows.lengths, "tokens", None)
    assert len(rows.take(500)) == 500


@every_packing
def test_label_weights_stay_with_their_tokens(packing):
    found = take(planned(LENGTHS, packing=packing, epochs=1, with_weights=True))
    for slices, weights, _, _ in found:
        assert weights == [[token % 7 for token in tokens] for tokens in slices]
    assert all(weights is None for _, weights, _, _ in take(planned(LENGTHS, epochs=1)))


@every_packing
def test_a_subset_of_documents_keeps_its_document_numbers(packing):
    whole = take(planned(LENGTHS, packing=packing, epochs=1))
    shifted = take(planned([5, 5, *LENGTHS], packing=packing, epochs=1, first=2))
    assert [[[t - 2000 for t in tokens] for tokens in slices] for slices, *_ in shifted] == [
        slices for slices, *_ in whole
    ]


@every_packing
def test_a_subset_of_documents_resumes_at_every_row(packing):
    options = {"packing": packing, "epochs": 2, "first": 20, "buffer_docs": 6}
    rows, expected = planned(LENGTHS, **options), take(planned(LENGTHS, **options))
    for done in range(len(expected)):
        assert take(resumed(state_of(rows), **options), 8) == expected[done : done + 8]
        rows.take(1)


@every_packing
def test_a_restart_repeats_the_same_pass(packing):
    source = planned_source("web", LENGTHS, packing=packing, epochs=1)
    rows = source.rows()
    first = take(rows)
    assert rows.ended and take(rows) == []
    assert take(source.rows()) == first


# Bounds -------------------------------------------------------------------------------------------


def web_lengths(count):
    """Return log-normal lengths, like those of web documents."""
    lengths = np.random.default_rng(3).lognormal(6, 1.2, count)
    return np.clip(lengths, 2, 20_000).astype(int).tolist()


@pytest.mark.parametrize("buffer_docs", [512, 4096])
def test_web_rows_are_full_and_a_state_has_at_most_256_pieces(buffer_docs):
    seq_len = 4096
    rows = planned(web_lengths(20_000), seq_len=seq_len, buffer_docs=buffer_docs)
    tokens, carried = 0, set()
    for _ in range(40):
        tokens += rows.take(50).num_tokens
        state = state_of(rows)
        carried.add(len(state["carried"]["starts"]))
        assert len(json.dumps(state)) < 7000
    assert tokens / (2000 * seq_len) >= 0.999
    assert 100 < max(carried) <= 256


def test_a_stream_carries_over_at_most_one_row():
    rows = planned(web_lengths(5000), packing="sequential", seq_len=4096, buffer_docs=512)
    for _ in range(60):
        assert rows.take(30).num_tokens == 30 * 4096
        carried = state_of(rows)["carried"]
        lengths = rows.lengths.lengths(np.array(carried["documents"], np.int64))
        assert (lengths - np.array(carried["starts"], np.int64)).sum() <= 4096


@every_packing
def test_a_plan_of_long_documents_is_limited_by_its_rows(packing, monkeypatch):
    monkeypatch.setattr(plan_rows, "MAX_ROWS", 50)
    rows = planned([10 * 16 + 1] * 40, packing=packing, buffer_docs=4096, epochs=2)
    found = []
    while not rows.ended:
        found += take(rows, 1)
        # Four documents of 161 tokens fit into 50 rows of 16, and a fifth does not.
        assert state_of(rows)["taken"] <= 4
    assert trained(found) == pairs([161] * 40, 2)


def test_a_plan_takes_at_most_4096_rows_of_tokens():
    rows = planned([128 * 16] * 40, seq_len=16, buffer_docs=64)
    rows.take(1)
    assert state_of(rows)["taken"] == 4096 // 128


def test_sources_share_a_million_documents_that_are_packed_together():
    expected = {0: 4096, 1: 4096, 256: 4096, 512: 2048, 1024: 1024, 5000: 1024}
    assert {sources: count_buffer_docs(sources) for sources in expected} == expected


@every_packing
def test_a_document_longer_than_a_plan_gets_its_own_plan(packing, monkeypatch):
    monkeypatch.setattr(plan_rows, "MAX_ROWS", 3)
    lengths = [5, 900, 7, 800, 9]
    rows = planned(lengths, packing=packing, buffer_docs=64, epochs=1)
    found = []
    while not rows.ended:
        found += take(rows, 1)
        assert state_of(rows)["taken"] >= 1 or state_of(rows)["last"]
    assert trained(found) == pairs(lengths)


def test_carried_over_documents_count_towards_the_buffer():
    rows = planned([5] * 100, buffer_docs=20)
    taken = []
    while len(taken) < 5:
        rows.take(1)
        state = state_of(rows)
        if state["next_row"] == 1:
            taken.append((len(state["carried"]["starts"]), state["taken"]))
    # 20 documents of 5 tokens fill six rows of three, so at most six are carried over.
    assert taken[0] == (0, 20)
    assert all(carried + count == 20 for carried, count in taken)
    assert all(0 < carried <= 6 for carried, _ in taken[1:])


# States -------------------------------------------------------------------------------------------


@every_packing
@pytest.mark.parametrize("epochs", [pytest.param(None, marks=pytest.mark.nightly), 2])
def test_a_state_resumes_at_every_row_and_can_be_restored_twice(packing, epochs):
    count = 150 if epochs is None else None
    expected = take(planned(LENGTHS, packing=packing, epochs=epochs), count)
    rows = planned(LENGTHS, packing=packing, epochs=epochs)
    for done in range(len(expected) + 1):
        state = state_of(rows)
        left = None if epochs else len(expected) - done
        for _ in range(2):
            other = resumed(state, packing=packing, epochs=epochs)
            assert state_of(other) == state
            assert take(other, left) == expected[done:]
        assert done == len(expected) or take(rows, 1) == expected[done : done + 1]


@every_packing
def test_a_hundred_resumes_read_one_run_and_the_state_stays_small(packing):
    expected = take(planned(LENGTHS, packing=packing), 400)
    state, found, sizes = state_of(planned(LENGTHS, packing=packing)), [], []
    for hop in range(100):
        rows = resumed(state, packing=packing)
        found += take(rows, 1 + hop % 7)
        state = state_of(rows)
        sizes.append(len(json.dumps(state)))
    assert found == expected[: len(found)]
    assert max(sizes) <= 360


@every_packing
@given(done=st.integers(0, 120), buffers=st.lists(st.integers(1, 40), min_size=2, max_size=2))
def test_the_open_plan_is_finished_unchanged_with_another_buffer(packing, done, buffers):
    before, after = buffers
    expected = take(planned(LENGTHS, packing=packing, buffer_docs=before, epochs=3))
    rows = planned(LENGTHS, packing=packing, buffer_docs=before, epochs=3)
    found = take(rows, done)
    remaining = len(rows._plan) - state_of(rows)["next_row"]
    rows = resumed(state_of(rows), packing=packing, buffer_docs=after, epochs=3)
    found += take(rows, remaining)
    assert found == expected[: len(found)]
    found += take(rows)
    assert trained(found) == pairs(LENGTHS, 3)
    assert documents_in(found) == 3 * len(LENGTHS)


@every_packing
@pytest.mark.parametrize("rows_before", [1, 5, 30])
def test_a_restart_inside_a_pass_begins_with_the_first_row(packing, rows_before):
    rows = planned(LENGTHS, packing=packing, epochs=1, buffer_docs=12)
    first = take(planned(LENGTHS, packing=packing, epochs=1, buffer_docs=12))
    start = rows.window
    take(rows, rows_before)
    assert take(rows.at(start, 0)) == first


@pytest.mark.parametrize("packing", ["sequential", pytest.param("bin", marks=pytest.mark.nightly)])
def test_lowering_and_raising_a_limit_loses_and_repeats_nothing(packing):
    """At any row, with a limit of 1 in between that is used for some rows or for all."""
    whole = len(take(planned(LENGTHS, packing=packing, epochs=4)))
    for done in range(0, whole + 1, 7):
        for between in (0, 2, None):
            rows = planned(LENGTHS, packing=packing, epochs=4)
            found = take(rows, done)
            rows = resumed(state_of(rows), packing=packing, epochs=1)
            found += take(rows, between)
            rows = resumed(state_of(rows), packing=packing, epochs=4)
            found += take(rows)
            assert trained(found) == pairs(LENGTHS, 4)
            assert documents_in(found) == 4 * len(LENGTHS)


@every_packing
def test_a_raised_limit_adds_its_epochs_at_every_row(packing):
    whole = len(take(planned(LENGTHS, packing=packing, epochs=1)))
    for done in range(whole + 1):
        rows = planned(LENGTHS, packing=packing, epochs=1)
        found = take(rows, done)
        rows = resumed(state_of(rows), packing=packing, epochs=2)
        found += take(rows)
        assert trained(found) == pairs(LENGTHS, 2)
        assert documents_in(found) == 2 * len(LENGTHS), done


def test_documents_of_one_token_after_a_raised_limit_by_hand():
    """Tokens a, b, c in windows of two transitions: one stream of two epochs, or two of one."""
    options = {"packing": "sequential", "seq_len": 2, "buffer_docs": 1, "shuffled": False}
    whole = take(planned([1, 1, 1], epochs=2, **options))
    assert [documents for _, _, documents, _ in whole] == [3, 2, 1]  # abc, cab, bc
    rows = planned([1, 1, 1], epochs=1, **options)
    assert [documents for _, _, documents, _ in take(rows)] == [3]
    rows = resumed(state_of(rows), [1, 1, 1], epochs=2, **options)
    assert [documents for _, _, documents, _ in take(rows)] == [3]


short_documents = st.lists(st.sampled_from([0, 1, 1, 1, 2, 9]), min_size=1, max_size=12)
rising_limits = st.lists(st.integers(1, 4), min_size=2, max_size=4, unique=True).map(sorted)


@given(
    lengths=short_documents.filter(any),
    seq_len=st.integers(2, 6),
    buffers=st.lists(st.integers(1, 15), min_size=6, max_size=6),
    begun=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    limits=rising_limits,
)
def test_each_raised_limit_starts_a_separate_stream(lengths, seq_len, buffers, begun, limits):
    """A resume inside the stream changes the size of its plans."""
    state, epochs_before = None, 0
    for limit in limits:
        found = []
        for count in (begun.pop() if begun else 0, None):
            rows = planned(
                lengths,
                packing="sequential",
                seq_len=seq_len,
                epochs=limit,
                buffer_docs=buffers[(limit + bool(found)) % 6],
                shuffled=False,
            )
            if state is not None:
                rows.restore_state(state)
            found += take(rows, count)
            state = json.loads(json.dumps(state_of(rows)))
        expected = slow.sequential(lengths * (limit - epochs_before), seq_len)
        assert [documents for _, _, documents, _ in found] == [count for _, count in expected]
        assert [slices for slices, *_ in found] == [
            [
                [1000 * (number % len(lengths)) + position for position in range(start, stop)]
                for number, start, stop in spans
            ]
            for spans, _ in expected
        ]
        epochs_before = limit


@given(
    lengths=short_documents.filter(any),
    seq_len=st.integers(2, 6),
    buffer_docs=st.integers(1, 5),
    begun=st.lists(st.integers(0, 20), min_size=4, max_size=4),
    limits=rising_limits,
)
def test_documents_of_one_token_count_once_wherever_a_limit_is_raised(
    lengths, seq_len, buffer_docs, begun, limits
):
    options = {"packing": "sequential", "seq_len": seq_len, "buffer_docs": buffer_docs}
    rows, counted = planned(lengths, epochs=limits[0], **options), 0
    for limit, count in zip(limits, begun):
        rows = resumed(state_of(rows), lengths, epochs=limit, **options)
        counted += documents_in(take(rows, count))
    counted += documents_in(take(rows))
    assert counted == limits[-1] * sum(length > 0 for length in lengths)


def test_a_one_token_document_counts_if_the_one_before_is_excluded():
    """The last token of document 1 is not yet an input; without it document 2 starts a stream."""
    options = {"packing": "sequential", "seq_len": 4, "epochs": 1, "buffer_docs": 2}
    lengths = [4, 9, 1, 1, 1]
    rows = planned(lengths, shuffled=False, **options)
    assert documents_in(take(rows, 3)) == 2  # windows 0..4, 4..8, 8..12 of the tokens of 0 and 1
    rows = resumed(state_of(rows), lengths, shuffled=False, excluded=np.array([1]), **options)
    assert documents_in(take(rows)) == 3


@every_packing
def test_a_limit_below_the_current_epoch_ends_with_the_open_plan(packing):
    rows = planned(LENGTHS, packing=packing)
    found = take(rows, 200)
    epoch = state_of(rows)["epoch"]
    assert epoch >= 2
    rows = resumed(state_of(rows), packing=packing, epochs=1)
    found += take(rows)
    assert rows.ended
    # Documents already taken from the order are read to their end; nothing else starts.
    counts = trained(found)
    assert epoch <= min(counts.values()) and max(counts.values()) <= epoch + 1


@every_packing
def test_empty_documents_are_passed_over(packing):
    lengths = [0] * 70 + [9] + [0] * 200 + [30, 1]
    found = take(planned(lengths, packing=packing, epochs=2, buffer_docs=4))
    assert trained(found) == pairs(lengths, 2)
    assert documents_in(found) == 6
    assert len(take(planned(lengths, packing=packing, buffer_docs=4), 20)) == 20


class FullRows:
    """Selects rows of two samples; one that remains waits."""

    length_attribute = "length"

    def select_samples_to_pack(self, samples):
        assert samples, "an empty buffer needs no packer"
        return [list(pair) for pair in zip(samples[::2], samples[1::2])]


@pytest.mark.parametrize("lengths", [[5] * 8 + [0], [0] * 8 + [5] * 8, [5] * 9, [5, 0, 0, 5, 5]])
@pytest.mark.parametrize("epochs", [1, 2, 3])
def test_a_packer_of_the_user_reads_everything_with_empty_and_short_buffers(lengths, epochs):
    def source():
        return PackedRows(
            MemoryDocuments(lengths),
            source="web",
            packer=OwnPacker(16, encoder=FullRows()),
            order=EpochOrder(len(lengths), "web", epochs=epochs, shuffled=False),
            buffer_docs=8,
        )

    rows = source()
    found = take(rows)
    assert trained(found) == pairs(lengths, epochs)
    assert rows.ended
    for number in range(len(found) + 1):
        resumed_rows = source()
        resumed_rows.take(number)
        state = json.loads(json.dumps(state_of(resumed_rows)))
        again = source()
        again.restore_state(state)
        assert take(again) == found[number:]


def test_a_packer_that_selects_nothing_is_refused_once_samples_pile_up():
    encoder = FullRows()
    encoder.select_samples_to_pack = lambda samples: []
    packer = OwnPacker(16, encoder=encoder)
    few, many = (Pieces.whole(np.arange(n), np.full(n, 8)) for n in (3, 4))
    assert packer.plan(Pieces.none(), few).carried.ranges() == few.ranges()
    with pytest.raises(ConfigError, match="no row is made of 4 samples with 32 tokens, 16 of"):
        packer.plan(Pieces.none(), many)


def test_the_tokens_of_an_epoch_are_counted_without_looking_documents_up():
    excluded = np.array([1, 4, 9])
    rows = planned(LENGTHS, first=3, excluded=excluded)
    before = rows.lengths.looked_up
    expected = sum(LENGTHS[3:]) - LENGTHS[4] - LENGTHS[9]
    assert [rows.epoch_tokens for _ in range(3)] == [expected] * 3
    assert rows.lengths.looked_up - before == 2  # the excluded ones of the epoch, once


def test_blocks_are_an_option_from_two_documents_on():
    def options(block):
        return PackedRows(
            MemoryDocuments(LENGTHS),
            source="web",
            packer=PACKERS["bin"](16),
            order=EpochOrder(len(LENGTHS), "web", block=block),
            buffer_docs=8,
        ).options()

    assert [options(block).get("block_docs") for block in (1, 2, 3)] == [None, 2, 3]


def test_the_initial_state_is_empty():
    rows = planned(LENGTHS)
    assert state_of(rows) == {
        "kind": "documents",
        "documents": rows.lengths.fingerprint(),
        "epoch": 0,
        "position": 0,
        "carried": {"documents": [], "starts": [], "stops": None, "visits": []},
        "rows_before": 0,
        "taken": None,
        "excluded": [],
        "next_row": 0,
        "last": False,
        "digest": "",
        "pass_start": 0,
    }


# Refusals -----------------------------------------------------------------------------------------


def damaged(**changes):
    rows = planned(LENGTHS, seq_len=16)
    rows.take(40)
    return {**state_of(rows), **changes}


def carrying(documents, starts, stops=None, visits=(0,)):
    places = {"documents": documents, "starts": starts, "stops": stops}
    return {"carried": {**places, "visits": [*visits]}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (carrying([30], [0]), "the state has pieces that the source lacks"),
        (carrying([0], [10**6]), "the state has pieces that the source lacks"),
        (carrying([3], [LENGTHS[3]]), "the state has pieces that the source lacks"),
        (carrying([0, 1], [0]), "the state has pieces that the source lacks"),
        (carrying([0], [0], visits=[]), "the state has pieces that the source lacks"),
        (carrying([0], [0], visits=[10**6]), "the state has pieces that the source lacks"),
        (carrying([3, 4], [0, 0], [1], [0, 0]), "the state has pieces that the source lacks"),
        (carrying([3], [0], [LENGTHS[3] + 1]), "the state has pieces that the source lacks"),
        (carrying([3], [1], [1]), "the state has pieces that the source lacks"),
        ({"next_row": 10_000}, r"web: saved at row 10000 of a plan of \d+ documents"),
        ({"taken": 61}, r"of a plan of 61 documents; now \d+ documents give"),
        ({"position": 61}, r"a plan of \d+ documents; now 0 documents give"),
    ],
)
def test_an_impossible_state_is_refused(changes, message):
    with pytest.raises(StateFormatError, match=message):
        resumed(damaged(**changes))


def test_a_state_of_other_documents_is_refused_with_the_differences():
    state = damaged()
    with pytest.raises(StateMismatchError) as refused:
        resumed(state, [*LENGTHS, 5])
    assert refused.value.differences == {
        "web: documents": (30, 31),
        "web: tokens": (sum(LENGTHS), sum(LENGTHS) + 5),
    }
    with pytest.raises(StateMismatchError) as refused:
        resumed({"kind": "spliced", "documents": {}, "next_row": 0})
    assert refused.value.differences["web: kind"] == ("spliced", "documents")


def test_a_source_of_empty_documents_is_refused():
    """Searching for a row among them would never end."""
    with pytest.raises(ConfigError, match="web: all documents are empty; remove"):
        planned([0] * 130)
