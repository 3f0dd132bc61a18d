# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Frames position by position, and the selection of documents."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_ext.batch.collate import BatchAssembler
from energon_ext.errors import ConfigError
from energon_ext.splice import (
    Contents,
    MultiSpliceConfig,
    SpliceConfig,
    SpliceIndex,
    select_documents,
)
from energon_ext.splice.frames import Frames
from energon_ext.splice.reader import FrameReader
from tests.plan.memory_documents import ListDocuments
from tests.splice import slow

P = 9
DOC = np.arange(5)


def frame_of(doc, t, s, seq_len, content_length=None, pad_id=0, *, cyclic=False, **fields):
    """Return a batch of one frame with ``min(K, L - t, S - s)`` tokens of a document."""
    mode = "cyclic_roll" if cyclic else "slide_within"
    config = SpliceConfig(content_start_mode=mode, **fields)
    reader = FrameReader(ListDocuments([doc]), 0, [0], ["doc"], config, pad_id)
    left = len(doc) if cyclic else len(doc) - t
    copy_len = min(content_length or seq_len, left, seq_len - s)
    contents = Contents(*(np.array([n]) for n in (0, t, s, copy_len)))
    return BatchAssembler(seq_len, pad_id=pad_id)(reader.read([contents]), sources=["doc"])


@pytest.mark.parametrize(
    ("t", "s", "content_length", "tokens"),
    [
        (0, 0, None, [0, 1, 2, 3, 4]),
        (0, 1, None, [P, 0, 1, 2, 3]),
        (0, 2, None, [P, P, 0, 1, 2]),
        (1, 0, 2, [1, 2, P, P, P]),
        (2, 1, 3, [P, 2, 3, 4, P]),
        (3, 0, 3, [3, 4, P, P, P]),
        (3, 3, 3, [P, P, P, 3, 4]),
    ],
)
def test_the_worked_frames(t, s, content_length, tokens):
    assert frame_of(DOC, t, s, 5, content_length, P).tokens.tolist() == tokens


def test_weights_and_segments_of_the_fourth_worked_pair():
    frame = frame_of(DOC, t=1, s=1, seq_len=5, content_length=3, pad_id=P)
    assert frame.token_weights.tolist() == [0, 1, 1, 0, 0]
    assert frame.cu_seqlens.tolist() == [0, 1, 4, 5] and frame.source_ids.tolist() == [-1, 0, -1]
    assert frame.labels.tolist() == [1, 2, 3, P, P]
    assert frame.position_ids[1:4].tolist() == [1, 2, 3]


def test_the_first_start_of_the_suffix_trains_one_transition():
    frame = frame_of(DOC, t=1, s=0, seq_len=5, content_length=2, pad_id=P)
    assert frame.tokens.tolist() == [1, 2, P, P, P]
    assert frame.token_weights.tolist() == [1, 0, 0, 0, 0]


def test_a_small_document_at_three_offsets():
    for s, tokens, weights in (
        (0, [1, 2, 3, 0, 0], [1, 1, 0, 0, 0]),
        (1, [0, 1, 2, 3, 0], [0, 1, 1, 0, 0]),
        (2, [0, 0, 1, 2, 3], [0, 0, 1, 1, 0]),
    ):
        frame = frame_of([1, 2, 3], 0, s, 5)
        assert (frame.tokens.tolist(), frame.token_weights.tolist()) == (tokens, weights)


def test_the_worked_example_of_three_documents_shown_equally_often():
    """A .. G, H .. L and X, Y, Z; S = 8, K = 4: four frames of the first two, none of the third."""
    config = MultiSpliceConfig(
        num_docs=3,
        content_length=4,
        balance_mode="by_document",
        adaptive_k=False,
        shuffle_per_epoch=False,
    )
    source = Frames(
        SpliceIndex([7, 5, 3], 8, config),
        range(3),
        ["0", "1", "2"],
        config=config,
        seq_len=8,
        epochs=1,
        fingerprint={},
    )
    texts = [[ord(letter) for letter in text] for text in ("ABCDEFG", "HIJKL", "XYZ")]
    reader = FrameReader(ListDocuments(texts), 0, source.numbers, source.names, config, 0)
    taken = source.take(100)
    rows = reader.read([taken.description(number) for number in range(len(taken))])
    assert ["".join(map(chr, row.slices[0])) for row in rows] == [
        *["ABCD", "BCDE", "CDEF", "DEFG"],
        *["HIJK", "HIJK", "IJKL", "IJKL"],
    ]
    frame = BatchAssembler(8, pad_id=0)([rows[4]], sources=["0", "1", "2"])
    assert frame.tokens.tolist() == [0, 0, 0, 0, *map(ord, "HIJK")]
    assert frame.token_weights.tolist() == [0, 0, 0, 0, 1, 1, 1, 0]
    assert frame.cu_seqlens.tolist() == [0, 4, 8] and frame.source_ids.tolist() == [-1, 1]


@pytest.mark.parametrize("attend_prefix", [False, True])
def test_the_pieces_of_a_frame_are_what_its_attention_costs(attend_prefix):
    """A content of 4 tokens, at offset 4: with an attended prefix it is a piece of 8 tokens."""
    config = MultiSpliceConfig(num_docs=1, content_length=4, attend_prefix=attend_prefix)
    fields = {"config": config, "seq_len": 8, "epochs": 1, "fingerprint": {}}
    taken = Frames(SpliceIndex([4], 8, config), [0], ["doc"], **fields).take(100)
    assert {int(taken.description(number).offsets[0]) for number in range(len(taken))} == {4}
    lengths, ends = taken.pieces()
    assert lengths.tolist() == [8 if attend_prefix else 4] * len(taken)
    assert ends.tolist() == [*range(1, len(taken) + 1)]


