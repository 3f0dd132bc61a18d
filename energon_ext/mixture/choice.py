# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Many sources, one stream, and a state that belongs to the sources.

:class:`ChoiceDataset` asks a chooser whose sample is next and reads it there. Its state is a
mapping from source key to the state of that source, so a restore finds each source wherever it now
stands in the configuration:

* a source that both know continues where it was;
* a source that only the configuration knows starts fresh;
* a source that only the state knows is *parked*: its state is kept, unchanged, in every later save,
  and taken up when the source comes back.

A source that has read its ``max_epochs`` leaves. It stays out over a resume, unless its cap was
raised since: then it reads the epochs that were added.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass
from typing import Any, Callable, Iterator, Mapping, Sequence

from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset, add_sample_restore_key
from megatron.energon.state import FlexState
from megatron.energon.wrappers.base import BaseWrapperDataset

from energon_ext.config.source_key import global_worker, global_workers
from energon_ext.errors import ConfigError, StateMismatchError
from energon_ext.mixture.choosers import Chooser, chooser_for
from energon_ext.state.match import (
    STATE_CLASS,
    STATE_VERSION,
    check_fingerprint,
    check_format,
    match_sources,
    rename_sources,
)
from energon_ext.weights import ScheduleAxis, WeightSpec

logger = logging.getLogger(__name__)


@dataclass
class Source:
    """One source of a blend.

    Attributes:
        key: its identity, see :class:`energon_ext.config.source_key.SourceKey`.
        dataset: what it yields.
        weight: as the metadataset composed it; its knots count what the axis says.
        documents: number of samples in one epoch, over all ranks.
        max_epochs: epochs after which ``dataset`` ends, None where it does not.
        identity: its key with absolute paths; finds its state where the key has changed.
        order: what names the order it is read in.
    """

    key: str
    dataset: SavableDataset
    weight: WeightSpec
    documents: int
    max_epochs: int | None = None
    identity: str = ""
    order: str = ""


