# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The groups of ranks that share the micro-batches of a layout, and models that follow them.

Megatron's own context parallelism is off (``context_parallel_size=1``): all ranks that a layout
counts are data-parallel ranks. The group of each micro-batch travels in its ``PackedSeqParams``.
Attention reads it there, but rotary embeddings of megatron-core before Megatron-LM #6821 (August
2026) take the group of the model, and so positions of the wrong rank.
"""

import copy
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError
from energon_ext.megatron.attention import has_transformer_engine
from energon_ext.megatron.moe import unwrap
from energon_ext.megatron.rank_data import rank_data
from energon_ext.state.together import on_all_ranks

#: Attribute of models that follow the groups of micro-batches.
_FOLLOWS = "energon_ext_follows_context_groups"


def create_context_groups(sizes: Sequence[int]) -> None:
    """Create the groups of the blocks of a layout among the data-parallel ranks.

    All ranks of the run call this together, after ``initialize_model_parallel``.

    Args:
        sizes: of :class:`~energon_ext.plan.layout.ContextOptions`.

    Raises:
        ConfigError: a ``context_parallel_size`` above 1, or blocks that do not divide the
            data-parallel ranks.
    """
    static = parallel_state.get_context_parallel_world_size()
    if static != 1:
        raise ConfigError(
            f"create_context_groups: context_parallel_size={static}; set it to 1, since layouts "
            f"choose a size for each document among the data-parallel ranks."
        )
    own = dist.get_process_group_ranks(parallel_state.get_data_parallel_group())
    distinct = sorted({tuple(ranks) for ranks in on_all_ranks(lambda: own)})
    groups: dict[int, dist.ProcessGroup] = {}
    for size in sorted({*sizes} - {1}):
        if len(own) % size:
            raise ConfigError(
                f"create_context_groups: blocks of {size} ranks do not divide {len(own)} "
                f"data-parallel ranks; use smaller sizes, or another number of ranks."
            )
        blocks = [
            list(ranks[at : at + size]) for ranks in distinct for at in range(0, len(own), size)
        ]
        groups[size], _ = dist.new_subgroups_by_enumeration(blocks)
    rank_data().context_groups = groups


def context_group(batch: PackedBatch) -> dist.ProcessGroup | None:
    """Return the group of this rank that shares a batch of a layout; None for one rank alone.

    Raises:
        ConfigError: it was not created.
    """
    if batch.context_size in (None, 1):
        return None
    found = rank_data().context_groups.get(batch.context_size)
    if found is None:
        raise ConfigError(
            f"get_batch: a batch for {batch.context_size} context-parallel ranks was drawn, but "
            f"they have no group; call energon_ext.megatron.create_context_groups(sizes) on all "
            f"ranks after initialize_model_parallel()."
        )
    return found


def follow_context_groups(model: torch.nn.Module) -> None:
    """Make the attention of a model follow the groups of the micro-batches; call it once.

    Rotary embeddings then count positions for the group of the micro-batch, also if activations are
    computed again in the backward pass, and Transformer Engine has the stream that its exchange of
    keys and values needs, which Megatron creates only if ``context_parallel_size`` is above 1.

    Raises:
        ConfigError: the model has state-space layers, predicts several tokens, or has auxiliary
            losses of routers: they need all positions of a document; it has virtual stages of two
            pipeline stages; or megatron-core is older than 0.16.
    """
    check_core()
    _check_virtual_stages()
    inner = unwrap(model)
    config = inner.config
    for name, found in (
        ("mtp_num_layers", getattr(config, "mtp_num_layers", None)),
        ("is_hybrid_model", getattr(config, "is_hybrid_model", False)),
        ("moe_aux_loss_coeff", _has_auxiliary_loss(config)),
    ):
        if found:
            raise ConfigError(
                f"follow_context_groups: {name}={getattr(config, name)!r} found; its layers need "
                f"all positions of a document on one rank, or a fixed context-parallel group."
            )
    for module in inner.modules():
        if isinstance(module, Attention):
            static = module.pg_collection.cp
            module.pg_collection = copy.copy(module.pg_collection)
            hook = functools.partial(_follow, static=static)
            module.register_forward_pre_hook(hook, with_kwargs=True)
    setattr(inner, _FOLLOWS, True)
    if has_transformer_engine():
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        if TEDotProductAttention.cp_stream is None:
            TEDotProductAttention.cp_stream = torch.cuda.Stream()


def check_core() -> None:
    """Raise ConfigError if Megatron-core takes no group of a micro-batch."""
    if not hasattr(PackedSeqParams, "cp_group"):
        raise ConfigError(
            "contexts: the context-parallel groups of a layout differ between micro-batches, which "
            "needs megatron-core 0.16 or later."
        )


def _check_virtual_stages() -> None:
    """Raise ConfigError for virtual stages of exactly two pipeline stages."""
    virtual = parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1
    if virtual > 1 and parallel_state.get_pipeline_model_parallel_world_size() == 2:
        raise ConfigError(
            f"virtual_pipeline_model_parallel_size: {virtual} found; the micro-batches of a layout "
            f"differ in length, and with two pipeline stages, where the stage before and the stage "
            f"after are one rank, Megatron-core mixes up the lengths that they send; use more "
            f"stages, or none."
        )


def check_follows(model: torch.nn.Module) -> None:
    """Raise ConfigError unless :func:`follow_context_groups` was called for a model."""
    if not hasattr(unwrap(model), _FOLLOWS):
        raise ConfigError(
            "A batch of a layout was drawn, but the model does not follow its groups; call "
            "energon_ext.megatron.follow_context_groups(model) on each model chunk."
        )


def _has_auxiliary_loss(config: Any) -> bool:
    return bool(config.num_moe_experts) and bool(np.any(config.moe_aux_loss_coeff or 0))


def _follow(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, static: Any) -> None:
    """Before each forward pass, let an attention layer take the group of its micro-batch."""
    params: PackedSeqParams | None = kwargs.get("packed_seq_params")
    module.pg_collection.cp = getattr(params, "cp_group", None) or static
