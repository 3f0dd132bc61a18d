# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Arrange groups of answers into the rows of a batch."""

import heapq
from dataclasses import dataclass
from typing import Sequence

import numpy as np
import torch

from energon_ext.batch.rows import Row
from energon_ext.rl.sampler import ScoredGroup


@dataclass(frozen=True, eq=False)
class WeightedGroup:
    """A group to train on, with the key and the source of its prompt."""

    key: str
    source: str
    group: ScoredGroup
    advantages: torch.Tensor  # float32 [N]
    step: int  # optimizer steps taken by the policy when it answered


def balance_by_tokens(lengths: Sequence[int], bins: int, capacity: int) -> list[list[int]] | None:
    """Spread items over bins: the longest first, each into the bin with the fewest tokens.

    Graham's longest-processing-time rule (https://doi.org/10.1137/0117039): the fullest bin has at
    most 4/3 of the smallest possible load. Ties go to the lower index. Return None if an item does
    not fit into the emptiest bin.

    Example:
        >>> balance_by_tokens([2, 5, 3, 4], bins=2, capacity=8)
        [[1, 0], [3, 2]]
        >>> balance_by_tokens([2, 5, 3, 4], bins=2, capacity=6) is None
        True
    """
    loads = [(0, index) for index in range(bins)]
    filled: list[list[int]] = [[] for _ in range(bins)]
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        tokens, index = loads[0]
        if tokens + lengths[item] > capacity:
            return None
        filled[index].append(item)
        heapq.heapreplace(loads, (tokens + lengths[item], index))
    return filled


def arrange(
    groups: Sequence[WeightedGroup], rows: int, seq_len: int, alignment: int = 1
) -> list[list[tuple[WeightedGroup, int]]] | None:
    """Return the (group, sample index) pairs of each row, or None if the groups do not fit."""
    samples = [(group, sample) for group in groups for sample in range(len(group.advantages))]
    lengths = [n + -n % alignment for g in groups for n in g.group.sample_lengths()]
    bins = balance_by_tokens(lengths, rows, seq_len)
    return None if bins is None else [[samples[item] for item in items] for items in bins]


def row_of(members: Sequence[tuple[WeightedGroup, int]]) -> Row:
    """Return a row with one slice per sample, whose response has its advantage as weights.

    A row without samples is padding, so that all batches have one shape.
    """
    slices, weights, log_probs, rewards = [], [], [], []
    for weighted, sample in members:
        group = weighted.group
        prompt, length = group.prompt_len, group.sample_lengths()[sample]
        slices.append(group.tokens[sample, :length].numpy())
        response = np.zeros(length, np.float32)
        response[prompt:] = float(weighted.advantages[sample])
        weights.append(response)
        values = np.zeros(length, np.float32)
        values[prompt:] = group.log_probs[sample, : length - prompt].numpy()
        log_probs.append(values)
        rewards.append(float(group.rewards[sample]))
    return Row(
        slices,
        slice_sources=[weighted.source for weighted, _ in members],
        label_weights=weights,
        log_probs=log_probs,
        rewards=rewards,
    )
