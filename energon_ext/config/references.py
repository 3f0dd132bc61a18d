# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a path in a metadataset may name: all that Energon knows, and token files."""

# No `from __future__ import annotations` here: Energon's parser reads the annotations.
from dataclasses import dataclass
from typing import Any

from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory, SavableDataset
from megatron.energon.flavors.webdataset.structs import DatasetSubset
from megatron.energon.metadataset.loader_interface import (
    DatasetLoaderInterface,
    LoadedDataset,
    LoadedDatasetList,
    TraversedDatasetReference,
)
from megatron.energon.metadataset.metadataset_v2 import DatasetReference

from energon_ext.documents.file_set import open_token_files
from energon_ext.documents.token_paths import is_token_file, named_pair
from energon_ext.errors import ConfigError


class TokenFileFactory(BaseCoreDatasetFactory):
    """Token files as Energon's metadatasets hand them to a TaskEncoder."""

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
        self.paths = [EPath(named_pair(path))]
        self.subflavors = subflavors or {}
        self.subset = subset
        self.training = training
        self.worker_config = worker_config
        self.files = open_token_files(str(path))

    @property
    def document_range(self) -> tuple[int, int]:
        """First document and the one after the last."""
        total = len(self.files)
        return self.subset.compute_subset(total) if self.subset is not None else (0, total)

    def __len__(self) -> int:
        first, stop = self.document_range
        return stop - first

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset:
        raise ConfigError(
            f"{self.paths[0]}: a token file gives packed rows; load it with a PackedTaskEncoder."
        )

    def as_file_store(self) -> Any:
        raise NotImplementedError("A token file is not a file store.")


@dataclass
class TokenFileLoader(DatasetLoaderInterface):
    """What a reference to token files loads."""

    path: EPath

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        pass

    def traverse(
        self, mds_path: EPath | None = None, *, split_part: str, **kwargs: Any
    ) -> list[Any]:
        subflavors = kwargs.get("_subflavors") or {}
        return [TraversedDatasetReference(self.path, split_part, {}, subflavors)]

    def get_datasets(
        self,
        *,
        training: bool,
        worker_config: WorkerConfig,
        subflavors: dict[str, Any] | None = None,
        subset: DatasetSubset | None = None,
        shuffle_over_epochs_multiplier: int | None = 1,
        **kwargs: Any,
    ) -> LoadedDatasetList:
        if shuffle_over_epochs_multiplier not in (1, None):
            raise ConfigError(
                f"{self.path}: shuffle_over_epochs_multiplier is for webdatasets; every epoch of a "
                f"token file has an order of its own."
            )
        factory = TokenFileFactory(
            self.path,
            training=training,
            worker_config=worker_config,
            subflavors=subflavors,
            subset=subset,
        )
        return LoadedDatasetList(datasets=[LoadedDataset(dataset=factory)])


@dataclass(kw_only=True)
class AnyDatasetReference(DatasetReference):
    """A path to anything: a prepared folder, JSONL, a metadataset, or token files."""

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        path = self._resolve_path(mds_path)
        if is_token_file(path):
            self._dataset = TokenFileLoader(path)
        else:
            super().post_initialize(mds_path)
