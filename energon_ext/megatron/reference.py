# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A first pass over preferences with a reference model that several ranks may hold together.

One rank of each replica reads the pairs and writes the result; it sends the batches to the others.
Replicas share the work.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.encoders.preferences import PreferenceTaskEncoder
from energon_ext.encoders.reference import write_reference
from energon_ext.errors import ConfigError
from energon_ext.megatron.moe import scale_of_router_losses
from energon_ext.megatron.replica import create_replica_group
from energon_ext.megatron.step import forward_step
from energon_ext.state.together import on_all_ranks
from energon_ext.storage.claim import Part


def write_reference_of(
    model: torch.nn.Module,
    path: str | Path,
    task_encoder: PreferenceTaskEncoder,
    *,
    split_part: str = "train",
    trusted_modules: Iterable[str] = (),
) -> None:
    """Compute and cache what a model says of all pairs, unless that has been done.

    All ranks call this together, before the model is trained; ranks of different replicas must
    share a file system. See :func:`energon_ext.encoders.reference.write_reference`.

    Args:
        model: the reference, a ``GPTModel`` or a hybrid model, wrapped or not.
        path, task_encoder, split_part, trusted_modules: see ``write_reference``.

    Raises:
        ConfigError: as for ``write_reference``, or the model is context-parallel.
    """
    if (size := parallel_state.get_context_parallel_world_size()) > 1:
        raise ConfigError(
            f"write_reference_of: context_parallel_size={size} cuts answers; write the reference "
            f"in a job without context parallelism, which a run with it can read."
        )
    group = create_replica_group() if dist.get_world_size() > 1 else None
    write = partial(
        write_reference,
        path,
        task_encoder,
        split_part=split_part,
        part=Part(
            parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
        ),
        trusted_modules=trusted_modules,
    )
    was_training = model.training
    model.eval()
    try:
        on_all_ranks(lambda: _Replica(model, group).run(write))
    finally:
        model.train(was_training)
        if group is not None:
            dist.destroy_process_group(group)


class _Replica:
    """The ranks that hold one copy of a model; the one with the losses reads and writes."""

    def __init__(self, model: torch.nn.Module, group: dist.ProcessGroup | None):
        self._model, self._group = model, group
        self._loads = parallel_state.get_tensor_model_parallel_rank() == 0
        self._leads = self._loads and parallel_state.is_pipeline_last_stage()
        self._leader = 0
        if group is not None:
            found: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(found, self._leads, group=group)
            self._leader = dist.get_process_group_ranks(group)[found.index(True)]

    def run(self, write: Any) -> None:
        """Call ``write`` on the rank that leads, and help it on the others."""
        if self._leads:
            try:
                write(log_probs_of=self._log_probs_of)
            finally:
                self._send(None)
            return
        while (batches := self._send(None)) is not None:
            self._forward(batches)

    def _log_probs_of(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        self._send(batches)
        return self._forward(batches)

    def _send(self, batches: Sequence[PackedBatch] | None) -> Sequence[PackedBatch] | None:
        """Return the batches of the rank that leads, on all ranks; None when it has finished."""
        message = [batches]
        if self._group is not None:
            dist.broadcast_object_list(message, self._leader, group=self._group)
        return message[0]

    def _forward(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """Return the log-probabilities of the labels of each batch; empty on earlier stages."""
        if not batches:
            return []
        with torch.no_grad():
            reports = get_forward_backward_func()(
                forward_step_func=_keep_log_probs,
                data_iterator=iter(batches) if self._loads else None,
                model=[self._model],
                num_microbatches=len(batches),
                seq_length=batches[0].num_tokens,
                micro_batch_size=1,
                forward_only=True,
            )
        return [report["log_probs"] for report in reports]


def _keep_log_probs(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    scale = scale_of_router_losses(model)
    output, _ = forward_step(data_iterator, model, denominator="tokens", weight_scale=scale)

    def keep(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return output.sum(), {"log_probs": -output.float().view(-1)}

    return output, keep
