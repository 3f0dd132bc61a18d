# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The data of a saved run: its cursors on disk, and a dataset that continues one."""

from pathlib import Path
from typing import Any, Mapping

from megatron.energon import WorkerConfig

from energon_ext.encoders.load import get_train_dataset
from energon_ext.encoders.saved import load_encoder
from energon_ext.errors import ConfigError
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.plan.lookup import find_blend
from energon_ext.state.checkpoint_folder import checkpoints_in, cursors_in
from energon_ext.state.schema import check_format, check_seal


class SavedCursor:
    """One cursor of a planned run, in the folder of its checkpoint."""

    def __init__(self, folder: Path, sealed: Any):
        self.folder, self.state = folder, check_seal(sealed)
        check_format(self.state)
        self.step: int = self.state["plan"]["step"]  # that comes next or is open
        self.inside: Mapping[str, Any] = self.state["inside"] or {}  # where it is open

    def dataset(
        self,
        metadataset: Path,
        *,
        ranks: int | None = None,
        workers: int = 0,
        batch_size: int | None = None,
        rows_per_step: int | None = None,
        encoder: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> PlannedDataset:
        """A dataset that reads as the saved run did; what is None is as it was.

        ``encoder`` are options of the task encoder, ``options`` those of ``get_train_dataset``.
        """
        changed = {name: value for name, value in (encoder or {}).items() if value is not None}
        seed = self.state["fingerprint"].get("seed", 0)
        ranks = ranks or self.inside.get("ranks", 1)
        config = WorkerConfig(rank=0, world_size=ranks, num_workers=workers, seed_offset=seed)
        dataset = get_train_dataset(
            metadataset,
            worker_config=config,
            batch_size=batch_size or self.inside.get("batch_size", 1),
            rows_per_step=rows_per_step or self.state["rows_per_step"],
            task_encoder=load_encoder(self.state["encoder"], **changed),
            **options,
        )
        found: PlannedDataset = find_blend(dataset)
        return found


def saved_cursors(run: Path) -> list[SavedCursor]:
    """The cursors of a run, oldest first.

    ``run`` is the folder of a run, of its checkpoints, of one, or of Megatron-LM's data states.
    """
    if not run.is_dir():
        raise ConfigError(f"{run}: no such folder; name a checkpoint or the folder of a run.")
    found = []
    for folder in checkpoints_in(run):
        state = next((state for _, state in cursors_in(folder)), None)
        if isinstance(state, dict) and "plan" in state:
            found.append(SavedCursor(folder, state))
    if not found:
        raise ConfigError(
            f"{run}: no data.json of a planned run, and no train_dataloader_dprank000.pt of "
            f"Megatron-LM; name the folder of a run or of one checkpoint."
        )
    return found
