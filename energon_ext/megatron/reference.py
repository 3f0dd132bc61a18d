# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A first pass over preferences with a reference model that several ranks may hold together."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from energon_ext.encoders.preferences import PreferenceTaskEncoder
from energon_ext.encoders.reference import write_reference
from energon_ext.megatron.moe import scale_of_router_losses
from energon_ext.megatron.replica import KEPT, ask_replicas
from energon_ext.megatron.step import forward_step


def write_reference_of(
    model: torch.nn.Module,
    path: str | Path,
    task_encoder: PreferenceTaskEncoder,
    *,
    split_part: str = "train",
    trusted_modules: Iterable[str] = (),
) -> None:
    """Compute and cache what a model says of all pairs, unless that has been done.

    All ranks call this together, before the model is trained; ranks of different replicas must
    share a file system. See :func:`energon_ext.encoders.reference.write_reference`.

    Args:
        model: the reference, a ``GPTModel`` or a hybrid model, wrapped or not.
        path, task_encoder, split_part, trusted_modules: see ``write_reference``.

    Raises:
        ConfigError: as for ``write_reference``, or the model is context-parallel.
    """
    write = partial(
        write_reference, path, task_encoder, split_part=split_part, trusted_modules=trusted_modules
    )
    ask_replicas(
        model,
        _keep_log_probs,
        lambda ask, part: write(log_probs_of=ask, part=part),
        caller="write_reference_of",
    )


def _keep_log_probs(data_iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    scale = scale_of_router_losses(model)
    output, _ = forward_step(data_iterator, model, denominator="tokens", weight_scale=scale)

    def keep(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        return output.sum(), {KEPT: -output.float().view(-1)}

    return output, keep
