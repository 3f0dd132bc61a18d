# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The log of one process of a run: its file, and its boards."""

import contextlib
from pathlib import Path
from typing import Any, Mapping, Sequence

from energon_ext.metrics.boards import Board, TensorBoard, WeightsAndBiases, scalars_of
from energon_ext.metrics.file import MetricsFile, describe_blend
from energon_ext.plan.blend import Blend


class RunLog(contextlib.ExitStack):
    """Writes the events of one process of a run; leaving the ``with`` block closes its files.

    ``energon-ext report`` reads the file. Boards get the scalars of every event.

    Args:
        run_dir: folder of the run; ``metrics.jsonl`` in it is appended to.
        first_step: step at which this process starts.
        enabled: False makes every method do nothing, for ranks that do not log.
        tensorboard: also write TensorBoard files to ``run_dir/tensorboard``.
        wandb_project: also log to this Weights & Biases project.

    Raises:
        ConfigError: the package of a board is not installed.
    """

    def __init__(
        self,
        run_dir: str | Path,
        first_step: int = 0,
        *,
        enabled: bool = True,
        tensorboard: bool = False,
        wandb_project: str | None = None,
    ):
        super().__init__()
        self.enabled = enabled
        self._names: Mapping[str, str] = {}
        self._boards: list[Board] = []
        if not enabled:
            return
        run_dir = Path(run_dir)
        self._file = self.enter_context(MetricsFile(run_dir))
        if tensorboard:
            self._add(TensorBoard(run_dir, first_step))
        if wandb_project:
            self._add(WeightsAndBiases(run_dir, wandb_project))

    def _add(self, board: Board) -> None:
        self._boards.append(board)
        self.callback(board.close)

    def write_start(self, step: int, blend: Blend, **fields: Any) -> None:
        """Append the start of this process, which continues after ``step`` steps.

        Args:
            blend: the data of the run, see :func:`energon_ext.plan.lookup.find_blend`.
            **fields: ``rows_per_step``, ``config`` and any others.
        """
        if self.enabled:
            self.write("start", step, **describe_blend(blend), **fields)

    def write(self, event: str, step: int, **fields: Any) -> None:
        """Append one event."""
        if not self.enabled:
            return
        self._names = fields.get("names", self._names)
        self._file.write(event, step, **fields)
        if "data_digest" in fields:
            for board in self._boards:
                board.write_digest(fields["data_digest"], step)
        if event != "consumption":  # the sums of a checkpoint, which may be on the boards already
            self.write_boards(step, fields)

    def write_answers(self, step: int, answers: Sequence[Mapping[str, Any]]) -> None:
        """Append some answers of a step: ``source``, ``reward`` and ``text`` of each.

        Args:
            answers: see :func:`energon_ext.cli.shown_rows.describe_answers`.
        """
        self.write("answers", step, answers=[dict(answer) for answer in answers])

    def write_boards(self, step: int, fields: Mapping[str, Any]) -> None:
        """Write the scalars among some fields to the boards only."""
        if self._boards and (scalars := scalars_of(fields, self._names)):
            for board in self._boards:
                board.write(scalars, step)
