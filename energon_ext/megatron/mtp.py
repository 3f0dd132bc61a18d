# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Multi-token prediction on packed rows.

Megatron shifts tokens, labels and their mask once more for every later token, segment by segment,
and fills the ends with zeros. With the weights of a batch as the mask, a later token is trained
where it is a label of its own document that has a weight.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError
from energon_ext.megatron.attention import has_transformer_engine, replace_norms
from energon_ext.megatron.moe import unwrap


def mtp_block_spec(
    config: TransformerConfig, block: TransformerBlockSubmodules, vp_stage: int | None = None
) -> Any:
    """Return the layers of this stage for ``GPTModel(mtp_block_spec=...)``; None without any.

    Args:
        block: of :func:`~energon_ext.megatron.gpt_layer_spec`.
    """
    if not config.mtp_num_layers:
        return None
    spec = get_gpt_mtp_block_spec(config, block, has_transformer_engine(), vp_stage=vp_stage)
    if spec is not None and not has_transformer_engine():
        for layer in spec.layer_specs:
            replace_norms(layer.submodules, "enorm", "hnorm", "layer_norm")
    return spec


def loss_mask_for(
    model: torch.nn.Module, batch: PackedBatch, weight_scale: int
) -> dict[str, torch.Tensor]:
    """Return ``{"loss_mask": [1, positions]}`` for models that predict later tokens, else ``{}``.

    Megatron does not find the parts of a document in the aligned rows of context parallelism, and a
    ``weight_scale`` would divide the losses of later tokens.
    """
    if not unwrap(model).config.mtp_num_layers:
        return {}
    ranks = parallel_state.get_context_parallel_world_size()
    for name, found in (("context_parallel_size", ranks), ("weight_scale", weight_scale)):
        if found != 1:
            raise ConfigError(f"Multi-token prediction needs {name}=1, got {found}.")
    return {"loss_mask": batch.token_weights[None]}
