# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A whole draw of an interleave, and how far choosers drift from their target.

The peer is Megatron-core's C++ index builder for blended datasets, where its helpers are compiled.
"""

import numpy as np
from timing import markdown, microseconds

from energon_ext.mixture.choosers import LeastConsumedChooser, RandomChooser

NUM_SOURCES = (2, 10, 100, 1000)
DRAWS = 20_000

#: Tokens of the samples, laid out beforehand: making them up is no part of a draw.
LENGTHS = [100 + number % 500 for number in range(DRAWS)]


def run():
    rows = []
    for num_sources in NUM_SOURCES:
        weights = [1.0 + number % 7 for number in range(num_sources)]
        times = measure(weights)
        megatron = times.get("megatron")
        rows.append(
            (
                f"{num_sources:,}",
                f"{times['ours']:.2f}",
                f"{megatron:.3f}" if megatron else "not compiled here",
                f"{times['min']:.2f}",
                f"{deviation(LeastConsumedChooser, weights, sample_tokens=1):.2f}",
                f"{deviation(RandomChooser, weights):.0f}",
            )
        )
    return markdown(
        f"Choose and consume; largest deviation in {DRAWS:,} draws of equal samples",
        (
            "sources",
            "least consumed, µs",
            "Megatron build_blending_indices, µs",
            "min() over a list, µs",
            "deviation, samples",
            "deviation of random draws",
        ),
        rows,
    )


def measure(weights):
    keys = [f"source{number:05d}" for number in range(len(weights))]
    chooser = LeastConsumedChooser(keys, weights)
    choose, consume = chooser.choose, chooser.consume

    def ours(calls):
        for tokens in LENGTHS[:calls]:
            consume(choose(), tokens)

    clocks = [0.0] * len(weights)

    def plain_minimum(calls):
        for tokens in LENGTHS[:calls]:
            index = min(range(len(clocks)), key=clocks.__getitem__)
            clocks[index] += tokens / weights[index]

    contenders = {"ours": ours, "min": plain_minimum}
    helpers = megatron_helpers()
    if helpers is not None:
        shares = np.array(weights) / sum(weights)

        def megatron(calls):
            dataset_index = np.zeros(calls, dtype=np.int16)
            sample_index = np.zeros(calls, dtype=np.int64)
            helpers.build_blending_indices(
                dataset_index, sample_index, shares, len(weights), calls, False
            )

        contenders["megatron"] = megatron
    return microseconds(contenders, calls=DRAWS, rounds=5)


def megatron_helpers():
    try:
        from megatron.core.datasets import helpers_cpp
    except ImportError:
        return None
    return helpers_cpp


def deviation(chooser_class, weights, **options):
    """The largest distance of a count from its target, after any draw."""
    keys = [f"source{number:05d}" for number in range(len(weights))]
    chooser = chooser_class(keys, weights, **options)
    shares = np.array(weights) / sum(weights)
    index_of = {key: number for number, key in enumerate(keys)}
    counts, worst = np.zeros(len(weights)), 0.0
    for draw in range(1, DRAWS + 1):
        key = chooser.choose()
        chooser.consume(key, 1)
        counts[index_of[key]] += 1
        worst = max(worst, np.abs(counts - shares * draw).max())
    return worst


if __name__ == "__main__":
    print(run())
