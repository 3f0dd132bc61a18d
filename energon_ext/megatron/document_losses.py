# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes the losses of documents from the reports of Megatron's schedules."""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from energon_ext.errors import ConfigError
from energon_ext.megatron.loss import DOCUMENTS_KEY, SOURCE_PREFIX
from energon_ext.metrics.document_losses import DocumentLossFile, begin_folder
from energon_ext.state.together import on_all_ranks


class DocumentLossLog(contextlib.ExitStack):
    """Writes the loss of every document in every step, which ``energon-ext report`` reads.

    All ranks build one together. Those that compute losses write a file each: the first
    tensor-parallel rank on the last pipeline stage, of each data- and context-parallel rank. No
    call waits for another rank.

    Args:
        run_dir: folder of the run.
        first_step: step after which this process continues.
    """

    def __init__(self, run_dir: str | Path, first_step: int = 0):
        super().__init__()
        self._file: DocumentLossFile | None = None

        def begin() -> Path | None:
            return begin_folder(Path(run_dir), first_step) if dist.get_rank() == 0 else None

        folder = on_all_ranks(begin)[0]
        on_all_ranks(functools.partial(self._open, folder))

    def _open(self, folder: Path | None) -> None:
        assert folder is not None, "the first rank begins one, or all raise"
        is_last_stage = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        if is_last_stage and parallel_state.get_tensor_model_parallel_rank() == 0:
            rank = parallel_state.get_data_parallel_rank(with_context_parallel=True)
            self._file = self.enter_context(DocumentLossFile(folder, rank))

    def add(self, step: int, reports: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Write the losses of a step, from 1 on; it is on disk after :meth:`flush`.

        Args:
            reports: the schedule's result, one report per micro-batch.

        Raises:
            ConfigError: the batches do not number their documents, or the file cannot be written.
        """
        if self._file is None or not reports:
            return
        if DOCUMENTS_KEY not in reports[0]:
            raise ConfigError(
                "DocumentLossLog: the batches do not have the numbers of their documents; give a "
                "PackedTaskEncoder or SFTTaskEncoder document_numbers=True. Samples of other "
                "encoders and answers of a policy have none."
            )
        sources = [
            key.removeprefix(SOURCE_PREFIX) for key in reports[0] if key.startswith(SOURCE_PREFIX)
        ]
        self._file.add(step, sources, [report[DOCUMENTS_KEY] for report in reports])

    def flush(self) -> None:
        """Write everything that was added to disk: call this before every checkpoint."""
        if self._file is not None:
            self._file.flush()
