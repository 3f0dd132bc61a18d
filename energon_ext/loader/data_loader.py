# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loader of a planned dataset: one planner draws, readers read.

::

    planner --> rows of the next batches --> readers --> batches, in order
       |                                                     |
       +--> the state after each step                        +--> trainer; state_dict()

In torch's terms, the planner is the ``sampler`` of a ``DataLoader`` over the readers, which are a
map-style dataset. Without workers, everything runs in the trainer. With workers, the planner runs
in its own process, as a one-worker ``DataLoader``, so planning does not delay training steps.

The state is that after the last batch the trainer took, no matter what was read ahead.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import Any, Iterator, Mapping

import torch
from megatron.energon import WorkerConfig
from megatron.energon.rng import SystemRng
from torch.utils.data import DataLoader, IterableDataset

from energon_ext.arguments import check_integer, check_number
from energon_ext.errors import ConfigError, log_of
from energon_ext.loader.ahead import rounds_ahead, with_later_rows
from energon_ext.loader.compare import Comparison
from energon_ext.loader.fork import WorkerContext
from energon_ext.loader.planned_dataset import PlannedDataset
from energon_ext.loader.processes import (
    Failure,
    begin_worker,
    explain_deaths,
    explain_deaths_in_signals,
)
from energon_ext.loader.reader import RoundReader
from energon_ext.loader.resume_log import log_resume
from energon_ext.loader.slots import SlotBatch, Slots
from energon_ext.loader.state_names import SavesState
from energon_ext.plan.cursor import check_same_run, restore_cursor, save_cursor
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.progress import DescribedBatch, DrawnStep, Progress, Round
from energon_ext.plan.run import Run
from energon_ext.plan.topology import Topology
from energon_ext.state.match import SourceChange
from energon_ext.state.schema import check_seal, seal
from energon_ext.storage.range_reader import READ_REQUESTS, use_requests

logger = log_of(__name__)

#: Steps by which the planner's process runs ahead.
PLANNED_STEPS = 2


