# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fills the queue of a rank with answers, in rounds with the other ranks, or ahead of them."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import ConfigError, SamplerError
from energon_ext.rl.group_faults import GroupRules
from energon_ext.rl.group_queue import GroupQueue
from energon_ext.rl.place import Place
from energon_ext.rl.prompt_plan import PlannedPrompt, PromptPlan
from energon_ext.rl.request import Answered, Request
from energon_ext.rl.rounds import Need, Rounds, attempt
from energon_ext.rl.sampler import (
    BatchSampler,
    Sampler,
    ask_sampler,
    ask_together,
    check_question,
    run_together,
)
from energon_ext.state.together import from_first_rank

#: Share of groups that are of use, at least, by which prompts are asked ahead.
_LEAST_SHARE = 0.05


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
        groups_ahead: groups of all steps of a version, which are asked for in the version before;
            0 to ask in rounds only.

    Attributes:
        drawn: prompts that were drawn, but not asked about or not answered yet.
        request: those that a thread is asking about.
        asked_in: the last version in which prompts were asked ahead; None before the first.
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
    groups_ahead: int
    drawn: list[PlannedPrompt] = field(default_factory=list, init=False)
    request: Request | None = field(default=None, init=False)
    asked_in: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._prompts: list[Prompt] = []  # those that are asked about next
        self._synchronized: int | None = None  # step whose weights the server has

    def fill(self, least: int, place: Place) -> None:
        """Sample until every rank has enough groups; if one of them fails, all raise.

        Args:
            least: groups that this rank needs, unless the prompts end.
            place: steps and version of the policy that answers.
        """
        try:
            # After a resume, ranks may differ in what they have asked.
            if self.groups_ahead and any(self.rounds.agree(int(self.asked_in != place.version))):
                self._ask_ahead(place)
            is_short = len(self.queue.groups) < least
            error = attempt(self._collect) if is_short else None
            while any(needs := self.rounds.agree(self._need(least), error)):
                self.rounds.run(functools.partial(self._prepare, needs))
                self._synchronize(place.step)
                error = attempt(functools.partial(self._ask, place))
        except BaseException:
            self._synchronized = None  # a server that was started again has other weights
            raise

    def _synchronize(self, step: int) -> None:
        """Give the server the weights of a step, while no rank waits for answers of others."""
        if self.sync_weights is None or self._synchronized == step:
            return
        if self.groups_ahead:
            self.rounds.run(self._wait)
        sync = functools.partial(run_together, self.sync_weights, step, self.replica_group)
        self.rounds.run(sync)
        self._synchronized = step

    # In rounds ----------------------------------------------------------------------------------

    def _need(self, least: int) -> Need:
        if len(self.queue.groups) >= least:
            return Need.NOTHING
        if self.drawn:  # and not answered, as a call failed
            return Need.ANSWERS
        return Need.NOTHING if self.plan.ended else Need.PROMPTS

    def _prepare(self, needs: Sequence[int]) -> None:
        """Draw prompts for the ranks that need some, and read those that this rank asks about.

        After a failed call only its prompts are asked about, as if it had not failed.
        """
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
            arguments = (self.sampler, prompts, seeds, self._rules())
            groups = ask_together(*arguments, self.replica_group)
        except SamplerError as error:
            raise self._with_counts(error) from error
        if prompts:  # else this rank took part in the passes of others
            drawn, self.drawn = self.drawn, []
            self._add(_answered(drawn, prompts, groups, place))

    def _rules(self) -> GroupRules:
        """Return what the next groups must be like."""
        waiting = self.queue.groups
        return self.rules.like(waiting[0].group) if waiting else self.rules

    def _add(self, answers: Sequence[Answered]) -> None:
        for answered in answers:
            self.queue.add(answered)
        if answers:
            self.queue.check_attempts(self.max_attempts, answers[-1].key)

    def _with_counts(self, error: SamplerError) -> SamplerError:
        return SamplerError(error.reason, key=error.key, counts=self.queue.metrics.counts)

    # Ahead --------------------------------------------------------------------------------------

    def _ask_ahead(self, place: Place) -> None:
        """Collect the answers of the version before, and ask for those of the next one."""
        error = attempt(self._collect)
        counts = self.rounds.agree(0 if error else self._calls_ahead(), error)
        ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
        self.rounds.run(functools.partial(self._prepare_ahead, ranks))
        self._synchronize(place.step)
        self.rounds.run(functools.partial(self._begin_request, place))
        self.asked_in = place.version

    def _calls_ahead(self) -> int:
        """Return the batches of prompts that should give the groups of this and the next version.

        The share of groups that are of use is estimated from those so far, and the number of groups
        is two standard deviations above what is missing, so that the trainer rarely waits. All of
        this depends on counts that a state has, and on no time.
        """
        counts = self.queue.metrics.counts
        share = (counts["valid_groups"] + 1) / (counts["groups"] + 1)
        missing = max(0.0, 2.0 * self.groups_ahead - len(self.queue.groups))
        missing += 2 * math.sqrt(missing * (1 - share))
        prompts = missing / max(share, _LEAST_SHARE) - len(self.drawn)
        return max(0, math.ceil(prompts / self.plan.prompts_per_call))

    def _prepare_ahead(self, ranks: Sequence[int]) -> None:
        self.drawn += self.plan.draw(ranks, self.rank)
        self._prompts = self.plan.read(self.drawn) if self.drawn else []

    def _begin_request(self, place: Place) -> None:
        if not self.drawn:
            return
        drawn, prompts, now = self.drawn, self._prompts, Place(**vars(place))
        seeds = [each.seed(self.seed) for each in drawn]
        rules, is_first = self._rules(), True
        if self.replica_group is not None:
            check_question(prompts, seeds, self.replica_group)
            is_first = self.replica_group.rank() == 0

        def ask() -> list[Answered]:
            groups = ask_sampler(self.sampler, prompts, seeds, rules)
            return _answered(drawn, prompts, groups, now)

        self.request, self.drawn = Request(drawn, ask if is_first else None), []

    def _collect(self) -> None:
        """Wait for the answers that were asked for ahead; on an error, keep their prompts."""
        request = self.request
        if request is None:
            return
        try:
            if self.replica_group is None:
                answers = request.answers()
            else:
                answers = from_first_rank(request.answers, self.replica_group)
        except Exception as error:
            self.request, self.drawn = None, request.drawn + self.drawn
            if isinstance(error, SamplerError):
                raise self._with_counts(error) from error
            raise
        self.request = None
        self._add(answers)

    def _wait(self) -> None:
        """Wait until this rank has nothing in flight."""
        if self.request is not None:
            self.request.wait()

    # State --------------------------------------------------------------------------------------

    def in_flight(self, exact: bool) -> tuple[list[PlannedPrompt], list[Answered], int | None]:
        """Return the prompts without answers, the answers not collected yet, and ``asked_in``.

        Args:
            exact: wait for the answers; otherwise the prompts are asked again after a resume.
        """
        if self.request is None:
            return self.drawn, [], self.asked_in
        if not self.request.is_here:
            raise ConfigError(
                "save_state: only the first rank of a replica_group has the answers that are asked "
                "for ahead; save its state for all."
            )
        if exact:
            self.request.wait()
        if self.request.has_answers:
            return self.drawn, self.request.answers(), self.asked_in
        return self.request.drawn + self.drawn, [], None

    def restore(self, drawn: list[PlannedPrompt], answered: list[Answered], asked_in: Any) -> None:
        """Continue from what :meth:`in_flight` returned."""
        self.drawn, self.asked_in = drawn, asked_in
        self.request = Request.finished(answered) if answered else None


def _answered(
    drawn: Sequence[PlannedPrompt], prompts: Sequence[Prompt], groups: Sequence[Any], place: Place
) -> list[Answered]:
    return [
        Answered(planned.number, prompt.__key__, prompt.source, group, place.step, place.version)
        for planned, prompt, group in zip(drawn, prompts, groups)
    ]
