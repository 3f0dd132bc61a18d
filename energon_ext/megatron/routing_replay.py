# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Route each token to the experts that a sampler chose for it.

With ``moe_enable_routing_replay``, Megatron's routers ask an object for their choice. That of
Megatron needs an order before each pass, and has no free choice for single tokens. The one here
takes its place. It knows which micro-batch a layer computes: the one whose forward pass runs, or,
as activation checkpoints are recomputed in the order of the forward passes, the oldest one that
waits for its backward pass.
"""

import contextlib
from collections import deque
from typing import Any, Callable, Iterator

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from energon_ext.batch.experts import find_fault
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError
from energon_ext.megatron.moe import unwrap
from energon_ext.megatron.rank_data import rank_data

_OPTION = "moe_enable_routing_replay"

#: Parts of a layer whose CUDA graphs contain its router.
_PARTS_WITH_ROUTER = {"full", "full_iteration", "moe", "moe_router", "moe_preprocess"}


@contextlib.contextmanager
def replay_experts(model: torch.nn.Module, batch: PackedBatch, name: str) -> Iterator[None]:
    """Inside the context, the routers of a model choose the experts of a batch's column.

    Tokens whose experts are all -1, as those of padding, are routed as without the context. So are
    the batches of an evaluation that lack the column. A pass that no backward pass follows runs
    under ``torch.no_grad``, as Megatron's evaluations do: the experts of others wait to be used
    again when their layers are recomputed.

    Args:
        model: a ``GPTModel`` or a hybrid model, wrapped or not; its forward pass on the batch, and
            nothing else, runs inside the context.
        batch: as :func:`~energon_ext.megatron.get_batch` returns it.
        name: a column of integers [N, layers, k]. The layers are all layers of the model, or its
            MoE layers only.

    Raises:
        ConfigError: the routers of this model take no choice from outside, or one did not ask for
            it; the batch lacks the column, or its shape differs from the model's.
    """
    inner = unwrap(model)
    check_replayable(inner)
    if name not in batch.columns and not torch.is_grad_enabled():
        yield
        return
    of_layer = _check_shape(inner.config, batch, name)
    experts = batch.columns[name]
    if inner.config.sequence_parallel:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        experts = experts.chunk(ranks)[parallel_state.get_tensor_model_parallel_rank()]
    routers = _routers(inner)
    begun = [_replay_of(router) for router in routers]
    for router, replay in zip(routers, begun):
        waiting = rank_data().recomputed.setdefault(router, deque())
        # A copy, as activation checkpoints would otherwise keep the experts of all layers.
        replay.begin(experts[:, of_layer[router.layer_number - 1]].contiguous(), waiting)
    try:
        yield
    finally:
        was_asked = [replay.end() for replay in begun]
    if not all(was_asked):
        silent = ", ".join(
            str(router.layer_number) for router, was in zip(routers, was_asked) if not was
        )
        raise ConfigError(
            f"replay_experts: the routers of layers {silent} did not ask for their choice, so that "
            f"they chose other experts; use Megatron's TopKRouter, without graphs or fusion."
        )


def check_experts(model: torch.nn.Module, batch: PackedBatch, name: str) -> None:
    """Raise ConfigError unless the experts of a batch are experts of the model.

    Call it as the ``check`` of :func:`~energon_ext.megatron.get_batch`: before a batch moves to a
    GPU, where a wrong number would end the process. :func:`~energon_ext.megatron.forward_step`
    does.
    """
    config = unwrap(model).config
    if name not in batch.columns and not torch.is_grad_enabled():
        return
    of_layer = _check_shape(config, batch, name)
    values = batch.columns[name].numpy()
    if fault := find_fault(values, config.num_moe_experts, [*of_layer.values()]):
        raise ConfigError(f"columns[{name!r}]: {fault}.")


def check_replayable(model: torch.nn.Module) -> None:
    """Raise ConfigError if the routers of a model take no choice from outside."""
    config = unwrap(model).config
    if not config.num_moe_experts:
        raise ConfigError("replay_experts: the model has no experts (num_moe_experts).")
    if not hasattr(config, _OPTION):
        raise ConfigError(
            f"replay_experts: this version of megatron-core has no {_OPTION}; use megatron-core "
            f"0.16 or later."
        )
    if not getattr(config, _OPTION):
        raise ConfigError(
            f"replay_experts: TransformerConfig.{_OPTION}=False found; set it to True before the "
            f"model is built."
        )
    if config.moe_router_fusion:
        raise ConfigError(
            "replay_experts: TransformerConfig.moe_router_fusion=True found, with which routers "
            "ask nobody for their choice; set it to False."
        )
    if config.moe_router_load_balancing_type in ("sinkhorn", "quantile_balancing"):
        raise ConfigError(
            f"replay_experts: moe_router_load_balancing_type="
            f"{config.moe_router_load_balancing_type!r} found, with which routers ask nobody for "
            f"their choice; take another."
        )
    if _graphs_contain_routers(config):
        raise ConfigError(
            f"replay_experts: cuda_graph_impl={config.cuda_graph_impl!r} found, whose graphs would "
            f"repeat the experts of one micro-batch; name parts of layers without the router, such "
            f"as ['attn'], in cuda_graph_modules (cuda_graph_scope before megatron-core 0.18)."
        )


def _graphs_contain_routers(config: TransformerConfig) -> bool:
    if getattr(config, "cuda_graph_impl", "none") in (None, "none"):
        return False
    parts = getattr(config, "cuda_graph_modules", None) or getattr(config, "cuda_graph_scope", None)
    names = {
        getattr(part, "name", part) for part in ([parts] if isinstance(parts, str) else parts or ())
    }
    return not names or bool(names & _PARTS_WITH_ROUTER)


def _check_shape(config: TransformerConfig, batch: PackedBatch, name: str) -> dict[int, int]:
    """Return the index in a column of each MoE layer, by the layer's number from 0.

    Raises:
        ConfigError: the batch lacks the column, or it has another shape or type.
    """
    column = batch.columns.get(name)
    if column is None:
        found = ", ".join(batch.columns) or "no columns"
        raise ConfigError(
            f"experts={name!r}: a batch with {found} was drawn; let the sampler return the "
            f"experts as columns[{name!r}] of its groups."
        )
    layers, topk, moe_layers = config.num_layers, config.moe_router_topk, _moe_layers(config)
    is_integer = not (column.is_floating_point() or column.dtype == torch.bool)
    shape = column.shape[1:]
    if is_integer and shape == (layers, topk):
        return {layer: layer for layer in moe_layers}
    if is_integer and shape == (len(moe_layers), topk):
        return {layer: index for index, layer in enumerate(moe_layers)}
    kind = str(column.dtype).removeprefix("torch.")
    raise ConfigError(
        f"columns[{name!r}]: {kind} {['N', *shape]} found, integers ['N', {layers}, {topk}] (all "
        f"layers) or ['N', {len(moe_layers)}, {topk}] (MoE layers; moe_layer_freq) with "
        f"k = moe_router_topk are needed."
    )


def _moe_layers(config: TransformerConfig) -> list[int]:
    """Return the numbers, from 0, of the layers with experts; of all layers for hybrid models."""
    every = config.moe_layer_freq
    if isinstance(every, int):
        return [*range(0, config.num_layers, every)]
    return np.flatnonzero(every).tolist()


def _routers(model: MegatronModule) -> list[Any]:
    """Return the routers of this stage's layers, without those of multi-token prediction."""
    found = (getattr(getattr(layer, "mlp", None), "router", None) for layer in model.decoder.layers)
    return [router for router in found if router is not None]