class ExactDataLoader(SavesState):
    """Iterates a planned dataset; its state is one JSON object, the same on every rank.

    The dataset determines a pass: endless, a virtual epoch, or once through the data. The next
    ``iter()`` continues after the last batch that was taken.

    Args:
        dataset: dataset of :func:`energon_ext.get_train_dataset` with planned sources.
        prefetch_factor: batches that each worker reads ahead.
        timeout: seconds to wait for a batch from the workers; live weights and the comparison of
            ranks get a quarter of it.
        read_ahead_bytes: approximate bytes to prefetch from an object store.
        read_requests: concurrent requests to an object store, over all workers.
        compare_ranks: whether the data-parallel ranks compare what they plan at their first batch.

    Attributes:
        dataset: the given dataset.
        comparison: made before the first batch.
        changes: effect of the restore on each source.

    Raises:
        ConfigError: the dataset is streamed, or wrapped in other datasets.
        RankError: from ``next()``: ranks differ, or some do not come.

    Example:
        >>> loader = ExactDataLoader(dataset)                         # doctest: +SKIP
        >>> batch = next(iter(loader))                                # doctest: +SKIP
        >>> json.dump(loader.state_dict(), open("data.json", "w"))    # doctest: +SKIP
    """

    def __init__(
        self,
        dataset: Any,
        *,
        prefetch_factor: int = 2,
        timeout: float = 1800.0,
        read_ahead_bytes: int = 64 * 2**20,
        read_requests: int = READ_REQUESTS,
        compare_ranks: bool = True,
    ):
        check_integer("ExactDataLoader: prefetch_factor", prefetch_factor, 1)
        check_integer("ExactDataLoader: read_ahead_bytes", read_ahead_bytes, 0)
        check_integer("ExactDataLoader: read_requests", read_requests, 1)
        check_number("ExactDataLoader: timeout", timeout, above_zero=True)
        self.dataset = _check_planned(dataset)
        self._run = self.dataset.run
        if (contexts := self._run.options.contexts) is not None:
            contexts.check_ranks(self._run.topology.ranks)
        self.comparison = Comparison(self.worker_config, compare_ranks, timeout / 4)
        self.changes: list[SourceChange] = []
        self._timeout, self._prefetch_factor = timeout, prefetch_factor
        self._read_requests = read_requests
        self._rounds_ahead = rounds_ahead(self.dataset, read_ahead_bytes)
        self._slots: Slots | None = None  # with workers
        self._batches: Iterator[Any] | None = None
        self._pending: deque[Round] = deque()  # passed to readers, but not yet to the trainer
        self._has_begun = self._is_closed = False
        for live in self._run.live_weights:
            live.deadline = timeout / 4  # 450 s, below Megatron's collective timeout of 600 s
            # All ranks wait together, unless a file system shows them different files.
            live.patience = 10.0 if self.dataset.worker_config.rank == 0 else 60.0

    @property
    def planned_through(self) -> int:
        """The last step that may be planned before the next batch is returned.

        A controller of :class:`~energon_ext.weights.LiveWeights` in the training loop must set
        weights up to this step before it draws the batch; without workers, the step of that batch.
        """
        step, ahead = self._run.progress.plan.step, 0
        if workers := self.worker_config.num_workers:
            batches = workers * self._prefetch_factor
            ahead = PLANNED_STEPS + math.ceil(batches / self._run.topology.rounds)
        clock = self._run.clock
        for _ in range(ahead + 1):
            while clock.is_skipped(step):
                step += 1
            step += 1
        return step - 1

    @property
    def worker_config(self) -> WorkerConfig:
        """The worker configuration of the dataset."""
        return self.dataset.worker_config

    @property
    def batches_drawn(self) -> int:
        """Batches of this rank since the start of the run; in layouts, since the last restore."""
        return self._run.batches_read

    @property
    def ends_step(self) -> bool:
        """True if the last batch completed its step, and before the first batch of a step."""
        return self._run.progress.done == 0

    def __len__(self) -> int:
        """Return the batches of this rank in a pass; TypeError if it is endless."""
        return self.dataset.len_rank()

    def __iter__(self) -> Iterator[Any]:
        """Start or continue a pass; ConfigError if the loader was closed."""
        self._check_open()
        return self._one_pass()

    def _check_open(self) -> None:
        if self._is_closed:
            raise ConfigError("This loader was closed; create a new one and load the state.")

    def _one_pass(self) -> Iterator[Any]:
        is_last = False
        while not is_last:
            if (batch := self._next()) is None:  # the plan has ended
                self._batches = None
                self.dataset.end_pass()
                return
            is_last = self.dataset.hand_out(self._pending.popleft())
            if is_last and self._run.options.restarts:
                self._drop_batches()
                self.dataset.end_pass()
            yield batch

    def _drop_batches(self) -> None:
        """End the processes, with what they have read ahead; the next batch starts others."""
        self._batches = None
        self._pending.clear()

    def _next(self) -> Any:
        self._check_open()
        try:
            with explain_deaths(self.worker_config.num_workers):
                if self._batches is None:
                    self._batches = self._start()
                batch = next(self._batches, None)
                if self._slots is not None and isinstance(batch, SlotBatch):
                    batch = self._slots.take(batch)
            if isinstance(batch, Failure):
                batch.throw()
        except BaseException:
            self.close()  # the plan may be ahead of the batches
            raise
        return batch

    def _start(self) -> Iterator[Any]:
        self._has_begun = True
        self.comparison.run(self._run)
        workers = self.worker_config.num_workers
        count = max(1, workers)  # of readers
        self._slots = Slots(workers * self._prefetch_factor + 1) if workers else None
        if self._rounds_ahead:  # each forked worker inherits this number
            use_requests(-(-self._read_requests // count))
        self.dataset.begin()
        readers = DataLoader(
            RoundReader(self.dataset.batches, self.worker_config, self._slots),
            sampler=_Rounds(lambda: with_later_rows(self._rounds(), count, self._rounds_ahead)),
            **_options(workers, self._prefetch_factor, self._timeout),
            worker_init_fn=self._begin_reader,
        )
        batches = iter(readers)
        explain_deaths_in_signals()
        return batches

    def _rounds(self) -> Iterator[tuple[int, DescribedBatch | Failure]]:
        """Yield the number of every batch and the batch; the last may be an error of the planner.

        This must be a generator: torch iterates a sampler twice, and readers must be forked before
        the planner.
        """
        number = self.batches_drawn
        failures: list[Failure] = []
        for round_ in self._run.rounds(self._steps(failures)):
            self._pending.append(round_)
            yield number, round_.batch
            number += 1
        for failure in failures:
            yield number, failure

    def _steps(self, failures: list[Failure]) -> Iterator[DrawnStep]:
        if self.worker_config.num_workers == 0:
            yield from self._run.draw_own_steps()
            return
        planner = DataLoader(
            _Planner(self._run),
            **_options(1, PLANNED_STEPS, self._timeout),
            worker_init_fn=begin_worker,
        )
        for step in planner:
            if isinstance(step, Failure):
                failures.append(step)
                return
            yield step

    def _begin_reader(self, worker: int) -> None:
        begin_worker(worker)
        SystemRng.seed(self.worker_config.worker_seed(worker))

    # State --------------------------------------------------------------------------------------

    def mark(self) -> Progress:
        """Mark the last batch that was taken, for a later :meth:`state_dict`; takes no time."""
        return self._run.progress.copy()

    def state_dict(self, mark: Progress | None = None) -> dict[str, Any]:
        """Return the cursor after the last or the marked batch: JSON values, equal on all ranks."""
        return seal(save_cursor(self._run, mark))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict` of any rank, with any number of ranks and workers.

        A state saved inside a step only continues with the same ranks, batch size and mix.

        Raises:
            StateFormatError: the state is damaged, or not a data state.
            StateMismatchError: it belongs to another configuration.
            ConfigError: batches were already drawn, a state was loaded, or the loader was closed.
        """
        if self._has_begun or self._is_closed or self.changes:
            raise ConfigError("Restore a data state before the first batch, in a new loader.")
        content = check_seal(state)
        self.changes = restore_cursor(self._run, content)
        if self.worker_config.rank == 0:
            log_resume(self.changes, content, self._run)

    def continue_from(
        self,
        start: Progress | Mapping[str, Any],
        *,
        rank: int | None = None,
        ranks: int | None = None,
        batch_rows: int | None = None,
    ) -> None:
        """Continue at the start of a step, as any data-parallel rank of any number of ranks.

        With this, a run goes on in the same processes when it loses or regains ranks: all of them
        go back to the mark before the step and divide its rows again. If the loader is at ``start``
        already and the given ``ranks`` are as before, nothing is done, so it may be called before
        every step. Without ``ranks``, the loader's processes end in any case: call it so when this
        rank leaves a process group, of whose connections they have copies.

        If the batches of all ranks do not divide the global batch, padding completes the last ones
        of each step. Ranks that are given here are not compared at the first batch, as they must
        not wait for one that has died; instead, the state of another rank is.

        Args:
            start: a :meth:`mark` of this loader, or the :meth:`state_dict` of another rank of the
                run, which has the same metadataset, data and arguments.
            rank, ranks: this rank, and their number; by default as before.
            batch_rows: rows of a batch; by default as before.

        Raises:
            ConfigError: ``start`` is inside a step, the rank is not one of the ranks, nothing can
                pad a step, or the loader was closed.
            RankError: the other rank plans other rows.
            StateFormatError, StateMismatchError: as for :meth:`load_state_dict`.

        Example:
            >>> start = loader.mark()                           # doctest: +SKIP
            >>> loader.continue_from(start, rank=1, ranks=3)    # doctest: +SKIP
        """
        self._check_open()
        topology = _change(self._run.topology, rank=rank, ranks=ranks, batch_rows=batch_rows)
        if (contexts := self._run.options.contexts) is not None:
            contexts.check_ranks(topology.ranks)
        moved = self._run.on(topology)
        if isinstance(start, Progress):
            _check_between_steps(start.done, topology)
            is_there = start.plan is moved.progress.plan and not moved.progress.done
            if is_there and topology == self._run.topology and ranks is not None:
                self.comparison.skip()
                return
            moved.progress = start.copy()
        else:
            content = check_seal(start)
            changes = restore_cursor(moved, content)
            _check_between_steps(content["done"], topology)
            check_same_run(moved, content)
            self.changes = changes
        if ranks is not None:
            self.comparison.skip()
        self._run.adopt(moved)
        self.dataset.move_to(topology.rank, topology.ranks)
        self._drop_batches()
        if topology.rank == 0:
            step = self._run.progress.plan.step
            logger.info("The data continues at step %d on %d ranks.", step, topology.ranks)

    def close(self) -> None:
        """End the processes; the state can still be saved."""
        self._is_closed = True
        self._batches = None


class _Rounds:
    """An iterable over the generator that a function returns."""

    def __init__(self, generate: Any):
        self._generate = generate

    def __iter__(self) -> Iterator[Any]:
        return self._generate()


class _Planner(IterableDataset[Any]):
    """Draws the steps of a plan in a separate process."""

    def __init__(self, run: Run):
        self._run = run

    def __iter__(self) -> Iterator[Any]:
        try:
            yield from self._run.draw_own_steps()
        except Exception as error:  # the trainer raises it in place of the step
            yield Failure.of(error)


def _change(topology: Topology, **given: int | None) -> Topology:
    """Return a topology with other ranks or batches, which need not divide a step."""
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    for name, value in changes.items():
        check_integer(f"continue_from: {name}", value, int(name != "rank"))
    changed = dataclasses.replace(topology, **changes, is_uneven=True)
    if changed.rank >= changed.ranks:
        raise ConfigError(
            f"continue_from: rank {changed.rank} of {changed.ranks} ranks found; it must be below "
            f"their number."
        )
    return dataclasses.replace(changed, is_uneven=changed.places > changed.rows_per_step)


def _check_between_steps(done: int, topology: Topology) -> None:
    if done:
        raise ConfigError(
            f"continue_from: {done} of the {topology.rows_per_step} rows of a step were read where "
            f"it should continue; take the mark or the state before the first batch of a step."
        )


def _check_planned(dataset: Any) -> PlannedDataset:
    if isinstance(dataset, PlannedDataset):
        return dataset
    if find_blend(dataset).is_planned:
        raise ConfigError(
            f"ExactDataLoader: a {type(dataset).__name__} around a planned dataset found; pass the "
            f"planned dataset itself, and change batches in the TaskEncoder (`encode_batch`)."
        )
    raise ConfigError(
        f"ExactDataLoader: a {type(dataset).__name__} with streamed sources found, whose rows are "
        f"unknown until they are read; use megatron.energon.get_savable_loader(dataset). The log "
        f"says why they are streamed."
    )


def _options(workers: int, prefetch_factor: int, timeout: float) -> dict[str, Any]:
    return {
        "batch_size": None,
        "num_workers": workers,
        "multiprocessing_context": WorkerContext() if workers else None,
        "collate_fn": _identity,
        "prefetch_factor": prefetch_factor if workers else None,
        "timeout": timeout if workers else 0,
        "generator": torch.Generator(),  # the default would disturb the draws of the model
    }


def _identity(item: Any) -> Any:
    """Return an item unchanged; torch would convert arrays to tensors."""
    return item
