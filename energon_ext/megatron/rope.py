# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""RoPE that reads ``position_ids``.

Megatron's RoPE does not: in a packed sequence it counts every segment from 0. That is right for
documents. Frames that place a piece of a document at an offset of its own, or jump in a segment,
say so in ``position_ids``, and :func:`rope_by_position_ids` lets the model listen.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from energon_ext.errors import ConfigError
from energon_ext.megatron.moe import unwrap


def rope_by_position_ids(model: torch.nn.Module) -> None:
    """Let a ``GPTModel`` rotate each position by its ``position_ids``; call it on every stage.

    RoPE is relative: adding one number to all ids of a segment changes nothing while attention
    stays inside it. Nothing is added to the state of the model.

    Raises:
        ConfigError: another position embedding, fused RoPE or context parallelism, none of which
            can be given a position.
    """
    inner = unwrap(model)
    for what, found, allowed in (
        ("position_embedding_type", inner.position_embedding_type, "rope"),
        ("apply_rope_fusion", inner.config.apply_rope_fusion, False),
        ("multi_latent_attention", inner.config.multi_latent_attention, False),
        ("context_parallel_size", inner.config.context_parallel_size, 1),
    ):
        if found != allowed:
            raise ConfigError(f"rope_by_position_ids: {what}={found!r}; it must be {allowed!r}.")
    rope = PositionIdRope(inner.rotary_pos_emb)
    inner.rotary_pos_emb = rope
    inner.register_forward_pre_hook(rope.take_position_ids, with_kwargs=True)


class PositionIdRope(torch.nn.Module):
    """Stands where Megatron's ``RotaryEmbedding`` stood, with the same frequencies.

    Megatron turns the whole packed sequence by the angles it is given when there is one for each of
    its positions, and that is what it is given here.
    """

    def __init__(self, rope: RotaryEmbedding):
        super().__init__()
        self.rope = rope
        self.position_ids: torch.Tensor | None = None

    def take_position_ids(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return self.rope.get_rotary_seq_len(*args, **kwargs)

    def forward(self, max_seq_len: int, **_: Any) -> torch.Tensor:
        """The angles of every position: float32 [positions, batch, 1, channels]."""
        assert self.position_ids is not None  # the hook comes first
        rope, positions = self.rope, self.position_ids.t()
        if rope.seq_len_interpolation_factor is not None:
            positions = positions / rope.seq_len_interpolation_factor
        angles = positions[..., None] * rope.inv_freq.to(positions.device)
        if rope.rotary_interleaved:
            return angles.repeat_interleave(2, dim=-1)[:, :, None]
        return torch.cat((angles, angles), dim=-1)[:, :, None]
