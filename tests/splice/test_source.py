# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Spliced rows by number: equal for any chunk size and after a resume from any state."""

import copy
import json
from collections import Counter

import numpy as np
import pytest

from energon_ext.errors import StateMismatchError
from energon_ext.splice import MultiSpliceConfig, SpliceIndex
from energon_ext.splice.frames import Frames
from energon_ext.splice.reader import FrameReader
from tests.plan.memory_documents import MemoryDocuments

SEQ_LEN = 24
LENGTHS = [9, 14, 5, 30]
every_packing = pytest.mark.parametrize("pack", [False, True])


def source(pack=False, epochs=2, **changes):
    fields = {"content_start_mode": "slide_within", "content_length": 8, "pack_contents": pack}
    config = MultiSpliceConfig(**{**fields, "balance_mode": "every_pair", **changes})
    return Frames(
        SpliceIndex(LENGTHS, SEQ_LEN, config, key="book"),
        range(len(LENGTHS)),
        [f"book/doc{number}" for number in range(len(LENGTHS))],
        config=config,
        seq_len=SEQ_LEN,
        epochs=epochs,
        fingerprint=config.to_json(),
        key="book",
    )


def take(rows, count=2**40):
    taken = rows.take(count)
    return [content(row) for row in read(rows, taken)]


def read(rows, taken):
    reader = FrameReader(MemoryDocuments(LENGTHS), 0, rows.numbers, rows.names, rows.config, 0)
    return reader.read([taken.description(number) for number in range(len(taken))])


def state_of(rows):
    return rows.state_at(rows.window, rows.next_row)


def content(row):
    return [each.tolist() for each in row.slices], row.first_positions, row.gaps, row.num_tokens


def resumed(state, *arguments, **options):
    rows = source(*arguments, **options)
    rows.restore_state(json.loads(json.dumps(state)))
    return rows


@every_packing
def test_taken_frames_name_the_documents_and_tokens_they_show(pack):
    """Documents count from 1000 times their number, so tokens reveal their position."""
    rows = source(pack)
    taken = rows.take(20)
    for number, row in enumerate(read(rows, taken)):
        shown = [divmod(int(tokens[0]), 1000) + (len(tokens),) for tokens in row.slices]
        assert taken.contents(number) == [(d, start, start + n) for d, start, n in shown]


@every_packing
def test_every_example_of_every_epoch_is_shown_once(pack):
    rows = source(pack)
    shown = Counter(
        (tuple(tokens), position)
        for slices, positions, *_ in take(rows)
        for tokens, position in zip(slices, positions)
    )
    contents = rows.examples.locate(np.arange(rows.examples.size))
    expected = Counter(
        (tuple(range(1000 * d + t, 1000 * d + t + n)), s)
        for d, t, s, n in zip(*(column.tolist() for column in contents))
    )
    assert shown == Counter({key: 2 * count for key, count in expected.items()})
    assert rows.ended and take(rows) == []


@every_packing
def test_rows_do_not_depend_on_chunk_size(pack):
    at_once = take(source(pack))
    assert len(at_once) > 200
    for counts in ([1], [2, 3], [40], [7, 1, 90]):
        rows, found = source(pack), []
        while not rows.ended:
            for count in counts:
                found += take(rows, count)
        assert found == at_once


@every_packing
def test_a_resume_at_any_row_continues_like_the_source(pack):
    options = {"epochs": 1, "content_stride": 2}
    expected = take(source(pack, **options))
    rows = source(pack, **options)
    for done in range(len(expected) + 1):
        state = state_of(rows)
        assert set(state) == {"kind", "documents", "next_row", "pass_start"}
        assert take(resumed(state, pack, **options), 12) == expected[done : done + 12]
        assert take(copy.copy(rows), 12) == expected[done : done + 12]
        take(rows, 1)


def test_a_frame_is_filled_with_any_number_of_contents():
    frames = take(source(True, content_length=2))
    assert {len(slices) for slices, *_ in frames[:-1]} == {12}  # two tokens each, of 24


@every_packing
def test_a_frame_holds_contents_until_the_next_does_not_fit(pack):
    frames = [slices for slices, *_ in take(source(pack))]
    for slices, following in zip(frames, frames[1:]):
        size = sum(map(len, slices))
        assert size <= SEQ_LEN
        assert len(slices) == 1 if not pack else size + len(following[0]) > SEQ_LEN


@every_packing
def test_planned_frames_match_written_frames(pack):
    rows = source(pack)
    while not rows.ended:
        taken = rows.take(5)
        found = read(rows, taken)
        assert taken.num_tokens == sum(sum(map(len, row.slices)) for row in found)
        assert taken.num_documents == sum(len(row.slices) for row in found)
        # If every slice names its source, each counts as a document.
        counted = [row.documents or len(row.slice_sources) for row in found]
        assert sum(counted) == taken.num_documents
    prefixed = source(attend_prefix=True)
    assert [row.documents for row in read(prefixed, prefixed.take(3))] == [1, 1, 1]


@every_packing
def test_a_raised_limit_adds_epochs_and_a_lowered_one_ends_at_once(pack):
    size = source(pack).examples.size
    rows = source(pack, epochs=1)
    before = take(rows)
    more = take(resumed(state_of(rows), pack, epochs=3))
    assert sum(len(slices) for slices, *_ in before + more) == 3 * size
    rows = source(pack, epochs=None)
    take(rows, size + 5)
    lowered = resumed(state_of(rows), pack, epochs=1)
    assert lowered.ended and take(lowered) == []
    again = resumed(state_of(lowered), pack, epochs=None)
    assert take(again, 20) == take(rows, 20)


def test_a_state_of_another_configuration_is_refused_naming_the_field():
    with pytest.raises(StateMismatchError) as refused:
        resumed(state_of(source()), content_length=7)
    assert refused.value.differences == {"book: content_length": (8, 7)}


def test_another_pass_shows_as_many_contents_again_like_an_endless_source():
    rows, endless = source(False, epochs=1), source(False, epochs=None)
    first = take(rows)
    assert rows.ended and first == take(endless, len(first))
    rows.begin_pass()
    state = state_of(rows)
    assert state["pass_start"] == len(first)
    second = take(rows)
    assert second == take(endless, len(first)) != first and rows.ended
    assert take(resumed(state, False, epochs=1)) == second
