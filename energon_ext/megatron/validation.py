# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Finite validation datasets as the endless iterator that Megatron-LM evaluates with."""

import dataclasses
import itertools
from typing import Any, Iterator, Sequence

import torch
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory, SavableDataset

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.config.source_key import numbered
from energon_ext.errors import ConfigError
from energon_ext.loader.data_loader import ExactDataLoader
from energon_ext.plan.lookup import find_blend


class ValidationLoader:
    """An endless iterator that gives every evaluation the same batches, one of each source in turn.

    The losses of two evaluations differ by the model alone, and a resumed run has nothing to
    restore. The batches are drawn in the first evaluation and kept: 28 bytes a position on the CPU.
    A source that ends before the others begins again.

    Args:
        datasets: of :func:`energon_ext.get_val_datasets`, one for each source.
        batches_per_evaluation: micro-batches that a rank draws in one evaluation, >= 1.
        **loader_options: as for :class:`~energon_ext.ExactDataLoader`.
    """

    def __init__(
        self,
        datasets: Sequence[tuple[SavableDataset, BaseCoreDatasetFactory]],
        batches_per_evaluation: int,
        **loader_options: Any,
    ):
        if batches_per_evaluation < 1:
            raise ConfigError(
                f"batches_per_evaluation={batches_per_evaluation}: an evaluation needs at least "
                "one micro-batch on each rank."
            )
        # A spliced source has a loss for each of its documents.
        parts = [list(find_blend(dataset).documents) for dataset, _ in datasets]
        self.sources = tuple(numbered(itertools.chain.from_iterable(parts)))
        self._begins = [0, *itertools.accumulate(map(len, parts))]
        self._loaders = [ExactDataLoader(dataset, **loader_options) for dataset, _ in datasets]
        self._batches = itertools.cycle(self._draw(batches_per_evaluation))

    def __iter__(self) -> "ValidationLoader":
        return self

    def __next__(self) -> PackedBatch:
        """Return the next batch of this evaluation, or the first of the next one."""
        return next(self._batches)

    def close(self) -> None:
        """End the worker processes."""
        for loader in self._loaders:
            loader.close()

    def _draw(self, size: int) -> Iterator[PackedBatch]:
        endless = [itertools.chain.from_iterable(itertools.repeat(each)) for each in self._loaders]
        for number in range(size):
            index = number % len(endless)
            batch = next(endless[index])
            if number == size - 1:
                self.close()
            yield self._of_source(batch, index)

    def _of_source(self, batch: PackedBatch, index: int) -> PackedBatch:
        """The batch among all sources: Megatron-LM wants the same losses of every micro-batch."""
        begin = self._begins[index]
        documents = torch.zeros(len(self.sources), dtype=torch.int32)
        documents[begin : begin + len(batch.sources)] = batch.source_documents
        return dataclasses.replace(
            batch,
            sources=self.sources,
            source_ids=torch.where(batch.source_ids < 0, -1, batch.source_ids + begin).int(),
            source_documents=documents,
        )
