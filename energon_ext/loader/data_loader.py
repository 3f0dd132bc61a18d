# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Energon's loader, with the gaps of its state closed.

Stock ``SavableDataLoader`` saves an exact state while a run is under way. With worker processes it
does not around a start, an end and a resume: ``docs/internals/loader.md`` has each of these gaps,
and what closes it.

It saves and restores through the same methods, and its states are the stock ones, with a digest in
each worker's, see :mod:`energon_ext.loader.seals`. Where all sources are planned, ``state_dict``
gives one cursor for the whole run, the same on every rank, which continues on any number of ranks
and workers.
"""

from __future__ import annotations

import json
import logging
import time
from typing import Any, Mapping, Sequence

import torch
from megatron.energon import SavableDataLoader
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.savable_loader import SavableDataLoaderState
from megatron.energon.state import FlexState
from torch.utils.data._utils import signal_handling

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError, EnergonExtError, StateMismatchError, printable
from energon_ext.loader.compare import check_continues, virtual_epoch_length
from energon_ext.loader.regroup import (
    WorkerState,
    batches_of,
    blends_in,
    cursor_of,
    last_stored,
    loader_state,
    regrouped,
    with_blend,
    workers_of,
)
from energon_ext.loader.seals import check_workers, sealed_workers
from energon_ext.loader.workers import ExactWorker, WorkersInTurn, full_memory_named
from energon_ext.plan.lookup import blends_inside, find_blend
from energon_ext.state.match import ENCODER, SourceChange
from energon_ext.state.schema import check_seal, sealed

logger = logging.getLogger(__name__)

#: Seconds that workers may take to start before a save gives up.
WORKER_START_SECONDS = 600.0


class ExactDataLoader(SavableDataLoader):
    """A :class:`megatron.energon.SavableDataLoader` whose state is exact from the first batch on.

    Args:
        dataset: an Energon dataset, for example of :func:`energon_ext.get_train_dataset`.
        save_every: batches of this rank between two saves, counted from the beginning of the run.
            Workers then store a state where a save will ask for one, and not after every batch. A
            save in between is exact too; a resume with a streamed source reads some batches again.
        **options: as for ``megatron.energon.get_savable_loader``.

    Attributes:
        changes: what the last restore did with each source.

    Raises:
        ConfigError: ``save_every`` is no integer >= 1, or ``dataset`` is none.
    """

    _iterator: Any  # torch sets it, once there are workers

    def __init__(self, dataset: SavableDataset, *, save_every: int = 1, **options: Any):
        check_integer("save_every", save_every, 1)
        if not isinstance(dataset, SavableDataset):
            raise ConfigError(f"{type(dataset).__name__} found, a dataset of Energon is needed.")
        options.setdefault("checkpoint_every_sec", 0)
        options.setdefault("checkpoint_every_min_n_samples", 1)
        with full_memory_named():
            super().__init__(dataset, **options)
        self.changes: list[SourceChange] = []
        if self.num_workers > 0:
            # Stock builds its wrapper itself, and lets nobody replace it.
            self.dataset.__class__ = ExactWorker
            self.dataset.save_every = save_every
        # Stock always asks for page-locked memory; torch warns where there is no GPU to copy to.
        self.pin_memory = torch.cuda.is_available()

    @property
    def batches_drawn(self) -> int:
        """Batches of this rank since the beginning of the run."""
        if self.num_workers == 0:
            return self.dataset._sample_index
        return sum(last + 1 for last in self._worker_sample_counters)

    # One cursor for the run -----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The cursor after the last batch that was drawn: JSON values, the same on every rank.

        Raises:
            ConfigError: a source is streamed; save with :meth:`save_state_rank`.
        """
        blend = self._shared_blend()
        state = self.stored_state()
        cursor = blend.save_state() if state is None else _cursor_now(blend, state)
        return sealed(json.loads(json.dumps({**cursor, "skip": 0})))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict` of any rank of a run, on any ranks and workers.

        A state that was saved inside a step continues on the ranks and batch size of then only.

        Raises:
            StateFormatError: it is damaged, or something else.
            StateMismatchError: it belongs to another configuration.
            ConfigError: a source is streamed, or batches were drawn already.
        """
        blend = self._shared_blend()
        cursor = FlexState(check_seal(state))
        blend.check_state(cursor)
        self.restore_state_rank(self._state_at(cursor))

    def _shared_blend(self) -> Any:
        blend = find_blend(self.dataset)
        if not blend.is_shared:
            streamed = [key for key, source in blend.sources.items() if source.streamed]
            raise ConfigError(
                f"state_dict: {', '.join(streamed)} is tokenized on the fly, so that every worker "
                f"has a state of its own. Save with save_state_rank() on every rank, or prepare "
                f"the text with `energon-ext prepare`."
            )
        return blend

    def _state_at(self, cursor: FlexState) -> SavableDataLoaderState:
        """The stock state of this rank that stands at a cursor."""
        blend = find_blend(self.dataset)
        workers = max(1, self.num_workers)
        batches = (cursor["plan"]["row"] + cursor["done"]) // blend.topology.rows_per_round
        inner = self.dataset.dataset
        fresh = inner.save_state()
        length = virtual_epoch_length(inner)
        in_epoch = batches % length if length else 0
        own_length = length // workers or 1
        states = []
        for worker in range(workers):
            own = FlexState({**cursor, "skip": (worker - batches) % workers})
            begun = len(range(worker, in_epoch, workers)) % own_length
            made = len(range(worker, batches, workers))
            states.append(WorkerState(with_blend(fresh, own, begun), made))
        return self._sealed(loader_state(states, self.num_workers, self._get_batch_size()))

    # The states of ranks --------------------------------------------------------------------

    def _get_iterator(self) -> Any:
        if self.num_workers == 0:
            return super()._get_iterator()
        self.check_worker_number_rationality()
        with full_memory_named():
            return WorkersInTurn(self)

    def _worker_command(self, *command: Any) -> list[Any]:
        if command[0] == "get_checkpoint" and self._epoch_iterator is None:  # a pass has ended
            command = ("get_checkpoint", None)
        for commands in self.cmd_queues:
            commands.put(command)
        answers = [self._iterator.answer(queue) for queue in self.result_queues]
        for error in (answer for answer in answers if isinstance(answer, Exception)):
            raise error
        return answers

    def save_state_rank(self) -> SavableDataLoaderState | None:
        """The state after the last batch that was drawn, None before there is any."""
        return self.exact_state(self.stored_state())

    def exact_state(self, stored: SavableDataLoaderState | None) -> SavableDataLoaderState | None:
        """What to save, now or later, of what :meth:`stored_state` returned."""
        if stored is None:
            return None
        blends = blends_inside(self.dataset)
        is_behind = any(getattr(worker, "offset", 0) for worker in stored.worker_states)
        if is_behind and len(blends) == 1 and blends[0].is_shared:
            return self._state_at(_cursor_now(blends[0], stored))
        return self._sealed(stored)

    def stored_state(self) -> SavableDataLoaderState | None:
        """The state after the last batch as Energon keeps it, quickly: not yet exact or sealed."""
        # Stock believes in workers as soon as iter() was called; they start with the first batch.
        self._has_workers = self.num_workers > 0 and self._iterator is not None
        deadline = time.monotonic() + WORKER_START_SECONDS
        while True:
            state = super().save_state_rank()
            if not self._has_workers or all(worker.state for worker in state.worker_states):
                return state
            if time.monotonic() > deadline:
                raise EnergonExtError(
                    f"A data worker did not start within {WORKER_START_SECONDS:.0f} s, so its "
                    f"state cannot be saved; see the log for what it waits for."
                )
            time.sleep(0.005)

    def restore_states(self, states: Sequence[SavableDataLoaderState]) -> None:
        """Continue a run from the states of its ranks, perhaps on other ranks and workers.

        Args:
            states: of all ranks of the saved run, in their order. Of a shared plan one is enough.

        Raises:
            StateFormatError: a state is damaged, or something else.
            StateMismatchError: another configuration, or another number of workers in all with a
                streamed source, or states of different steps.
            ConfigError: states are missing; or the dataset was built without this package's mixin;
                or batches were drawn already.
        """
        self.restore_state_rank(self.state_of(states))

    def state_of(self, states: Sequence[SavableDataLoaderState]) -> SavableDataLoaderState:
        """The state with which this rank continues what the ranks of ``states`` did."""
        states = list(states) if isinstance(states, (list, tuple)) else [states]
        missing = sum(state is None for state in states)
        if not states or missing:
            raise ConfigError(
                f"restore_states: {len(states)} states found, {missing} of them None; the states "
                f"of all ranks of the saved run are needed, after a first batch."
            )
        for state in states:
            check_workers(state)
        batches = sorted({batches_of(state) for state in states})
        if len(batches) > 1:
            raise StateMismatchError({"batches drawn": (batches, "the same on every rank")}, _MIXED)
        config = self.worker_config
        blend = find_blend(self.dataset)
        if blend.is_shared:
            cursor = cursor_of(states[0])
            blend.check_state(cursor)
            _check_equal([cursor, *map(cursor_of, states[1:])])
            return self._state_at(cursor)
        if [workers_of(state) for state in states] == [self.num_workers] * config.world_size:
            return states[config.rank]
        length = virtual_epoch_length(self.dataset.dataset)
        return self._sealed(
            regrouped(states, config.rank, config.world_size, self.num_workers, length)
        )

    def restore_state_rank(self, state: SavableDataLoaderState | None) -> None:
        """Continue after the batch that ``state`` was saved after.

        Raises: as of :meth:`restore_states`, before anything has changed.
        """
        if state is None:
            return
        check_workers(state)
        self._has_workers = self.num_workers > 0 and self._iterator is not None
        if self._has_workers:
            raise ConfigError("Restore a data state before the first batch, in a new loader.")
        self.changes = check_continues(
            state, self.dataset.dataset, self.num_workers, self._get_batch_size()
        )
        # The same on every rank, so one says it.
        if self.worker_config.rank == 0 and self.changes:
            lines = "\n  ".join(printable(str(change)) for change in self.changes)
            logger.info("Resuming the data of %d sources:\n  %s", len(self.changes), lines)
            saved = blends_in(state)[0]["fingerprint"].get(ENCODER)
            now = find_blend(self.dataset).fingerprint.get(ENCODER)
            if saved != now:
                logger.warning(
                    "The TaskEncoder was %s, and is %s; see that it reads alike.", saved, now
                )
        try:
            super().restore_state_rank(state)
        except BaseException:  # Ctrl-C too: half a state must not be gone on from
            if self.num_workers == 0:
                self.dataset.reset_state_deep()
            raise
        if self.num_workers > 0:
            self.dataset._worker_offset = 0  # WorkersInTurn knows whose turn it is
            self._worker_sample_counters = [
                worker.state.sample_index + worker.offset - 1 for worker in state.worker_states
            ]

    def _sealed(self, state: SavableDataLoaderState) -> SavableDataLoaderState:
        return sealed_workers(state, self.worker_config.world_size)

    def close(self) -> None:
        """End the worker processes now; torch would wait five seconds for each of them."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator._shutdown = True
            if iterator._worker_pids_set:  # by a stock loader
                signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
            for worker in iterator._workers:
                worker.kill()
                worker.join()
        self._has_workers = False
        self._epoch_iterator = None


#: Advice where states do not belong together.
_MIXED = "States of different saves are mixed; take those of one save."


def _cursor_now(blend: Any, state: SavableDataLoaderState) -> FlexState:
    """The cursor after the last batch that this run has drawn, planned on where need be."""
    cursor, rounds = last_stored(state)
    return blend.state_after(cursor, rounds) if rounds else cursor


def _check_equal(cursors: Sequence[FlexState]) -> None:
    if any({**cursor, "skip": 0} != {**cursors[0], "skip": 0} for cursor in cursors):
        rows = sorted({cursor["plan"]["row"] + cursor["done"] for cursor in cursors})
        raise StateMismatchError({"rows drawn": (rows, "the same on every rank")}, _MIXED)
