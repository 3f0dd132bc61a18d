# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sampling metrics: per batch and in total, on one rank and over all ranks."""

import math
from typing import Any, Mapping, Sequence

import torch
import torch.distributed as dist

from energon_ext.rl.scored_group import ScoredGroup
from energon_ext.state.together import collective_device, group_size

#: Reasons to drop a group, and the advice of an error if no group can be trained on.
_DROPPED = {
    "zero_var_groups": "whose rewards do not vary",
    "too_long_groups": "too long for the rows",
    "unanswered_groups": "unanswered",
}
_ADVICE = {
    "zero_var_groups": "check the reward function, or use other prompts",
    "too_long_groups": "limit the answers, or resume with longer or more rows (seq_len, rows)",
}
_COUNTS = ("groups", "valid_groups", *_DROPPED, "stale_groups", "batches")
#: Counts of a single batch.
_OF_BATCH = ("attempts_per_batch", *_DROPPED, "stale_groups")

_SAVED = ("counts", "failures_in_a_row", "since_batch", "sampled")


def add_up(states: Sequence[Mapping[str, Any]], *, is_first: bool) -> dict[str, Any]:
    """Return a state with which a rank continues the counts of other ranks.

    The first rank continues the sums of all, and the others begin at 0, so that the sums over all
    ranks stay the same; only batches are counted on every rank.
    """
    counts = _sum([state["counts"] for state in states] if is_first else [])
    counts["batches"] = states[0]["counts"]["batches"]
    sampled: dict[str, list[float]] = {}
    for state in states if is_first else ():
        for name, (total, number) in state["sampled"].items():
            before = sampled.get(name, [0.0, 0.0])
            sampled[name] = [before[0] + total, before[1] + number]
    return {
        "counts": {**dict.fromkeys(_COUNTS, 0), **counts},
        "failures_in_a_row": {},
        "since_batch": {
            **dict.fromkeys(_OF_BATCH, 0),
            **_sum([state["since_batch"] for state in states] if is_first else []),
        },
        "sampled": sampled,
    }


def _sum(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(each[name] for each in counts) for name in (counts[0] if counts else ())}


