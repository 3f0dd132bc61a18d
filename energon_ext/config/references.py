# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Paths in a metadataset: everything that Energon reads, and token files."""

# No `from __future__ import annotations` here: Energon's parser reads the annotations.
from dataclasses import dataclass, field, fields
from typing import Any, Sequence, Union, get_args

from megatron.energon import WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory, SavableDataset
from megatron.energon.flavors.webdataset.structs import DatasetSubset
from megatron.energon.metadataset.dataset_loader import DatasetLoader
from megatron.energon.metadataset.metadataset_v2 import DatasetReference

from energon_ext.compat import resolve_path, set_dataset
from energon_ext.errors import ConfigError
from energon_ext.samples.numbered import ALONE
from energon_ext.storage.object_store import as_msc, file_name, is_remote
from energon_ext.tokens.formats import find_format, open_documents
from energon_ext.tokens.index import without_suffix


class DocumentFactory(BaseCoreDatasetFactory):
    """Tokenized documents as Energon's metadatasets pass datasets to a TaskEncoder."""

    # No sample type: rows of token files are complete, so there is nothing to cook.
    __sample_type__ = None

    #: As Energon has it: 1 for a random order in each epoch, None for the stored one.
    shuffle_over_epochs: int | None = 1

    def __init__(
        self,
        path: EPath,
        *,
        training: bool,
        worker_config: WorkerConfig,
        subflavors: dict[str, Any] | None = None,
        subset: DatasetSubset | None = None,
        **sample_options: Any,
    ):
        self.subflavors = subflavors or {}
        self.subset = subset
        self.training = training
        self.worker_config = worker_config
        # Commands that only ask for names or tokenizers are not part of a run.
        is_run = worker_config is not ALONE
        share = (worker_config.rank, worker_config.world_size) if is_run else None
        self.documents = open_documents(path, share)
        self.paths = [named_path(path, self.documents.prefixes)]

    def __len__(self) -> int:
        return len(subset_of(self, len(self.documents)))

    def read_field(self, name: str) -> None:
        """Read the tokens from a field that the entry names, if the documents have fields."""
        if (found := self.documents.of_field(name)) is not None:
            self.documents = found

    def build(self, worker_rotation_offset: int = 0) -> SavableDataset:
        raise ConfigError(
            f"{self.paths[0]}: token files yield packed rows; load them with a PackedTaskEncoder, "
            f"or with an encoder that implements length_of and pack_tokens."
        )

    def as_file_store(self) -> Any:
        raise NotImplementedError("A token file is not a file store.")


def subset_of(dataset: BaseCoreDatasetFactory, total: int) -> range:
    """Return the numbers that a dataset reads among the ``total`` documents or samples it has."""
    subset = getattr(dataset, "subset", None)
    return range(total) if subset is None else range(*subset.compute_subset(total))


def check_blocks(dataset: BaseCoreDatasetFactory, found: str) -> None:
    """Raise ConfigError, which begins with what was ``found``, unless blocks fit a source.

    In stored order the documents of a block may have much in common, so that steps differ from each
    other many times as much as in a random order.
    """
    path = dataset.paths[0]
    if not isinstance(dataset, DocumentFactory):
        raise ConfigError(f"{found}, but {path} are not token files; remove it.")
    if not dataset.documents.is_shuffled:
        raise ConfigError(
            f"{found}, but the documents of {path} are not in random order; write them with "
            f"`energon-ext prepare --shuffle SEED`, or remove it."
        )


def named_path(path: EPath, prefixes: Sequence[str]) -> EPath:
    """Return a path without suffix if it names a single pair, any other path unchanged."""
    name = file_name(path).rstrip("/")
    stem = without_suffix(name)
    is_pair = stem != name and (is_remote(name) or list(prefixes) == [stem])
    return EPath(without_suffix(str(path).rstrip("/"))) if is_pair else path


class TokenFileLoader(DatasetLoader):
    """Loads the token files that a reference names."""

    def get_dataset(self, *, shuffle_over_epochs: int | None = 1, **options: Any) -> Any:
        if shuffle_over_epochs not in (1, None):
            raise ConfigError(
                f"{self.path}: shuffle_over_epochs_multiplier: {shuffle_over_epochs} is for "
                f"webdatasets only; token files have a new order in every epoch, or the `order` of "
                f"the entry. Remove it."
            )
        path = self.path if isinstance(self.path, EPath) else EPath(self.path)
        found = DocumentFactory(path, **options)
        found.shuffle_over_epochs = shuffle_over_epochs
        return found


def _try_none_first(reference: type) -> type:
    """Redeclare Energon's optional fields, so that its parser tries None before other types.

    For each field without a value it would otherwise raise and catch an error: about 80 us for each
    reference, of which there may be ten thousand.
    """
    for each in fields(DatasetReference):
        if each.default is None:
            kinds = sorted(get_args(each.type), key=lambda kind: kind is not type(None))
            reference.__annotations__[each.name] = Union[tuple(kinds)]  # noqa: UP007
            setattr(reference, each.name, field(default=each.default))
    return reference


@dataclass(kw_only=True)
@_try_none_first
class AnyDatasetReference(DatasetReference):
    """A path to a prepared folder, JSONL, a metadataset or token files."""

    def post_initialize(self, mds_path: EPath | None = None) -> None:
        self.path: EPath | str = as_msc(self.path)
        path = resolve_path(self, mds_path)
        if find_format(path) is not None:
            if self.aux:
                raise ConfigError(f"{path}: token files have no `aux`; remove it.")
            set_dataset(self, TokenFileLoader(path=path))
        else:
            super().post_initialize(mds_path)
