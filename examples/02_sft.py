# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fine-tune a GPT on conversations, with the model, the optimizer and the step of 01.

    python examples/02_sft.py chats.yaml --run-dir runs/sft
    python examples/02_sft.py chats.yaml --run-dir runs/sft --resume

Only the data differs from pretraining: SFTTaskEncoder weights the answers 1 and all else 0.
"""

import argparse
import sys
from contextlib import closing
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state
from train_loop import pretrain, train

from energon_ext import ConfigError, EnergonExtError, SFTTaskEncoder, get_train_dataset
from energon_ext.encoders.tokenizers import load_tokenizer
from energon_ext.megatron import MegatronEnergonLoader, data_parallel_worker_config


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("metadataset", help="YAML file, prepared folder or JSONL file")
    add("--run-dir", type=Path, required=True)
    add("--resume", action="store_true", help="continue from the last checkpoint of the run")
    add("--train-iters", type=int, default=100)
    add("--stop-after", type=int, metavar="STEP", help="save and leave after this step")
    add("--tensorboard", action="store_true", help="write TensorBoard files to the run folder")
    add("--save-interval", type=int, default=50)
    add("--tokenizer", default="bytes", help="bytes, a tokenizer.json, a folder or a HF name")
    add("--seq-length", type=int, default=256)
    add("--global-batch-rows", type=int, default=8, help="packed rows per optimizer step")
    add("--micro-batch-rows", type=int, default=4)
    add("--over-long", choices=("cut", "error"), default="cut")
    add("--seed", type=int, default=1234)
    add("--num-layers", type=int, default=2)
    add("--hidden-size", type=int, default=64)
    add("--lr", type=float, default=2e-3, help="after a warmup; falls to a tenth")
    add("--lr-warmup-iters", type=int, default=10)
    parser.set_defaults(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    return parser.parse_args()


def main():
    args = parse_args()
    try:
        pretrain.start_megatron(args)
        fine_tune(args)
        dist.destroy_process_group()
    except EnergonExtError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def fine_tune(args):
    rows = args.micro_batch_rows
    rows_at_once = rows * parallel_state.get_data_parallel_world_size()
    if args.global_batch_rows % rows_at_once:
        raise ConfigError(f"--global-batch-rows must be a multiple of {rows_at_once}.")
    tokenizer = load_tokenizer(args.tokenizer)
    model = pretrain.build_model(args, tokenizer.padded_vocab_size(128))
    dataset = get_train_dataset(
        args.metadataset,
        worker_config=data_parallel_worker_config(num_workers=0, seed=args.seed),
        batch_size=rows,
        task_encoder=SFTTaskEncoder(
            tokenizer, args.seq_length, over_long=args.over_long, packing_buffer_docs=64
        ),
        shuffle_buffer_size=100,
    )
    with closing(MegatronEnergonLoader(dataset)) as source:
        micro_batches = args.global_batch_rows // rows_at_once
        train(args, args.run_dir, model, source, rows=rows, micro_batches=micro_batches)


if __name__ == "__main__":
    main()
