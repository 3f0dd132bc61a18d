# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""From a path to a dataset, checked first.

Energon's own ``get_train_dataset`` accepts the same YAML and the same TaskEncoders, and is as safe
as Energon is: it runs what a YAML file names. The functions here look at all of it first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterable

import megatron.energon
from megatron.energon import TaskEncoder, WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory, SavableDataset
from megatron.energon.metadataset.loader import load_dataset

from energon_ext.config.source_key import order_name, source_identities, source_keys
from energon_ext.config.yaml_check import YamlChecker
from energon_ext.encoders.mixin import check_virtual_epoch


def get_train_dataset(
    path: str | Path | EPath,
    *,
    worker_config: WorkerConfig,
    batch_size: int | None,
    task_encoder: TaskEncoder,
    split_part: str = "train",
    shuffle_buffer_size: int | None = None,
    max_samples_per_sequence: int | None = None,
    virtual_epoch_length: int = 0,
    trusted_modules: Iterable[str] = (),
    allow_dataset_code: bool = False,
    **options: Any,
) -> SavableDataset:
    """A training dataset, ready for ``megatron.energon.get_savable_loader``.

    Args:
        path: metadataset YAML, prepared folder or JSONL file.
        worker_config: ranks and workers; ``WorkerConfig.default_worker_config()`` outside Megatron.
        batch_size: rows or samples per batch of one rank.
        task_encoder: a :class:`~energon_ext.PackedTaskEncoder`, or any with
            :class:`~energon_ext.DynamicBlendMixin`.
        trusted_modules: modules whose classes and functions a YAML file may name.
        allow_dataset_code: whether dataset folders may bring Python loaders.
        **options: everything else that Energon's ``get_train_dataset`` takes.

    Raises:
        ConfigError: something in the YAML, in a folder or in the arguments is wrong.
    """
    check_virtual_epoch(virtual_epoch_length, worker_config)
    checker = YamlChecker(frozenset(trusted_modules), allow_dataset_code)
    checker.check(EPath(path), split_part)
    return megatron.energon.get_train_dataset(
        path,
        worker_config=worker_config,
        batch_size=batch_size,
        task_encoder=task_encoder,
        split_part=split_part,
        shuffle_buffer_size=shuffle_buffer_size,
        max_samples_per_sequence=max_samples_per_sequence,
        virtual_epoch_length=virtual_epoch_length,
        **options,
    )


def source_names(
    path: str | Path | EPath,
    *,
    split_part: str = "train",
    trusted_modules: Iterable[str] = (),
    allow_dataset_code: bool = False,
) -> dict[str, tuple[str, str]]:
    """The sources of a metadataset, without a TaskEncoder.

    Args, Raises: as :func:`get_train_dataset`.

    Returns:
        Key -> its identity and order name, see :func:`energon_ext.state.match.match_sources`.
    """
    checker = YamlChecker(frozenset(trusted_modules), allow_dataset_code)
    checker.check(EPath(path), split_part)
    loaded = load_dataset(EPath(path)).get_datasets(
        training=True,
        split_part=split_part,
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
    )
    factories = [dataset.dataset for dataset in loaded.datasets]
    keys = source_keys(factories)
    orders = map(order_name, keys, factories)
    return dict(zip(keys, zip(source_identities(factories), orders)))


def get_val_datasets(
    path: str | Path | EPath,
    *,
    worker_config: WorkerConfig,
    batch_size: int,
    task_encoder: TaskEncoder,
    split_part: str = "val",
    trusted_modules: Iterable[str] = (),
    allow_dataset_code: bool = False,
    **options: Any,
) -> list[tuple[SavableDataset, BaseCoreDatasetFactory]]:
    """One validation dataset per source, with the factory it came from.

    Args, Raises: as :func:`get_train_dataset`.
    """
    checker = YamlChecker(frozenset(trusted_modules), allow_dataset_code)
    checker.check(EPath(path), split_part)
    return megatron.energon.get_val_datasets(
        path,
        worker_config=worker_config,
        batch_size=batch_size,
        task_encoder=task_encoder,
        split_part=split_part,
        **options,
    )
