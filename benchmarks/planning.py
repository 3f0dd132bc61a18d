# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What it costs that every worker plans the rows of all ranks.

One process plans whole steps of 64, 1 024 and 16 384 rows of 8 192 positions, one row a rank, over
1 to 1 000 sources of web-like documents, by a blend a third of whose weights move, and by an
interleave. No token is read. Beside it the planner of Megatron: its C++ function that draws as many
samples from blended datasets, which packs nothing and holds the whole run in memory. Measured is
the time of the processor, so that what else the machine does counts little.
"""

import time

import numpy as np
from megatron.core.datasets import helpers_cpp
from timing import markdown

from energon_ext.documents.order import EpochOrder
from energon_ext.encoders import pretrain
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import BLEND, INTERLEAVE, blend_of
from energon_ext.packing import BestFitPacker
from energon_ext.plan.rows import PlannedRows
from energon_ext.plan.source import Source
from energon_ext.plan.step import Plan
from energon_ext.weights import ConstantWeight, weight_from_config

SEQ_LEN = 8192
RANKS = (64, 1024, 16384)
SOURCES = (1, 10, 100, 1000)
LEAST_ROWS = 40_000  # that are measured


class WebLikeDocuments:
    """Lengths of documents; there are no tokens behind them."""

    def __init__(self, seed, count=200_000):
        lengths = np.exp(np.random.default_rng(seed).normal(6.2, 1.2, count)).astype(np.int64)
        self.lengths = np.clip(lengths, 1, 200_000)

    def __len__(self):
        return len(self.lengths)

    def locate(self, numbers):
        return numbers, self.lengths[numbers]

    def fingerprint(self):
        return {}


def run():
    pool = [WebLikeDocuments(seed) for seed in range(4)]
    rows = [
        (f"{rule}, {sources:,} sources", *(f"{figure:.2f}" for figure in figures))
        for rule in (BLEND, INTERLEAVE)
        for sources in SOURCES
        for figures in [[each for ranks in RANKS for each in measure(pool, rule, sources, ranks)]]
    ]
    rows += [
        (f"Megatron's draw alone, {sources:,} sources", f"{megatron(sources):.2f}", *[""] * 5)
        for sources in SOURCES
    ]
    header = [f"{ranks:,} ranks, µs per {what}" for ranks in RANKS for what in ("row", "document")]
    return markdown("Planning a step of all ranks", ("", *header), rows)


def plan_of(pool, rule, sources):
    keys = [f"source {number:04d}" for number in range(sources)]
    buffer_docs = pretrain.planned_buffer_docs(sources)
    found = {
        key: Source(
            key,
            PlannedRows(
                pool[number % len(pool)],
                source=key,
                packer=BestFitPacker(SEQ_LEN),
                order=EpochOrder(len(pool[0]), key),
                buffer_docs=buffer_docs,
            ),
        )
        for number, key in enumerate(keys)
    }
    weights = {
        key: weight_from_config({"linear": {0: 1, 1000: 2}})
        if number % 3 == 0
        else ConstantWeight(1.0 + number % 5)
        for number, key in enumerate(keys)
    }
    mixture = Mixture(blend_of(weights, rule), keys, seed="0", row_tokens=SEQ_LEN)
    return Plan(found, mixture)


def measure(pool, rule, sources, ranks):
    """µs per row and per document."""
    plan = plan_of(pool, rule, sources)
    # Every source has replaced its first pack plan before the clock starts.
    for step in range(1 + 150 * sources // ranks):
        plan.next(ranks, step)
    documents, steps = plan.documents.sum(), max(LEAST_ROWS, 150 * sources) // ranks
    begin = time.process_time()
    for _ in range(steps):
        plan.next(ranks, plan.step)
    seconds = time.process_time() - begin
    documents = plan.documents.sum() - documents
    return seconds / (steps * ranks) * 1e6, seconds / documents * 1e6


def megatron(sources):
    """µs per sample of ``build_blending_indices``."""
    weights = np.arange(1, sources + 1, dtype=np.float64)
    indices, numbers = np.zeros(LEAST_ROWS, np.int16), np.zeros(LEAST_ROWS, np.int64)
    begin = time.process_time()
    helpers_cpp.build_blending_indices(
        indices, numbers, weights / weights.sum(), sources, LEAST_ROWS, False
    )
    return (time.process_time() - begin) / LEAST_ROWS * 1e6


if __name__ == "__main__":
    print(run())
