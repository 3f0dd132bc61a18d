# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A token file as a leaf of a metadataset."""

from __future__ import annotations

from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory, SavableDataset
from megatron.energon.flavors.webdataset.structs import DatasetSubset

from energon_ext.config.source_key import order_name
from energon_ext.documents.token_file import TokenFile
from energon_ext.errors import ConfigError
from energon_ext.packing import Planner
from energon_ext.plan.rows import TokenRows


class TokenFileFactory(BaseCoreDatasetFactory):
    """A token file as Energon's metadatasets hand it to a TaskEncoder.

    Attributes:
        file: the tokens.
        training: whether the documents are to be shuffled.
        subset: of the documents, as the metadataset says it.
    """

    # No sample type: its rows are finished, and nothing is to be cooked.
    __sample_type__ = None

    def __init__(
        self,
        path: EPath,
        *,
        training: bool,
        worker_config: WorkerConfig,
        subflavors: dict[str, Any] | None = None,
        subset: DatasetSubset | None = None,
    ):
        self.paths = [path]
        self.subflavors = subflavors or {}
        self.subset = subset
        self.training = training
        self.worker_config = worker_config
        self.file = TokenFile(str(path))

    @property
    def document_range(self) -> tuple[int, int]:
        """First document and the one after the last."""
        total = len(self.file)
        return self.subset.compute_subset(total) if self.subset is not None else (0, total)

    def __len__(self) -> int:
        first, stop = self.document_range
        return stop - first

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset:
        raise ConfigError(
            f"{self.paths[0]}: a token file gives packed rows; load it with a PackedTaskEncoder."
        )

    def rows(
        self, *, source: str, planner: Planner, epochs: int | None, restarts: bool
    ) -> TokenRows:
        """The rows of this file."""
        return TokenRows(
            self.file,
            source=source,
            planner=planner,
            order_key=order_name(source, self),
            epochs=epochs,
            restarts=restarts,
            shuffled=self.training,
            subset=self.document_range,
            worker_config=self.worker_config,
        )

    def as_file_store(self):
        raise NotImplementedError("A token file is not a file store.")
