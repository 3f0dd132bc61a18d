# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The plan of many sources as one Energon dataset, whose samples are batches.

:class:`~energon_ext.ExactDataLoader` draws the plan in one process and reads its rows in others.
Energon's own loader can iterate the dataset, too: each of its workers then draws the whole plan and
reads the batches whose turn it is.
"""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Iterator, Mapping, Sequence

from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.state import FlexState

from energon_ext.errors import log_of
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import Tree
from energon_ext.plan.clock import Clock, RowLengths
from energon_ext.plan.cost import Cost
from energon_ext.plan.length import batches_in_pass
from energon_ext.plan.progress import DescribedRow, DrawnStep, Progress, Round, rounds_of
from energon_ext.plan.row_source import RowSource
from energon_ext.plan.settings import step_settings, worker_settings
from energon_ext.plan.source import Blend, Source
from energon_ext.plan.state import cursor_of, restore_cursor
from energon_ext.plan.step import Plan, Step
from energon_ext.state.match import SourceChange
from energon_ext.state.schema import without_seal
from energon_ext.weights import LiveWeights

logger = log_of(__name__)


@dataclass(frozen=True, kw_only=True)
class PassOptions:
    """The length of a pass over a plan, and what happens at the end of the plan.

    Attributes:
        batches: batches per rank in one pass; 0 for all.
        repeats: whether sources are read again, in another order, when all have ended.
        restarts: whether every pass starts with the first row.
    """

    batches: int = 0
    repeats: bool = False
    restarts: bool = False


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """How rows become batches, and which settings a saved state depends on.

    Attributes:
        assemble: builds a batch from rows.
        padding: builds a row that counts as nothing, to complete the last step, given a function
            that reads one of its rows. If None, an incomplete last step is dropped.
        fingerprint: JSON values saved with a state, which is refused if they differ.
        encoder: JSON values from which the encoder can be rebuilt.
        cost: cost of rows; if given, the rows of a step are distributed so that all ranks take
            equally long.
    """

    assemble: Callable[[list[Any]], Any]
    padding: Callable[[Callable[[], Any]], Any] | None
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    encoder: Mapping[str, Any] = field(default_factory=dict)
    cost: Cost | None = None


class PlannedDataset(Blend, SavableDataset):
    """Yields the batches of one rank.

    Args:
        sources, tree, clock: see :class:`~energon_ext.plan.source.Blend`; all sources are planned.
        worker_config: configuration of Energon.
        batches: how rows become batches.
        passes: length of a pass.

    Attributes:
        rows: the rows of each source, in the order of the keys.
        plan: draws steps; it may be ahead of ``progress``.
        progress: state after the last batch that was handed out.
        retained: states of sources that are only in the restored state, by key.
        earlier_digests: data digests of the steps before the restored state, as in a cursor.
        dropped_rows: rows that did not fill the last step, once the plan has ended.

    State: one cursor for the run, see :mod:`energon_ext.plan.state`.
    """

    is_planned = True

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        tree: Tree,
        clock: Clock,
        worker_config: WorkerConfig,
        batches: BatchOptions,
        passes: PassOptions | None = None,
    ):
        SavableDataset.__init__(self, worker_config=worker_config)
        Blend.__init__(self, sources, tree, clock)
        self.batches, self.passes = batches, passes or PassOptions()
        self.rows: list[RowSource] = [source.rows for source in self.sources.values()]
        self.fingerprint = {**batches.fingerprint, "seed": worker_config.seed_offset}
        self.reset_state_own()

    # The plan -----------------------------------------------------------------------------------

    def reset_state_own(self) -> None:
        self.retained: dict[str, Any] = {}
        self.earlier_digests: tuple[tuple[int, str], ...] = ()
        self.dropped_rows = 0
        for rows in self.rows:
            rows.restart()
        seed, row_tokens = str(self.worker_config.seed_offset), self.clock.row_tokens
        mixture = Mixture(self.tree, self.keys, seed=seed, row_tokens=row_tokens)
        self.plan = Plan(self.rows, mixture, repeats=self.passes.repeats)
        self.progress = Progress(self.plan.advance())
        self._stream: Iterator[Round] | None = None
        self._has_begun = False

    def fork(self, state: Mapping[str, Any] | None = None) -> PlannedDataset:
        """Return a dataset over the same data that draws on its own, to answer questions.

        It continues after the last batch of this one, which it never moves, or from a cursor. A
        step that was partly read comes first, as a whole.
        """
        cursor = cursor_of(self, self.progress) if state is None else without_seal(state)
        other = copy.copy(self)
        other.sources = {
            key: replace(source, rows=source.rows.fork()) for key, source in self.sources.items()
        }
        other.rows = [source.rows for source in other.sources.values()]
        other.continue_from({**cursor, "done": 0, "inside": None})
        return other

    def draw_steps(self, live_weights: Sequence[LiveWeights] = ()) -> Iterator[Step]:
        """Draw the next steps; before each, wait until the given live weights cover it."""
        plan, clock, rows = self.plan, self.clock, self.topology.rows_per_step
        while True:
            for live in live_weights if not plan.ended else ():
                live.wait(plan.step)
            step = plan.next(rows, clock.at(plan.step, plan.row, plan.row_lengths))
            if step is None:
                return
            if self.batches.padding is None and step.num_rows < rows:
                self.dropped_rows = step.num_rows
                return
            if self.batches.cost is not None:
                step.balance(self.batches.cost, self.topology)
            yield step

    def drawn_steps(self) -> Iterator[DrawnStep]:
        """Yield the next steps as this rank reads them."""
        for step in self.draw_steps(self.live_weights):
            yield self._drawn(step)
        if self.dropped_rows:
            logger.warning(
                "The last %d rows do not fill a step and are dropped; a method make_padding of the "
                "TaskEncoder would complete it.",
                self.dropped_rows,
            )

    def _drawn(self, step: Step) -> DrawnStep:
        number = self.plan.step - 1
        is_read = not self.clock.is_skipped(number)
        rounds = map(self.topology.rows_of, range(self.topology.rounds if is_read else 0))
        described = [[self._describe(step, row) for row in rows] for rows in rounds]
        return DrawnStep(number, described, self.plan.advance(), tuple(self.plan.just_ended))

    @staticmethod
    def _describe(step: Step, row: int) -> DescribedRow:
        found = step.taken(row)
        taken, index, source = found or step.first()
        return source, taken.description(index), found is None

    @functools.cached_property
    def step_settings(self) -> dict[str, Any]:
        return step_settings(self)

    @functools.cached_property
    def worker_settings(self) -> dict[str, Any]:
        return worker_settings(self)

    # Batches ------------------------------------------------------------------------------------

    @property
    def row_lengths(self) -> RowLengths:
        return self.progress.plan.row_lengths

    @property
    def batches_read(self) -> int:
        """Batches handed out since the run began, per rank."""
        return self.progress.read // self.topology.rows_per_round

    def begin(self) -> None:
        """Reset the plan to the progress: it may be ahead, or be drawn by another process."""
        if self._has_begun:
            self.continue_from(cursor_of(self, self.progress))

    def rounds(self, steps: Iterator[DrawnStep]) -> Iterator[Round]:
        """Yield the next rounds; ``steps`` begin with the current step."""
        self._has_begun = True
        return rounds_of(steps, self.progress.done // self.topology.rows_per_round)

    def hand_out(self, round_: Round) -> bool:
        """Advance the progress by a round; return whether the pass ends with it."""
        self.progress.hand_out(round_, self.topology.rows_per_round)
        if self.worker_config.rank == 0 and self.worker_config.rank_worker_id() == 0:
            self._log(round_)
        return bool(self.passes.batches) and self.batches_read % self.passes.batches == 0

    def _log(self, round_: Round) -> None:
        if round_.skipped:
            first, last = round_.skipped[0].number, round_.skipped[-1].number
            logger.info("Steps %d to %d are skipped, as set in the metadataset.", first, last)
        step = round_.completes
        if step is None:
            return
        for key in step.ended:
            limit = self.sources[key].max_epochs
            logger.info("%s: read to its end (max_epochs: %s) in step %d.", key, limit, step.number)

    def read(self, rows: Sequence[DescribedRow]) -> Any:
        """Read rows and build a batch from them."""
        self.prefetch(rows)
        return self.batches.assemble([self._read_row(row) for row in rows])

    def prefetch(self, rows: Sequence[DescribedRow]) -> None:
        """Ask the storage to prefetch rows."""
        for source, description, is_padding in rows:
            if not is_padding:
                self.rows[source].prefetch(description)

    def _read_row(self, row: DescribedRow) -> Any:
        source, description, is_padding = row
        read = functools.partial(self.rows[source].read, description)
        if not is_padding:
            return read()
        assert self.batches.padding is not None, "an incomplete step is dropped without padding"
        return self.batches.padding(read)

    def end_pass(self) -> None:
        """Start again with the first row if passes restart."""
        if self.passes.restarts:
            self.reset_state_own()

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of this worker of Energon's own loader in one pass."""
        worker, workers = self.worker_config.rank_worker_id(), self.topology.workers
        if self._stream is None:
            self.begin()
            self._stream = self.rounds(self.drawn_steps())
        for round_ in self._stream:
            is_own = self.batches_read % workers == worker
            is_last = self.hand_out(round_)
            if is_own:
                yield self.read(round_.rows)
            if is_last:
                break
        else:
            self._stream = None
        self.end_pass()

    # Energon's dataset interface ----------------------------------------------------------------

    def set_skip_mode(self, active: bool) -> None:
        """Do nothing: the next Energon may ask for less work on batches that it will drop."""

    def len_rank(self) -> int:
        """Return the batches of this rank in a pass; TypeError if it is endless."""
        batches = batches_in_pass(self)
        if batches is None:
            raise TypeError(
                "An endless dataset has no length; pass a virtual_epoch_length or repeat=False, or "
                "limit every source by max_epochs."
            )
        return batches

    def len_worker(self, worker_idx: int | None = None) -> int:
        workers = self.topology.workers
        worker = self.worker_config.rank_worker_id() if worker_idx is None else worker_idx
        return len(range(worker, self.len_rank(), workers))

    def worker_has_samples(self) -> bool:
        return True

    def assert_can_restore(self) -> None:
        raise NotImplementedError("Batches of a plan have no restore keys.")

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Any:
        self.assert_can_restore()

    def config(self) -> dict[str, Any]:
        return {
            "type": type(self).__qualname__,
            "sources": list(self.sources),
            "worker_config": self.worker_config.config(),
        }

    def save_state(self) -> FlexState:
        """Return the cursor after the last batch of this worker of Energon's own loader."""
        state = cursor_of(self, self.progress)
        if self.worker_config.num_workers:
            state["inside"] = self.worker_settings
        return FlexState(state)

    def restore_state(self, state: Any) -> None:
        """Continue from a cursor, with or without its digest; from the start if it is refused.

        Raises: see :func:`~energon_ext.plan.state.restore_cursor`.
        """
        self.continue_from(state)

    def continue_from(self, state: Any) -> list[SourceChange]:
        """Like :meth:`restore_state`, but return the change of every source."""
        self.reset_state_own()
        try:
            return restore_cursor(self, without_seal(state))
        except BaseException:  # including Ctrl-C: never continue from a partly restored state
            self.reset_state_own()
            raise
