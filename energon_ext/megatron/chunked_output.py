# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loss of a Megatron model in chunks of positions, by its own output layer and cross-entropy.

Megatron's models compute ``output_layer(hidden)`` and then ``compute_language_model_loss(labels,
logits)``. For the length of a forward pass, the first returns its input and the second does both,
chunk by chunk. Only a linear scale (muP) comes between them, which is the same on either side.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError
from energon_ext.losses.chunked import compute_in_chunks
from energon_ext.megatron.moe import unwrap

#: Fused losses of Megatron that take logits.
_FUSED = ("native", "te")


@contextlib.contextmanager
def loss_in_chunks(model: torch.nn.Module, chunk: int | None) -> Iterator[None]:
    """Let a model compute its loss in chunks of positions, None for all positions at once.

    With sequence parallelism a chunk is gathered from all ranks, so it has that number of positions
    times the number of ranks in each of them.

    Raises:
        ConfigError: the model has what cannot be computed in chunks.
    """
    if chunk is None:
        yield
        return
    inner: Any = unwrap(model)
    _check_model(inner, chunk)
    if not inner.post_process:
        yield
        return
    layer, loss_of = inner.output_layer, inner.compute_language_model_loss
    project, given = layer.forward, {}
    ranks = parallel_state.get_tensor_model_parallel_world_size() if _gathers(layer) else 1

    def keep(hidden: torch.Tensor, **options: Any) -> tuple[torch.Tensor, None]:
        given.update(options)
        return hidden, None

    def compute(hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits, _ = project(hidden, **given)
        # The positions of a chunk are together on each rank, and gathered rank by rank.
        losses: torch.Tensor = loss_of(labels.t().reshape(1, -1), logits)
        return losses.view(len(losses), ranks, -1).permute(2, 1, 0)

    def compute_loss(labels: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        losses = compute_in_chunks(compute, hidden, labels.view(ranks, -1).t(), chunk)
        return losses.permute(2, 1, 0).flatten(1)

    with (
        replace_method(layer, "forward", keep),
        replace_method(inner, "compute_language_model_loss", compute_loss),
    ):
        yield


def _gathers(layer: Any) -> bool:
    """Return True if each rank has only a part of the positions of the input."""
    return bool(getattr(layer, "sequence_parallel", False))


@contextlib.contextmanager
def replace_method(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one object; its class and its attributes are as before afterwards."""
    own = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


def _check_model(inner: Any, chunk: int) -> None:
    check_integer("loss_chunk", chunk, 1)
    config = inner.config
    refused = None
    if config.mtp_num_layers:
        refused = "mtp_num_layers: multi-token prediction compares whole logits; set it to None"
    elif config.defer_embedding_wgrad_compute:
        refused = (
            "defer_embedding_wgrad_compute: each chunk is computed twice, and Megatron would keep "
            "both; set it to False"
        )
    elif config.cross_entropy_loss_fusion and config.cross_entropy_fusion_impl not in _FUSED:
        refused = (
            f"cross_entropy_fusion_impl={config.cross_entropy_fusion_impl!r} has no logits; use "
            f"one of {', '.join(_FUSED)}"
        )
    elif not hasattr(inner, "compute_language_model_loss"):
        refused = f"{type(inner).__name__} has no compute_language_model_loss; use a GPTModel"
    if refused is not None:
        raise ConfigError(f"loss_chunk={chunk}: {refused}, or leave loss_chunk out.")
