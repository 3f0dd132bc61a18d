# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Many sources as one Energon dataset.

Where the lengths of all documents are known, every worker plans all rows of a step and reads its
own: the *shared* plan. A step then depends on the configuration alone, and the state is one cursor
for the run. Where a source is streamed, each worker plans for itself, one row at a time, and its
state belongs to it: a *private* plan. Both are one loop.
"""

from __future__ import annotations

import copy
from typing import Any, Callable, Iterator, Mapping, Sequence

from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import add_sample_restore_key
from megatron.energon.state import FlexState
from megatron.energon.wrappers.base import BaseWrapperDataset

from energon_ext.errors import ConfigError, StateMismatchError
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import BLEND as BLEND_RULE
from energon_ext.mixture.tree import Tree, blend_of
from energon_ext.plan.clock import Clock
from energon_ext.plan.cost import Cost
from energon_ext.plan.cursor import Cursor
from energon_ext.plan.deal import ALONE, Topology
from energon_ext.plan.source import Source
from energon_ext.plan.step import Plan, Step
from energon_ext.state.match import ENCODER, check_fingerprint
from energon_ext.state.schema import BLEND, STATE_CLASS, STATE_VERSION, check_format, digest_of
from energon_ext.weights import ScheduleAxis


class BlendedDataset(BaseWrapperDataset):
    """Yields rows of several sources in the order that a mixture draws them.

    Args:
        sources: at least one; keys must be distinct. Their order means nothing.
        tree: the mixture; one node over all sources by their weights where it is None.
        topology: of a shared plan; one row a batch where it is None.
        axis, row_tokens: as of :class:`~energon_ext.plan.clock.Clock`.
        worker_config: Energon's.
        fingerprint: JSON values that the state depends on; a state saved under others is refused.
        padding: makes rows that complete the last step of a shared plan; else it stays incomplete.
        cost: of rows; those of a step of a shared plan are then dealt so that ranks end together.
        skip: steps ``[first, stop)`` of a shared plan that are drawn and not read.
        restarts: whether another iteration after the end begins with the first row again.
        repeats: whether the end is followed by the first row again at once.

    State: of the :class:`~energon_ext.plan.cursor.Cursor`, and of whom it is.
    """

    rule = BLEND_RULE  # of the one node, where no tree is given

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        tree: Tree | None = None,
        topology: Topology | None = None,
        axis: ScheduleAxis | None = None,
        row_tokens: int = 0,
        worker_config: WorkerConfig,
        fingerprint: Mapping[str, Any] | None = None,
        padding: Callable[[], Any] | None = None,
        cost: Cost | None = None,
        skip: Sequence[tuple[int, int]] = (),
        restarts: bool = False,
        repeats: bool = False,
        **node_options: Any,
    ):
        ordered = sorted(sources, key=lambda source: source.key)
        self.sources = {source.key: source for source in ordered}
        if not ordered or len(self.sources) != len(ordered):
            keys = [source.key for source in ordered]
            raise ConfigError(f"A blend needs sources of distinct keys, got {keys}.")
        self._streamed = [s.streamed for s in ordered if s.streamed is not None]
        super().__init__([rows.dataset for rows in self._streamed], worker_config=worker_config)
        weights = {source.key: source.weight for source in ordered}
        self.tree = tree or blend_of(weights, self.rule, **node_options)
        self.topology = topology or Topology.of(worker_config, None, None)
        self.clock = Clock(axis or ScheduleAxis(), self.topology, row_tokens, tuple(skip))
        self._padding, self._cost = padding, None if self._streamed else cost
        self._restarts = restarts
        self._repeats = repeats
        self.fingerprint = {
            **(fingerprint or {}),
            "seed": worker_config.seed_offset,
            "plan": "shared" if self.is_shared else "private",
        }
        if not self.is_shared:
            self.fingerprint["global_workers"] = self.topology.workers * self.topology.ranks
        self.reset_state_own()

    # What others may ask ------------------------------------------------------------------------

    @property
    def is_shared(self) -> bool:
        """Whether all workers follow one plan."""
        return not self._streamed

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(self.sources)

    @property
    def epoch_limits(self) -> dict[str, int]:
        """``max_epochs`` of all sources, where they end the whole run; else empty."""
        limits = {key: source.max_epochs for key, source in self.sources.items()}
        return {k: n for k, n in limits.items() if n is not None and None not in limits.values()}

    @property
    def documents(self) -> dict[str, int]:
        """Documents in one epoch of each source, or part of it."""
        return {k: n for s in self.sources.values() for k, n in s.part_documents.items()}

    @property
    def names(self) -> dict[str, str]:
        """What people call the sources that have a name beside their key."""
        return {key: each.shown_as for key, each in self.sources.items() if each.shown_as}

    @property
    def interleaves(self) -> dict[str, int]:
        """How many interleaves keep the share of a source in the whole run, where no blend does."""
        return self.tree.interleaves() if self.is_shared else {}

    def position(self, step: int, row: int | None = None) -> int:
        """Where an optimizer step stands on the schedule axis; ``row`` is its first, if known."""
        return self.clock.at_step(step, row)

    def planned_shares(self, position: int) -> dict[str, float]:
        """The share that the weights give each source at a position, as if none had ended.

        A source whose batches name its parts, as spliced documents are, is given as these.
        """
        shares = Mixture(self.tree, self.keys, seed="").shares(position).tolist()
        return {
            part: share * of_source
            for source, share in zip(self.sources.values(), shares)
            for part, of_source in source.part_shares.items()
        }

    # Iteration ----------------------------------------------------------------------------------

    def reset_state_own(self) -> None:
        self._cursor: Cursor | None = None  # made in the worker, which knows its number
        self._skip: int | None = None  # rounds until the next one of this worker

    def len_worker(self, worker_idx: int | None = None) -> int:
        if not self.is_shared:
            return sum(dataset.len_worker(worker_idx) for dataset in self.datasets)
        documents = sum(source.documents for source in self.sources.values())
        return -(-documents // (self.topology.ranks * self.topology.workers))

    def worker_has_samples(self) -> bool:
        return self.is_shared or super().worker_has_samples()

    def __iter__(self) -> Iterator[Any]:
        topology = self.topology if self.is_shared else ALONE
        for rows in self._streamed:
            rows.open()
        if self._skip is None:
            self._skip = self._worker_number() % topology.workers  # 0 where it reads alone
        for number in self._rounds():
            if self._skip:
                self._skip -= 1
                continue
            self._skip = topology.workers - 1
            yield from self._read(topology.rows_of(number))
        if self._restarts:
            self.reset_state_own()

    def _rounds(self) -> Iterator[int]:
        """The number in its step of every round, until the run ends."""
        yield from self._active().rounds()
        while self._repeats and self._active().plan.row:
            self._cursor = None  # a worker's turn goes on from one pass to the next
            yield from self._active().rounds()

    def state_after(self, state: FlexState, rounds: int) -> FlexState:
        """The state of a shared plan some rounds later; nothing is read, and nothing begun."""
        self.restore_state(state)
        for _, _ in zip(range(rounds), self._rounds()):
            pass
        later = self.save_state()
        self.reset_state_own()
        return later

    def planned_steps(self, state: FlexState | None = None) -> Iterator[Step]:
        """Every step of a shared plan, from a state on where one is given; nothing is read."""
        self.reset_state_own()
        if state is not None:
            self.restore_state(state)
        return self._active().steps()

    @property
    def plan(self) -> Plan:
        """What was drawn so far."""
        return self._active().plan

    def _read(self, numbers: range) -> Iterator[Any]:
        step = self._active().step
        assert step is not None
        for row in map(step.row, numbers):
            if row is None and self._padding is not None:
                row = self._padding()
            if row is not None:
                yield row

    def _active(self) -> Cursor:
        if self._cursor is None:
            self._cursor = Cursor(
                plan=self._new_plan(),
                clock=self.clock,
                is_shared=self.is_shared,
                cost=self._cost,
                is_first=self._worker_number() == 0,
            )
        return self._cursor

    def _new_plan(self) -> Plan:
        phase = (0, 1)
        if not self.is_shared:
            phase = self._worker_number(), self.topology.workers * self.topology.ranks
        for source in self.sources.values():
            if not self.is_shared:
                source.rows.read_part(*phase)
            source.rows.restart()
        mixture = Mixture(
            self.tree,
            self.keys,
            seed=str(self.worker_config.seed_offset),
            row_tokens=self.clock.row_tokens,
            phase=phase,
        )
        return Plan(self.sources, mixture)

    def _worker_number(self, worker: int | None = None) -> int:
        """The number of a worker of this rank among those of all ranks."""
        config = self.worker_config
        own = config.rank_worker_id() if worker is None else worker
        return config.rank * self.topology.workers + own

    # State --------------------------------------------------------------------------------------

    def save_state(self) -> FlexState:
        cursor = self._active().save_state()
        return FlexState(
            __class__=STATE_CLASS,
            version=STATE_VERSION,
            fingerprint=dict(self.fingerprint),
            worker=None if self.is_shared else self._worker_number(),
            **cursor,
            inside=self._inside() if cursor["done"] else None,
            skip=self._skip,
        )

    def _inside(self) -> dict[str, Any]:
        """What a state that is saved inside a step depends on, since the step is drawn again."""
        name = getattr(self._cost, "__qualname__", repr(self._cost)) if self._cost else None
        return {
            "rows_per_step": self.topology.rows_per_step,
            "batch_size": self.topology.batch_rows,
            "ranks": self.topology.ranks,
            "mixture": digest_of(self.tree.to_json()),
            "cost": name,
        }

    def restore_state(self, state: FlexState) -> None:
        """Continue from :meth:`save_state`; begins nothing with a state that is refused."""
        self.check_state(state)
        own = copy.deepcopy(dict(state))  # stock datasets keep references into it
        self.reset_state_own()
        try:
            self._active().restore_state(own)
        except BaseException:  # Ctrl-C too: half a state must not be gone on from
            self.reset_state_own()
            raise
        self._skip = own["skip"]

    def check_state(self, state: Mapping[str, Any], worker: int | None = None) -> None:
        """Refuse a state that this dataset cannot continue.

        Args:
            worker: of this rank, which is to continue it; this one by default.

        Raises:
            StateFormatError: it is damaged, or of another version.
            StateMismatchError: it belongs to another configuration; names all that differs.
        """
        check_format(state)
        saved, now = (
            {name: value for name, value in of.items() if name != ENCODER}
            for of in (state["fingerprint"], self.fingerprint)
        )
        if not self.is_shared:
            saved["worker"], now["worker"] = state["worker"], self._worker_number(worker)
        check_fingerprint(saved, now)
        if state["done"]:
            check_fingerprint(
                state["inside"] or {},
                self._inside(),
                advice="The state was saved inside a step; save at the end of one to continue "
                "elsewhere.",
            )

    # Restoring single samples, for buffers above ------------------------------------------------

    def restore_sample(self, restore_key: tuple[Any, ...]) -> Any:
        _, key = restore_key[:2]
        key = self._active().plan.moved.get(key, key)
        if key not in self.sources or (streamed := self.sources[key].streamed) is None:
            raise StateMismatchError(
                {"buffered sample of source": (key, list(self.keys))},
                "A source with samples in a shuffle or packing buffer cannot leave; keep it with "
                "`weight: 0`.",
            )
        sample = streamed.dataset.restore_sample(restore_key[2:])
        return add_sample_restore_key(sample, key, src=BLEND)

    def config(self) -> dict[str, Any]:
        return {
            "type": type(self).__qualname__,
            "sources": list(self.sources),
            "datasets": [dataset.config() for dataset in self.datasets],
            "worker_config": self.worker_config.config(),
        }
