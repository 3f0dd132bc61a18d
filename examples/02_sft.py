# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fine-tune a GPT on conversations, with the model, the optimizer and the loop of 01.

    python examples/02_sft.py chats.yaml --run-dir runs/sft
    python examples/02_sft.py chats.yaml --run-dir runs/sft --resume

Only the data differs from pretraining: SFTTaskEncoder gives answers weight 1 and the rest weight 0.
"""

from megatron_gpt import build_model, run
from options import add_arguments, add_data_arguments, add_loss_arguments, new_parser
from train_data import build_source, build_tokenizer, validation
from train_loop import train

from energon_ext import SFTTaskEncoder


def parse_args():
    parser = new_parser(
        __doc__.splitlines()[0],
        "python examples/02_sft.py chats.yaml --run-dir runs/sft --tokenizer tokenizer.json",
    )
    add_data_arguments(parser)
    add_arguments(parser)
    add_loss_arguments(parser)
    parser.add_argument(
        "--over-long",
        choices=("cut", "error"),
        default="cut",
        help="how to handle conversations longer than a row",
    )
    parser.set_defaults(
        train_iters=100,
        save_interval=50,
        global_batch_rows=8,
        micro_batch_rows=4,
        seed=1234,
        num_layers=2,
        hidden_size=64,
        lr=2e-3,
        lr_warmup_iters=10,
    )
    return parser.parse_args()


def fine_tune(args):
    tokenizer = build_tokenizer(args)
    model = build_model(args, tokenizer.padded_vocab_size(128))
    encoder = SFTTaskEncoder(
        tokenizer,
        args.seq_length,
        over_long=args.over_long,
        packing_buffer_docs=64,
        document_means=args.denominator == "documents",
        document_numbers=args.document_losses,
    )
    source = build_source(args, encoder)
    train(args, args.run_dir, model, source, evaluate=validation(args, encoder, model))


if __name__ == "__main__":
    run(fine_tune, parse_args())
