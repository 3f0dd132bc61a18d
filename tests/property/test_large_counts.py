# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ten thousand documents, rows and weights; a million at night: nothing is lost or repeated."""

import random

import numpy as np
import pytest

from energon_ext.packing import BestFitPacker, Pieces, SequentialPacker
from energon_ext.weights import Weights, weight_from_config
from energon_ext.weights.schedule import KINDS
from tests.mixture.slow import interleave
from tests.packing.buffers import plans_of
from tests.weights.slow import slow_weight

every_count = pytest.mark.parametrize(
    "count", [10_000, pytest.param(1_000_000, marks=pytest.mark.nightly)]
)


@every_count
@pytest.mark.parametrize("make", [SequentialPacker, BestFitPacker])
def test_packed_documents_are_complete_and_no_row_overflows(make, count):
    """Adjacent pieces of a document share one token and cover it from start to end."""
    seq_len = 64
    lengths = np.random.default_rng(count).lognormal(3, 1.2, count).astype(int)  # some are 0
    plans = list(plans_of(make(seq_len), lengths.tolist(), buffer_docs=512))
    for plan in plans:
        sizes = plan.pieces.stops - plan.pieces.starts
        in_rows = np.add.reduceat(sizes, np.concatenate(([0], plan.ends[:-1])))
        assert (sizes >= 1).all() and (in_rows <= seq_len + 1).all()
        assert plan.tokens.tolist() == np.minimum(in_rows, seq_len).tolist()
    assert sum(int(plan.documents.sum()) for plan in plans) == np.count_nonzero(lengths)
    pieces = sum((plan.pieces for plan in plans), Pieces.none())
    pieces = pieces[np.lexsort((pieces.starts, pieces.documents))]
    is_first = np.diff(pieces.documents, prepend=-1) > 0
    is_last = np.append(is_first[1:], True)
    assert pieces.documents[is_first].tolist() == np.flatnonzero(lengths).tolist()
    assert not pieces.starts[is_first].any()
    assert (pieces.starts[1:] == pieces.stops[:-1] - 1)[~is_first[1:]].all()
    assert (pieces.stops == lengths[pieces.documents])[is_last].all()


@every_count
def test_random_schedules_follow_the_formulas(count):
    rng, found, expected = random.Random(count), [], []
    for _ in range(count // 100):
        parts = [
            (kind, {rng.randrange(10**6): rng.uniform(0.01, 9) for _ in range(rng.randint(1, 6))})
            for kind in rng.choices(list(KINDS), k=10)
        ]
        weights = Weights([weight_from_config({kind: points}) for kind, points in parts])
        for position in (rng.randrange(10**6) for _ in range(10)):
            found += weights.at(position).tolist()
            expected += [slow_weight(kind, points, position) for kind, points in parts]
    assert len(found) == count
    np.testing.assert_allclose(found, expected, rtol=1e-9)


@every_count
def test_an_interleave_is_never_a_row_off_after_any_step(count):
    """With constant shares, no member is off by more than 1 - 1 / (2 n - 2) rows."""
    weights, rows = [7, 1, 0.25, 3, 3], 20
    mixture, _ = interleave(weights)
    shares = np.array(weights) / sum(weights)
    drawn = np.zeros(len(weights), np.int64)
    for step in range(count // rows):
        mixture.open(step)
        members = mixture.draw(np.arange(step * rows, (step + 1) * rows))
        counts = np.bincount(members, minlength=len(weights))
        mixture.settle(counts)
        drawn += counts
        assert np.abs(drawn - shares * rows * (step + 1)).max() <= 1 - 1 / 8 + 1e-6, step
    assert drawn.sum() == count