class RolloutMetrics:
    """Counts of groups and means of answers, per batch and since the start.

    Args:
        sources: keys of the sources of prompts.
        reward_names: names of the rewards, if they have names.

    Attributes:
        counts: ``groups`` sampled, by outcome, and ``batches``, since the start.
        failures_in_a_row: groups dropped since the last valid one, by reason.
        since_batch: counts since the last batch.
        sampled: name -> ``[sum, number]`` over the answers sampled since the last batch.
        of_last_batch: name -> ``[sum, number]``; a count has the number 0.

    Example:
        >>> metrics = RolloutMetrics(["web"])
        >>> group = ScoredGroup.from_responses([7], [[5, 6], [8]], [[-1, -2], [-3]], [1, 0])
        >>> metrics.add("web", group, None)
        >>> metrics.end_batch([0])
        >>> found = metrics.means()
        >>> found["reward/mean"], found["reward/mean/web"], found["response_length"]
        (0.5, 0.5, 1.5)
        >>> found["entropy"], found["valid_groups"], found["staleness"]
        (2.0, 1, 0.0)
    """

    def __init__(self, sources: Sequence[str] = (), reward_names: Sequence[str] = ()):
        self.sources = list(sources)
        self.reward_names = list(reward_names)
        self.counts = dict.fromkeys(_COUNTS, 0)
        self.failures_in_a_row: dict[str, int] = {}
        self.since_batch = dict.fromkeys(_OF_BATCH, 0)
        self.sampled = self._sums({})
        self.of_last_batch: dict[str, list[float]] = {}

    def add(
        self,
        source: str,
        group: ScoredGroup | None,
        dropped: str | None,
        parts: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Count a group (None if unanswered) and its answers, and why it is dropped, if it is.

        Args:
            parts: named rewards of which those of the group are the sum, float [N].
        """
        if not self.since_batch["attempts_per_batch"]:
            self.sampled = self._sums({})
        self.since_batch["attempts_per_batch"] += 1
        self.counts["groups"] += 1
        if dropped is None:
            self.failures_in_a_row = {}
            self.counts["valid_groups"] += 1
        else:
            self.failures_in_a_row[dropped] = self.failures_in_a_row.get(dropped, 0) + 1
            self.count(dropped)
        if group is None:
            return
        rewards = group.reward.double()
        lengths, trained = group.response_lengths(), group.trained()
        self._add("reward/mean", float(rewards.sum()), len(rewards))
        self._add(f"reward/mean/{source}", float(rewards.sum()), len(rewards))
        for name, values in (parts or {}).items():
            self._add(f"reward/{name}", float(values.double().sum()), len(values))
        self._add("squares", float(rewards.square().sum()), len(rewards))
        self._add("response_length", sum(lengths), len(lengths))
        self._add("entropy", -float(group.log_probs[trained].sum()), int(trained.sum()))
        if group.truncated is not None:
            self._add("truncated", int(group.truncated.sum()), len(group.truncated))

    def count(self, name: str, number: int = 1) -> None:
        """Count dropped groups."""
        self.counts[name] += number
        self.since_batch[name] += number

    def end_batch(self, staleness: Sequence[int]) -> None:
        """Finish a batch, given the age of each of its groups in steps."""
        self.counts["batches"] += 1
        self.of_last_batch = {
            **{name: [float(count), 0.0] for name, count in self.since_batch.items()},
            "valid_groups": [float(len(staleness)), 0.0],
            "staleness": [float(sum(staleness)), float(len(staleness))],
            **{name: list(values) for name, values in self.sampled.items()},
        }
        self.since_batch = dict.fromkeys(_OF_BATCH, 0)

    def means(self, group: Any = None, *, all_ranks: bool = False) -> dict[str, float]:
        """Return the last batch's counts and means; with all ranks, they call this together."""
        sums = self.of_last_batch
        if all_ranks and sums and group_size(group) > 1:
            values = list(sums.values())
            summed = torch.tensor(values, dtype=torch.float64, device=collective_device())
            dist.all_reduce(summed, group=group)
            sums = dict(zip(sums, summed.tolist()))
        means: dict[str, float] = {}
        for name, (total, number) in sums.items():
            if name in ("valid_groups", *_OF_BATCH):
                means[name] = int(total)
            elif name != "squares" and number:
                means[name] = total / number
        total, number = sums.get("reward/mean", (0.0, 0.0))
        if number > 1:
            squares = sums["squares"][0] - total**2 / number
            means["reward/std"] = math.sqrt(max(0.0, squares) / (number - 1))
        return means

    def failures(self, last_refusal: str) -> str:
        """Describe the groups dropped in a row, with advice.

        Args:
            last_refusal: why the last prompt without answer has none.
        """
        advice = {**_ADVICE, "unanswered_groups": f"the last one: {last_refusal}"}
        reasons = ", ".join(f"{n} {_DROPPED[name]}" for name, n in self.failures_in_a_row.items())
        return "; ".join([reasons, *(advice[name] for name in self.failures_in_a_row)])

    def save_state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _SAVED}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        for name in _SAVED:
            setattr(self, name, state[name])
        self.sampled = self._sums(self.sampled)

    def _sums(self, saved: Mapping[str, list[float]]) -> dict[str, list[float]]:
        """Return ``[sum, number]`` by name, for the current sources."""
        by_source = [f"reward/mean/{source}" for source in self.sources]
        by_name = [f"reward/{name}" for name in self.reward_names]
        of_answers = ("squares", "response_length", "truncated", "entropy")
        names = ("reward/mean", *by_source, *by_name, *of_answers)
        return {name: saved.get(name, [0.0, 0.0]) for name in names}

    def _add(self, name: str, total: float, number: int) -> None:
        entry = self.sampled[name]
        entry[0] += total
        entry[1] += number
