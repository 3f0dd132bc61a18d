# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
# ruff: noqa: E402
"""The GPT that 01, 02 and 03 train: Megatron's setup, model, optimizer, step and checkpoint.

The same code runs on CPU and GPU, alone or under torchrun, with tensor and pipeline parallelism.
"""

import math
import os
import queue
import sys
import warnings
from functools import partial

# Hide a dozen warnings about missing GPU kernels at every start.
warnings.filterwarnings("ignore", module=r"(megatron\.core|torch)\.")
warnings.filterwarnings("ignore", message="Please use DTensor instead")

import torch
import torch.distributed as dist
from initial_weights import initialize_weights
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import unwrap_model
from torch.distributed.checkpoint.api import CheckpointException

from energon_ext import ConfigError, EnergonExtError
from energon_ext.megatron import (
    check_losses,
    create_broadcast_groups,
    enable_cpu,
    forward_step,
    gpt_layer_spec,
    mean_losses,
    scale_router_losses,
    select_gpu,
)
from energon_ext.state.together import on_all_ranks

HEADS = 8

#: Megatron counts weights as integers; this scale counts them to the nearest 1 / 1024.
WEIGHT_SCALE = 1024


def run(work, args):
    """Run a script's work inside Megatron; exit with one line on user errors."""
    try:
        start_megatron(args)
        work(args)
        dist.destroy_process_group()
    except (EnergonExtError, OSError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt as stop:
        sys.exit(f"Stopped: {stop or f'the last checkpoint is in {args.run_dir}'}.")


def start_megatron(args):
    on_cpu = enable_cpu()
    if not on_cpu:
        select_gpu()
    # One process needs no torchrun.
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo" if on_cpu else "nccl", **alone)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    create_broadcast_groups()
    model_parallel_cuda_manual_seed(args.seed, inference_rng_tracker=on_cpu)
    torch.manual_seed(args.seed)


def build_model(args, vocab_size):
    config = build_config(args)
    model = GPTModel(
        config,
        gpt_layer_spec(config),
        vocab_size,
        args.seq_length,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    return ready_to_train(args, model)


def build_config(args):
    if args.hidden_size % HEADS:
        raise ConfigError(f"--hidden-size must be a multiple of {HEADS}, got {args.hidden_size}.")
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=2 * args.hidden_size,
        num_attention_heads=HEADS,
        num_query_groups=2,
        normalization="RMSNorm",
        init_method_std=0.05,  # the usual 0.02 is for larger models
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=on_gpu,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,  # the loss is a mean over tokens, not over micro-batches
        **(_experts(args) if args.num_experts else {}),
    )
    if args.num_experts:
        scale_router_losses(config, WEIGHT_SCALE)
    return config


def _experts(args):
    """Return settings for many small experts with a load-balancing loss, like Qwen3-A3B."""
    if args.num_experts < 2 or args.num_experts % args.expert_model_parallel_size:
        raise ConfigError(
            f"--num-experts must be 2 or more and a multiple of --expert-model-parallel-size "
            f"{args.expert_model_parallel_size}, got {args.num_experts}."
        )
    return {
        "num_moe_experts": args.num_experts,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": args.hidden_size // 2,
        "moe_router_load_balancing_type": "aux_loss",
        "moe_aux_loss_coeff": 1e-3,
        "moe_token_dispatcher_type": "alltoall" if torch.cuda.is_available() else "allgather",
        "expert_model_parallel_size": args.expert_model_parallel_size,
        "sequence_parallel": args.tensor_model_parallel_size > 1,
        "qk_layernorm": True,
        **({"moe_enable_routing_replay": True} if hasattr(args, "experts") else {}),
    }


def ready_to_train(args, model):
    """Initialize a model, move it to its device, and wrap it for data parallelism."""
    config = model.config
    initialize_weights(model, args.seed)
    if config.bf16:
        model = Float16Module(config, model.cuda())
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, ddp_config, model)


def build_optimizer(args, model):
    config = model.config
    optimizer_config = OptimizerConfig(
        lr=args.lr,
        weight_decay=0.1,
        adam_beta2=0.95,
        clip_grad=1.0,
        bf16=config.bf16,
        params_dtype=config.params_dtype,
    )
    optimizer = get_megatron_optimizer(optimizer_config, [model])
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    return optimizer


def train_step(args, step, model, optimizer, batches, documents=None):
    """Take one optimizer step; return its mean losses, on the last pipeline stage.

    Args:
        documents: the DocumentLossLog of the run, if there is one.
    """
    model.zero_grad_buffer()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(args, step)
    reports = _run_batches(args, model, batches)
    if documents is not None:
        documents.add(step, reports)
    losses = mean_losses(reports)
    on_all_ranks(lambda: check_losses(losses, step))
    _, grad_norm, _ = optimizer.step()
    return {**losses, "grad_norm": float(grad_norm)}


def forward(args, model, batches, token_losses=None):
    """Return the mean losses of micro-batches without training, on the last pipeline stage.

    If ``token_losses`` is a list, the loss at each position of each micro-batch is appended to it.
    """
    with torch.no_grad():
        reports = _run_batches(args, model, batches, token_losses, forward_only=True)
    return mean_losses(reports)


def _run_batches(args, model, batches, token_losses=None, forward_only=False):
    # A model with further inputs has its own forward step.
    model_step = getattr(unwrap_model(model), "forward_step", None)
    text_step = partial(
        forward_step,
        ratio_limit=getattr(args, "ratio_limit", None),
        denominator=getattr(args, "denominator", "weights"),
        loss_chunk=getattr(args, "loss_chunk", None),
        experts=getattr(args, "experts", None),
    )
    step = partial(model_step or text_step, weight_scale=_weight_scale(args))

    def recording_step(data_iterator, model):
        output, loss_func = step(data_iterator, model)

        def record(output):
            token_losses.append(output[0].float().cpu())
            return loss_func(output)

        return output, record

    return get_forward_backward_func()(
        forward_step_func=step if token_losses is None else recording_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=len(batches),
        seq_length=args.micro_batch_rows * args.seq_length,  # a packed micro-batch is one sequence
        micro_batch_size=1,
        forward_only=forward_only,
    )


def _weight_scale(args):
    """Return the scale of weights; documents are counted in parts anyway."""
    return 1 if getattr(args, "denominator", None) == "documents" else WEIGHT_SCALE


def learning_rate(args, step):
    if step <= args.lr_warmup_iters:
        return args.lr * step / args.lr_warmup_iters
    done = (step - args.lr_warmup_iters) / max(1, args.train_iters - args.lr_warmup_iters)
    return args.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def save_model(model, optimizer, folder):
    """Write one checkpoint from all ranks; it can be loaded under any other parallelism."""
    # Megatron-core would start a process for the results of background saves, which imports this
    # script again and takes five seconds. These saves are not in the background.
    filesystem_async._results_queue = queue.Queue()
    dist_checkpointing.save(_sharded_state(model, optimizer), str(folder))


def load_model(model, optimizer, folder):
    state = _sharded_state(model, optimizer, is_loading=True)
    try:
        state = dist_checkpointing.load(state, str(folder))
    except (Exception, CheckpointException) as error:  # the readers may raise anything
        *_, reason = str(error).strip().splitlines() or [type(error).__name__]
        raise EnergonExtError(
            f"{folder}: the model cannot be loaded ({reason}). Copy the folder again from its "
            f"original, or resume from another checkpoint."
        ) from error
    unwrap_model(model).load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def _sharded_state(model, optimizer, is_loading=False):
    weights = unwrap_model(model).sharded_state_dict()
    # No random states, as training without dropout draws no random numbers.
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading),
    }
