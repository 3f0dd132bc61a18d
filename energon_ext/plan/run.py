# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A run: its plan, and how much of the plan has been handed out.

A run is a function of numbers alone. It reads no document and needs neither torch nor Energon, so
any process may ask it what comes next: on a fork, which draws on its own.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, Iterable, Iterator, Mapping, Sequence

from energon_ext.errors import ConfigError, log_of
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import Tree
from energon_ext.plan.blend import Blend
from energon_ext.plan.clock import Clock, RowLengths, add_rows
from energon_ext.plan.cost import Cost, digest_of_cost
from energon_ext.plan.layout import ContextOptions, Layout, MicroBatch, lay_out_step
from energon_ext.plan.plan import Plan
from energon_ext.plan.progress import (
    DescribedBatch,
    DescribedRow,
    DrawnStep,
    Progress,
    Round,
    rounds_of,
)
from energon_ext.plan.rows import Rows
from energon_ext.plan.source import PlannedSource
from energon_ext.plan.spec import Spec
from energon_ext.plan.step import Step
from energon_ext.plan.topology import Topology
from energon_ext.state.schema import digest_of

logger = log_of(__name__)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run, in addition to its sources, weights and topology.

    Attributes:
        spec: what decides its rows together with the metadataset.
        pass_batches: batches per rank in one pass; 0 for all.
        repeats: whether sources are read again, in another order, when all have ended.
        restarts: whether every pass starts with the first row.
        cost: that of ``spec``; None if it has none, or one that is not known here.
        contexts: those of ``spec``; None if its steps are not read in layouts.
    """

    spec: Spec = field(default_factory=Spec)
    pass_batches: int = 0
    repeats: bool = False
    restarts: bool = False
    cost: Cost | None = None
    contexts: ContextOptions | None = None


class Run(Blend):
    """The rows of a run, step by step, and its progress.

    Args:
        sources, tree, clock: see :class:`~energon_ext.plan.blend.Blend`.
        options: everything else.

    Attributes:
        plan: draws steps; it may be ahead of ``progress``.
        progress: state after the last batch that was handed out.
        retained: states of sources that are only in the restored state, by key.
        earlier_digests: data digests of the steps before the restored state, as in a cursor.
        dropped_rows: rows that did not fill the last step, once the plan has ended.
        is_fork: whether it only answers questions; the last weights written then stand for those
            that are not decided.

    State: one cursor, see :mod:`energon_ext.plan.cursor`.
    """

    is_planned = True
    is_fork = False
    sources: Mapping[str, PlannedSource]

    def __init__(
        self,
        sources: Sequence[PlannedSource],
        *,
        tree: Tree,
        clock: Clock,
        options: RunOptions | None = None,
    ):
        super().__init__(sources, tree, clock)
        self.options = options or RunOptions()
        self.spec = self.options.spec
        self.fingerprint = self.spec.compared()
        self.restart()

    def restart(self) -> None:
        """Start with the first row."""
        self.retained: dict[str, Any] = {}
        self.earlier_digests: tuple[tuple[int, str], ...] = ()
        self.dropped_rows = 0
        mixture = Mixture(
            self.tree,
            self.keys,
            seed=str(self.spec.seed),
            row_tokens=self.clock.row_tokens,
            unit=self.clock.axis.one,
        )
        first_rows = [source.first_rows for source in self.sources.values()]
        self.plan = Plan(
            first_rows,
            mixture,
            repeats=self.options.repeats,
            row_tokens=self.clock.row_tokens,
        )
        self.progress = Progress(self.plan.save_state())

    def rewind(self) -> None:
        """Reset the plan to the progress."""
        self.plan = self.plan.fork(self.progress.plan)
        self.dropped_rows = 0

    def over(self, topology: Topology) -> Run:
        """Return a run over the same data from its first row on, with another topology."""
        clock = dataclasses.replace(self.clock, topology=topology)
        return Run([*self.sources.values()], tree=self.tree, clock=clock, options=self.options)

    def fork(self) -> Run:
        """Return a run over the same data that draws on its own, to answer questions.

        It continues after the last batch of this one, which it never moves. A step that was partly
        read comes first, as a whole.
        """
        other = copy.copy(self)
        other.is_fork = True
        other.progress = dataclasses.replace(self.progress, done=0)
        other.rewind()
        return other

    def on(self, topology: Topology) -> Run:
        """Return a run over the same data with other ranks, to be restored.

        Raises:
            ConfigError: the rows of a step do not fill the batches of all ranks, and nothing pads.
        """
        if topology.places > topology.rows_per_step and not self.spec.pads:
            raise ConfigError(
                f"rows_per_step: {topology.rows_per_step} found; {topology.batch_rows} x "
                f"{topology.ranks} = batch_size x data-parallel ranks must divide it, since the "
                f"TaskEncoder has no method make_padding, whose rows would complete each step."
            )
        other = copy.copy(self)
        other.clock = dataclasses.replace(self.clock, topology=topology)
        return other

    def adopt(self, other: Run) -> None:
        """Continue where another run over the same data is, which is not used any more."""
        self.clock = other.clock
        self.plan, self.progress, self.dropped_rows = other.plan, other.progress, 0
        self.retained, self.earlier_digests = other.retained, other.earlier_digests

    # Drawing ------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[Rows]:
        """The rows of each source at the current step of the plan, in the order of the keys."""
        return [self.plan.rows(number) for number in range(len(self.keys))]

    @property
    def epoch_tokens(self) -> dict[str, int]:
        tokens = {key: source.first_rows.epoch_tokens for key, source in self.sources.items()}
        return {key: count for key, count in tokens.items() if count is not None}

    def draw_steps(self) -> Iterator[Step]:
        """Draw the next steps; before each, wait until live weights cover it, unless on a fork."""
        plan, clock = self.plan, self.clock
        while True:
            for live in () if self.is_fork or plan.ended else self.live_weights:
                live.wait(plan.step)
            position = clock.at(plan.step, plan.row, plan.row_lengths)
            topology = self._repack(position)
            rows = topology.rows_per_step
            step = plan.next(rows, position)
            if step is None:
                return
            if clock.rows is not None:
                plan.row_lengths = add_rows(
                    plan.row_lengths, plan.row - rows, plan.row, plan.row_tokens, clock.row_tokens
                )
            step.position, step.topology, step.row_tokens = position, topology, plan.row_tokens
            if not self.spec.pads and step.num_rows < rows:
                self.dropped_rows = step.num_rows
                return
            if self.options.cost is not None:
                step.balance(self.options.cost, topology)
            yield step

    def _repack(self, position: int) -> Topology:
        """Change the length of rows as their schedule asks; return the topology of the step."""
        row_tokens = self.clock.row_tokens_at(position)
        if row_tokens != self.plan.row_tokens:
            self.plan.repack(row_tokens)
        return self.clock.topology_of(row_tokens)

    def draw_own_steps(self) -> Iterator[DrawnStep]:
        """Yield the next steps as this rank reads them."""
        for step in self.draw_steps():
            yield self._describe_step(step)
        if self.dropped_rows:
            logger.warning(
                "The last %d rows do not fill a step and are dropped; a method make_padding of the "
                "TaskEncoder would complete it.",
                self.dropped_rows,
            )

    def _describe_step(self, step: Step) -> DrawnStep:
        number = self.plan.step - 1
        described = [] if self.clock.is_skipped(number) else self._describe_batches(step)
        return DrawnStep(number, described, self.plan.save_state(), tuple(self.plan.just_ended))

    def _describe_batches(self, step: Step) -> list[DescribedBatch]:
        """Return the batches of this rank in a step."""
        found = self.loss_weights_at(step.position)
        weights = {self.keys.index(key): weight for key, weight in found.items()}
        if self.options.contexts is not None:
            own = self.lay_out(step).of_rank(self.topology.rank)
            return [_describe_micro_batch(step, each, weights) for each in own]
        rounds = map(step.topology.rows_of, range(step.topology.rounds))
        return [self.describe_rows(step, rows, weights) for rows in rounds]

    def describe_rows(
        self, step: Step, rows: Iterable[int], weights: Mapping[int, float]
    ) -> DescribedBatch:
        """Return rows of a step as a batch; ``weights`` in the loss are by number of the source."""
        row_tokens = None if self.clock.rows is None else step.row_tokens
        described = [_describe(step, row, weights) for row in rows]
        return DescribedBatch(described, row_tokens=row_tokens)

    def lay_out(self, step: Step) -> Layout:
        """Return the layout of a step of a run that reads its steps in layouts."""
        assert self.options.contexts is not None, "other steps have no layout"
        return lay_out_step(step.units, self.topology.ranks, self.options.contexts)

    # Progress -----------------------------------------------------------------------------------

    @property
    def row_lengths(self) -> RowLengths:
        return self.progress.plan.row_lengths

    @property
    def next_position(self) -> int:
        plan, skipped = self.progress.plan, 0
        while self.clock.is_skipped(plan.step + skipped):
            skipped += 1
        row = plan.row + skipped * self.topology.rows_per_step
        return self.clock.at(plan.step + skipped, row, plan.row_lengths)

    def position(self, step: int, row: int | None = None) -> int:
        if self.clock.rows is None:
            return super().position(step, row)
        # All steps have as many positions, except those before a resume with another length.
        plan, clock = self.progress.plan, self.clock
        found = clock.at(plan.step, plan.row, plan.row_lengths)
        usual = clock.at(plan.step, plan.step * self.topology.rows_per_step)
        return clock.at_step(step) + found - usual

    @property
    def batches_read(self) -> int:
        """Batches handed out since the run began, per rank; in layouts, since the last restore."""
        if self.topology.in_layouts:
            return self.progress.batches
        steps, rows = divmod(self.progress.read, self.topology.rows_per_step)
        return steps * self.topology.rounds + rows // self.topology.rows_per_round

    def rounds(self, steps: Iterator[DrawnStep]) -> Iterator[Round]:
        """Yield the next rounds; ``steps`` begin with the current step."""
        done = self.progress.done
        is_counted = self.topology.in_layouts
        return rounds_of(steps, done if is_counted else done // self.topology.rows_per_round)

    def hand_out(self, round_: Round) -> bool:
        """Advance the progress by a round; return whether the pass ends with it."""
        self.progress.hand_out(round_, self.topology)
        batches = self.options.pass_batches
        return bool(batches) and self.batches_read % batches == 0

    # Settings that a state depends on, as JSON values; long ones are replaced by digests ---------

    @property
    def step_settings(self) -> dict[str, Any]:
        """Everything that the draw of a step depends on apart from the plan."""
        topology = self.topology
        return {
            "rows_per_step": topology.rows_per_step,
            "batch_size": topology.batch_rows,
            "ranks": topology.ranks,
            **self._settings_of_any_ranks,
        }

    @functools.cached_property
    def _settings_of_any_ranks(self) -> dict[str, Any]:
        cost, clock = self.options.cost, self.clock
        contexts = self.options.contexts
        options: dict[str, list[Any]] = {}
        for key, source in self.sources.items():
            for name, value in source.first_rows.options().items():
                options.setdefault(name, []).append([key, value])
        return {
            "axis": clock.axis.counted,
            "cost": None if cost is None else digest_of_cost(cost, clock.row_tokens),
            "mixture": digest_of(self.tree.to_json())[:16],
            **({} if contexts is None else {"contexts": digest_of(contexts.to_json())[:16]}),
            **({"loss_weights": self.loss_weights_as_json} if self.loss_weights else {}),
            **({"row_tokens": clock.rows.to_json()} if clock.rows else {}),
            **{name: digest_of(values)[:16] for name, values in options.items()},
        }

    @property
    def loss_weights_as_json(self) -> dict[str, Any]:
        """The factors of the sources in the loss as JSON values."""
        return {key: weight.to_json() for key, weight in self.loss_weights.items()}

    @property
    def worker_settings(self) -> dict[str, Any]:
        """Everything that the batches of one worker of Energon's loader depend on.

        The workers of a rank are saved after different batches. Each of them draws the steps in
        between again, so all must draw them as before.
        """
        return {
            **self.step_settings,
            "workers": self.topology.workers,
            "skip": [list(each) for each in self.clock.skip],
            "virtual_epoch_length": self.options.pass_batches,
        }


def _describe(step: Step, row: int, weights: Mapping[int, float]) -> DescribedRow:
    found = step.row(row)
    taken, index, source = found or step.first()
    return source, taken.description(index), found is None, weights.get(source)


def _describe_micro_batch(
    step: Step, micro_batch: MicroBatch, weights: Mapping[int, float]
) -> DescribedBatch:
    rows: list[DescribedRow] = []
    for found in step.contents_of_units(micro_batch.units):
        description = found.taken.description_of_pieces(found.places)
        rows.append((found.source, description, False, weights.get(found.source)))
    return DescribedBatch(rows or [(0, None, True, None)], micro_batch.size)
