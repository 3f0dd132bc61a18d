# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A small real GPTModel and synthetic packed batches for it, on the CPU."""

import contextlib
import importlib.util
import inspect
from importlib.metadata import version

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.megatron import (
    build_packed_seq_params,
    create_broadcast_groups,
    enable_cpu,
)
from tests.megatron.example_code import initialize_weights
from tests.megatron.gathering_attention import gathering_layer_spec

VOCABULARY = 64
SEQ_LEN = 32

MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "allgather",
    "moe_grouped_gemm": False,
    # The auxiliary loss looks at the batch as a whole, so it differs between packings.
    "moe_router_load_balancing_type": "none",
    "qk_layernorm": True,
}

#: Large enough that a wrong share of the auxiliary loss shows in the gradients.
BALANCED_MOE = {**MOE, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.5}


#: Routers of megatron-core 0.15 count padding: they are given no mask.
ROUTERS_TAKE_A_MASK = "padding_mask" in inspect.signature(GPTModel.forward).parameters

MTP_NEEDS_TRANSFORMER_ENGINE = pytest.mark.skipif(
    version("megatron-core") >= "0.20" and importlib.util.find_spec("transformer_engine") is None,
    reason="without Transformer Engine megatron-core 0.20 fails itself to build the layers of "
    "multi-token prediction (inference_layers.py: isinstance() with a mock)",
)


@contextlib.contextmanager
def megatron(rank=0, world_size=1, store=None, **parallel_sizes):
    """Process groups and random states of Megatron, taken down again."""
    enable_cpu()
    store = store or dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        with model_parallel(**parallel_sizes):
            yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def model_parallel(**parallel_sizes):
    parallel_state.initialize_model_parallel(**parallel_sizes)
    create_broadcast_groups()
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=True, force_reset_rng=True)
    forget_router_losses()
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def forget_router_losses():
    """Megatron logs router losses in an array that has room for the layers of the first model."""
    try:
        from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    except ImportError:  # megatron-core before 0.18
        from megatron.core.transformer.moe import moe_utils

        moe_utils.get_moe_layer_wise_logging_tracker().clear()
    else:
        destroy_moe_metrics_tracker()


def small_config(**overrides):
    return TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "ffn_hidden_size": 64,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "pipeline_dtype": torch.float32,
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "calculate_per_token_loss": True,
            "init_method_std": 0.2,  # far from uniform outputs, so that differences show
            **overrides,
        }
    )


def small_model(config, seed=0, vocabulary=VOCABULARY, vp_stage=None, tied=False):
    model = GPTModel(
        config,
        gathering_layer_spec(config, vp_stage),
        vocabulary,
        SEQ_LEN,
        pre_process=parallel_state.is_pipeline_first_stage(False, vp_stage),
        post_process=parallel_state.is_pipeline_last_stage(False, vp_stage),
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    )
    initialize_weights(model, seed)
    return model


def run_packed(model, batch, **inputs):
    """Return the logits of a batch, or with ``labels`` its losses, one per position."""
    packed = build_packed_seq_params(batch)
    tokens, positions = batch.tokens[None], batch.position_ids[None]
    return model(tokens, positions, None, packed_seq_params=packed, **inputs)[0]


def documents_of(batch):
    """Return the positions of each document of a batch."""
    ends = batch.cu_seqlens.tolist()
    return [
        slice(start, end)
        for start, end, source in zip(ends, ends[1:], batch.source_ids.tolist())
        if source >= 0
    ]


def synthetic_batch(seed, rows=2, sources=("code", "web")):
    """Rows of two or three random documents and some padding; some positions masked."""
    random = np.random.default_rng(seed)
    batch = BatchAssembler(SEQ_LEN)([_row(random, sources) for _ in range(rows)], sources)
    masked = torch.from_numpy(random.random(batch.num_tokens) < 0.2)
    batch.token_weights[masked] = 0.0
    return batch


def _row(random, sources):
    lengths = random.integers(4, 12, size=random.integers(2, 4)).tolist()
    return Row(
        # Counting is something to learn, so a loss falls.
        [(random.integers(VOCABULARY) + np.arange(length)) % VOCABULARY for length in lengths],
        source=sources[random.integers(len(sources))],
        documents=len(lengths),
    )
