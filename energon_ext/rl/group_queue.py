# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Groups of answers that wait for a batch."""

from collections.abc import Iterable, Sequence

from energon_ext.errors import SamplerError, log_of
from energon_ext.rl.group_rows import WaitingGroup, arrange
from energon_ext.rl.request import Answered
from energon_ext.rl.rollout_metrics import RolloutMetrics
from energon_ext.rl.sampler import Unanswered
from energon_ext.rl.scoring import Scoring

_logger = log_of(__name__)


#: Prompts without answers in a row that end a run.
_MOST_UNANSWERED = 32


class GroupQueue:
    """Keeps the groups from which something can be learned, in the order of their prompts.

    Args:
        scoring: how rewards become weights.
        metrics: counts all groups.
        size: rows of a batch, tokens of a row, and alignment of a sample.

    Attributes:
        groups: the groups that wait.
        metrics: as above.
    """

    def __init__(self, scoring: Scoring, metrics: RolloutMetrics, size: tuple[int, int, int]):
        self._scoring, self.metrics, self._size = scoring, metrics, size
        self.groups: list[WaitingGroup] = []
        self._last_refusal = ""

    def add(self, answered: Answered) -> None:
        """Add the answers to a prompt, unless nothing can be learned from them."""
        key, source, group = answered.key, answered.source, answered.group
        if isinstance(group, Unanswered):
            _logger.warning("Prompt %s is dropped: %s", key, group.reason)
            self._last_refusal = group.reason
            self.metrics.add(source, None, "unanswered_groups")
            return
        group, parts = self._scoring.combine_rewards(group)
        waiting = WaitingGroup(**{**vars(answered), "group": group})
        dropped = None
        if not self._scoring.teaches(group):
            dropped = "zero_var_groups"
        elif not self._fits(waiting):
            dropped = "too_long_groups"
        self.metrics.add(source, group, dropped, parts)
        if dropped is None:
            self.groups.append(waiting)

    def check_attempts(self, most: int, key: str) -> None:
        """Raise SamplerError if the last ``most`` groups were of no use, and count again.

        Fewer are enough if none of the prompts was answered: the server would reject all others.

        Args:
            key: key of the last prompt.
        """
        failed, limit = self.metrics.failures_in_a_row, f"max_attempts={most}"
        if {*failed} == {"unanswered_groups"} and most > _MOST_UNANSWERED:
            most, limit = _MOST_UNANSWERED, f"at most {_MOST_UNANSWERED} without answers"
        if sum(failed.values()) < most:
            return
        failures = self.metrics.failures(self._last_refusal)
        self.metrics.failures_in_a_row = {}
        reason = f"no group could be trained on ({limit}): {failures}"
        raise SamplerError(reason, key=key, counts=self.metrics.counts)

    def restore(self, groups: Iterable[WaitingGroup]) -> None:
        """Replace the groups by saved ones; those that no longer fit are dropped and counted."""
        saved = list(groups)
        self.groups = [each for each in saved if self._fits(each)]
        self.metrics.count("too_long_groups", len(saved) - len(self.groups))

    def drop_before(self, version: int) -> None:
        """Drop and count groups that were answered by an earlier version of the weights."""
        kept = [waiting for waiting in self.groups if waiting.version >= version]
        self.metrics.count("stale_groups", len(self.groups) - len(kept))
        self.groups = kept

    def first(self, most: int) -> list[WaitingGroup]:
        """Return the groups of the next batch, at most ``most``, and fewer if no more fit."""
        groups = self.groups[:most]
        while self.arrange(groups) is None:
            groups.pop()
        return groups

    def arrange(self, groups: Sequence[WaitingGroup]) -> list[list[tuple[int, int]]] | None:
        """Return the (group index, answer index) pairs of each row; None if they do not fit."""
        return arrange(groups, *self._size)

    def remove(self, count: int) -> None:
        """Remove the first groups, which have been trained on."""
        del self.groups[:count]

    def _fits(self, waiting: WaitingGroup) -> bool:
        """Return True if a batch has room for this group alone; otherwise log it."""
        if self.arrange([waiting]) is not None:
            return True
        lengths = waiting.group.sample_lengths()
        _logger.warning(
            "The answers to prompt %s are dropped: with the prompt they have %s tokens, the "
            "longest %s, and a batch has %s rows of %s.",
            *(waiting.key, sum(lengths), max(lengths), *self._size[:2]),
        )
        return False
