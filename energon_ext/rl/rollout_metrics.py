# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What sampling has come to, per batch and in all."""

from typing import Any, Sequence

import torch


class RolloutMetrics:
    """Counts groups and rewards between batches.

    Attributes:
        counts: ``groups`` sampled, of them ``valid_groups`` and ``zero_var_groups``, and
            ``batches``, since the start of the run.
        failures_in_a_row: groups that did not vary since the last one that did.
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
        self._attempts = 0
        self._dropped = 0
        self._rewards: list[float] = []

    def add(self, rewards: Sequence[torch.Tensor], valid: Sequence[bool]) -> None:
        """Count sampled groups, each with the rewards of its answers."""
        if not self._attempts:
            self._rewards = []
        self._rewards += [reward for group in rewards for reward in group.tolist()]
        for varies in valid:
            self.failures_in_a_row = 0 if varies else self.failures_in_a_row + 1
        dropped = len(valid) - sum(valid)
        self._attempts += len(valid)
        self._dropped += dropped
        self.counts["groups"] += len(valid)
        self.counts["valid_groups"] += len(valid) - dropped
        self.counts["zero_var_groups"] += dropped

    def end_batch(self, valid_groups: int) -> None:
        """Close the account of a batch."""
        rewards = torch.tensor(self._rewards, dtype=torch.float64)
        self.counts["batches"] += 1
        self.of_last_batch = {
            "zero_var_groups": self._dropped,
            "valid_groups": valid_groups,
            "attempts_per_batch": self._attempts,
            "reward/mean": float(rewards.mean()),
            "reward/std": float(rewards.std()),
        }
        self._attempts = self._dropped = 0

    def save_state(self) -> dict[str, Any]:
        return {
            "counts": dict(self.counts),
            "failures_in_a_row": self.failures_in_a_row,
            "attempts": self._attempts,
            "dropped": self._dropped,
            "rewards": list(self._rewards),
        }

    def restore_state(self, state: dict[str, Any]) -> None:
        self.counts = dict(state["counts"])
        self.failures_in_a_row = state["failures_in_a_row"]
        self._attempts = state["attempts"]
        self._dropped = state["dropped"]
        self._rewards = list(state["rewards"])
