# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers that a thread asks for while the trainer trains."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from energon_ext.errors import ConfigError
from energon_ext.rl.prompt_plan import PlannedPrompt
from energon_ext.rl.sampler import Unanswered
from energon_ext.rl.scored_group import ScoredGroup


@dataclass(frozen=True, eq=False)
class Answered:
    """The answers to a prompt, before anything is computed from them.

    Attributes:
        number: number of the prompt, see :class:`~energon_ext.rl.prompt_plan.PlannedPrompt`.
        key, source: those of the prompt.
        group: the answers, or why there are none.
        step: optimizer steps taken by the policy when it answered.
        version: version of the weights that answered.
    """

    number: int
    key: str
    source: str
    group: ScoredGroup | Unanswered
    step: int
    version: int


class Request:
    """Prompts that are being answered.

    Args:
        drawn: the prompts.
        work: returns the answers; None if another rank of the replica asks.

    Attributes:
        drawn: as above.
        is_here: whether this rank has the answers.
    """

    def __init__(self, drawn: Sequence[PlannedPrompt], work: Callable[[], list[Answered]] | None):
        self.drawn = list(drawn)
        self.is_here = work is not None
        self._answers: Future[list[Answered]] = Future()
        if work is not None:
            # A daemon, so that a process may end while a server answers.
            threading.Thread(target=self._run, args=(work,), daemon=True, name="answers").start()

    @classmethod
    def finished(cls, answers: Sequence[Answered]) -> "Request":
        """Return a request whose answers are known, as after a resume."""
        request = cls([], None)
        request.is_here = True
        request._answers.set_result(list(answers))
        return request

    def _run(self, work: Callable[[], list[Answered]]) -> None:
        try:
            self._answers.set_result(work())
        except BaseException as error:  # raised where the answers are needed
            self._answers.set_exception(error)

    def wait(self) -> None:
        """Wait until nothing is in flight."""
        if self.is_here:
            wait([self._answers])

    @property
    def has_answers(self) -> bool:
        """True if all prompts have been answered, without an error."""
        return self._answers.done() and self._answers.exception() is None

    def answers(self) -> list[Answered]:
        """Wait for the answers, or raise the error of the sampler."""
        return self._answers.result()


def check_ahead(
    ahead: int, sampler: Any, steps_per_version: int, max_staleness: int | None
) -> None:
    """Raise ConfigError if answers cannot be asked for ahead with the other arguments."""
    if hasattr(sampler, "agree"):
        raise ConfigError(
            f"ahead: a {type(sampler).__name__} samples from the model in training, which changes "
            f"while it samples; use a server, or ahead=0."
        )
    if steps_per_version > 1:
        raise ConfigError(
            f"steps_per_version: {steps_per_version} found, but ahead={ahead} says how many steps "
            f"have the answers of one version; leave it out."
        )
    if max_staleness == 0:
        raise ConfigError(
            "max_staleness: 0 found, but with `ahead` all answers are one version old; use at "
            "least 1."
        )
