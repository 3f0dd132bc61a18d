# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Interfaces of samplers, and calls of them; errors name the prompt."""

from dataclasses import dataclass
from typing import Any, Callable, Iterator, Protocol, Sequence

import torch
import torch.distributed as dist

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import SamplerError
from energon_ext.rl.group_faults import GroupRules, find_fault
from energon_ext.rl.scored_group import ScoredGroup
from energon_ext.state.together import from_first_rank, on_all_ranks


class BatchSource(Protocol):
    """An iterable of packed batches, such as a loader or an :class:`~energon_ext.rl.RLDataset`."""

    def __iter__(self) -> Iterator[PackedBatch]: ...


@dataclass(frozen=True)
class Unanswered:
    """Result for a single prompt that cannot be answered; it is counted and dropped."""

    reason: str


class Sampler(Protocol):
    """A sampler of one prompt per call; keeps nothing between calls, and has its own time limit.

    A sampler with its own random generator cannot repeat its answers after a resume; a
    :class:`BatchSampler` is given seeds, and can.
    """

    def sample_and_score(self, prompt: torch.Tensor) -> ScoredGroup | Unanswered:
        """Return N answers to a prompt of int64 [n], with their rewards."""


class BatchSampler(Protocol):
    """A sampler of many prompts per call, given their random seeds and their metadata.

    A sampler whose ranks must all be called equally often also has a method ``agree(status) ->
    int``, which returns the largest status of these ranks; it may be called without prompts.
    """

    def sample_and_score_batch(
        self, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> Sequence[ScoredGroup | Unanswered]:
        """Return a group for each prompt, in order.

        A group should depend only on its prompt, its seed and the policy: then it is the same
        whichever rank asks, and together with whichever prompts.
        """


def ask_together(
    sampler: BatchSampler | Sampler,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    rules: GroupRules,
    replica_group: dist.ProcessGroup | None,
) -> list[ScoredGroup | Unanswered]:
    """Return :func:`ask_sampler` of the first rank of a group; if it fails, all ranks raise."""

    def ask() -> list[ScoredGroup | Unanswered]:
        return ask_sampler(sampler, prompts, seeds, rules)

    if replica_group is None:
        return ask()
    check_question(prompts, seeds, replica_group)
    return from_first_rank(ask, replica_group)


def check_question(
    prompts: Sequence[Prompt], seeds: Sequence[int], replica_group: dist.ProcessGroup
) -> None:
    """Raise SamplerError on all ranks of a group unless they ask for the same prompts."""
    question = [[prompt.__key__ for prompt in prompts], list(seeds)]
    if any(other != question for other in on_all_ranks(lambda: question, replica_group)):
        raise SamplerError(
            "the ranks of a replica_group ask for different prompts; give their RLDatasets the "
            "same data-parallel rank, seed and state"
        )


def run_together(
    function: Callable[[int], Any], step: int, replica_group: dist.ProcessGroup | None
) -> None:
    """Call a function on each rank of a group; if it fails on one rank, all ranks raise."""

    def run() -> None:
        function(step)

    if replica_group is None:
        run()
    else:
        on_all_ranks(run, replica_group)


def ask_sampler(
    sampler: BatchSampler | Sampler,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    rules: GroupRules,
) -> list[ScoredGroup | Unanswered]:
    """Return a checked group, or Unanswered, for each prompt.

    Raises:
        SamplerError: names the prompt, or the first prompt of a call that failed as a whole.
    """
    if hasattr(sampler, "sample_and_score_batch"):
        groups = _call(prompts, sampler.sample_and_score_batch, prompts, seeds)
    else:
        groups = []
        for prompt in prompts:
            tokens = torch.as_tensor(prompt.tokens)
            groups += _call([prompt], lambda tokens: [sampler.sample_and_score(tokens)], tokens)
    results = []
    for prompt, group in zip(prompts, groups):
        if not isinstance(group, Unanswered):
            if fault := find_fault(group, prompt, rules):
                raise SamplerError(fault, key=prompt.__key__)
            group = group.plain(rules.described)
            rules = rules.like(group)
        results.append(group)
    return results


def _call(prompts: Sequence[Prompt], call: Callable[..., Any], *arguments: Any) -> list[Any]:
    key = prompts[0].__key__ if prompts else ""
    if len(prompts) > 1:
        key += f" (and {len(prompts) - 1} more in the same call)"
    try:
        groups = call(*arguments)
    except SamplerError as error:
        raise SamplerError(error.reason, key=error.key or key) from error
    except Exception as error:  # a user's sampler may raise anything
        reason = f"the sampler raised {type(error).__name__}: {error}"
        raise SamplerError(reason, key=key) from error
    if not isinstance(groups, list) or len(groups) != len(prompts):
        found = f"{len(groups)} groups" if isinstance(groups, list) else type(groups).__name__
        raise SamplerError(f"the sampler returned {found} for {len(prompts)} prompts", key=key)
    return groups