def _replay_of(router: Any) -> "_Replay":
    """Return the object that a router asks for its choice, put in the place of Megatron's."""
    if not isinstance(router.router_replay, _Replay):
        router.router_replay = _Replay(router.router_replay)
    replay: _Replay = router.router_replay
    return replay


class _Replay:
    """Tells a router its choice; outside of passes with given experts, as Megatron's own does."""

    def __init__(self, own: Any):
        self._get_own = own.get_replay_topk
        self._given: torch.Tensor | None = None  # [tokens, k] of the pass that runs
        self._waiting: deque[torch.Tensor] = deque()
        self._is_trained = self._was_asked = False

    def begin(self, experts: torch.Tensor, waiting: deque[torch.Tensor]) -> None:
        """A forward pass begins; ``waiting`` are the experts of passes to recompute."""
        self._given, self._waiting = experts, waiting
        self._is_trained, self._was_asked = torch.is_grad_enabled(), False

    def end(self) -> bool:
        """The forward pass ends; return True if the router asked for its choice."""
        self._given = None
        return self._was_asked

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        compute_topk: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the scores and numbers of the chosen experts, [tokens, k] each."""
        given = self._take()
        if given is None:
            return self._get_own(scores, topk, num_groups, group_topk, compute_topk)
        _, free = compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        given = given.to(free.dtype)  # torch compares no unsigned integers of more than 8 bits
        chosen = torch.where(given >= 0, given, free)
        return scores.gather(1, chosen), chosen

    def _take(self) -> torch.Tensor | None:
        if self._given is None:
            return self._waiting.popleft() if self._waiting else None
        self._was_asked = True
        if self._is_trained and not torch.is_grad_enabled():
            # The pass runs inside an activation checkpoint: the backward pass repeats it.
            self._waiting.append(self._given)
        return self._given
