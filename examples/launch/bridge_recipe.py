# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A dataset provider for Megatron-Bridge, and its forward step.

    config = ...  # any pretraining recipe of Megatron-Bridge
    use_energon(config, path="mix.yaml", tokenizer="tokenizer.json")
    pretrain(config, forward_step_func=bridge_forward_step)

Megatron-Bridge saves the data state next to the model and restores it. Written for its interface of
August 2026; tested only with its recipes and configs, not on GPUs.
"""

from dataclasses import dataclass
from datetime import timedelta

from megatron.bridge.training.config import DatasetBuildContext, DatasetProvider
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import get_current_global_batch_size

from energon_ext import ConfigError, PackedTaskEncoder, get_train_dataset, get_val_datasets
from energon_ext.megatron import (
    ValidationLoader,
    create_broadcast_groups,
    data_parallel_worker_config,
    forward_step,
)
from energon_ext.megatron.loader import RerunLoader
from energon_ext.tokenizers.tokenizers import load_tokenizer


@dataclass(kw_only=True)
class EnergonExtProvider(DatasetProvider):
    """Packed rows of a metadataset; tensor-parallel rank 0 of every pipeline stage loads data."""

    path: str
    seq_length: int
    rows_per_step: int
    tokenizer: str = "bytes"
    batches_per_evaluation: int = 0
    seed: int = 1234
    timeout_minutes: float = 10
    dataloader_type: str = "external"

    def build_datasets(self, context: DatasetBuildContext):
        """Return the iterators that Bridge passes to the step unchanged."""
        size = get_current_global_batch_size()
        if self.rows_per_step != size:
            raise ConfigError(
                f"train.global_batch_size: {size} found, but use_energon was called with "
                f"{self.rows_per_step}; call it after the last change, and without a ramp-up."
            )
        create_broadcast_groups(timedelta(minutes=self.timeout_minutes))  # on all ranks
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return None, None, None
        ranks = parallel_state.get_context_parallel_world_size()
        options = {
            "worker_config": data_parallel_worker_config(self.num_workers, seed=self.seed),
            "batch_size": 1,  # a packed micro-batch is one sequence
            "task_encoder": PackedTaskEncoder(
                load_tokenizer(self.tokenizer),
                self.seq_length,
                alignment=2 * ranks if ranks > 1 else 1,
            ),
        }
        train = RerunLoader(
            get_train_dataset(self.path, rows_per_step=self.rows_per_step, **options)
        )
        if not self.batches_per_evaluation:
            return train, None, None
        validation = get_val_datasets(self.path, **options)
        return train, ValidationLoader(validation, self.batches_per_evaluation), None


def use_energon(config, path, tokenizer):
    """Make a recipe read ``path``, keeping its model and optimizer."""
    config.train.micro_batch_size = 1
    config.dataset = EnergonExtProvider(
        path=path,
        tokenizer=tokenizer,
        seq_length=config.model.seq_length,
        rows_per_step=config.train.global_batch_size,
        timeout_minutes=config.dist.distributed_timeout_minutes,
    )
    # Sum gradients over ranks and divide once by the step's tokens; recipes average by default.
    config.model.calculate_per_token_loss = True
    config.ddp.average_in_collective = False


def bridge_forward_step(state, data_iterator, model, return_schedule_plan=False):
    """Run one micro-batch, as Bridge's schedules call it."""
    return forward_step(data_iterator, model)
