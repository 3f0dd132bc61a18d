# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The data state of a saved run: its cursors on disk, and datasets that continue from them."""

from pathlib import Path
from typing import Any, Mapping

import click
from megatron.energon import WorkerConfig

from energon_ext.cli.mix import named_encoder
from energon_ext.encoders.load import get_train_dataset
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.saved import load_encoder
from energon_ext.encoders.written_tokenizer import tokenizer_of_plan
from energon_ext.errors import ConfigError
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.run import Run
from energon_ext.state.checkpoint_folder import checkpoints_in, cursors_in
from energon_ext.state.schema import check_seal, read_format
from energon_ext.tokenizers.tokenizers import load_tokenizer

#: Command line options that change the encoder of a state, by the encoder's own option.
OPTIONS = {"seq_len": "--seq-length", "packing": "--packing", "tokenizer": "--tokenizer"}


class SavedCursor:
    """A cursor of a planned run, read from the folder of its checkpoint."""

    def __init__(self, folder: Path, sealed: Any):
        self.folder, self.state = folder, read_format(check_seal(sealed))
        self.step: int = self.state["plan"]["step"]  # the next step, which may be partly read
        self.inside: Mapping[str, Any] = self.state["inside"] or {}  # not empty if partly read

    def dataset(
        self,
        metadataset: Path,
        *,
        ranks: int | None = None,
        workers: int = 0,
        batch_size: int | None = None,
        rows_per_step: int | None = None,
        encoder: str | None = None,
        changed: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Run:
        """Open the dataset of the next run; arguments that are None keep their saved values.

        Args:
            encoder: ``MODULE:FUNCTION`` that returns the task encoder; by default it is rebuilt
                from the state.
            changed: options of the rebuilt encoder.
            **options: passed on to ``get_train_dataset``.
        """
        seed = self.state["fingerprint"].get("seed", 0)
        ranks = ranks or self.inside.get("ranks", 1)
        config = WorkerConfig(rank=0, world_size=ranks, num_workers=workers, seed_offset=seed)
        dataset = get_train_dataset(
            metadataset,
            worker_config=config,
            batch_size=batch_size or self.inside.get("batch_size", 1),
            rows_per_step=rows_per_step or self.state["rows_per_step"],
            task_encoder=self._encoder(encoder, changed or {}),
            **options,
        )
        blend: Run = find_blend(dataset)
        return blend

    def _encoder(self, name: str | None, changed: Mapping[str, Any]) -> DynamicBlendMixin:
        options = {option: value for option, value in changed.items() if value is not None}
        if name is None:
            return load_encoder(self.state["encoder"], **options)
        if options:
            given = ", ".join(OPTIONS[option] for option in options)
            raise click.UsageError(f"{given}: set by --encoder; remove it.")
        encoder: DynamicBlendMixin = named_encoder(name, DynamicBlendMixin)
        return encoder


def open_unsaved(
    metadataset: Path,
    tokenizer: str | None,
    *,
    encoder: str | None = None,
    seq_len: int = 2,
    packing: str = "bin",
    seed: int = 0,
    ranks: int = 1,
    batch_size: int = 1,
    rows_per_step: int | None = None,
    split_part: str,
    trusted_modules: tuple[str, ...],
) -> Run:
    """Open the dataset of a run that has no state yet, by default of text."""
    if encoder is not None:
        task_encoder = named_encoder(encoder, DynamicBlendMixin)
    elif tokenizer is None:
        loaded = tokenizer_of_plan(metadataset, split_part, trusted_modules)
        task_encoder = PackedTaskEncoder(loaded, seq_len, packing=packing)
    else:
        task_encoder = PackedTaskEncoder(load_tokenizer(tokenizer), seq_len, packing=packing)
    dataset = get_train_dataset(
        metadataset,
        worker_config=WorkerConfig(rank=0, world_size=ranks, num_workers=0, seed_offset=seed),
        batch_size=batch_size,
        rows_per_step=rows_per_step,
        task_encoder=task_encoder,
        split_part=split_part,
        trusted_modules=trusted_modules,
    )
    blend: Run = find_blend(dataset)
    return blend


def saved_cursors(run: Path, may_be_none: bool = False) -> list[SavedCursor]:
    """Return the cursors of a run, oldest first.

    Args:
        run: folder of a run, of its checkpoints, of one checkpoint or of Megatron-LM's data states.
        may_be_none: return an empty list if it has none; otherwise raise ConfigError.
    """
    if not run.is_dir():
        raise ConfigError(f"{run}: does not exist; give the folder of a run or of one checkpoint.")
    cursors = []
    for folder in checkpoints_in(run):
        state = next((state for _, state in cursors_in(folder)), None)
        if isinstance(state, dict) and "plan" in state:
            cursors.append(SavedCursor(folder, state))
    if not cursors and not may_be_none:
        raise ConfigError(
            f"{run}: no data.json of a planned run, and no train_dataloader_dprank000.pt of "
            f"Megatron-LM; give the folder of a run or of one checkpoint."
        )
    return cursors
