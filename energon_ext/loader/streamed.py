# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Energon's own loader over a streamed blend, with the methods of :class:`ExactDataLoader`.

Its state belongs to one rank: it continues on the ranks x workers that saved it.
"""

from __future__ import annotations

import copy
from typing import Any, Iterator, Mapping

from megatron.energon import SavableDataLoader, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.savable_loader import SavableDataLoaderState

from energon_ext.errors import ConfigError, StateFormatError, StateMismatchError
from energon_ext.loader.data_loader import ExactDataLoader
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.plan.lookup import find_blend
from energon_ext.state.match import SourceChange, compare_sources
from energon_ext.state.plain import from_plain, to_plain
from energon_ext.state.schema import check_seal, sealed
from energon_ext.streamed.blend import STATE_CLASS, StreamedBlend


def open_loader(dataset: SavableDataset, **options: Any) -> Any:
    """The loader of a dataset: exact for a planned one, Energon's for a streamed one.

    Args:
        **options: of :class:`~energon_ext.ExactDataLoader`, or of
            ``megatron.energon.get_savable_loader``.
    """
    if isinstance(find_blend(dataset), PlannedDataset):
        return ExactDataLoader(dataset, **options)
    return StreamedLoader(dataset, **options)


class StreamedLoader:
    """Iterates a streamed dataset.

    Args:
        dataset: of :func:`energon_ext.get_train_dataset`, with streamed sources.
        **options: as for ``megatron.energon.get_savable_loader``.

    Attributes:
        changes: what the last restore did with each source.
    """

    def __init__(self, dataset: SavableDataset, **options: Any):
        options.setdefault("checkpoint_every_sec", 0)  # a state after every batch
        options.setdefault("checkpoint_every_min_n_samples", 1)
        self.dataset = dataset
        self.blend: StreamedBlend = find_blend(dataset)
        self.changes: list[SourceChange] = []
        self._loader = SavableDataLoader(dataset, **options)
        self._drawn = 0
        self._is_restored = False

    @property
    def worker_config(self) -> WorkerConfig:
        """Of the dataset."""
        return self.dataset.worker_config

    @property
    def batches_drawn(self) -> int:
        """Batches of this rank since the beginning of the run."""
        return self._drawn

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            self._drawn += 1
            yield batch

    def mark(self) -> dict[str, Any]:
        """Remember the last batch that was taken, for a later :meth:`state_dict`."""
        return self.state_dict()

    def state_dict(self, mark: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The state of this rank after the last batch, or after that of a mark, as JSON values."""
        if mark is not None:
            return dict(mark)
        state = self._loader.save_state_rank() if self._drawn or self._is_restored else None
        ranks = self.worker_config.world_size
        return sealed({"drawn": self._drawn, "ranks": ranks, "state": to_plain(state)})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict` of this rank.

        Raises:
            StateFormatError: it is damaged, or something else.
            StateMismatchError: it belongs to another configuration, rank or number of workers.
            ConfigError: batches were drawn already.
        """
        if self._drawn or self._is_restored:
            raise ConfigError("Restore a data state before the first batch, in a new loader.")
        content = check_seal(state)
        saved = from_plain(content.get("state"))
        if saved is None:
            return
        self.changes = self._compare(saved, content)
        self._loader.restore_state_rank(copy.deepcopy(saved))
        self._drawn, self._is_restored = content["drawn"], True

    def _compare(
        self, saved: SavableDataLoaderState, content: Mapping[str, Any]
    ) -> list[SourceChange]:
        """Refuse what cannot be continued before a worker has started."""
        found, config = _blends_in(saved), self.worker_config
        workers = len(found) if config.num_workers else 0
        topology = {"ranks": content.get("ranks"), "workers": len(found)}
        now = {"ranks": config.world_size, "workers": max(1, config.num_workers)}
        if topology != now:
            raise StateMismatchError(
                {name: (topology[name], now[name]) for name in now},
                "A streamed blend continues on the ranks and workers that saved it.",
            )
        for number, blend in enumerate(found):
            self.blend.check_state(blend, config.rank * max(1, workers) + number)
        return compare_sources([blend["sources"] for blend in found], self.blend.source_names)

    def save_state_rank(self) -> dict[str, Any]:
        """:meth:`state_dict`, by the name that Energon's loader has for it."""
        return self.state_dict()

    def restore_state_rank(self, state: Mapping[str, Any] | None) -> None:
        """:meth:`load_state_dict`, by the name that Energon's loader has for it."""
        if state is not None:
            self.load_state_dict(state)

    def close(self) -> None:
        """End the worker processes."""
        self._loader = None  # torch ends them with the loader


def _blends_in(state: Any) -> list[Mapping[str, Any]]:
    """The state of the blend in every worker of a rank.

    Raises:
        StateFormatError: it is no state of Energon's loader.
    """
    if not isinstance(state, SavableDataLoaderState) or not state.worker_states:
        raise StateFormatError(f"A {type(state).__name__} is no state of Energon's loader.")
    found: list[Mapping[str, Any]] = []
    for worker in state.worker_states:
        tree = worker if isinstance(worker, dict) else getattr(worker.state, "dataset_state", None)
        while isinstance(tree, dict) and tree.get("__class__") != STATE_CLASS:
            inner = tree.get("datasets") or [None]
            tree = inner[0] if len(inner) == 1 else None
        if not isinstance(tree, dict):
            raise StateFormatError("A data state without a blend of sources was found.")
        found.append(tree)
    return found
