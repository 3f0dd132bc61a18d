# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""From an Energon dataset to the iterator that Megatron's training loops want.

Which ranks load: tensor-parallel rank 0 of every pipeline stage and data-parallel rank. Loading is
deterministic, so all stages of a replica hold the same batch without talking to each other, and one
stage's state is every stage's.
"""

from __future__ import annotations

import copy
import logging
import os
from pathlib import Path
from typing import Any, Iterator

import torch
from megatron.core import parallel_state
from megatron.energon import TaskEncoder, WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.savable_loader import SavableDataLoaderState

from energon_ext.errors import ConfigError, StateFormatError, StateMismatchError
from energon_ext.loading import get_train_dataset
from energon_ext.savable_loader import ExactDataLoader
from energon_ext.state_file import read_state_file
from energon_ext.task_encoders.packed import PACKINGS, PackedTaskEncoder
from energon_ext.tokenizers import load_tokenizer

logger = logging.getLogger(__name__)


class MegatronEnergonLoader:
    """An endless iterator over an Energon dataset, as ``--dataloader-type external`` expects it.

    A state stands exactly between two batches, so a resume draws nothing twice.

    Args:
        dataset: an Energon dataset, for example of :func:`energon_ext.get_train_dataset`.
        **loader_options: as for ``megatron.energon.get_savable_loader``.

    State: the stock ``SavableDataLoaderState`` of this data-parallel rank. It depends on the
    dataset's configuration, the rank, the world size and the number of workers.
    """

    def __init__(self, dataset: SavableDataset, **loader_options: Any):
        self.loader = ExactDataLoader(dataset, **loader_options)
        # Energon always asks for pinned memory; torch warns where there is no GPU to pin it for.
        self.loader.pin_memory = torch.cuda.is_available()
        self._iterator: Iterator[Any] | None = None
        self._next_batch_index = 0

    @property
    def next_batch_index(self) -> int:
        """Per-rank index of the batch that comes next; what weight schedules are evaluated at."""
        return self._next_batch_index

    def __iter__(self) -> "MegatronEnergonLoader":
        return self

    def __next__(self) -> Any:
        """Draw a batch; where the dataset ends, begin its next epoch.

        Raises:
            ConfigError: an epoch holds no batch on this rank.
        """
        batch = next(self._iterator, None) if self._iterator is not None else None
        if batch is None:
            self._iterator = iter(self.loader)
            batch = next(self._iterator, None)
        if batch is None:
            worker = self.loader.worker_config
            raise ConfigError(
                f"The dataset has no batch for data-parallel rank {worker.rank} of "
                f"{worker.world_size}: use fewer ranks or workers, or a smaller batch."
            )
        self._next_batch_index += 1
        return batch

    def save_state(self) -> SavableDataLoaderState | None:
        """Return the state after the last batch drawn; None before workers drew the first."""
        return copy.deepcopy(self.loader.save_state_rank())

    def restore_state(self, state: SavableDataLoaderState | None) -> None:
        """Continue after the batch that ``state`` was saved after.

        Raises:
            StateFormatError: ``state`` is something else.
            StateMismatchError: saved with another number of workers; what else differs in the
                dataset's configuration is reported by the dataset, for workers at the first batch.
            ConfigError: this loader has drawn batches already.
        """
        if state is not None and not isinstance(state, SavableDataLoaderState):
            raise StateFormatError(
                f"The data state is a {type(state).__name__}, not what save_state() returned. "
                "Restore another checkpoint; the data is not started over in its place."
            )
        if self._iterator is not None:
            raise ConfigError("Restore a data state before the first batch, in a new loader.")
        if state is not None:
            _check_workers(state, self.loader.num_workers)
            self._next_batch_index = _batches_drawn(state)
        # Energon keeps references into a state it is given, and it may be restored again.
        self.loader.restore_state_rank(copy.deepcopy(state))

    def close(self) -> None:
        """End the worker processes."""
        self.loader.close()


def train_valid_test_dataloaders_provider(
    train_val_test_num_samples: Any,
    vp_stage: int | None = None,
    *,
    task_encoder: TaskEncoder | None = None,
) -> tuple[MegatronEnergonLoader | None, None, None]:
    """Build the training loader inside a Megatron-LM launch script.

    Reads Megatron-LM's arguments and those of :func:`add_energon_args`::

        pretrain(train_valid_test_dataloaders_provider, model_provider,
                 ModelType.encoder_or_decoder, forward_step,
                 extra_args_provider=add_energon_args)

    with ``--dataloader-type external --micro-batch-size 1 --calculate-per-token-loss
    --data-path mix.yaml --dataloader-save DIR``. A packed micro-batch is one sequence of
    ``--seq-length`` positions. Validation is not built: give ``--eval-iters 0``.

    When the model was loaded at an iteration > 0, the data continues from the state saved with it.

    Args:
        train_val_test_num_samples: not needed; sources repeat and blend by weight.
        vp_stage: not needed; every virtual stage loads the same.
        task_encoder: of the user; by default a :class:`~energon_ext.PackedTaskEncoder`.

    Returns:
        ``(loader, None, None)`` on ranks that load, ``(None, None, None)`` on the others.

    Raises:
        ConfigError: an argument, the YAML or a dataset is wrong.
        StateFormatError: the data state cannot be read, or some ranks have one and others not.
        StateMismatchError: the data state belongs to another configuration.
    """
    from megatron.training import get_args

    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return None, None, None
    args = get_args()
    _check_args(args)
    loader = MegatronEnergonLoader(
        get_train_dataset(
            args.data_path[0],
            worker_config=data_parallel_worker_config(args.num_workers, seed=args.seed),
            batch_size=args.micro_batch_size,
            task_encoder=task_encoder or _default_task_encoder(args),
            shuffle_buffer_size=args.energon_shuffle_buffer_docs,
        )
    )
    if args.iteration > 0:
        _restore_megatron_state(loader, args)
    return loader, None, None


#: Megatron-LM calls the provider on every rank, not only on those of tensor-parallel rank 0.
train_valid_test_dataloaders_provider.is_distributed = True


def add_energon_args(parser):
    """Add this package's arguments to Megatron-LM's parser, as its ``extra_args_provider``.

    Example:
        >>> import argparse
        >>> parser = add_energon_args(argparse.ArgumentParser())
        >>> parser.parse_args(["--energon-packing", "sequential"]).energon_packing
        'sequential'
    """
    group = parser.add_argument_group(title="energon_ext")
    group.add_argument(
        "--dataloader-save",
        help="Folder for the data state, saved with every model checkpoint.",
    )
    group.add_argument(
        "--dataloader-load",
        help="Folder to resume the data state from; default: that of --dataloader-save.",
    )
    group.add_argument(
        "--energon-tokenizer",
        default="bytes",
        help="`bytes`, a tokenizer.json, a folder or a Hugging Face name.",
    )
    group.add_argument("--energon-packing", choices=PACKINGS, default="bin")
    group.add_argument("--energon-packing-buffer-docs", type=int, default=512)
    group.add_argument("--energon-shuffle-buffer-docs", type=int, default=1000)
    return parser


def data_parallel_worker_config(num_workers: int, seed: int = 0) -> WorkerConfig:
    """Return Energon's view of this rank: one shard of the data per data-parallel rank."""
    return WorkerConfig(
        rank=parallel_state.get_data_parallel_rank(),
        world_size=parallel_state.get_data_parallel_world_size(),
        num_workers=num_workers,
        data_parallel_group=parallel_state.get_data_parallel_group(),
        seed_offset=seed,
    )


