# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""An endless iterator over finite validation datasets, as Megatron-LM's evaluation expects."""

import dataclasses
import itertools
import math
from typing import Any, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.energon import get_loader
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory, SavableDataset

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.compat import end_workers
from energon_ext.config.source_key import number_duplicates
from energon_ext.errors import ConfigError
from energon_ext.loader.data_loader import ExactDataLoader
from energon_ext.loader.planned_dataset import PlannedDataset
from energon_ext.splice.frames import splices_of
from energon_ext.splice.validation import contents_of
from energon_ext.state.together import collective_device


class ValidationLoader:
    """An endless iterator that gives every evaluation the same batches, from each source in turn.

    Losses of two evaluations therefore differ only by the model, and a resumed run has nothing to
    restore. The first evaluation draws the batches and keeps them: 28 bytes per position on the
    CPU, and whatever else they contain, such as images. A source that ends before the others starts
    over. Batches may be of any class; only those of a PackedBatch name their source.

    Args:
        datasets: from :func:`energon_ext.get_val_datasets`, one per source.
        batches_per_evaluation: micro-batches that a rank draws per evaluation, >= 1.
        **loader_options: as for :class:`~energon_ext.ExactDataLoader`.

    Attributes:
        spliced: names of the documents of spliced sources, as in the batches.
    """

    def __init__(
        self,
        datasets: Sequence[tuple[SavableDataset, BaseCoreDatasetFactory]],
        batches_per_evaluation: int,
        **loader_options: Any,
    ):
        if batches_per_evaluation < 1:
            raise ConfigError(
                f"batches_per_evaluation={batches_per_evaluation}: give at least one micro-batch."
            )
        parts, spliced = zip(*(_names_of(dataset) for dataset, _ in datasets))
        self.sources = tuple(number_duplicates(itertools.chain.from_iterable(parts)))
        is_spliced = [name in names for part, names in zip(parts, spliced) for name in part]
        self.spliced = tuple(itertools.compress(self.sources, is_spliced))
        self._begins = [0, *itertools.accumulate(map(len, parts))]
        self._loaders = [_open(dataset, loader_options) for dataset, _ in datasets]
        self._batches = itertools.cycle(self._draw(batches_per_evaluation))

    def __iter__(self) -> "ValidationLoader":
        return self

    def __next__(self) -> Any:
        """Return the next batch of this evaluation, or the first of the next one."""
        return next(self._batches)

    def memorized(
        self, batches: Sequence[PackedBatch], token_losses: Sequence[torch.Tensor]
    ) -> dict[str, float]:
        """Return the mean P(z) of each spliced document, as :class:`~energon_ext.splice.LossMap`.

        The mean is over the contents in the micro-batches of all data-parallel ranks, which call
        this together; documents without contents are omitted.

        Args:
            batches: this rank's batches of one evaluation, not split for context parallelism.
            token_losses: for each batch, float [N], cross-entropy at each position.
        """
        sums = torch.zeros(2, len(self.spliced), dtype=torch.float64)
        for batch, losses in zip(batches, token_losses):
            for name, trained in contents_of(batch, self.spliced):
                index = self.spliced.index(name)
                sums[0, index] += math.exp(-losses[torch.from_numpy(trained)].double().sum())
                sums[1, index] += 1
        if not self.spliced:
            return {}
        sums = sums.to(collective_device())
        dist.all_reduce(sums, group=parallel_state.get_data_parallel_group())
        totals = zip(self.spliced, *sums.tolist())
        return {name: total / count for name, total, count in totals if count}

    def close(self) -> None:
        """Stop the worker processes."""
        while self._loaders:
            loader = self._loaders.pop()
            if isinstance(loader, ExactDataLoader):
                loader.close()
            else:
                end_workers(loader)

    def _draw(self, size: int) -> Iterator[Any]:
        endless = [_repeat(loader) for loader in self._loaders]
        for number in range(size):
            index = number % len(endless)
            batch = next(endless[index])
            if number == size - 1:
                self.close()
            yield self._of_source(batch, index)

    def _of_source(self, batch: Any, index: int) -> Any:
        """Renumber a batch's sources among all, as Megatron-LM expects every source in a report."""
        if not isinstance(batch, PackedBatch):
            return batch
        begin = self._begins[index]
        documents = torch.zeros(len(self.sources), dtype=torch.int32)
        documents[begin : begin + len(batch.sources)] = batch.source_documents
        return dataclasses.replace(
            batch,
            sources=self.sources,
            source_ids=torch.where(batch.source_ids < 0, -1, batch.source_ids + begin).int(),
            source_documents=documents,
        )


def _names_of(dataset: SavableDataset) -> tuple[list[str], set[str]]:
    """Return the names of a dataset's sources, and those of spliced documents among them."""
    if not isinstance(dataset, PlannedDataset):  # samples that Energon streams
        return [], set()
    # A spliced source reports one loss per document.
    spliced = {name for source in splices_of(dataset) for name in source.names}
    return list(dataset.run.documents), spliced


def _open(dataset: SavableDataset, options: Mapping[str, Any]) -> Any:
    if isinstance(dataset, PlannedDataset):
        return ExactDataLoader(dataset, **options)
    return get_loader(dataset)


def _repeat(loader: Any) -> Iterator[Any]:
    """Iterate a loader again and again; ConfigError if it has no batch."""
    while True:
        count = 0
        for batch in loader:
            count += 1
            yield batch
        if not count:
            worker = loader.worker_config
            raise ConfigError(
                f"A validation source has no batch for data-parallel rank {worker.rank} of "
                f"{worker.world_size}: give it more samples, or use fewer ranks."
            )
