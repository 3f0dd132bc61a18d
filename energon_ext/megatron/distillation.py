# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A Megatron model as the student of a teacher whose words are columns of the batch.

Megatron's models call ``compute_language_model_loss(labels, logits)``. For the length of a forward
pass it returns two losses of each position, and the labels are the numbers of the positions, so
that a loss in chunks knows which positions it has.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import parallel_state

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import ConfigError
from energon_ext.losses.distillation import Distillation, names_of, teacher_divergences
from energon_ext.megatron.chunked_output import replace_method
from energon_ext.megatron.loss import PositionLosses
from energon_ext.megatron.moe import unwrap


@contextlib.contextmanager
def labels_for(
    model: torch.nn.Module, batch: PackedBatch, distillation: Distillation | None
) -> Iterator[torch.Tensor]:
    """Yield the labels to give to a model, [N]; let it return the losses of a student, [2, N]."""
    inner: Any = unwrap(model)
    if distillation is None or not inner.post_process:
        yield batch.labels
        return
    ids, log_probs = distillation.columns_of(batch)
    group = None
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        group = parallel_state.get_tensor_model_parallel_group()

    def compute_losses(positions: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        (chosen,) = positions
        losses = teacher_divergences(
            logits.squeeze(1),
            batch.labels[chosen],
            ids[chosen],
            log_probs[chosen],
            distillation,
            group,
        )
        return torch.stack(losses)

    with replace_method(inner, "compute_language_model_loss", compute_losses):
        yield torch.arange(batch.num_tokens, device=batch.labels.device)


def distillation_of(batch: PackedBatch, distillation: Distillation | None) -> Distillation | None:
    """Return how to learn from a batch: from its labels alone to evaluate one without a teacher."""
    if distillation is None or torch.is_grad_enabled():
        return distillation
    return distillation if names_of(distillation.name)[0] in batch.columns else None


def check_student(
    model: torch.nn.Module,
    distillation: Distillation | None,
    position_losses: PositionLosses | None,
) -> None:
    """Raise ConfigError if a model cannot be a student, or another loss is chosen."""
    if distillation is None:
        return
    inner: Any = unwrap(model)
    refused = None
    if position_losses is not None:
        refused = "position_losses replace the loss that the teacher's is mixed with"
    elif inner.config.mtp_num_layers:
        refused = (
            "mtp_num_layers: the teacher's words are those of the next token only; set it to None"
        )
    elif not hasattr(inner, "compute_language_model_loss"):
        refused = f"{type(inner).__name__} has no compute_language_model_loss; use a GPTModel"
    if refused is not None:
        raise ConfigError(f"distillation: {refused}, or leave distillation out.")
