# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Arrange groups of answers into the rows of a batch."""

import heapq
from dataclasses import dataclass
from typing import Mapping, Sequence

import numpy as np
import torch

from energon_ext.batch.columns import NO_COLUMNS, RESPONSE_MASK, Column
from energon_ext.batch.rows import Row
from energon_ext.errors import SampleError
from energon_ext.rl.request import Answered
from energon_ext.rl.scored_group import ScoredGroup


@dataclass(frozen=True, eq=False)
class WaitingGroup(Answered):
    """Answers to train on, with one reward each."""

    group: ScoredGroup


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
    groups: Sequence[WaitingGroup], rows: int, seq_len: int, alignment: int
) -> list[list[tuple[int, int]]] | None:
    """Return the (group index, answer index) pairs of each row, or None if they do not fit."""
    lengths = [waiting.group.sample_lengths() for waiting in groups]
    samples = [(index, sample) for index, each in enumerate(lengths) for sample in range(len(each))]
    aligned = [n + -n % alignment for each in lengths for n in each]
    bins = balance_by_tokens(aligned, rows, seq_len)
    return None if bins is None else [[samples[item] for item in items] for items in bins]


def build_row(
    groups: Sequence[WaitingGroup],
    weights: Sequence[torch.Tensor],
    members: Sequence[tuple[int, int]],
    described: Mapping[str, Column] = NO_COLUMNS,
) -> Row:
    """Return a row with one slice per answer; a row without answers is padding.

    Args:
        described: columns that are described, and not a number per response token.
        weights: weight of each response token of each group, float32 [N, G].
        members: (group index, answer index) pairs.
    """
    slices, label_weights, log_probs, rewards = [], [], [], []
    columns: dict[str, list[np.ndarray]] = {}
    for index, sample in members:
        group = groups[index].group
        end = group.sample_lengths()[sample]
        slices.append(group.tokens[sample, :end].numpy())
        label_weights.append(_at_labels(group, sample, weights[index]))
        log_probs.append(_at_labels(group, sample, group.log_probs))
        rewards.append(float(group.reward[sample]))
        for name, values in _columns_of(group).items():
            column = described.get(name)
            own = (
                _at_labels(group, sample, values)
                if column is None
                else _values_of_column(group, sample, values, column)
            )
            columns.setdefault(name, []).append(own)
    for name, parts in columns.items():
        if len(parts) != len(slices):
            raise SampleError(
                f"Only some groups of a batch have the column {name}; give all or none."
            )
    return Row(
        slices,
        slice_sources=[groups[index].source for index, _ in members],
        label_weights=label_weights,
        log_probs=log_probs,
        rewards=rewards,
        columns=columns,
    )


def _columns_of(group: ScoredGroup) -> Mapping[str, torch.Tensor]:
    """Return the columns of a group, [N, G] each, and where a loss on them counts."""
    if not group.columns:
        return {}
    trained = group.trained()
    if group.sample_weights is not None:
        trained = trained & (group.sample_weights != 0)[:, None]
    return {**group.columns, RESPONSE_MASK: trained.float()}


def _values_of_column(
    group: ScoredGroup, sample: int, values: torch.Tensor, column: Column
) -> np.ndarray:
    """Return the values of an answer as a row has them."""
    if column.per == "document":
        return values[sample].numpy()
    begin, end = group.prompt_lengths()[sample], group.sample_lengths()[sample]
    if column.at == "input":
        return values[sample, :end].numpy()
    result = column.filled(end)
    result[begin:] = values[sample, : end - begin].numpy()
    return result


def _at_labels(group: ScoredGroup, sample: int, values: torch.Tensor) -> np.ndarray:
    """Return values of an answer's response tokens, [N, G], after zeros for its prompt."""
    begin, end = group.prompt_lengths()[sample], group.sample_lengths()[sample]
    result = np.zeros(end, np.float32)
    result[begin:] = values[sample, : end - begin].numpy()
    return result
