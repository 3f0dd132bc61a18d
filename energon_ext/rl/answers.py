# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fills the queue of a rank with answers, in rounds with the other ranks."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import SamplerError
from energon_ext.rl.group_faults import GroupRules
from energon_ext.rl.group_queue import GroupQueue
from energon_ext.rl.place import Place
from energon_ext.rl.prompt_plan import PlannedPrompt, PromptPlan
from energon_ext.rl.rounds import Need, Rounds
from energon_ext.rl.sampler import BatchSampler, Sampler, ask_together, run_together


@dataclass(kw_only=True, eq=False)
class Answers:
    """Asks the sampler about the next prompts.

    Args:
        plan: the prompts.
        sampler: answers them.
        queue: keeps the groups of answers.
        rules: what a group must be like.
        rounds: the ranks that sample together.
        rank: data-parallel rank.
        replica_group: ranks that share the answers of the first of them.
        sync_weights: gives a server the weights of a step.
        seed: random seed of the run.
        max_attempts: raise an error after this many groups in a row that are of no use.

    Attributes:
        drawn: prompts that were drawn, but not answered yet.
    """

    plan: PromptPlan
    sampler: BatchSampler | Sampler
    queue: GroupQueue
    rules: GroupRules
    rounds: Rounds
    rank: int
    replica_group: dist.ProcessGroup | None
    sync_weights: Callable[[int], Any] | None
    seed: int
    max_attempts: int
    drawn: list[PlannedPrompt] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._prompts: list[Prompt] = []  # those that a round asks about
        self._synchronized: int | None = None  # step whose weights the server has

    def fill(self, least: int, place: Place) -> None:
        """Sample until every rank has enough groups; if one of them fails, all raise.

        Args:
            least: groups that this rank needs, unless the prompts end.
            place: steps and version of the policy that answers.
        """
        error = None
        try:
            while any(needs := self.rounds.agree(self._need(least), error)):
                error = attempt(functools.partial(self._prepare, needs, place.step))
                self.rounds.agree(Need.NOTHING, error)
                error = attempt(functools.partial(self._ask, place))
        except BaseException:
            self._synchronized = None  # a server that was started again has other weights
            raise

    def _need(self, least: int) -> Need:
        if len(self.queue.groups) >= least:
            return Need.NOTHING
        if self.drawn:  # and not answered, as a call failed
            return Need.ANSWERS
        return Need.NOTHING if self.plan.ended else Need.PROMPTS

    def _prepare(self, needs: Sequence[Need], step: int) -> None:
        """Draw prompts for the ranks that need some, and read those that this rank asks about.

        After a failed call only its prompts are asked about, as if it had not failed.
        """
        if self.sync_weights is not None and self._synchronized != step:
            run_together(self.sync_weights, step, self.replica_group)
            self._synchronized = step
        if Need.ANSWERS not in needs:
            ranks = [rank for rank, need in enumerate(needs) if need == Need.PROMPTS]
            self.drawn += self.plan.draw(ranks, self.rank)
        asks = self.drawn and needs[self.rank] != Need.NOTHING
        self._prompts = self.plan.read(self.drawn) if asks else []

    def _ask(self, place: Place) -> None:
        """Sample answers; change nothing if that fails."""
        prompts = self._prompts
        if not prompts and not hasattr(self.sampler, "agree"):
            return
        seeds = [each.seed(self.seed) for each in self.drawn] if prompts else []
        try:
            arguments = (self.sampler, prompts, seeds, self.rules)
            groups = ask_together(*arguments, self.replica_group)
        except SamplerError as error:
            counts = self.queue.metrics.counts
            raise SamplerError(error.reason, key=error.key, counts=counts) from error
        if not prompts:  # this rank took part in the passes of others
            return
        drawn, self.drawn = self.drawn, []
        for planned, prompt, group in zip(drawn, prompts, groups):
            self.queue.add(planned.number, prompt, group, place)
        self.queue.check_attempts(self.max_attempts, prompts[-1].__key__)


def attempt(work: Callable[[], Any]) -> Exception | None:
    """Return the error of some work, which is raised once the other ranks know of it."""
    try:
        work()
    except Exception as error:  # a sampler, or what reads prompts, may raise anything
        return error
    return None
