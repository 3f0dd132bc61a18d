# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Feed packed batches to a Megatron-core model: loader, step and attention, also on a CPU."""

from energon_ext.megatron.attention import SegmentAttention, gpt_layer_spec
from energon_ext.megatron.broadcast import create_broadcast_groups
from energon_ext.megatron.context_groups import create_context_groups, follow_context_groups
from energon_ext.megatron.context_parallel import slice_for_context_parallel
from energon_ext.megatron.context_times import measure_context_times
from energon_ext.megatron.cpu import enable_cpu, select_gpu
from energon_ext.megatron.document_losses import DocumentLossLog
from energon_ext.megatron.lm.arguments import add_energon_args
from energon_ext.megatron.lm.provider import schedule_axis, train_valid_test_dataloaders_provider
from energon_ext.megatron.loader import (
    MegatronEnergonLoader,
    data_parallel_worker_config,
    draw_step,
)
from energon_ext.megatron.loss import check_losses, make_loss_func, mean_losses
from energon_ext.megatron.moe import scale_router_losses
from energon_ext.megatron.mtp import mtp_block_spec
from energon_ext.megatron.packed_params import build_packed_seq_params
from energon_ext.megatron.reference import write_reference_of
from energon_ext.megatron.replica import create_replica_group
from energon_ext.megatron.rope import rope_by_position_ids
from energon_ext.megatron.routing_replay import check_experts, replay_experts
from energon_ext.megatron.step import forward_step, get_batch
from energon_ext.megatron.teacher import write_teacher_of
from energon_ext.megatron.validation import ValidationLoader

__all__ = [
    "DocumentLossLog",
    "MegatronEnergonLoader",
    "SegmentAttention",
    "ValidationLoader",
    "add_energon_args",
    "build_packed_seq_params",
    "check_experts",
    "check_losses",
    "create_broadcast_groups",
    "create_context_groups",
    "create_replica_group",
    "data_parallel_worker_config",
    "draw_step",
    "enable_cpu",
    "follow_context_groups",
    "forward_step",
    "get_batch",
    "gpt_layer_spec",
    "make_loss_func",
    "mean_losses",
    "measure_context_times",
    "mtp_block_spec",
    "replay_experts",
    "rope_by_position_ids",
    "scale_router_losses",
    "schedule_axis",
    "select_gpu",
    "slice_for_context_parallel",
    "train_valid_test_dataloaders_provider",
    "write_reference_of",
    "write_teacher_of",
]
