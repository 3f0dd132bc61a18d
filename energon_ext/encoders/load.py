# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Datasets from a path, checked before they are loaded.

Energon's own ``get_train_dataset`` accepts the same YAML and the same TaskEncoders, but runs any
code that a YAML file names. The functions here check the whole YAML first.
"""

import contextlib
import copy
import gc
import inspect
import os
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Mapping

import megatron.energon
from megatron.energon import SampleDecoder, TaskEncoder, WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory, SavableDataset
from megatron.energon.metadataset.loader import load_dataset
from megatron.energon.metadataset.loader_interface import DatasetBlendMode

from energon_ext.arguments import check_integer, choices
from energon_ext.config.metadataset import errors_of_energon
from energon_ext.config.mix import Entry, Mix, mix_of
from energon_ext.config.yaml_check import YamlChecker
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.quiet import quiet_energon
from energon_ext.encoders.splicing import check_names
from energon_ext.errors import ConfigError
from energon_ext.samples.numbered import ALONE
from energon_ext.storage.folders import list_folders_once
from energon_ext.tokens.formats import find_format

#: Options that name files of a prepared folder.
_FOLDER_FILES = ("dataset_config", "split_config")

#: Options of Energon that are not in its signature (7.4.1, ``task_encoder/loader.py``).
_FURTHER_OPTIONS = {*_FOLDER_FILES, "auto_decode", "image_decode", "av_decode"}
_FURTHER_OPTIONS |= {"ignore_decoder_errors", "video_decode_audio", "handler"}


def get_train_dataset(
    path: str | Path | EPath,
    *,
    worker_config: WorkerConfig,
    batch_size: int | None,
    task_encoder: TaskEncoder,
    rows_per_step: int | None = None,
    split_part: str = "train",
    shuffle_buffer_size: int | None = None,
    max_samples_per_sequence: int | None = None,
    trusted_modules: Iterable[str] = (),
    allow_dataset_code: bool = False,
    **options: Any,
) -> SavableDataset:
    """Load a training dataset for :class:`energon_ext.ExactDataLoader`.

    Args:
        path: metadataset YAML, prepared folder or JSONL file.
        worker_config: ranks and workers; ``WorkerConfig.default_worker_config()`` outside Megatron.
        batch_size: rows or samples per batch of one rank.
        task_encoder: a :class:`~energon_ext.PackedTaskEncoder`, or any TaskEncoder with
            :class:`~energon_ext.DynamicBlendMixin`.
        rows_per_step: rows of a global batch, a multiple of ``batch_size`` x ranks (the default).
            Runs with the same number read the same rows in every step, with any ranks and workers.
        trusted_modules: modules whose classes and functions a YAML file may name.
        allow_dataset_code: whether to run Python loaders in dataset folders.
        **options: all other options of Energon's ``get_train_dataset``.

    Raises:
        ConfigError: the YAML, a folder or an argument is invalid.
    """
    if batch_size is not None:
        check_integer("get_train_dataset: batch_size", batch_size, 1)
    if rows_per_step is not None:
        task_encoder = _with_rows_per_step(task_encoder, rows_per_step)
    checker = YamlChecker(frozenset(trusted_modules), allow_dataset_code)
    with _check_first(get_train_dataset, checker, path, split_part, worker_config, options) as root:
        return megatron.energon.get_train_dataset(
            root,
            worker_config=worker_config,
            batch_size=batch_size,
            task_encoder=task_encoder,
            split_part=split_part,
            shuffle_buffer_size=shuffle_buffer_size,
            max_samples_per_sequence=max_samples_per_sequence,
            **options,
        )


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
    """Load one validation dataset per source, with the factory it came from.

    Args, Raises: see :func:`get_train_dataset`.
    """
    check_integer("get_val_datasets: batch_size", batch_size, 1)
    checker = YamlChecker(frozenset(trusted_modules), allow_dataset_code)
    with _check_first(get_val_datasets, checker, path, split_part, worker_config, options) as root:
        # Energon builds each source separately, which would hide a name that no source has.
        files = {name: options[name] for name in _FOLDER_FILES if name in options}
        check_names(_load_entries(root, split_part, task_encoder.decoder, **files))
        return megatron.energon.get_val_datasets(
            root,
            worker_config=worker_config,
            batch_size=batch_size,
            task_encoder=task_encoder,
            split_part=split_part,
            **options,
        )


def load_mix(
    path: str | Path | EPath, *, split_part: str, trusted_modules: Iterable[str]
) -> tuple[Mix, bool]:
    """Load a mix for training, and whether it repeats as a whole; no encoder is needed.

    Raises:
        ConfigError: the YAML or a folder is invalid.
    """
    config = WorkerConfig(rank=0, world_size=1, num_workers=0)
    with _loading(YamlChecker(frozenset(trusted_modules)), path, split_part) as root:
        loaded = load_dataset(root).get_datasets(
            training=True, split_part=split_part, worker_config=config
        )
        return mix_of(loaded.datasets), loaded.blend_mode is DatasetBlendMode.SAMPLE_REPETITIONS


def load_split(
    path: str | Path | EPath,
    split_part: str,
    decoder: SampleDecoder | None = None,
    trusted_modules: Iterable[str] = (),
) -> tuple[Entry, ...]:
    """Load the sources of one split, each as it is stored: once and in order.

    Raises:
        ConfigError: the YAML or a folder is invalid.
    """
    with _loading(YamlChecker(frozenset(trusted_modules)), path, split_part) as root:
        return _load_entries(root, split_part, decoder)


def _load_entries(
    root: EPath, split_part: str, decoder: SampleDecoder | None, **files: str
) -> tuple[Entry, ...]:
    """Load the sources of one split of a checked path."""
    loaded = load_dataset(root, **files).get_datasets(
        training=False, split_part=split_part, worker_config=ALONE, decoder=decoder
    )
    return mix_of(loaded.datasets).entries


@contextlib.contextmanager
def _check_first(
    function: Callable[..., Any],
    checker: YamlChecker,
    path: str | Path | EPath,
    split_part: str,
    worker_config: WorkerConfig,
    options: Mapping[str, Any],
) -> Iterator[EPath]:
    """Reject forbidden YAML and unknown options, which Energon would ignore; yield the path."""
    name = function.__name__
    check_integer("worker_config.seed_offset", worker_config.seed_offset, -(2**63))
    original = getattr(megatron.energon, name)
    known = {*inspect.signature(original).parameters, *inspect.signature(function).parameters}
    known = {*known, *_FURTHER_OPTIONS} - {"kwargs", "options"}
    for option in options:
        if option not in known:
            raise ConfigError(f"{name}: no option {option!r}; it has {choices(option, known)}")
    files = {name: options.get(name) for name in _FOLDER_FILES}
    with _loading(checker, path, split_part, **files) as root:
        yield root


@contextlib.contextmanager
def _loading(
    checker: YamlChecker, path: str | Path | EPath, split_part: str, **files: str | None
) -> Iterator[EPath]:
    """Check a path and yield it; the errors of Energon in the block are ours, and it is quiet.

    Args:
        **files: ``dataset_config`` and ``split_config`` of a prepared folder.
    """
    with list_folders_once(), _pause_collector():
        root = checker.check(path, split_part, **files)
        _refuse_documents(root, path, split_part)
        with quiet_energon(), errors_of_energon(str(path)):
            yield root


def _refuse_documents(root: EPath, path: str | Path | EPath, split_part: str) -> None:
    """Raise ConfigError if a checked path names tokenized documents, not a metadataset."""
    if find_format(root) is not None:
        split_folder = os.path.join(str(path), split_part)
        raise ConfigError(
            f"{path}: token files need a metadataset: a YAML file with `__module__: "
            f"energon_ext`, `__class__: ScheduledMetadataset` and `splits: {{{split_part}: "
            f"{{path: {split_folder if os.path.isdir(split_folder) else path}}}}}`."
        )


@contextlib.contextmanager
def _pause_collector() -> Iterator[None]:
    """Pause Python's garbage collector, which would search all sources built so far repeatedly."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _with_rows_per_step(task_encoder: TaskEncoder, rows_per_step: int) -> TaskEncoder:
    check_integer("get_train_dataset: rows_per_step", rows_per_step, 1)
    bound = copy.copy(require_mixin(task_encoder, f"rows_per_step: {rows_per_step} found"))
    bound.rows_per_step = rows_per_step
    return bound


def require_mixin(task_encoder: TaskEncoder, found: str) -> DynamicBlendMixin:
    """Return an encoder with the mixin, or raise a ConfigError that begins with ``found``."""
    if not isinstance(task_encoder, DynamicBlendMixin):
        raise ConfigError(
            f"{found}, but a {type(task_encoder).__name__} plans no steps; put "
            f"energon_ext.DynamicBlendMixin first among its base classes."
        )
    return task_encoder
