# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a training run says while it runs: ``metrics.jsonl``, a progress bar, TensorBoard.

``metrics.jsonl`` is one JSON object a line, each with ``event`` and ``step``: ``start`` when a
process begins (``step`` is where it resumed from), ``step`` per optimizer step, ``save`` per
checkpoint, ``end``. A resumed run appends; of a step that was done twice the later line counts.
``energon-ext report`` reads it.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from tqdm import tqdm


class RunLog(contextlib.AbstractContextManager):
    """Write the events of one process of a run; leaving the ``with`` block closes its files.

    Args:
        run_dir: an existing folder; ``metrics.jsonl`` in it is appended to.
        first_step: step that the run stands at.
        last_step: step that it is to reach.
        enabled: False makes every method do nothing, for ranks that do not log.
        tensorboard: also write TensorBoard files to ``run_dir/tensorboard``.

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
    ):
        self.enabled = enabled
        self._board = None
        self._open = contextlib.ExitStack()
        if not enabled:
            return
        # Line by line, so that a killed process leaves whole lines.
        file = open(run_dir / "metrics.jsonl", "a", encoding="utf-8", buffering=1)  # noqa: SIM115
        self._file = self._open.enter_context(file)
        bar = tqdm(total=last_step, initial=first_step, unit="step")
        self._bar = self._open.enter_context(bar)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = self._open.enter_context(SummaryWriter(run_dir / "tensorboard"))

    def __exit__(self, *exception) -> None:
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
        if self._board:
            self._board.add_scalar("loss", loss, step)
            self._board.add_scalars("loss by source", loss_by_source, step)
            self._board.add_scalars("planned share", planned_share, step)


def _label(key: str) -> str:
    return Path(key.partition(":")[0]).name
