# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a training run says while it runs: ``metrics.jsonl``, a progress bar, scalars.

``metrics.jsonl`` is one JSON object a line, each with ``event`` and ``step``: ``start`` when a
process begins (``step`` is where it resumed from), ``step`` per optimizer step, ``consumption`` now
and then, ``save`` per checkpoint, ``end``. A resumed run appends; of a step that was done twice the
later line counts. ``energon-ext report`` reads it.

TensorBoard and Weights & Biases get the same scalars under the same names, with the key of a source
in place of ``<source>``: ``train/loss``, ``train/loss/<source>``, ``data/planned_share/<source>``,
``perf/step_seconds`` and ``perf/tokens_per_second`` at every step; ``data/tokens/<source>``,
``data/share/<source>`` (of all tokens so far) and ``data/epochs/<source>`` with each
``consumption``.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Callable, Mapping

from tqdm import tqdm

from energon_ext.documents.permutation import stable_hash
from energon_ext.errors import ConfigError
from energon_ext.state.consumption import Consumption

#: ``(scalars by name, step)``
Board = Callable[[Mapping[str, float], int], None]


class RunLog(contextlib.AbstractContextManager["RunLog"]):
    """Write the events of one process of a run; leaving the ``with`` block closes its files.

    Args:
        run_dir: an existing folder; ``metrics.jsonl`` in it is appended to.
        first_step: step that the run stands at.
        last_step: step that it is to reach.
        enabled: False makes every method do nothing, for ranks that do not log.
        tensorboard: also write TensorBoard files to ``run_dir/tensorboard``.
        wandb_project: also log to this project of Weights & Biases; a resumed run goes on there.

    Raises:
        ConfigError: ``wandb_project`` without the package wandb.

    Example:
        >>> import tempfile
        >>> run_dir = Path(tempfile.mkdtemp())
        >>> with RunLog(run_dir, first_step=0, last_step=10) as log:
        ...     log.write("end", 10, reason="finished")
        >>> (run_dir / "metrics.jsonl").read_text()
        '{"event": "end", "step": 10, "reason": "finished"}\\n'
    """

    def __init__(
        self,
        run_dir: Path,
        first_step: int,
        last_step: int,
        *,
        enabled: bool = True,
        tensorboard: bool = False,
        wandb_project: str | None = None,
    ):
        self.enabled = enabled
        self._boards: list[Board] = []
        self._open = contextlib.ExitStack()
        if not enabled:
            return
        # Line by line, so that a killed process leaves whole lines.
        file = open(run_dir / "metrics.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._file = self._open.enter_context(file)
        bar = tqdm(total=last_step, initial=first_step, unit="step")
        self._bar = self._open.enter_context(bar)
        if tensorboard:
            self._boards.append(_tensorboard(run_dir, first_step, self._open))
        if wandb_project:
            self._boards.append(_weights_and_biases(run_dir, wandb_project, self._open))

    def __exit__(self, *exception: object) -> None:
        self._open.close()

    def write(self, event: str, step: int, **fields: Any) -> None:
        """Append one event."""
        if self.enabled:
            self._file.write(json.dumps({"event": event, "step": step, **fields}) + "\n")

    def write_step(
        self,
        step: int,
        *,
        seconds: float,
        loss: float,
        loss_by_source: dict[str, float],
        tokens: dict[str, int],
        planned_share: dict[str, float],
        **fields: Any,
    ) -> None:
        """Append one optimizer step and move the progress bar.

        Args:
            step: 1, 2, ...
            seconds: what the step took.
            loss: mean over its tokens.
            loss_by_source: means over the tokens of each source.
            tokens: tokens of each source in it.
            planned_share: share of each source that the schedule wanted.
            **fields: what else is to be written.
        """
        speed = sum(tokens.values()) / seconds
        self.write(
            "step",
            step,
            loss=loss,
            tokens_per_second=speed,
            planned_share=planned_share,
            tokens=tokens,
            loss_by_source=loss_by_source,
            **fields,
        )
        mix = ", ".join(f"{_label(key)} {share:.0%}" for key, share in planned_share.items())
        self._bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s, {mix}")
        self._bar.update()
        self._write_scalars(
            step,
            {
                "train/loss": loss,
                **_by_source("train/loss", loss_by_source),
                **_by_source("data/planned_share", planned_share),
                "perf/step_seconds": seconds,
                "perf/tokens_per_second": speed,
            },
        )

    def write_consumption(
        self, step: int, consumed: Consumption, documents: Mapping[str, int]
    ) -> None:
        """Append what the run has trained on so far.

        Args:
            step: the step just done.
            consumed: over all data-parallel ranks, see :meth:`Consumption.reduce`.
            documents: in one epoch of each source of the run.
        """
        shares, epochs = consumed.shares(), consumed.epochs(documents)
        state = consumed.to_json(current=list(documents))
        self.write("consumption", step, **state, shares=shares, epochs=epochs)
        self._write_scalars(
            step,
            {
                **_by_source("data/tokens", consumed.tokens),
                **_by_source("data/share", shares),
                **_by_source("data/epochs", epochs),
            },
        )

    def _write_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        for write in self._boards:
            write(scalars, step)


def _by_source(name: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{name}/{source}": value for source, value in values.items()}


def _tensorboard(run_dir: Path, first_step: int, files: contextlib.ExitStack) -> Board:
    from torch.utils.tensorboard import SummaryWriter

    # What an earlier process wrote of the steps to come is done again.
    writer = SummaryWriter(run_dir / "tensorboard", purge_step=first_step + 1)
    files.enter_context(writer)

    def write(scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)

    return write


def _weights_and_biases(run_dir: Path, project: str, files: contextlib.ExitStack) -> Board:
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(
            f"Logging to the Weights & Biases project {project!r} needs the package wandb: pip "
            f"install wandb, or leave the project out."
        ) from error
    run = wandb.init(
        project=project,
        name=run_dir.name,
        # The same folder is the same run, also in another process.
        id=f"{stable_hash(str(run_dir.resolve())):x}",
        resume="allow",
        dir=run_dir,
    )
    files.callback(run.finish)
    return lambda scalars, step: run.log(dict(scalars), step=step)


def _label(key: str) -> str:
    return Path(key.partition(":")[0]).name
