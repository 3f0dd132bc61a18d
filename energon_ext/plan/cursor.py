# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where a run stands in its plan: the step that is open, and how much of it has gone out."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any, Iterator, Mapping

from megatron.energon.state import FlexState

from energon_ext.errors import ConfigError
from energon_ext.plan.clock import Clock
from energon_ext.plan.cost import Cost
from energon_ext.plan.deal import ALONE
from energon_ext.plan.step import Plan, Step

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Cursor:
    """Draws step after step, and hands each out in rounds.

    Args:
        plan: at its beginning.
        clock: says at which position of the schedules a step is drawn, and whether it is skipped.
        is_shared: whether the plan is that of all ranks; else each row is a step of its own.
        cost: of rows; those of a step are then dealt so that ranks end together.
        is_first: whether this worker tells the log what all find.

    Attributes:
        step: the one that is open, None between two.
        done: rows of the step that all ranks have handed out.
        skipped: ranges of the steps that were skipped so far.
    """

    plan: Plan
    clock: Clock
    is_shared: bool
    cost: Cost | None
    is_first: bool

    def __post_init__(self) -> None:
        self.step: Step | None = None
        self.done = 0
        self.skipped: list[list[int]] = []
        self._topology = self.clock.topology if self.is_shared else ALONE
        self._before: FlexState | None = None  # state of the plan at the start of the step

    def rounds(self) -> Iterator[int]:
        """The number in its step of every round, until the plan ends."""
        for _ in self.steps():
            if self.clock.is_skipped(self.plan.step - 1):
                self._note_skipped(self.plan.step - 1)
                continue
            while self.done < self._topology.rows_per_step:
                self.done += self._topology.rows_per_round
                yield self.done // self._topology.rows_per_round - 1

    def steps(self) -> Iterator[Step]:
        """Every step, drawn and not read."""
        while self.step is not None or self._draw():
            assert self.step is not None
            yield self.step
            self.step, self.done = None, 0

    def _draw(self) -> bool:
        """Draw the rows of the next step; False at the end."""
        plan, topology = self.plan, self._topology
        self._before = plan.save_state() if topology.rounds > 1 else None
        ended = plan.mixture.ended.copy()
        number, position = plan.step, self.clock.at(plan.step, plan.row)
        if not self.is_shared:
            number, position = self.clock.step_now(), self.clock.now()
        self.step = plan.next(topology.rows_per_step, position)
        for key, has_ended in zip(plan.sources, plan.mixture.ended & ~ended):
            if has_ended and self.is_first:
                limit = plan.sources[key].max_epochs
                logger.info("%s: read to its end (max_epochs: %s); step %d.", key, limit, number)
        if self.step is not None and self.cost is not None:
            self.step.balance(self.cost, topology)
        return self.step is not None

    def _note_skipped(self, step: int) -> None:
        if self.skipped and self.skipped[-1][1] == step:
            self.skipped[-1][1] += 1
            return
        self.skipped.append([step, step + 1])
        if self.is_first:
            logger.info("Steps from %d on are skipped, as the metadataset says.", step)

    def save_state(self) -> dict[str, Any]:
        """The plan, at the start of the step where that is open, and rows of it that are done."""
        if self.is_shared and self.step is not None and self.done < self._topology.rows_per_step:
            plan, done = self._before, self.done
        else:
            plan, done = self.plan.save_state(), self.done if self.step is None else 0
        return {"plan": plan, "done": done, "skipped": copy.deepcopy(self.skipped)}

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`save_state`.

        Raises:
            ConfigError: the step that is open is to be skipped.
        """
        steps, rows = state["plan"]["step"], state["plan"]["row"]
        if state["done"] and self.clock.is_skipped(steps):
            raise ConfigError(
                f"skip: step {steps} was partly read when the state was saved; skip from "
                f"{steps + 1} on, or resume from a state that was saved between two steps."
            )
        at = self.clock.at(steps, rows) if self.is_shared else self.clock.at_own(rows)
        self.plan.restore_state(state["plan"], at)
        self.done = state["done"]
        self.skipped = [list(each) for each in state["skipped"]]
