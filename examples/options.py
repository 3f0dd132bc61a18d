# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The options of 01, 02 and 03."""

import argparse
from pathlib import Path


def count(text):
    """An argument of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} found, an integer >= 1 is needed")
    return int(text)


def count_or_none(text):
    """An argument of 0 or more."""
    return 0 if text == "0" else count(text)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawTextHelpFormatter):
    """Shows the defaults that are one."""

    def _get_help_string(self, action):
        return super()._get_help_string(action) if action.default else action.help


def new_parser(text, example):
    """A parser whose help has the defaults and an example."""
    return argparse.ArgumentParser(
        description=text, epilog=f"example: {example}", formatter_class=HelpFormatter
    )


def add_arguments(parser):
    """Add the options of every run."""
    add = parser.add_argument
    add("--run-dir", type=Path, required=True, help="gets metrics.jsonl and checkpoints")
    add("--resume", action="store_true", help="continue from the last checkpoint of the run")
    add("--train-iters", type=count, help="last step; a resumed run may be given a later one")
    add("--log-interval", type=count, default=10, help="steps between two lines off a terminal")
    add("--stop-after", type=count, metavar="STEP", help="save and leave after this step")
    add("--save-interval", type=count, help="steps between two checkpoints")
    add("--tensorboard", action="store_true", help="write TensorBoard files to the run folder")
    add("--wandb-project", metavar="NAME", help="log to this project of Weights & Biases")
    add("--seed", type=int, help="of the model and of the data")
    add("--num-layers", type=count, help="of the model")
    add("--hidden-size", type=count, help="of the model, a multiple of 8 heads")
    add("--lr", type=float, help="after a warmup; falls to a tenth")
    add("--lr-warmup-iters", type=count_or_none, help="steps in which the learning rate rises")
    add("--tensor-model-parallel-size", type=count, default=1, help="ranks of one layer")
    add("--pipeline-model-parallel-size", type=count, default=1, help="ranks of one model")
    add("--expert-model-parallel-size", type=count, default=1, help="ranks that share the experts")
    add("--num-experts", type=count, help="of a layer; two of them see each token")


def add_data_arguments(parser):
    """Add the further options of runs over a metadataset of text or tokens."""
    add = parser.add_argument
    add("metadataset", help="YAML file, prepared folder or JSONL file")
    add(
        "--tokenizer",
        help="bytes, a tokenizer.json, a folder or a HF name;\n"
        "default: the one that wrote the token files, else bytes",
    )
    add("--eos-token", help="token of the tokenizer that ends every text")
    add("--bos-token", help="token of the tokenizer that begins every text")
    add("--seq-length", type=count, default=256, help="positions of a row")
    add("--global-batch-rows", type=count, help="packed rows per optimizer step")
    add("--micro-batch-rows", type=count, help="default: all rows of a data-parallel rank")
    add("--num-workers", type=count_or_none, default=0, help="processes that read for a rank")
    add("--eval-interval", type=count, help="steps between two losses of the split val")
    add("--eval-iters", type=count, default=4, help="micro-batches of such a loss")
