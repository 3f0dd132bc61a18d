# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A planned run as a map-style dataset, for training loops that have a loader of their own."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError
from energon_ext.loader.planned_dataset import PlannedDataset
from energon_ext.loader.resume_log import log_resume
from energon_ext.plan.numbered_rows import NumberedRows
from energon_ext.plan.progress import DescribedBatch
from energon_ext.samples.numbered import as_worker
from energon_ext.state.match import SourceChange
from energon_ext.state.schema import check_seal, seal


class MapStyleDataset(Dataset[Any]):
    """The rows of a planned run by number: item n is a batch of row n alone.

    Row n is the same on any number of ranks and workers. The loop needs no
    shuffling of its own: the plan is shuffled, and only in its order do the shares of sources hold
    in every step. One epoch of the loop is the whole run. Derive from this class to change what an
    item is.

    Args:
        dataset: dataset of :func:`energon_ext.get_train_dataset` with planned sources. Its
            ``rows_per_step`` is the loop's global batch. Ranks and workers are the loop's own.
        rows: rows of the run, its length; by default those until all sources have reached their
            ``max_epochs``.

    Attributes:
        changes: effect of a restored state on each source.

    Raises:
        ConfigError: the sources are streamed, the dataset was already read, or it is endless and
            ``rows`` is missing.
        IndexError: from an item: there is no such row, or it was read before a resume that has
            changed the mix.

    State: the cursor after the row with the largest number that was asked for, in this process.
    torchdata's ``StatefulDataLoader`` saves and restores it, and reads nothing again. A cursor of
    an :class:`~energon_ext.ExactDataLoader` can be restored, too. A resume may change the mix,
    unless the state is one of several workers, which are at different rows.

    Example:
        >>> rows = MapStyleDataset(dataset, rows=64 * 1000)           # doctest: +SKIP
        >>> rows[5]                                                   # doctest: +SKIP
    """

    def __init__(self, dataset: PlannedDataset, *, rows: int | None = None):
        if not isinstance(dataset, PlannedDataset):
            raise ConfigError(
                f"MapStyleDataset: a {type(dataset).__name__} found, whose rows have no numbers; "
                f"pass the dataset of get_train_dataset with planned sources. The log says why "
                f"sources are streamed."
            )
        if dataset.run.progress.read:
            raise ConfigError(
                "MapStyleDataset: the dataset was already read; pass a new one, and load the state "
                "into the MapStyleDataset."
            )
        self._batches = dataset.batches
        self._rows = NumberedRows(dataset.run)
        if rows is not None:
            check_integer("MapStyleDataset: rows", rows, 1)
        self._given, self._count, self._stop = rows, 0, 0
        self._count_rows()
        self.changes: list[SourceChange] = []

    def _count_rows(self) -> None:
        if (count := self._given or self._rows.count()) is None:
            raise ConfigError(
                "MapStyleDataset: the run is endless; pass `rows`, such as steps x rows_per_step, "
                "or limit every source by max_epochs."
            )
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        number = operator.index(number)
        if not 0 <= number < self._count:
            raise IndexError(f"Row {number} does not exist; there are {self._count}.")
        row = self._rows[number]
        self._stop = max(self._stop, number + 1)
        with as_worker():
            return self._batches.read(DescribedBatch([row]))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this process as JSON values."""
        state = self._rows.cursor(max(self._stop, self._rows.first))
        if (worker := get_worker_info()) is not None and worker.num_workers > 1:
            state["inside"] = self._rows.run.worker_settings
        return seal(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`.

        Raises:
            StateFormatError: the state is damaged, or not a data state.
            StateMismatchError: it belongs to another configuration.
        """
        content = check_seal(state)
        self._stop, self.changes = self._rows.restore(content)
        self._count_rows()
        if get_worker_info() is None:
            log_resume(self.changes, content, self._rows.run)
