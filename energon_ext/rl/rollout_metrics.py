# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What sampling has come to, per batch and in all."""

import copy
from typing import Any, Sequence

import torch

#: Of the counts below; what was said of the last batch is not saved.
_SAVED = ("counts", "failures_in_a_row", "attempts", "dropped", "rewards")


class RolloutMetrics:
    """Counts groups and rewards between batches.

    Attributes:
        counts: ``groups`` sampled, of them ``valid_groups`` and ``zero_var_groups``, and
            ``batches``, since the start of the run.
        failures_in_a_row: groups that did not vary since the last one that did.
        attempts, dropped, rewards: groups and rewards since the last batch.
        of_last_batch: ``attempts_per_batch`` groups were sampled for it, and ``zero_var_groups``
            of them dropped; it holds ``valid_groups``; ``reward/mean`` and ``reward/std`` are over
            all answers of what was sampled last, before clipping.

    Example:
        >>> metrics = RolloutMetrics()
        >>> metrics.add([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 0.0])], [True, False])
        >>> metrics.end_batch(valid_groups=1)
        >>> metrics.of_last_batch["reward/mean"], metrics.of_last_batch["reward/std"]
        (0.25, 0.5)
        >>> metrics.counts
        {'groups': 2, 'valid_groups': 1, 'zero_var_groups': 1, 'batches': 1}
    """

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("groups", "valid_groups", "zero_var_groups", "batches"), 0)
        self.failures_in_a_row = 0
        self.of_last_batch: dict[str, float] = {}
        self.attempts = 0
        self.dropped = 0
        self.rewards: list[float] = []

    def add(self, rewards: Sequence[torch.Tensor], valid: Sequence[bool]) -> None:
        """Count sampled groups, each with the rewards of its answers."""
        if not self.attempts:
            self.rewards = []
        self.rewards += [reward for group in rewards for reward in group.tolist()]
        for varies in valid:
            self.failures_in_a_row = 0 if varies else self.failures_in_a_row + 1
        dropped = len(valid) - sum(valid)
        self.attempts += len(valid)
        self.dropped += dropped
        self.counts["groups"] += len(valid)
        self.counts["valid_groups"] += len(valid) - dropped
        self.counts["zero_var_groups"] += dropped

    def end_batch(self, valid_groups: int) -> None:
        """Close the account of a batch."""
        rewards = torch.tensor(self.rewards, dtype=torch.float64)
        self.counts["batches"] += 1
        self.of_last_batch = {
            "zero_var_groups": self.dropped,
            "valid_groups": valid_groups,
            "attempts_per_batch": self.attempts,
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
        }
        self.attempts = self.dropped = 0

    def save_state(self) -> dict[str, Any]:
        return {name: copy.copy(getattr(self, name)) for name in _SAVED}

    def restore_state(self, state: dict[str, Any]) -> None:
        for name in _SAVED:
            setattr(self, name, copy.copy(state[name]))
