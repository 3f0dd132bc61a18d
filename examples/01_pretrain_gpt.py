# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pretrain a GPT with Megatron-core on a scheduled blend, with exact resume.

It runs on CPU or GPU, in one process or several under torchrun:

    python examples/01_pretrain_gpt.py mix.yaml --run-dir runs/a --stop-after 75
    python examples/01_pretrain_gpt.py mix.yaml --run-dir runs/a --resume
    torchrun --nproc-per-node 2 examples/01_pretrain_gpt.py mix.yaml --run-dir runs/a --resume \
        --tensor-model-parallel-size 2     (or pipeline; by default data parallel)

A run folder contains metrics.jsonl, with one JSON object per line, and checkpoints/, each with the
model, the optimizer, the data state and the consumption of each source. If all sources are token
files, every step reads the same rows as in an uninterrupted run, even if it resumes with other
ranks, workers, parallelism or micro-batches.
"""

from megatron_gpt import build_model, run
from options import add_arguments, add_data_arguments, add_loss_arguments, new_parser
from train_data import build_source, build_tokenizer, validation
from train_loop import train

from energon_ext import PackedTaskEncoder


def parse_args():
    parser = new_parser(
        __doc__.splitlines()[0],
        "python examples/01_pretrain_gpt.py mix.yaml --run-dir runs/a --eval-interval 50",
    )
    add_data_arguments(parser)
    add_arguments(parser)
    add_loss_arguments(parser)
    parser.set_defaults(
        train_iters=150,
        save_interval=50,
        global_batch_rows=16,
        seed=1234,
        num_layers=4,
        hidden_size=128,
        lr=4e-3,
        lr_warmup_iters=15,
    )
    return parser.parse_args()


def pretrain(args):
    tokenizer = build_tokenizer(args)
    model = build_model(args, tokenizer.padded_vocab_size(128))
    encoder = PackedTaskEncoder(
        tokenizer,
        args.seq_length,
        packing_buffer_docs=64,
        document_means=args.denominator == "documents",
        document_numbers=args.document_losses,
    )
    source = build_source(args, encoder)
    train(args, args.run_dir, model, source, evaluate=validation(args, encoder, model))


if __name__ == "__main__":
    run(pretrain, parse_args())
