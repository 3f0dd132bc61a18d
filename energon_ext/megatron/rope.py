# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""RoPE that reads ``position_ids``.

Megatron's RoPE ignores them: in a packed sequence it counts every segment from 0, which is right
for documents. Frames that place a piece of a document at an offset, or jump within a segment, need
:func:`rope_by_position_ids`.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from energon_ext.errors import ConfigError
from energon_ext.megatron.moe import unwrap


def rope_by_position_ids(model: torch.nn.Module) -> None:
    """Make a ``GPTModel`` rotate each position by its ``position_ids``; call it on every stage.

    RoPE is relative: adding a constant to all ids of a segment changes nothing, as attention stays
    within the segment. The model's state dict does not change.

    Raises:
        ConfigError: another position embedding, fused RoPE or context parallelism, which cannot use
            explicit positions.
    """
    inner = unwrap(model)
    for name, found, allowed in (
        ("position_embedding_type", inner.position_embedding_type, "rope"),
        ("apply_rope_fusion", inner.config.apply_rope_fusion, False),
        ("multi_latent_attention", inner.config.multi_latent_attention, False),
        ("context_parallel_size", inner.config.context_parallel_size, 1),
    ):
        if found != allowed:
            raise ConfigError(f"rope_by_position_ids: {name}={found!r}; it must be {allowed!r}.")
    rope = PositionIdRope(inner.rotary_pos_emb)
    inner.rotary_pos_emb = rope
    inner.register_forward_pre_hook(rope.take_position_ids, with_kwargs=True)


class PositionIdRope(torch.nn.Module):
    """Replacement of Megatron's ``RotaryEmbedding``, with the same frequencies.

    Given one angle per position, Megatron rotates the whole packed sequence by these angles.
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
        """Return the angles of every position: float32 [positions, batch, 1, channels]."""
        assert self.position_ids is not None  # the hook runs first
        rope, positions = self.rope, self.position_ids.t()
        if rope.seq_len_interpolation_factor is not None:
            positions = positions / rope.seq_len_interpolation_factor
        angles = positions[..., None] * rope.inv_freq.to(positions.device)
        if rope.rotary_interleaved:
            return angles.repeat_interleave(2, dim=-1)[:, :, None]
        return torch.cat((angles, angles), dim=-1)[:, :, None]
