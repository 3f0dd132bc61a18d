# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One draw of a source: stock Energon against RandomChooser, constant and scheduled."""

import random

import torch
from megatron.energon import WorkerConfig
from megatron.energon.rng import WorkerRng
from timing import markdown, microseconds

from energon_ext.mixture.choosers import RandomChooser
from energon_ext.weights import weight_from_config

NUM_SOURCES = (2, 100, 1000, 10_000)
DRAWS_PER_BATCH = 64

#: Enough for more than one of the windows of batch indices that the chooser lays out at a time, so
#: that the cost of laying them out is in every round.
DRAWS = 66_000


def run():
    rows = []
    for num_sources in NUM_SOURCES:
        times = measure(num_sources)
        stock, constant = times["stock"], times["constant"]
        rows.append(
            (
                f"{num_sources:,}",
                f"{stock:.2f}",
                f"{constant:.2f}",
                f"{stock / constant:.0f}x",
                f"{times['a tenth linear'] / constant:.2f}x",
                f"{times['all linear'] / constant:.2f}x",
                f"{times['all step'] / constant:.2f}x",
            )
        )
    return markdown(
        f"One draw, {DRAWS_PER_BATCH} draws per batch index",
        (
            "sources",
            "stock, µs",
            "constant, µs",
            "faster than stock",
            "a tenth linear / constant",
            "all linear / constant",
            "all step / constant",
        ),
        rows,
    )


def measure(num_sources):
    generator = random.Random(0)
    weights = [generator.random() + 0.01 for _ in range(num_sources)]
    keys = [f"source{number:05d}" for number in range(num_sources)]

    def chooser(scheduled, kind="linear"):
        """The first ``scheduled`` weights double within a million batches."""
        specs = [
            {kind: {0: weight, 1_000_000: 2 * weight}} if number < scheduled else weight
            for number, weight in enumerate(weights)
        ]
        choose = RandomChooser(keys, [weight_from_config(spec) for spec in specs]).choose
        start = 0

        def draw(calls):
            nonlocal start
            for number in range(start, start + calls):
                choose(number // DRAWS_PER_BATCH)
            start += calls

        return draw

    stock_rng = WorkerRng(WorkerConfig(rank=0, world_size=1, num_workers=0))
    stock_weights = torch.tensor(weights)

    def stock(calls):
        for _ in range(calls):
            stock_rng.choice_idx(stock_weights)

    contenders = {
        "stock": stock,
        "constant": chooser(0),
        "a tenth linear": chooser(max(1, num_sources // 10)),
        "all linear": chooser(num_sources),
        "all step": chooser(num_sources, "step"),
    }
    return microseconds(contenders, calls=DRAWS)
