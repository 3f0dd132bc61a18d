# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Planning the rows of whole steps for all ranks, as every planner does.

Rows of 8192 positions, one per rank, are planned from 1 to 1000 sources of web-like documents, with
a blend of which a third of the weights change, and with an interleave. No token is read. Times are
the best processor times of several rounds, which take turns with a reference operation: if that is
slow, so is the machine. The last rows are Megatron's C++ function that draws the same number of
samples from blended datasets; it does not pack, and keeps the whole run in memory.
"""

import time
from bisect import bisect_right

import numpy as np
from megatron.core.datasets import helpers_cpp
from timing import markdown, microseconds

from energon_ext.encoders.plan_mix import count_buffer_docs
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import BLEND, INTERLEAVE, blend_of
from energon_ext.packing import BestFitPacker
from energon_ext.plan.order import EpochOrder
from energon_ext.plan.packed_rows import PackedRows
from energon_ext.plan.plan import Plan
from energon_ext.tokens.documents import Lengths
from energon_ext.weights import ConstantWeight, weight_from_config

SEQ_LEN = 8192
RANKS = (64, 1024, 16384)
SOURCES = (1, 10, 100, 1000)
ROWS = 2**15  # per round
REFERENCES = 100_000


class WebLikeDocuments(Lengths):
    """Lengths of documents without any tokens."""

    def __init__(self, seed, count=200_000):
        lengths = np.exp(np.random.default_rng(seed).normal(6.2, 1.2, count)).astype(np.int64)
        self._lengths = np.clip(lengths, 1, 200_000)

    def __len__(self):
        return len(self._lengths)

    def lengths(self, numbers):
        return self._lengths[numbers]

    def fingerprint(self):
        return {}


def run():
    pool = [WebLikeDocuments(seed) for seed in range(4)]
    table, references = [], []
    for rule in (BLEND, INTERLEAVE):
        for sources in SOURCES:
            cells, most = [], 0.0
            for ranks in RANKS:
                row, document, reference = measure(pool, rule, sources, ranks)
                cells += [f"{row:.1f}", f"{document:.2f}"]
                most = max(most, document / reference)
                references.append(reference)
            what = "1 source" if sources == 1 else f"{sources:,} sources"
            table.append((f"{rule}, {what}", *cells, f"{most:.1f}"))
    for sources in SOURCES:
        table.append((f"Megatron's draw alone, {sources:,}", f"{megatron(sources):.2f}", *[""] * 6))
    each = [f"{ranks:,} ranks, µs per {what}" for ranks in RANKS for what in ("row", "document")]
    header = ("", *each, "most expensive document, in reference operations")
    return markdown("Planning steps of all ranks", header, table) + (
        f"\nThe reference operation, a `bisect_right` among 4096 integers and a dict update in "
        f"Python, takes {min(references):.3f} to {max(references):.3f} µs.\n"
    )


def measure(pool, rule, sources, ranks):
    """Return µs per row, per document and per reference operation."""
    plan = plan_of(pool, rule, sources)
    documents = plan.documents.sum()

    def steps(rows):
        for _ in range(rows // ranks):
            plan.next(ranks, plan.step)

    contenders = {"row": steps, "reference": reference}
    calls, rounds = {"row": ROWS, "reference": REFERENCES}, 4
    times = microseconds(contenders, calls, rounds, time.process_time)
    documents_per_row = (plan.documents.sum() - documents) / (rounds * ROWS)
    return times["row"], times["row"] / documents_per_row, times["reference"]


def plan_of(pool, rule, sources):
    keys = [f"source {number:04d}" for number in range(sources)]
    buffer_docs = count_buffer_docs(sources)
    found = [
        PackedRows(
            pool[number % len(pool)],
            source=key,
            packer=BestFitPacker(SEQ_LEN),
            order=EpochOrder(len(pool[0]), key),
            buffer_docs=buffer_docs,
        )
        for number, key in enumerate(keys)
    ]
    # As in a long run, sources are at different places in their pack plans.
    for source, rows in zip(found, np.linspace(1, buffer_docs // 8, sources)):
        source.take(int(rows))
    weights = {
        key: weight_from_config({"linear": {0: 1, 1000: 2}})
        if number % 3 == 0
        else ConstantWeight(1.0 + number % 5)
        for number, key in enumerate(keys)
    }
    mixture = Mixture(blend_of(weights, rule), keys, seed="0", row_tokens=SEQ_LEN)
    return Plan(found, mixture)


def reference(calls):
    ordered = list(range(0, 8 * 4096, 8))
    counts = dict.fromkeys(ordered, 0)
    for number in range(calls):
        position = bisect_right(ordered, number * 7919 & 0x7FFF) - 1
        counts[ordered[position]] += 1


def megatron(sources):
    """Return µs per sample of ``build_blending_indices``."""
    weights = np.arange(1, sources + 1, dtype=np.float64)
    weights /= weights.sum()

    def build(rows):
        indices, numbers = np.zeros(rows, np.int16), np.zeros(rows, np.int64)
        helpers_cpp.build_blending_indices(indices, numbers, weights, sources, rows, False)

    return microseconds({"": build}, ROWS, 5, time.process_time)[""]
