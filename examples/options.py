# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Command-line options shared by the examples."""

import argparse
from pathlib import Path


def count(text):
    """Parse an integer >= 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} found, an integer >= 1 is needed")
    return int(text)


def count_or_none(text):
    """Parse an integer >= 0."""
    return 0 if text == "0" else count(text)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawTextHelpFormatter):
    """Help formatter that shows defaults, except empty ones."""

    def _get_help_string(self, action):
        return super()._get_help_string(action) if action.default else action.help


def new_parser(text, example):
    """Return a parser whose help shows the defaults and an example."""
    return argparse.ArgumentParser(
        description=text, epilog=f"example: {example}", formatter_class=HelpFormatter
    )


def add_arguments(parser):
    """Add the options of all runs."""
    add = parser.add_argument
    add("--run-dir", type=Path, required=True, help="folder for metrics.jsonl and checkpoints")
    add("--resume", action="store_true", help="continue from the last checkpoint of the run")
    add("--train-iters", type=count, help="last step; may be increased when resuming")
    add("--log-interval", type=count, default=10, help="steps per line if stderr is no terminal")
    add("--stop-after", type=count, metavar="STEP", help="save and exit after this step")
    add("--save-interval", type=count, help="steps between two checkpoints")
    add("--tensorboard", action="store_true", help="write TensorBoard files to the run folder")
    add("--wandb-project", metavar="NAME", help="log to this Weights & Biases project")
    add("--seed", type=int, help="random seed of the model and the data")
    add("--num-layers", type=count, help="layers of the model")
    add("--hidden-size", type=count, help="hidden size of the model, a multiple of 8 heads")
    add("--lr", type=float, help="learning rate after the warmup; decays to a tenth")
    add("--lr-warmup-iters", type=count_or_none, help="warmup steps of the learning rate")
    add("--tensor-model-parallel-size", type=count, default=1, help="ranks per layer")
    add("--pipeline-model-parallel-size", type=count, default=1, help="pipeline stages")
    add("--expert-model-parallel-size", type=count, default=1, help="ranks that share the experts")
    add("--num-experts", type=count, help="experts per layer, of which each token uses two")


def add_loss_arguments(parser):
    """Add the options of the loss of text."""
    parser.add_argument(
        "--denominator",
        choices=("weights", "tokens", "documents"),
        default="weights",
        help="what a loss is averaged over",
    )
    parser.add_argument(
        "--loss-chunk", type=count, help="positions with logits at any time; default: all"
    )
    parser.add_argument(
        "--document-losses", action="store_true", help="write the loss of every document"
    )


def add_data_arguments(parser):
    """Add the options of runs on a metadataset of text or tokens."""
    add = parser.add_argument
    add("metadataset", help="YAML file, prepared folder or JSONL file")
    add(
        "--tokenizer",
        help="bytes, a tokenizer.json, a folder or a HF name;\n"
        "default: the one that wrote the token files, else bytes",
    )
    add("--eos-token", help="token of the tokenizer that ends every text")
    add("--bos-token", help="token of the tokenizer that begins every text")
    add("--seq-length", type=count, default=256, help="positions per row")
    add("--global-batch-rows", type=count, help="packed rows per optimizer step")
    add("--micro-batch-rows", type=count, help="default: all rows of a data-parallel rank")
    add("--num-workers", type=count_or_none, default=0, help="worker processes per rank")
    add("--eval-interval", type=count, help="steps between two evaluations of the split val")
    add(
        "--eval-iters",
        type=count,
        help="micro-batches per evaluation; default: 4, at least one per source",
    )
