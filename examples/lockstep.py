# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Forward passes of a model that is split over ranks, which all of them take together.

A rank alone cannot run its part: it waits for sums over tensors, for the stage before it, for
tokens of other ranks that its experts serve. So all ranks take as many passes, with tensors of one
shape, as the rank that needs the most; what a rank needs no more is padding.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from megatron.core.utils import get_attr_wrapped_model

from energon_ext.errors import ConfigError
from energon_ext.state.together import collective_device


class Lockstep:
    """The ranks whose forward passes wait for each other: of tensors, stages and experts.

    Raises:
        ConfigError: context parallelism, stages of several chunks, or tensors and experts that are
            split so that neither group holds the other.
    """

    def __init__(self) -> None:
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        context = parallel_state.get_context_parallel_world_size()
        for name, size in {"context-parallel": context, "virtual pipeline": chunks}.items():
            if size > 1:
                raise ConfigError(
                    f"MegatronSampler: {name} size {size} found, 1 is needed. Split the model by "
                    f"tensors, stages or experts, or use a server and OpenAISampler."
                )
        self.replica = parallel_state.get_model_parallel_group()
        tensors = parallel_state.get_tensor_model_parallel_world_size()
        experts = parallel_state.get_expert_tensor_and_model_parallel_group().size()
        if experts % tensors and tensors % experts:
            raise ConfigError(
                f"MegatronSampler: tensor-parallel size {tensors} with experts over {experts} "
                f"ranks found; one must be a multiple of the other. Use other sizes, or a server "
                f"and OpenAISampler."
            )
        self.group = self.replica
        if experts > tensors:  # several replicas, which share experts
            self.group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()

    def most(self, *values: int) -> list[int]:
        """The largest of each value over all ranks."""
        if self.group.size() == 1:
            return list(values)
        largest = torch.tensor(values, dtype=torch.int64, device=collective_device())
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest.tolist()

    def next_logits(
        self, model: Any, tokens: torch.Tensor, ends: torch.Tensor, rows: int, width: int
    ) -> torch.Tensor | None:
        """Logits of the token behind each row's last one; None but on the last stage.

        Args:
            model: a ``GPTModel``, wrapped or not.
            tokens: int64 [n, T]; n may be 0. What lies behind a row's end is not looked at.
            ends: int64 [n].
            rows, width: of the pass, the same on all ranks, not less than n and any end.

        Returns:
            float32 [n, V].
        """
        config = get_attr_wrapped_model(model, "config")
        split = parallel_state.get_tensor_model_parallel_world_size()
        if config.sequence_parallel:
            width += -width % split
        used = tokens[:, :width]
        used = F.pad(used, (0, width - used.shape[1], 0, rows - len(used)))
        position_ids = torch.arange(width, device=tokens.device).expand(rows, -1)
        stages = parallel_state.get_pipeline_model_parallel_group()
        if not parallel_state.is_pipeline_first_stage():
            shape = (
                width // split if config.sequence_parallel else width,
                rows,
                config.hidden_size,
            )
            dtype = config.pipeline_dtype or config.params_dtype
            hidden = torch.empty(shape, dtype=dtype, device=tokens.device)
            dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank(), group=stages)
            get_attr_wrapped_model(model, "set_input_tensor")(hidden)
        output = model(used, position_ids, None)
        if not parallel_state.is_pipeline_last_stage():
            behind = parallel_state.get_pipeline_model_parallel_next_rank()
            dist.send(output.contiguous(), behind, group=stages)
            return None
        logits = output[torch.arange(len(tokens), device=tokens.device), ends - 1]
        if split > 1 and get_attr_wrapped_model(model, "parallel_output"):
            logits = gather_from_tensor_model_parallel_region(logits)
        return logits.float()

    def share(self, values: torch.Tensor) -> torch.Tensor:
        """Broadcast from the last stage's first rank to every rank of its replica."""
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(values, last, group=parallel_state.get_pipeline_model_parallel_group())
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            first = parallel_state.get_tensor_model_parallel_src_rank()
            dist.broadcast(values, first, group=parallel_state.get_tensor_model_parallel_group())
        return values
