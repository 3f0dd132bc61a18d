# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Multi-token prediction on packed rows.

For each later token, Megatron shifts tokens, labels and their mask by one more position within each
segment, and fills the ends with zeros. With a batch's weights as the mask, a later token is trained
only if it is a label with a weight in the same document.
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
    """Return this stage's layers for ``GPTModel(mtp_block_spec=...)``, or None if it has none.

    Args:
        block: from :func:`~energon_ext.megatron.gpt_layer_spec`.
    """
    if not config.mtp_num_layers:
        return None
    spec = get_gpt_mtp_block_spec(config, block, has_transformer_engine(), vp_stage=vp_stage)
    if spec is not None and not has_transformer_engine():
        for layer in spec.layer_specs:
            replace_norms(layer.submodules, "enorm", "hnorm", "layer_norm")
    return spec


def loss_mask_for(
    model: torch.nn.Module, batch: PackedBatch, weight_scale: int, denominator: str
) -> dict[str, torch.Tensor]:
    """Return ``{"loss_mask": [1, positions]}`` for models that predict later tokens, else ``{}``.

    Raises:
        ConfigError: context parallelism, as Megatron does not find a document's parts in its
            aligned rows, a ``weight_scale``, which would divide the losses of later tokens,
            documents as the denominator, or pairs of answers, whose rejected answers it would
            unlearn token by token.
    """
    if not unwrap(model).config.mtp_num_layers:
        return {}
    ranks = parallel_state.get_context_parallel_world_size()
    for name, value in (("context_parallel_size", ranks), ("weight_scale", weight_scale)):
        if value != 1:
            raise ConfigError(f"Multi-token prediction needs {name}=1, got {value}.")
    if denominator == "documents":
        raise ConfigError(
            "Multi-token prediction has no loss by document; choose another denominator, or build "
            "the model with mtp_num_layers=None."
        )
    if batch.pair_ids is not None:
        raise ConfigError(
            "Multi-token prediction has no loss on pairs; build the model with mtp_num_layers=None."
        )
    return {"loss_mask": batch.token_weights[None]}
