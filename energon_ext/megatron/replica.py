# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ranks that hold one copy of the model together."""

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError
from energon_ext.state.together import create_group_of, on_all_ranks
from energon_ext.storage.claim import Part

#: Name under which a forward step for :func:`ask_replicas` reports what it found.
KEPT = "kept"

#: ``batches -> what a model says of each``
Ask = Callable[[Sequence[PackedBatch]], list[Any]]


def create_replica_group(timeout: datetime.timedelta | None = None) -> dist.ProcessGroup:
    """Create the gloo group of this rank's replica, the ranks with its data-parallel rank.

    Tensor-, pipeline- and context-parallel ranks of one model train on the same answers of a
    server: see ``replica_group`` of :class:`~energon_ext.rl.RLDataset`. All ranks of the run call
    this together, once, after ``initialize_model_parallel``.

    Args:
        timeout: longest time that ranks wait for the first one; by default two hours. It must be
            longer than a call of the sampler and than ``sync_weights``.
    """
    own = parallel_state.get_data_parallel_rank()
    return create_group_of(own, timeout or datetime.timedelta(hours=2))


def ask_replicas(
    model: torch.nn.Module,
    step: Callable[[Any, torch.nn.Module], Any],
    write: Callable[[Ask, Part], None],
    *,
    caller: str,
) -> None:
    """Let one rank of each replica read and write, and all of them compute what a model says.

    That rank sends the batches to the others. Replicas share the work.

    Args:
        model: wrapped or not.
        step: a forward step, whose report has what is asked for under :data:`KEPT`.
        write: gets a function that returns this for batches, and the part of this replica.
        caller: for messages.

    Raises:
        ConfigError: the model is context-parallel.
    """
    if (size := parallel_state.get_context_parallel_world_size()) > 1:
        raise ConfigError(
            f"{caller}: context_parallel_size={size} cuts documents; write in a job without "
            f"context parallelism, which a run with it can read."
        )
    group = create_replica_group() if dist.get_world_size() > 1 else None
    part = Part(
        parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    )
    was_training = model.training
    model.eval()
    try:
        on_all_ranks(lambda: _Replica(model, group, step).run(write, part))
    finally:
        model.train(was_training)
        if group is not None:
            dist.destroy_process_group(group)


class _Replica:
    """The ranks that hold one copy of a model; the one with the losses reads and writes."""

    def __init__(self, model: torch.nn.Module, group: dist.ProcessGroup | None, step: Any):
        self._model, self._group, self._step = model, group, step
        self._loads = parallel_state.get_tensor_model_parallel_rank() == 0
        self._leads = self._loads and parallel_state.is_pipeline_last_stage()
        self._leader = 0
        if group is not None:
            leads = on_all_ranks(lambda: self._leads, group)
            self._leader = dist.get_process_group_ranks(group)[leads.index(True)]

    def run(self, write: Callable[[Ask, Part], None], part: Part) -> None:
        """Call ``write`` on the rank that leads, and help it on the others."""
        if self._leads:
            try:
                write(self._ask, part)
            finally:
                self._send(None)
            return
        while (batches := self._send(None)) is not None:
            self._forward(batches)

    def _ask(self, batches: Sequence[PackedBatch]) -> list[Any]:
        self._send(batches)
        return self._forward(batches)

    def _send(self, batches: Sequence[PackedBatch] | None) -> Sequence[PackedBatch] | None:
        """Return the batches of the rank that leads, on all ranks; None when it has finished."""
        message = [batches]
        if self._group is not None:
            dist.broadcast_object_list(message, self._leader, group=self._group)
        return message[0]

    def _forward(self, batches: Sequence[PackedBatch]) -> list[Any]:
        """Return what the step reports of each batch; nothing on earlier stages."""
        if not batches:
            return []
        with torch.no_grad():
            reports = get_forward_backward_func()(
                forward_step_func=self._step,
                data_iterator=iter(batches) if self._loads else None,
                model=[self._model],
                num_microbatches=len(batches),
                seq_length=batches[0].num_tokens,
                micro_batch_size=1,
                forward_only=True,
            )
        return [report[KEPT] for report in reports]
