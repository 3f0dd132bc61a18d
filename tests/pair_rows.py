# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows of random pairs, and a slow model of their loss."""

import numpy as np
import torch

from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row


def random_pair(random, vocabulary=64):
    """Return the slices, weights and reference columns of a pair, whose prompt is the same."""
    prompt = random.integers(1, vocabulary, random.integers(1, 5))
    slices, weights, columns = [], [], []
    for sign in (1.0, -1.0):
        answer = random.integers(1, vocabulary, random.integers(1, 7))
        slices.append(np.concatenate([prompt, answer]))
        weights.append(np.repeat([0.0, sign], [len(prompt), len(answer)]).astype(np.float32))
        reference = (random.random(len(slices[-1])) - 4.5).astype(np.float32)
        columns.append(reference * (weights[-1] != 0))
    return slices, weights, columns


def row_of(pairs, source="web"):
    slices, weights, columns = ([each for pair in pairs for each in pair[n]] for n in range(3))
    return Row(
        slices,
        source=source,
        documents=len(pairs),
        label_weights=weights,
        pairs=[number for number in range(len(pairs)) for _ in (0, 1)],
        columns={"ref_log_probs": columns},
    )


def batch_of(rows, seq_len, **options):
    return BatchAssembler(seq_len, **options)(rows, sources=("code", "web")).validate()


def slow_losses(batch, log_probs, beta, kind="sigmoid", smoothing=0.0):
    """Return the loss of each pair, answer by answer and position by position."""
    ends, reference = batch.cu_seqlens.tolist(), batch.columns["ref_log_probs"].tolist()
    sums = {}
    for begin, end, pair in zip(ends, ends[1:], batch.pair_ids.tolist()):
        if pair < 0:
            continue
        total, count = torch.zeros(()), 0.0
        for place in range(begin, end):
            weight = float(batch.token_weights[place])
            if weight:
                total = total + abs(weight) * (log_probs[place] - reference[place])
                count += abs(weight)
        sums.setdefault(pair, []).append((total, count))
    losses = []
    for (chosen, chosen_count), (rejected, rejected_count) in sums.values():
        if kind == "ipo":
            margin = chosen / chosen_count - rejected / rejected_count
            losses.append((margin - 1 / (2 * beta)) ** 2)
            continue
        probability = 1 / (1 + (-beta * (chosen - rejected)).exp())
        right, wrong = probability.log(), (1 - probability).log()
        losses.append(-(1 - smoothing) * right - smoothing * wrong)
    return losses