def _default_task_encoder(args) -> PackedTaskEncoder:
    return PackedTaskEncoder(
        load_tokenizer(args.energon_tokenizer),
        args.seq_length,
        packing=args.energon_packing,
        packing_buffer_docs=args.energon_packing_buffer_docs,
    )


def _check_args(args) -> None:
    for flag, found, allowed, right in (
        ("--data-path", args.data_path, "one metadataset", len(args.data_path or ()) == 1),
        ("--micro-batch-size", args.micro_batch_size, "1", args.micro_batch_size == 1),
        ("--dataloader-type", args.dataloader_type, "external", args.dataloader_type == "external"),
    ):
        if not right:
            raise ConfigError(f"{flag} must be {allowed} with energon_ext, got {found!r}.")


def _restore_megatron_state(loader: MegatronEnergonLoader, args) -> None:
    """Restore what Megatron-LM saved of this rank with the model it has just loaded."""
    path = _megatron_state_path(args)
    world_size = loader.loader.worker_config.world_size
    found = _count_over_data_parallel(path is not None and os.path.exists(path))
    if found == world_size:
        loader.restore_state(_read_megatron_state(path))
    elif found == 0:
        # No state is a decision of the user (a model from elsewhere); half of one is damage.
        logger.warning(
            "NO DATA STATE: the model continues from iteration %d, but %s does not exist, so the "
            "data starts from its beginning and what the model has seen will be seen again. To "
            "continue the data as well, set --dataloader-load to the folder it was saved in.",
            args.iteration,
            path or "a folder given by --dataloader-save",
        )
    else:
        raise StateFormatError(
            f"Only {found} of {world_size} data-parallel ranks find their data state of iteration "
            f"{args.iteration} (here: {path}). Copy the missing files, or resume elsewhere."
        )


def _read_megatron_state(path: str) -> Any:
    saved = read_state_file(Path(path), record=None)  # Megatron-LM keeps no checksums
    if not isinstance(saved, dict) or "dataloader_state_dict" not in saved:
        raise StateFormatError(
            f"{path} holds no dataloader_state_dict, so Megatron-LM did not write it there; set "
            "--dataloader-load to the folder that --dataloader-save was."
        )
    return saved["dataloader_state_dict"]


def _megatron_state_path(args) -> str | None:
    from megatron.training.checkpointing import get_checkpoint_name

    folder = args.dataloader_load or args.dataloader_save
    if not folder:
        return None
    rank = parallel_state.get_data_parallel_rank()
    # Megatron-LM saves on the first pipeline stage only; every stage loads that file.
    return get_checkpoint_name(
        folder,
        args.iteration,
        pipeline_rank=0,
        basename=f"train_dataloader_dprank{rank:03d}.pt",
    )


def _count_over_data_parallel(here: bool) -> int:
    device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
    count = torch.tensor(int(here), device=device)
    torch.distributed.all_reduce(count, group=parallel_state.get_data_parallel_group())
    return int(count)


def _check_workers(state: SavableDataLoaderState, workers: int) -> None:
    saved = 0 if _without_workers(state) else len(state.worker_states)
    if saved != workers:
        raise StateMismatchError(
            {"num_workers": (saved, workers)},
            "Resume with the saved number of workers.",
        )


def _without_workers(state: SavableDataLoaderState) -> bool:
    return len(state.worker_states) == 1 and isinstance(state.worker_states[0], dict)


def _batches_drawn(state: SavableDataLoaderState) -> int:
    if _without_workers(state):
        return state.worker_states[0]["_sample_index"]
    return sum(worker.state.sample_index + worker.offset for worker in state.worker_states)
