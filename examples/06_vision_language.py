# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Train a small vision-language model on packed images, captions and text.

    python examples/drawn_images.py vision
    python examples/06_vision_language.py vision/mix.yaml --run-dir runs/vision --stop-after 75
    torchrun --nproc-per-node 2 examples/06_vision_language.py vision/mix.yaml \
        --run-dir runs/vision --resume --num-workers 1

A custom encoder (vision_language.py) encodes samples read by number: lengths are measured once,
rows are planned for the whole run, and the state is one cursor. A run can therefore resume with
other ranks and workers, and every step has the loss of an uninterrupted run. At the end, the script
compares the loss of unseen captions with their images and with images of other samples.
"""

import dataclasses
import itertools
from functools import partial

import torch
import torch.distributed as dist
from megatron_gpt import build_config, forward, ready_to_train, run
from options import add_arguments, add_data_arguments, new_parser
from train_data import build_source, build_tokenizer, validation
from train_loop import train
from vision_language import ImageTextEncoder, build_llava, forward_step, vision_configs

from energon_ext import ConfigError, ExactDataLoader, get_val_datasets
from energon_ext.megatron import data_parallel_worker_config
from energon_ext.plan.cost import AttentionCost, VisionCost


def parse_args():
    parser = new_parser(
        __doc__.splitlines()[0],
        "python examples/06_vision_language.py vision/mix.yaml --run-dir runs/vision",
    )
    add_data_arguments(parser)
    add_arguments(parser)
    parser.add_argument(
        "--balance", action="store_true", help="balance the cost of rows over ranks"
    )
    parser.set_defaults(
        train_iters=300,
        save_interval=100,
        global_batch_rows=16,
        seed=1234,
        num_layers=2,
        hidden_size=128,
        lr=4e-3,
        lr_warmup_iters=15,
        eval_iters=2,
    )
    return parser.parse_args()


def train_vision_language(args):
    if args.num_experts:
        raise ConfigError("--num-experts: the language model of this example has no experts.")
    tokenizer, config = build_tokenizer(args), build_config(args)
    costs = AttentionCost.of_model(config), VisionCost.of_model(*vision_configs(config))
    encoder = ImageTextEncoder(tokenizer, args.seq_length, costs if args.balance else None)
    source = build_source(args, encoder)
    model = build_model(args, config, encoder)
    evaluate = validation(args, encoder, model)
    train(args, args.run_dir, model, source, evaluate=evaluate)
    compare_with_wrong_images(args, encoder, model)


def build_model(args, config, encoder):
    vocab_size = encoder.tokenizer.padded_vocab_size(128)
    positions = args.micro_batch_rows * args.seq_length
    llava = build_llava(config, vocab_size, positions, encoder.image_id)
    llava.forward_step = partial(forward_step, image_id=encoder.image_id)
    return ready_to_train(args, llava)


@torch.no_grad()
def compare_with_wrong_images(args, encoder, model):
    """Print the loss of unseen captions with their images, and with images of other samples."""
    ((dataset, _),) = get_val_datasets(
        args.metadataset,
        worker_config=data_parallel_worker_config(0, seed=args.seed),
        batch_size=args.micro_batch_rows,
        task_encoder=encoder,
    )
    batches = list(itertools.islice(ExactDataLoader(dataset), args.eval_iters))
    swapped = [dataclasses.replace(batch, images=batch.images.roll(1, 0)) for batch in batches]
    right, wrong = (forward(args, model, each).get("loss") for each in (batches, swapped))
    if dist.get_rank() == dist.get_world_size() - 1:  # on the last pipeline stage
        print(f"Unseen captions: loss {right:.3f} with their images, {wrong:.3f} with others.")


if __name__ == "__main__":
    run(train_vision_language, parse_args())
