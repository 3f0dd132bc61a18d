# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Initial weights that do not depend on model parallelism.

Megatron draws weights rank by rank, so the same seed gives different weights with tensor or
pipeline parallelism, and the losses of two such runs cannot be compared.
"""

import math

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.transformer.module import MegatronModule

from energon_ext.keyed import stable_hash

#: Projections back into the residual stream, drawn with a smaller standard deviation.
_RESIDUAL_WEIGHTS = ("linear_proj.weight", "linear_fc2.weight")


@torch.no_grad()
def initialize_weights(model: MegatronModule, seed: int) -> None:
    """Draw this rank's weight matrices, which depend only on ``(seed, name)``.

    They are normal with ``config.init_method_std``, divided by ``sqrt(2 * num_layers)`` for
    projections back into the residual stream. Vectors (norms, biases) do not change. Each rank
    draws whole matrices and keeps its slices.

    Args:
        model: a Megatron model, not yet wrapped.
        seed: any integer.
    """
    sharded = model.sharded_state_dict()
    apply_factories(sharded)
    for shard in nested_values(sharded):
        if isinstance(shard, ShardedTensor) and len(shard.local_shape) >= 2:
            std = model.config.init_method_std
            if shard.key.endswith(_RESIDUAL_WEIGHTS):
                std /= math.sqrt(2 * model.config.num_layers)
            shard.data.copy_(_draw(shard, seed) * std)


def _draw(shard: ShardedTensor, seed: int) -> torch.Tensor:
    # The prepended axes number the layers (and experts) that share a key.
    axes = shard.prepend_axis_num
    name = f"{seed}/{shard.key}/{shard.global_offset[:axes]}"
    generator = torch.Generator().manual_seed(stable_hash(name))
    matrix = torch.randn(shard.global_shape[axes:], generator=generator)
    ranges = zip(shard.global_offset[axes:], shard.local_shape)
    return matrix[tuple(slice(begin, begin + size) for begin, size in ranges)]