def test_eos_precedes_the_content_but_not_the_frame():
    prefix = {"attend_prefix": True, "eos_token_id": 7}
    assert frame_of(DOC, 3, 2, 5, None, P, **prefix).tokens.tolist() == [P, 7, 3, 4, P]
    assert frame_of(DOC, 3, 0, 5, None, P, **prefix).tokens.tolist() == [3, 4, P, P, P]


@settings(max_examples=2 * settings().max_examples)
@given(st.data(), st.integers(2, 9), st.integers(2, 9), st.booleans())
def test_frames_equal_those_written_position_by_position(data, length, seq_len, cyclic):
    last = length - 1 if cyclic else length - 2
    t, s = data.draw(st.integers(0, last)), data.draw(st.integers(0, seq_len - 2))
    content_length = data.draw(st.none() | st.integers(2, 12))
    doc = list(range(1, length + 1))
    frame = frame_of(doc, t, s, seq_len, content_length, 0, cyclic=cyclic).validate()
    tokens, weights = slow.frame(doc, t, s, seq_len, content_length, cyclic=cyclic)
    assert frame.tokens.tolist() == tokens
    assert frame.token_weights.tolist() == weights
    assert frame.labels.tolist()[:-1] == tokens[1:]
    inside = ~frame.padding_mask()
    assert frame.position_ids[inside].tolist() == np.flatnonzero(inside).tolist()


LENGTHS = np.array([30, 10, 50, 10, 40, 50])


def choose(config, **options):
    return select_documents(LENGTHS, config, seq_len=8, source="web", **options).tolist()


@pytest.mark.parametrize(
    ("mode", "three"),
    [("longest", [2, 5, 4]), ("shortest", [1, 3, 0]), ("first", [0, 1, 2])],
)
def test_a_policy_selects_one_or_many_documents(mode, three):
    assert choose(SpliceConfig(doc_select_mode=mode)) == three[:1]
    assert choose(MultiSpliceConfig(num_docs=3, doc_select_mode=mode)) == three


def test_random_documents_are_distinct_and_reproducible():
    config = MultiSpliceConfig(num_docs=4, doc_select_mode="random", min_doc_length=11)
    chosen = choose(config)
    assert sorted(chosen) == [0, 2, 4, 5] and chosen == choose(config)
    seeds = {
        choose(MultiSpliceConfig(num_docs=1, doc_select_mode="random", seed=seed))[0]
        for seed in range(40)
    }
    assert seeds == set(range(6))
    one = {
        choose(SpliceConfig(doc_select_mode="random", content_seed=seed))[0] for seed in range(40)
    }
    assert one == set(range(6))


def test_limits_include_their_bounds():
    config = MultiSpliceConfig(num_docs=9, min_doc_length=30, max_doc_length=40)
    assert choose(config) == [4, 0]


def test_the_longest_document_is_chosen_if_none_is_within_limits(caplog):
    with caplog.at_level(logging.WARNING):
        assert choose(SpliceConfig(min_doc_length=60, doc_select_mode="first")) == [2]
    assert "No document of source web has 60 to any number of tokens" in caplog.text


def test_an_index_is_honoured_only_within_the_limits(caplog):
    assert choose(SpliceConfig(doc_index=3)) == [3]
    with caplog.at_level(logging.WARNING):
        assert choose(SpliceConfig(doc_index=3, min_doc_length=20)) == [2]
    assert "doc_index 3 of source web (10 tokens) is not among" in caplog.text
    with pytest.raises(ConfigError, match="doc_index: 6 found, source web has 6 documents"):
        choose(SpliceConfig(doc_index=6))


def test_a_key_pattern_narrows_the_selection():
    keys = ["a/0", "a/1", "b/2", "b/3", "b/4", "c/5"]
    assert choose(SpliceConfig(doc_key="b/*"), keys=keys) == [2]
    assert choose(SpliceConfig(doc_key="b/3"), keys=keys) == [3]
    with pytest.raises(ConfigError, match="doc_key: 'd/.' found, no sample .* its first is 'a/0'"):
        choose(SpliceConfig(doc_key="d/*"), keys=keys)
    with pytest.raises(ConfigError, match="have no keys; use doc_index"):
        choose(SpliceConfig(doc_key="b/*"))


def test_the_training_subset_contains_the_documents_that_end_in_it():
    # Two batches of seven rows of 8 tokens: 112, and documents end at 30, 40, 90, 100, 140, 190.
    subset = {"restrict_to_training_subset": True, "initial_batch_size": 7, "max_train_batches": 2}
    assert choose(MultiSpliceConfig(**subset)) == [2, 0, 1, 3]
    with pytest.raises(ConfigError, match="no document to choose from .* its first 8 tokens"):
        choose(SpliceConfig(**{**subset, "initial_batch_size": 1, "max_train_batches": 1}))


def test_ties_in_length_go_to_the_first_documents():
    lengths = np.random.default_rng(0).integers(5, 8, 500)
    for mode, sign in (("longest", -1), ("shortest", 1)):
        config = MultiSpliceConfig(num_docs=400, doc_select_mode=mode)
        expected = sorted(range(500), key=lambda document: (sign * lengths[document], document))
        assert select_documents(lengths, config, seq_len=8).tolist() == expected[:400]
