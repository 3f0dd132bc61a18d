# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pretrain a GPT with Megatron-core on a scheduled blend; stop it, and resume it exactly.

On CPU or GPU, one process or several under torchrun, without an edit:

    python examples/01_pretrain_gpt.py mix.yaml --run-dir runs/a --stop-after 75
    python examples/01_pretrain_gpt.py mix.yaml --run-dir runs/a --resume
    torchrun --nproc-per-node 2 examples/01_pretrain_gpt.py mix.yaml --run-dir runs/b \
        --tensor-model-parallel-size 2     (or pipeline; without either, data parallel)

A run folder holds metrics.jsonl, one JSON object a line, and checkpoints/, each with the model, the
optimizer, the random state, the state of the data and how much of each source was trained on. After
a resume every batch and every loss is that of a run which was never stopped.
"""

import argparse
import math
import os
import sys
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state
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

from energon_ext import ConfigError, EnergonExtError, PackedTaskEncoder, get_train_dataset
from energon_ext.encoders.tokenizers import load_tokenizer
from energon_ext.megatron import (
    MegatronEnergonLoader,
    RunLog,
    data_parallel_worker_config,
    enable_cpu,
    forward_step,
    gpt_layer_spec,
    initialize_weights,
    mean_losses,
    summarize_step,
)
from energon_ext.plan.lookup import find_blend
from energon_ext.state.checkpoint import CheckpointStore
from energon_ext.state.consumption import Consumption
from energon_ext.state.match import check_fingerprint

#: Megatron counts weights in integers: these are counted to the nearest 1 / 1024.
WEIGHT_SCALE = 1024

#: What a resumed run may change. The data state checks the metadataset itself.
FREE_ARGUMENTS = {"metadataset", "run_dir", "resume", "stop_after", "save_interval"}
FREE_ARGUMENTS |= {"log_interval", "tensorboard", "wandb_project", "num_workers"}


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("metadataset", help="YAML file or prepared folder")
    add("--run-dir", type=Path, required=True)
    add("--resume", action="store_true", help="continue from the last checkpoint of the run")
    add("--train-iters", type=int, default=150)
    add("--stop-after", type=int, metavar="STEP", help="save and leave after this step")
    add("--save-interval", type=int, default=50)
    add("--log-interval", type=int, default=10, help="steps between two counts of all ranks")
    add("--tensorboard", action="store_true", help="write TensorBoard files to the run folder")
    add("--wandb-project", metavar="NAME", help="log to this project of Weights & Biases")
    add("--tokenizer", default="bytes", help="bytes, a tokenizer.json, a folder or a HF name")
    add("--seq-length", type=int, default=256)
    add("--global-batch-rows", type=int, default=16, help="packed rows per optimizer step")
    add("--micro-batch-rows", type=int, help="default: all rows of a data-parallel rank")
    add("--num-workers", type=int, default=0)
    add("--seed", type=int, default=1234)
    add("--num-layers", type=int, default=4)
    add("--hidden-size", type=int, default=128)
    add("--lr", type=float, default=4e-3, help="after a warmup; falls to a tenth")
    add("--lr-warmup-iters", type=int, default=15)
    add("--tensor-model-parallel-size", type=int, default=1)
    add("--pipeline-model-parallel-size", type=int, default=1)
    return parser.parse_args()


def main():
    args = parse_args()
    try:
        start_megatron(args)
        train(args)
        dist.destroy_process_group()
    except EnergonExtError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"Stopped by Ctrl-C; the last checkpoint stays in {args.run_dir / 'checkpoints'}.")


def start_megatron(args):
    on_cpu = enable_cpu()
    if not on_cpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    # One process needs no torchrun.
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group("gloo" if on_cpu else "nccl", **alone)
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    )
    model_parallel_cuda_manual_seed(args.seed, inference_rng_tracker=on_cpu)
    torch.manual_seed(args.seed)


def train(args):
    tokenizer = load_tokenizer(args.tokenizer)
    model = build_model(args, tokenizer.padded_vocab_size(128))
    optimizer = build_optimizer(args, model)
    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    checkpoints = CheckpointStore(args.run_dir / "checkpoints", **ranks)
    with closing(Data(args, tokenizer)) as data, checkpoints as store:
        step = 0
        if args.resume:
            step = resume(store, args, model, optimizer, data)
        elif store.latest():
            raise ConfigError(f"{args.run_dir} holds a run: --resume it, or take another folder.")
        with start_log(args, step, data) as log:
            train_steps(args, step, model, optimizer, data, store, log)


def train_steps(args, step, model, optimizer, data, store, log):
    last_step = min(args.train_iters, args.stop_after or args.train_iters)
    while step < last_step:
        step += 1
        began = time.perf_counter()
        losses = train_step(args, step, model, optimizer, data)
        seconds = time.perf_counter() - began
        summary = data.take_summary()
        if log.enabled:
            log.write_step(step, seconds=seconds, **losses, **summary)
        saves = step % args.save_interval == 0 or step == last_step
        if data.loader is not None and (saves or step % args.log_interval == 0):
            consumed = data.consumed.reduce(parallel_state.get_data_parallel_group())
            log.write_consumption(step, consumed, data.choice.documents)
        if saves:
            path = save(store, step, args, model, optimizer, data)
            log.write("save", step, path=str(path))
    log.write("end", step, reason="finished" if step == args.train_iters else "stopped")


def start_log(args, step, data):
    """One rank logs: it has the loader, and the loss, which is on the last pipeline stage."""
    logs = data.loader is not None and parallel_state.is_pipeline_last_stage()
    log = RunLog(
        args.run_dir,
        step,
        args.train_iters,
        enabled=logs and parallel_state.get_data_parallel_rank() == 0,
        tensorboard=args.tensorboard,
        wandb_project=args.wandb_project,
    )
    if log.enabled:
        log.write(
            "start",
            step,
            sources=data.choice.keys,
            documents=data.choice.documents,
            row_length=args.seq_length,
            rows_per_step=args.global_batch_rows,
            config={**fixed_arguments(args), "metadataset": args.metadataset},
        )
    return log


def train_step(args, step, model, optimizer, data):
    model.zero_grad_buffer()
    optimizer.zero_grad()
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(args, step)
    reports = get_forward_backward_func()(
        forward_step_func=partial(forward_step, weight_scale=WEIGHT_SCALE),
        data_iterator=data,
        model=[model],
        num_microbatches=data.micro_batches,
        seq_length=data.rows * args.seq_length,  # a packed micro-batch is one long sequence
        micro_batch_size=1,
        forward_only=False,
    )
    optimizer.step()
    return mean_losses(reports)


def learning_rate(args, step):
    if step <= args.lr_warmup_iters:
        return args.lr * step / args.lr_warmup_iters
    done = (step - args.lr_warmup_iters) / (args.train_iters - args.lr_warmup_iters)
    return args.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)


def build_model(args, vocab_size):
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=2 * args.hidden_size,
        num_attention_heads=8,
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
    )
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
    initialize_weights(model, args.seed)
    if on_gpu:
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


class Data:
    """The loader of this rank, and the batches drawn since the last step.

    Tensor-parallel rank 0 of every pipeline stage loads; the others have ``loader = None``.
    """

    def __init__(self, args, tokenizer):
        replicas = parallel_state.get_data_parallel_world_size()
        self.rows = args.micro_batch_rows or args.global_batch_rows // replicas
        if self.rows < 1 or args.global_batch_rows % (self.rows * replicas):
            raise ConfigError(
                f"--global-batch-rows must be a multiple of {self.rows} rows of a micro-batch x "
                f"{replicas} data-parallel ranks, got {args.global_batch_rows}."
            )
        self.micro_batches = args.global_batch_rows // (self.rows * replicas)
        self.batches = []
        self.consumed = Consumption()  # by the steps of this rank
        self.loader = None
        if parallel_state.get_tensor_model_parallel_rank() == 0:
            dataset = get_train_dataset(
                args.metadataset,
                worker_config=data_parallel_worker_config(args.num_workers, seed=args.seed),
                batch_size=self.rows,
                batch_drop_last=True,  # pipeline stages expect one shape
                task_encoder=PackedTaskEncoder(tokenizer, args.seq_length, packing_buffer_docs=64),
                shuffle_buffer_size=100,
            )
            self.choice = find_blend(dataset)
            # Workers then store their states where a save asks for them, and nowhere else.
            save_every = args.save_interval * self.micro_batches
            self.loader = MegatronEnergonLoader(dataset, save_every=save_every)

    def __next__(self):
        self.batches.append(next(self.loader))
        return self.batches[-1]

    def close(self):
        if self.loader is not None:
            self.loader.close()

    def take_summary(self):
        """Hash, tokens and documents of the step just done, and where it stood in the schedule."""
        if self.loader is None:
            return {}
        batches, self.batches = self.batches, []
        for batch in batches:
            self.consumed.add_batch(batch)
        index = self.loader.next_batch_index - len(batches)
        planned_share = self.choice.planned_shares(index)
        return {"batch_index": index, "planned_share": planned_share, **summarize_step(batches)}


def save(store, step, args, model, optimizer, data):
    """Every rank saves its part of the model, the first stage of each replica its data."""
    files = {
        file_of("model"): {
            "model": model.state_dict_for_save_checkpoint(),
            "optimizer": optimizer.state_dict(),
            "random": torch.get_rng_state(),  # without dropout there is no other
        }
    }
    if data.loader is not None and parallel_state.is_pipeline_first_stage():
        files[file_of("data")] = data.loader.save_state()
        files[file_of("consumption")] = data.consumed.to_json(data.choice.keys)
    metadata = {"arguments": fixed_arguments(args)}
    if data.loader is not None:
        metadata["resumed"] = [change.to_json() for change in data.loader.changes]
    return store.save(step, files, metadata=metadata)


def resume(store, args, model, optimizer, data):
    """Restore everything from the last checkpoint; return its step."""
    checkpoint = store.latest()
    if checkpoint is None:
        raise ConfigError(f"{store.root} holds no checkpoint to --resume; begin without it.")
    check_fingerprint(checkpoint.metadata["arguments"], fixed_arguments(args))
    state = checkpoint.load(file_of("model"))
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"])
    if data.loader is not None:
        replicas = range(parallel_state.get_data_parallel_world_size())
        data.loader.restore_states([checkpoint.load(file_of("data", rank)) for rank in replicas])
        data.consumed = Consumption.from_json(checkpoint.load(file_of("consumption")))
    return checkpoint.step


def file_of(kind, rank=None):
    if rank is None:
        rank = dist.get_rank() if kind == "model" else parallel_state.get_data_parallel_rank()
    return f"{kind}_rank{rank:05d}.pt"


def fixed_arguments(args):
    values = {name: value for name, value in vars(args).items() if name not in FREE_ARGUMENTS}
    return {**values, "world_size": dist.get_world_size()}


if __name__ == "__main__":
    main()
