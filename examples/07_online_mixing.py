# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pretrain a small GPT while a controller sets the weights of the sources from their losses.

    python examples/07_online_mixing.py online --run-dir runs/constant --weights constant
    python examples/07_online_mixing.py online --run-dir runs/a --reference runs/constant
    python examples/07_online_mixing.py online --run-dir runs/compared --compare 3

The first folder gets three corpora that come with Python, as token files. A run folder gets its
metadataset and live.jsonl, to which the controller appends. Its only state is that file and the
run's log, so a stopped or killed run continues as if nothing had happened. --compare trains with
the controller, constant weights and a schedule, with that many seeds and equally many tokens each,
and draws the results.

The rule is the dynamic batch loading of Xia, Gao, Zeng and Chen, "Sheared LLaMA" (2023,
https://arxiv.org/abs/2310.06694): if the loss of a source on unseen text is above a reference, here
the final loss of a run with constant weights, its weight is multiplied by exp(loss - reference).
"""

import itertools
import json
import math
from copy import copy
from pathlib import Path

from demo_corpora import CORPORA, write_corpora
from megatron_gpt import build_model, run
from online_mixing_figure import compare, last_losses, losses_of
from options import add_arguments, count, count_or_none, new_parser
from torch import distributed as dist
from train_data import build_source, validation
from train_loop import train

from energon_ext import ConfigError, PackedTaskEncoder, load_tokenizer
from energon_ext.tokens.file_set import open_token_files
from energon_ext.weights import LiveWeights


def parse_args():
    parser = new_parser(
        __doc__.splitlines()[0], "python examples/07_online_mixing.py online --run-dir online/runs"
    )
    add = parser.add_argument
    add("folder", help="folder for the token files, written unless they exist")
    add("--weights", choices=MIXES, default="controlled", help="kind of weights")
    add("--reference", metavar="RUN", help="run whose last losses are the controller's target")
    add("--compare", type=count, metavar="SEEDS", help="train with all kinds, and draw the results")
    add("--eval-interval", type=count, help="steps between two evaluations and decisions")
    add("--seq-length", type=count, default=256, help="positions per row")
    add("--num-workers", type=count_or_none, default=0, help="worker processes per rank")
    add_arguments(parser)
    parser.set_defaults(
        train_iters=100,
        save_interval=50,
        eval_interval=10,
        eval_iters=len(CORPORA),
        global_batch_rows=8,
        micro_batch_rows=None,
        seed=1,
        num_layers=2,
        hidden_size=64,
        lr=8e-3,
        lr_warmup_iters=10,
        log_interval=50,
    )
    return parser.parse_args()


def work(args):
    if args.tensor_model_parallel_size * args.pipeline_model_parallel_size > 1:
        raise ConfigError("This example only uses data parallelism: use one rank per model.")
    data = Path(args.folder) / "data"
    if dist.get_rank() == 0:
        write_corpora(data)
    dist.barrier()
    if args.weights == "controlled" and not (args.compare or args.reference):
        raise ConfigError("Give --reference the folder of a run with --weights constant.")
    if args.compare is None:
        pretrain(args, data)
        return
    runs, run_dir = {}, args.run_dir
    for name, seed in itertools.product(MIXES, range(1, args.compare + 1)):
        run_args = copy(args)
        run_args.weights, run_args.seed, run_args.run_dir = name, seed, run_dir / f"{name}_{seed}"
        run_args.reference = str(run_dir / f"constant_{seed}")
        pretrain(run_args, data)
        runs[name, seed] = run_args.run_dir / "metrics.jsonl"
    if dist.get_rank() == 0:
        compare(runs, run_dir / "online_mixing.png")


def pretrain(args, data):
    args.metadataset = args.run_dir / "mix.yaml"
    if dist.get_rank() == 0 and not args.metadataset.exists():
        args.run_dir.mkdir(parents=True, exist_ok=True)
        content = MIXES[args.weights](data.resolve(), args.train_iters)
        args.metadataset.write_text(json.dumps(content, indent=1))  # JSON is YAML
    dist.barrier()
    tokenizer = load_tokenizer("bytes")
    model = build_model(args, tokenizer.padded_vocab_size(128))
    encoder = PackedTaskEncoder(tokenizer, args.seq_length)
    source = build_source(args, encoder)
    evaluate = validation(args, encoder, model)
    if args.weights == "controlled" and dist.get_rank() == 0:
        evaluate = Controller(args, source, evaluate)
    train(args, args.run_dir, model, source, evaluate=evaluate)


# Metadatasets -----------------------------------------------------------------------------------


def metadataset(data, weights, **fields):
    """Return a metadataset in which each source has a name, a weight and a validation part."""
    names = list(CORPORA)
    train = [
        {"path": str(data / name / "train"), "name": name, "weight": weight}
        for name, weight in zip(names, weights)
    ]
    val = [{"path": str(data / name / "val")} for name in names]
    return {
        "__module__": "energon_ext",
        "__class__": "ScheduledMetadataset",
        "splits": {"train": {"interleave": train, **fields}, "val": {"blend": val}},
    }


def controlled(data, steps):
    return metadataset(data, [1] * len(CORPORA), weights_file="live.jsonl")


def constant(data, steps):
    return metadataset(data, [1] * len(CORPORA))


def scheduled(data, steps):
    """Schedule the weights from the sizes of the corpora to equal shares."""
    sizes = [open_token_files(data / name / "train").num_tokens for name in CORPORA]
    return metadataset(data, [{"linear": {0: n / sum(sizes), steps: 1 / 3}} for n in sizes])


MIXES = {each.__name__: each for each in (constant, scheduled, controlled)}


# The controller ---------------------------------------------------------------------------------


class Controller:
    """Sets the weights of every block of steps before the plan needs them.

    The loop calls it to evaluate: at the start and after every step.

    Args:
        args: arguments of the script.
        source: loader of this rank.
        evaluate: step -> losses on unseen text, at every ``--eval-interval``.
    """

    def __init__(self, args, source, evaluate):
        self._live = LiveWeights(args.run_dir / "live.jsonl")
        self._log, self._block = args.run_dir / "metrics.jsonl", args.eval_interval
        self._loader, self._evaluate = source.loader, evaluate
        self._reference = last_losses(Path(args.reference) / "metrics.jsonl")

    def __call__(self, step):
        evaluation = self._evaluate(step)
        while (first := self._live.next_step) <= self._loader.planned_through:
            weights = dict.fromkeys(CORPORA, 1 / 3)
            if first:
                losses = losses_of(evaluation) if evaluation else last_losses(self._log, step)
                weights = reweighted(self._live.lines[-1].weights, losses, self._reference)
            self._live.set(first, weights, through=first + self._block - 1)
        return evaluation


def reweighted(weights, losses, reference):
    """Multiply each weight by exp(max(loss - reference, 0)), and normalize them to sum to 1."""
    excess = {name: max(losses[name] - reference[name], 0.0) for name in weights}
    raised = {name: weight * math.exp(excess[name]) for name, weight in weights.items()}
    return {name: weight / sum(raised.values()) for name, weight in raised.items()}


if __name__ == "__main__":
    run(work, parse_args())
