# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes the scalars of a run to TensorBoard and to Weights & Biases."""

from pathlib import Path
from typing import Any, Mapping, Protocol

from energon_ext.arguments import optional_module
from energon_ext.keyed import stable_hash

#: Field of an event -> name of its scalar; values of a mapping get the suffix ``/<source>``.
#: Fields with a ``/`` in their name keep it.
SCALARS = {
    "loss": "train/loss",
    "loss_by_source": "train/loss",
    "learning_rate": "train/learning_rate",
    "grad_norm": "train/grad_norm",
    "trained_tokens": "train/tokens",
    "planned_share": "data/planned_share",
    "tokens_in_all": "data/tokens",
    "shares": "data/share",
    "epochs": "data/epochs",
    "epochs_left": "data/epochs_left",
    "batch_hash": "data/batch_hash",
    "state_digest": "data/state_digest",
    "waiting_share": "perf/waiting_for_data",
    "step_seconds": "perf/step_seconds",
    "data_seconds": "perf/data_seconds",
    "tokens_per_second": "perf/tokens_per_second",
}

#: Name under which boards show the data digest.
DATA_DIGEST = "data/digest"

#: Bits of a hash in a scalar: TensorBoard's float32 holds 24 of them exactly.
_HASH_BITS = 24


def scalars_of(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, float]:
    """Return the scalars of an event by the names that boards show.

    Args:
        names: display names of sources that have one.

    Example:
        >>> scalars_of({"loss": 2.5, "epochs": {"a": 1.5}, "step": 3}, {"a": "Web"})
        {'train/loss': 2.5, 'data/epochs/Web': 1.5}
    """
    scalars: dict[str, float] = {}
    for field, value in fields.items():
        name = field if "/" in field else SCALARS.get(field)
        if name is None or value == "":
            continue
        if isinstance(value, Mapping):
            scalars |= {f"{name}/{names.get(key, key)}": number for key, number in value.items()}
        elif isinstance(value, str):
            scalars[name] = stable_hash(value) % (1 << _HASH_BITS)
        else:
            scalars[name] = value
    return scalars


class Board(Protocol):
    """A place that shows the scalars of a run."""

    def write(self, scalars: Mapping[str, float], step: int) -> None: ...

    def write_digest(self, data_digest: str, step: int) -> None:
        """Show the digest of the data that a process reads from a step on."""

    def close(self) -> None: ...


class TensorBoard:
    """Writes to the folder ``tensorboard`` of a run.

    Args:
        first_step: step from which the process continues. What an earlier process wrote for later
            steps is discarded, as these steps run again.
    """

    def __init__(self, run_dir: Path, first_step: int):
        tensorboard = optional_module(
            "torch.utils.tensorboard", "TensorBoard", "tensorboard", "tensorboard"
        )
        folder = run_dir / "tensorboard"
        self._writer = tensorboard.SummaryWriter(folder, purge_step=first_step + 1)

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def write_digest(self, data_digest: str, step: int) -> None:
        self._writer.add_text(DATA_DIGEST, data_digest, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """Logs to a project of Weights & Biases; the same folder is the same run in every process."""

    def __init__(self, run_dir: Path, project: str):
        what = f"Logging to the Weights & Biases project {project!r}"
        wandb = optional_module("wandb", what, "wandb", "wandb")
        name = f"{stable_hash(str(run_dir.resolve())):x}"
        self._run = wandb.init(
            project=project, name=run_dir.name, id=name, resume="allow", dir=run_dir
        )

    def write(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def write_digest(self, data_digest: str, step: int) -> None:
        self._run.config.update({DATA_DIGEST: data_digest}, allow_val_change=True)

    def close(self) -> None:
        self._run.finish()
