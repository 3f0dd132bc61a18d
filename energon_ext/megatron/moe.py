# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Padding and weights of packed batches for MoE routers."""

import inspect
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError

#: Attribute of a config in which scale_router_losses stores its scale.
_SCALE = "energon_ext_router_loss_scale"
_COEFFICIENTS = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


def padding_mask_for(model: torch.nn.Module, batch: PackedBatch) -> dict[str, torch.Tensor]:
    """Return ``{"padding_mask": bool [1, positions]}`` for MoE models, ``{}`` for others.

    Without the mask, padding would count as router load.
    """
    inner = unwrap(model)
    takes_mask = "padding_mask" in inspect.signature(inner.forward).parameters  # core 0.16
    if not (inner.config.num_moe_experts and takes_mask):
        return {}
    mask = batch.padding_mask()[None]
    # Megatron splits the mask along with the embeddings, so on the first stage only.
    if inner.config.sequence_parallel and not inner.pre_process:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        mask = mask.chunk(ranks, dim=1)[parallel_state.get_tensor_model_parallel_rank()]
    return {"padding_mask": mask}


def scale_router_losses(config: TransformerConfig, weight_scale: int) -> None:
    """Scale the auxiliary losses of routers like the token count, to preserve their weight.

    With ``calculate_per_token_loss`` Megatron multiplies them by the router's tokens and divides
    them, with all gradients, by the count that the loss function returned. Call this once, before
    the model is built, if ``forward_step`` gets a ``weight_scale``. The losses that Megatron logs
    do not change.

    Args:
        config: Megatron's ``TransformerConfig``; its coefficients are multiplied in place.
        weight_scale: as for :func:`~energon_ext.megatron.make_loss_func`.

    Raises:
        ConfigError: the config is already scaled.
    """
    if hasattr(config, _SCALE):
        raise ConfigError(
            f"scale_router_losses(config, {weight_scale}): the config is already scaled by "
            f"{getattr(config, _SCALE)}; call it once, on a new config."
        )
    for name in _COEFFICIENTS:
        if value := getattr(config, name):  # a number, or a list of numbers
            setattr(config, name, np.multiply(value, weight_scale).tolist())
    setattr(config, _SCALE, weight_scale)


def scale_of_router_losses(model: torch.nn.Module) -> int:
    """Return the scale that :func:`scale_router_losses` gave a model, 1 for none."""
    scale: int = getattr(unwrap(model).config, _SCALE, 1)
    return scale


def check_router_losses(model: torch.nn.Module, weight_scale: int, denominator: str) -> None:
    """Raise ConfigError unless the model's auxiliary losses keep their weight."""
    config = unwrap(model).config
    used = [name for name in _COEFFICIENTS if np.any(getattr(config, name) or 0)]
    if not config.num_moe_experts or not used:
        return
    if denominator in ("pairs", "documents"):
        raise ConfigError(
            f"denominator={denominator!r}: Megatron multiplies the auxiliary losses of routers by "
            f"tokens, and would divide them by {denominator}, which are far fewer; set "
            f"{' and '.join(used)} to 0."
        )
    scale = scale_of_router_losses(model)
    if scale != weight_scale:
        raise ConfigError(
            f"weight_scale={weight_scale}, but the auxiliary losses of the routers are scaled by "
            f"{scale}: call scale_router_losses(config, {weight_scale}) on a new config before "
            "the model is built, or use denominator='tokens' without a weight_scale."
        )


def unwrap(model: torch.nn.Module) -> MegatronModule:
    """Return the model inside its data-parallel and precision wrappers."""
    inner: Any = model
    while hasattr(inner, "module"):
        inner = inner.module
    return inner
