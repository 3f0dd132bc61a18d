# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Forward passes of a model that is split over ranks, which must run them together.

A rank cannot run its part alone: it waits for tensor-parallel sums, the previous stage, and other
ranks' tokens for its experts. So all ranks run as many passes as the rank that needs the most, with
tensors of the same shape; the rest is padding.
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
    """The ranks that share tensors, stages or experts, and so must run forward passes together.

    Raises:
        ConfigError: context parallelism, virtual pipeline stages, or tensor and expert groups of
            which neither contains the other.
    """

    def __init__(self) -> None:
        chunks = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
        context = parallel_state.get_context_parallel_world_size()
        for name, size in {"context-parallel": context, "virtual pipeline": chunks}.items():
            if size > 1:
                raise ConfigError(
                    f"MegatronSampler: {name} size must be 1, got {size}. Use tensor, pipeline or "
                    f"expert parallelism, or a server and OpenAISampler."
                )
        self.replica = parallel_state.get_model_parallel_group()
        tensors = parallel_state.get_tensor_model_parallel_world_size()
        experts = parallel_state.get_expert_tensor_and_model_parallel_group().size()
        if experts % tensors and tensors % experts:
            raise ConfigError(
                f"MegatronSampler: tensor-parallel size {tensors} with experts over {experts} "
                f"ranks; one must be a multiple of the other. Use other sizes, or a server and "
                f"OpenAISampler."
            )
        self.group = self.replica
        if experts > tensors:  # several replicas share experts
            self.group = parallel_state.get_expert_tensor_model_pipeline_parallel_group()

    def max(self, *values: int) -> list[int]:
        """Return the maximum of each value over all ranks."""
        if self.group.size() == 1:
            return list(values)
        largest = torch.tensor(values, dtype=torch.int64, device=collective_device())
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.group)
        return largest.tolist()

    def next_logits(
        self, model: Any, tokens: torch.Tensor, ends: torch.Tensor, rows: int, width: int
    ) -> torch.Tensor | None:
        """Return the logits of each row's next token on the last stage, None on other stages.

        Args:
            model: a ``GPTModel``, wrapped or not.
            tokens: int64 [n, T]; n may be 0. Tokens after the end of a row are ignored.
            ends: int64 [n].
            rows, width: shape of the pass, the same on all ranks, at least n and the longest end.

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
            positions = width // split if config.sequence_parallel else width
            dtype = config.pipeline_dtype or config.params_dtype
            hidden = torch.empty(
                positions, rows, config.hidden_size, dtype=dtype, device=tokens.device
            )
            dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank(), group=stages)
            get_attr_wrapped_model(model, "set_input_tensor")(hidden)
        output = model(used, position_ids, None)
        if not parallel_state.is_pipeline_last_stage():
            next_rank = parallel_state.get_pipeline_model_parallel_next_rank()
            dist.send(output.contiguous(), next_rank, group=stages)
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