class ChoiceDataset(BaseWrapperDataset):
    """Yields samples of several sources in the order that a chooser decides.

    Args:
        sources: at least one; keys must be distinct. Their order means nothing.
        make_chooser: ``(keys, weights, seed=..., axis=..., sample_tokens=...) -> Chooser``; called
            in each worker, with a seed of its own.
        axis: what the knots of the weights count.
        sample_tokens: tokens of a sample, where all have about as many; 0 where they differ.
        worker_config: Energon's.
        fingerprint: JSON values that the state depends on; a state saved under other values is
            refused.

    State: per source its own state and what was drawn from it, the chooser's state, and what was
    parked; grows with the buffers of the sources, not with what was consumed.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        make_chooser: Callable[..., Chooser] = chooser_for,
        axis: ScheduleAxis | None = None,
        sample_tokens: int = 0,
        worker_config: WorkerConfig,
        fingerprint: Mapping[str, Any] | None = None,
    ):
        ordered = sorted(sources, key=lambda source: source.key)
        if not ordered:
            raise ConfigError("A blend needs at least one source, got none.")
        super().__init__([source.dataset for source in ordered], worker_config=worker_config)
        self._sources = {source.key: source for source in ordered}
        if len(self._sources) != len(ordered):
            raise ConfigError(f"Source keys must be distinct: {[s.key for s in ordered]}.")
        self._make_chooser = make_chooser
        self._axis = axis or ScheduleAxis()
        self._sample_tokens = sample_tokens
        self.fingerprint = {
            **(fingerprint or {}),
            "seed": worker_config.seed_offset,
            "global_workers": global_workers(worker_config),
        }
        self.reset_state_own()

    # What others may ask ------------------------------------------------------------------------

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the sources, sorted."""
        return tuple(self._sources)

    @property
    def documents(self) -> dict[str, int]:
        """Samples in one epoch of each source (or part of it), over all ranks."""
        return {
            part: documents
            for key, source in self._sources.items()
            for part, documents in getattr(
                source.dataset, "part_documents", {key: source.documents}
            ).items()
        }

    @property
    def drawn(self) -> dict[str, tuple[int, int]]:
        """Rows (documents) and tokens drawn from each source by the active worker."""
        return {key: (self._rows[key], self._tokens[key]) for key in self._sources}

    @property
    def sources(self) -> Mapping[str, Source]:
        """The sources by key."""
        return self._sources

    @property
    def names(self) -> dict[str, tuple[str, str]]:
        """Identity and order name of each source, see :mod:`energon_ext.state.match`."""
        return {key: (source.identity, source.order) for key, source in self._sources.items()}

    @property
    def max_epochs(self) -> dict[str, int | None]:
        """Epochs after which each source leaves, None where it does not."""
        return {key: source.max_epochs for key, source in self._sources.items()}

    def planned_shares(self, batch_index: int) -> dict[str, float]:
        """The share that the weights give each source at a batch index, as if none had left.

        A source whose batches name its parts, as spliced documents are, is given as these.
        """
        weights = {
            key: self._axis.restate(source.weight).evaluate(batch_index)
            for key, source in self._sources.items()
        }
        total = sum(weights.values())
        return {
            part: weights[key] / total * share if total else 0.0
            for key, source in self._sources.items()
            for part, share in getattr(source.dataset, "part_shares", {key: 1.0}).items()
        }

    def knots(self) -> list[int]:
        """Batch indices at which the weights change or change direction; 0 is always one."""
        weights = (self._axis.restate(source.weight) for source in self._sources.values())
        return sorted({0, *(knot for weight in weights for knot in weight.knots())})

    # Iteration ----------------------------------------------------------------------------------

    def reset_state_own(self) -> None:
        self._chooser: Chooser | None = None
        self._chooser_state: dict[str, Any] | None = None
        self._parked: dict[str, FlexState] = {}
        self._left_after: dict[str, int] = {}
        self._moved: dict[str, str] = {}  # key in the state -> key of now
        self._rows = dict.fromkeys(self._sources, 0)
        self._tokens = dict.fromkeys(self._sources, 0)

    def len_worker(self, worker_idx: int | None = None) -> int:
        return sum(dataset.len_worker(worker_idx) for dataset in self.datasets)

    def __iter__(self) -> Iterator[Any]:
        chooser = self._active_chooser()
        iterators: dict[str, Iterator[Any]] = {}
        for key in chooser.active_keys:
            dataset = self._sources[key].dataset
            if dataset.worker_has_samples():
                iterators[key] = iter(dataset)
            else:
                chooser.drop(key)
        sources_left = len(iterators)
        choose, consume = chooser.choose, chooser.consume
        while sources_left:
            key = choose(current_batch_index())
            try:
                sample = next(iterators[key])
            except StopIteration:
                self._leave(key)
                sources_left -= 1
                continue
            tokens = getattr(sample, "num_tokens", 1)
            consume(key, tokens)
            self._tokens[key] += tokens
            self._rows[key] += getattr(sample, "documents", 1)
            yield add_sample_restore_key(sample, key, src=self)
        if not self._left_after:
            # The next pass over finite sources begins anew.
            chooser.revive()

    def _leave(self, key: str) -> None:
        self._chooser.drop(key)
        cap = self._sources[key].max_epochs
        if cap is None:
            return
        self._left_after[key] = cap
        if global_worker(self.worker_config) == 0:  # the others say the same
            logger.warning(
                "%s: %d of %d epochs read; leaves the blend at batch %d.",
                key,
                cap,
                cap,
                current_batch_index(),
            )

    def _active_chooser(self) -> Chooser:
        if self._chooser is None:
            weights = [source.weight for source in self._sources.values()]
            seed = f"choice/{self.worker_config.worker_seed()}"
            self._chooser = self._make_chooser(
                self.keys,
                weights,
                seed=seed,
                axis=self._axis,
                sample_tokens=self._sample_tokens,
            )
            self._restore_chooser(self._chooser)
            self._keep_out(self._chooser)
        return self._chooser

    def _keep_out(self, chooser: Chooser) -> None:
        """Of the sources that had left, let those back in whose cap was raised since."""
        for key, epochs in list(self._left_after.items()):
            cap = self._sources[key].max_epochs
            if cap is None or cap > epochs:
                del self._left_after[key]
                chooser.revive([key])
            else:
                chooser.drop(key)

    def _restore_chooser(self, chooser: Chooser) -> None:
        state, self._chooser_state = self._chooser_state, None
        if state is None:
            return
        kind, state = state
        if kind == type(chooser).__name__:
            chooser.restore_state(state)
        else:
            logger.warning(
                "The blend is chosen by %s now, by %s in the state: every source continues where "
                "it was, the order of choice begins anew.",
                type(chooser).__name__,
                kind,
            )

    # State --------------------------------------------------------------------------------------

    def save_state(self) -> FlexState:
        chooser = self._chooser_state
        if self._chooser is not None:
            chooser = [type(self._chooser).__name__, self._chooser.save_state()]
        states = {
            key: FlexState(
                dataset=source.dataset.save_state(),
                rows=self._rows[key],
                tokens=self._tokens[key],
                left_after=self._left_after.get(key),
                identity=source.identity,
                order=source.order,
            )
            for key, source in self._sources.items()
        }
        return FlexState(
            __class__=STATE_CLASS,
            version=STATE_VERSION,
            fingerprint=dict(self.fingerprint),
            global_worker=global_worker(self.worker_config),
            chooser=copy.deepcopy(chooser),
            sources=FlexState({**self._parked, **states}),
        )

    def restore_state(self, state: FlexState) -> None:
        check_format(state)
        check_fingerprint(
            {**state["fingerprint"], "global_worker": state["global_worker"]},
            {**self.fingerprint, "global_worker": global_worker(self.worker_config)},
        )
        # Stock datasets keep references into what they are given; a state may be restored twice.
        states = copy.deepcopy(dict(state["sources"]))
        matched = match_sources(states, self.names)
        self.reset_state_own()
        for key, source in self._sources.items():
            if key not in matched:
                source.dataset.reset_state_deep()
                continue
            own = states.pop(matched[key])
            source.dataset.restore_state(self._dealt(source, own))
            self._rows[key], self._tokens[key] = own["rows"], own["tokens"]
            if own["left_after"] is not None:
                self._left_after[key] = own["left_after"]
        self._parked = states
        self._moved = {saved: key for key, saved in matched.items() if saved != key}
        self._chooser_state = rename_sources(copy.deepcopy(state["chooser"]), self._moved)

    def _dealt(self, source: Source, own: FlexState) -> FlexState:
        """The state of a source, which may have been parked while others were dealt anew."""
        if not own.get("undealt"):
            return own["dataset"]
        worker, workers = global_worker(self.worker_config), global_workers(self.worker_config)
        return source.dataset.redeal(own["undealt"], workers, [worker])[0]

    # Restoring single samples, for buffers above ------------------------------------------------

    def restore_sample(self, restore_key: tuple) -> Any:
        _, key = restore_key[:2]
        key = self._moved.get(key, key)
        if key not in self._sources:
            raise StateMismatchError(
                {"buffered sample of source": (key, list(self.keys))},
                "A source with samples in a shuffle or packing buffer cannot leave; keep it with "
                "`weight: 0`.",
            )
        sample = self._sources[key].dataset.restore_sample(restore_key[2:])
        return add_sample_restore_key(sample, key, src=self)

    def config(self) -> dict[str, Any]:
        return {
            "type": type(self).__qualname__,
            "sources": {
                key: {"weight": repr(source.weight), "dataset": source.dataset.config()}
                for key, source in self._sources.items()
            },
            "worker_config": self.worker_config.config(),
        }


def current_batch_index() -> int:
    """The index of the batch that the active worker is assembling, per rank.

    Raises:
        ConfigError: no loader is iterating, so there is no such index.
    """
    active = WorkerConfig.active_worker_config
    if active is None:
        raise ConfigError(
            "A scheduled blend was iterated without a loader, so it has no batch index; wrap the "
            "dataset with megatron.energon.get_savable_loader(dataset)."
        )
    return active.active_worker_batch_index
