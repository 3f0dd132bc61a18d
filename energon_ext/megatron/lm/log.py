# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Log the data of a Megatron-LM run to ``metrics.jsonl``, TensorBoard and W&B.

Megatron-LM logs on its last rank, which has the losses but may have no loader. After every step the
ranks of the last pipeline stage therefore sum their counts. Only a PackedBatch can be counted; of
other batches the boards show the planned shares, and there is no file.
"""

import argparse
import atexit
import math
import time
from pathlib import Path
from typing import Any, Mapping

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from energon_ext.batch.row_hashes import NUM_PARTS, hash_of_parts
from energon_ext.errors import log_of
from energon_ext.megatron.document_losses import DocumentLossLog
from energon_ext.megatron.lm.state import MegatronLMLoader
from energon_ext.megatron.loss import LOSS_KEY, SOURCE_PREFIX
from energon_ext.metrics.boards import DATA_DIGEST, scalars_of
from energon_ext.metrics.file import MetricsFile, describe_blend, epochs_after
from energon_ext.state.together import collective_device, on_all_ranks

logger = log_of(__name__)


class DataLog:
    """The log of this process; every rank builds one and calls :meth:`step` after every step."""

    def __init__(self, loader: MegatronLMLoader | None, args: argparse.Namespace):
        self._loader, self._args = loader, args
        # All ranks have the same: they compare it before the first batch.
        self._about: dict[str, Any] = next(filter(None, on_all_ranks(self._describe)))
        self._sources = self._about["sources"]
        self._is_hashed = getattr(args, "energon_batch_hash", False)
        if loader is not None and self._is_hashed:
            loader.hash_rows()
        if loader is not None and args.energon_run_dir:
            loader.counted_for = "--energon-run-dir"
        self._begin: int | None = None
        self._counts, self._row, self._time = self._count(), self._rows(), time.perf_counter()
        begun_with = self._split(self._counts.cpu())
        self._begun_with = torch.stack([begun_with["tokens"], begun_with["documents"]])
        # A plan that starts over under a trained model counts its steps from 0 again.
        self._first_step = args.iteration if self._row == 0 else 0
        self._writes = dist.get_rank() == dist.get_world_size() - 1
        config = {name: str(value) for name, value in vars(args).items()}
        rows = args.global_batch_size
        start = {**self._about, "rows_per_step": rows, "config": config}
        self._file: MetricsFile | None = None
        on_all_ranks(lambda: self._open_file(args.energon_run_dir))
        self._write("start", args.iteration, **start)
        self.documents: DocumentLossLog | None = None
        if getattr(args, "energon_document_losses", False):
            self.documents = DocumentLossLog(args.energon_run_dir, args.iteration)
            atexit.register(self.documents.close)  # Megatron-LM tells nobody of its last step
        self._write_digest(args.iteration)

    def _open_file(self, folder: str | None) -> None:
        if self._writes and folder:
            self._file = MetricsFile(Path(folder))

    def _describe(self) -> dict[str, Any]:
        """Return the sources of this rank's blend; empty without a loader."""
        if self._loader is None:
            return {}
        blend = self._loader.blend
        limits = {key: source.max_epochs for key, source in blend.sources.items()}
        return {**describe_blend(blend), "max_epochs": limits}

    def step(self, losses: Mapping[str, torch.Tensor], iteration: int) -> None:
        """Log a step (from 1 on) and its mean losses; a skipped step has none."""
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return
        before, self._counts = self._counts, self._count(iteration)
        if not self._writes:
            return
        seconds, self._time = time.perf_counter() - self._time, time.perf_counter()
        now, earlier = self._split(self._counts.cpu()), self._split(before.cpu())
        planned = self._by_source(now["planned"])
        if now["uncounted"]:
            if not earlier["uncounted"]:
                logger.warning(
                    "The task encoder's batches are no PackedBatch, so tokens, shares and hashes "
                    "are not logged."
                )
            self._write_scalars(iteration, {"planned_share": planned})
            return
        documents, tokens = now["documents"], now["tokens"]
        step_documents, step_tokens = documents - earlier["documents"], tokens - earlier["tokens"]
        values = dict(zip(losses, torch.stack([*losses.values()]).tolist())) if losses else {}
        batch_hash = hash_of_parts(now["hash"].tolist()) if self._is_hashed else ""
        self._write(
            "step",
            iteration,
            loss=values.get(LOSS_KEY, math.nan),
            # A source without tokens in this step is reported as 0.
            loss_by_source={
                key.removeprefix(SOURCE_PREFIX): value
                for key, value in values.items()
                if key.startswith(SOURCE_PREFIX) and value
            },
            tokens=self._by_source(step_tokens.long()),
            documents=self._by_source(step_documents.long()),
            planned_share=planned,
            tokens_per_second=float(step_tokens.sum()) / seconds,
            batch_hash=batch_hash,
        )
        of_sources = {
            "shares": tokens / tokens.sum().clamp(min=1),
            "tokens_in_all": tokens,
            **self._epochs(documents, tokens),
        }
        per_source = {name: self._by_source(value) for name, value in of_sources.items()}
        self._write_scalars(
            iteration, {"planned_share": planned, "batch_hash": batch_hash, **per_source}
        )

    def _epochs(self, documents: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the epochs read, in tokens if an epoch's tokens are known, and the epochs left."""
        before = self._begun_with
        since = torch.stack([tokens, documents]) - before
        pairs = zip(self._sources, since.T.tolist(), before.T.tolist())
        found = [
            epochs_after(self._about, key, read[0], read[1], (earlier[0], earlier[1]))
            for key, read, earlier in pairs
        ]
        read = torch.tensor(found, dtype=torch.float64)
        # A source without a limit gets NaN.
        limits = [self._about["max_epochs"].get(key) or math.nan for key in self._sources]
        return {"epochs": read, "epochs_left": (torch.tensor(limits) - read).clamp(min=0)}

    def _count(self, iteration: int | None = None) -> torch.Tensor:
        """Return the sums over all ranks that :meth:`_split` takes apart: float64."""
        local = torch.zeros(3 * len(self._sources) + 1 + NUM_PARTS, dtype=torch.float64)
        if self._loader is not None:
            drawn, keys, parts = self._loader.drawn, self._sources, self._split(local)
            parts["documents"][:] = torch.tensor([drawn.rows[key] for key in keys])
            parts["tokens"][:] = torch.tensor([drawn.tokens[key] for key in keys])
            parts["uncounted"][:] = self._loader.uncounted
            parts["hash"][:] = torch.tensor(self._loader.take_hash())
            if iteration is not None and self._loader.loader.worker_config.rank == 0:
                blend, step = self._loader.blend, iteration - 1 - self._first_step
                begin = blend.position(step, self._row) if self._begin is None else self._begin
                shares = blend.shares_at(begin)
                parts["planned"][:] = torch.tensor([shares.get(key, 0.0) for key in keys])
            blend, self._row = self._loader.blend, self._rows()
            self._begin = blend.next_position
        counts = local.to(collective_device())
        # Not over context-parallel ranks, as they all load the same rows.
        dist.all_reduce(counts, group=parallel_state.get_tensor_and_data_parallel_group())
        return counts

    def _split(self, counts: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the documents and tokens so far, the batches in which they could not be counted,
        a step's planned shares, and its hash in parts.

        They are views: [S], [S], [1], [S] and [NUM_PARTS].
        """
        names = ("documents", "tokens", "uncounted", "planned", "hash")
        sources = len(self._sources)
        return dict(zip(names, counts.split([sources, sources, 1, sources, NUM_PARTS])))

    def _rows(self) -> int:
        """Return the number of rows of the global plan drawn so far."""
        if self._loader is None:
            return 0
        return self._loader.next_batch_index * self._loader.blend.topology.rows_per_round

    def _by_source(self, values: torch.Tensor) -> dict[str, Any]:
        return dict(zip(self._sources, values.tolist()))

    def _write(self, event: str, step: int, **fields: Any) -> None:
        if self._file is not None:
            self._file.write(event, step, **fields)

    def _write_digest(self, iteration: int) -> None:
        """Show the data digest on Megatron-LM's boards."""
        from megatron.training import get_tensorboard_writer, get_wandb_writer

        digest = self._about["data_digest"]
        if self._writes and (writer := get_tensorboard_writer()):
            writer.add_text(DATA_DIGEST, digest, iteration)
        if self._writes and (wandb := get_wandb_writer()):
            wandb.config.update({DATA_DIGEST: digest}, allow_val_change=True)

    def _write_scalars(self, iteration: int, fields: Mapping[str, Any]) -> None:
        from megatron.training import get_tensorboard_writer, get_wandb_writer

        if iteration % self._args.tensorboard_log_interval:
            return
        scalars = scalars_of(fields, self._about["names"])
        known = {name: value for name, value in scalars.items() if not math.isnan(value)}
        if writer := get_tensorboard_writer():
            for name, value in known.items():
                writer.add_scalar(name, value, iteration)
        if wandb := get_wandb_writer():
            wandb.log(known, iteration)
