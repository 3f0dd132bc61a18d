# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Groups of answers that wait for a batch."""

from collections.abc import Iterable

from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import log_of
from energon_ext.rl.group_rows import WaitingGroup, arrange
from energon_ext.rl.rollout_metrics import RolloutMetrics
from energon_ext.rl.sampler import Unanswered
from energon_ext.rl.scored_group import ScoredGroup
from energon_ext.rl.scoring import Scoring

_logger = log_of(__name__)


class GroupQueue:
    """Keeps the groups from which something can be learned, in the order of their prompts.

    Args:
        scoring: how rewards become weights.
        metrics: counts all groups.
        size: rows of a batch, tokens of a row, and alignment of a sample.

    Attributes:
        groups: the groups that wait.
        last_refusal: why the last prompt without answer has none.
    """

    def __init__(self, scoring: Scoring, metrics: RolloutMetrics, size: tuple[int, int, int]):
        self._scoring, self._metrics, self._size = scoring, metrics, size
        self.groups: list[WaitingGroup] = []
        self.last_refusal = ""

    def add(self, number: int, prompt: Prompt, group: ScoredGroup | Unanswered, step: int) -> None:
        """Add a group of answers, unless nothing can be learned from it.

        Args:
            number: number of the prompt.
            step: optimizer steps taken by the policy when it answered.
        """
        key, source = prompt.__key__, prompt.source
        if isinstance(group, Unanswered):
            _logger.warning("Prompt %s is dropped: %s", key, group.reason)
            self.last_refusal = group.reason
            self._metrics.add(source, None, "unanswered_groups")
            return
        group, parts = self._scoring.combine_rewards(group)
        waiting = WaitingGroup(number, key, source, group, step)
        dropped = None
        if not self._scoring.teaches(group):
            dropped = "zero_var_groups"
        elif not self._fits(waiting):
            dropped = "too_long_groups"
        self._metrics.add(source, group, dropped, parts)
        if dropped is None:
            self.groups.append(waiting)

    def restore(self, groups: Iterable[WaitingGroup]) -> None:
        """Replace the groups by saved ones; those that no longer fit are dropped and counted."""
        saved = list(groups)
        self.groups = [each for each in saved if self._fits(each)]
        self._metrics.count("too_long_groups", len(saved) - len(self.groups))

    def drop_before(self, step: int) -> None:
        """Drop and count groups that were answered before a step."""
        kept = [waiting for waiting in self.groups if waiting.step >= step]
        self._metrics.count("stale_groups", len(self.groups) - len(kept))
        self.groups = kept

    def first(self, most: int) -> tuple[list[WaitingGroup], list[list[tuple[int, int]]]]:
        """Return the groups of the next batch, at most ``most``, and fewer if no more fit.

        Returns:
            The groups, and the (group index, answer index) pairs of each row.
        """
        groups = self.groups[:most]
        while (arrangement := arrange(groups, *self._size)) is None:
            groups.pop()
        return groups, arrangement

    def remove(self, count: int) -> None:
        """Remove the first groups, which have been trained on."""
        del self.groups[:count]

    def _fits(self, waiting: WaitingGroup) -> bool:
        """Return True if a batch has room for this group alone; otherwise log it."""
        if arrange([waiting], *self._size) is not None:
            return True
        lengths = waiting.group.sample_lengths()
        _logger.warning(
            "The answers to prompt %s are dropped: with the prompt they have %s tokens, the "
            "longest %s, and a batch has %s rows of %s.",
            *(waiting.key, sum(lengths), max(lengths), *self._size[:2]),
        )
        return False
