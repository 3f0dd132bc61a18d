# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the training loop of Megatron-LM does otherwise when its batches are packed rows."""

from __future__ import annotations

from typing import Any

from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.rerun_state_machine import get_rerun_state_machine


def skip_packed_steps() -> None:
    """Let ``--iterations-to-skip``, and a tracker of rejected results, skip steps of packed rows.

    Megatron-LM's own function takes a batch for a dictionary of rows of one shape, and sends them
    to the tensor-parallel ranks only to drop them.
    """
    from megatron.training import training

    training.dummy_train_step = _draw_and_drop


def _draw_and_drop(data_iterator: Any) -> None:
    """One step, on every rank: those that load draw its batches."""
    iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    while get_rerun_state_machine().should_run_forward_backward(data_iterator):
        for _ in range(get_num_microbatches()):
            for iterator in iterators:
                if iterator is not None:
                    next(iterator)
