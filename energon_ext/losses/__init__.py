# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Losses of packed batches."""

from energon_ext.losses.chunked import chunked_log_probs, chunked_loss
from energon_ext.losses.distillation import Distillation, distillation_loss
from energon_ext.losses.documents import document_losses, document_mean
from energon_ext.losses.pairs import dpo_loss, preference_margins
from energon_ext.losses.sources import separate_weights
from energon_ext.losses.unified import (
    clipped_ratio_losses,
    group_advantages,
    reference_kl,
    truncated_ratios,
    unified_loss,
)

__all__ = [
    "Distillation",
    "chunked_log_probs",
    "chunked_loss",
    "clipped_ratio_losses",
    "distillation_loss",
    "document_losses",
    "document_mean",
    "dpo_loss",
    "group_advantages",
    "preference_margins",
    "reference_kl",
    "separate_weights",
    "truncated_ratios",
    "unified_loss",
]
