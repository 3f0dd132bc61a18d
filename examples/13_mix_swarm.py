# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Train a swarm of small GPTs on different mixes, and choose a mix by what they have learned.

    python examples/13_mix_swarm.py swarm --run-dir swarm/runs

The first folder gets three corpora that come with Python, as token files. Every mix reads nested
subsets of them, which are as much smaller as a run here is than one of --target-tokens: it repeats
a source as often. The steps:

1. Draw mixes at random, and let `energon-ext plan --mixes` check them and write a metadataset each.
2. Train a model on each, from the same weights, and measure its loss on unseen text of each source.
3. Fit each loss as a power law of the shares, and predict each mix from the others, to see how far
   the fit can be trusted. Other laws are a few lines: losses.csv has what they need.
4. Find the mix with the smallest predicted mean loss, and train on it and on equal shares.

A table, losses.csv and mix_swarm.png come last. --resume continues a swarm.
"""

import csv
import json
import subprocess
import sys
from copy import copy
from pathlib import Path

import numpy as np
from demo_corpora import CORPORA, write_corpora
from megatron_gpt import build_model, run
from mix_swarm_figure import draw
from online_mixing_figure import last_losses
from options import add_arguments, count, count_or_none, new_parser
from torch import distributed as dist
from train_data import build_source, validation
from train_loop import train

from energon_ext import ConfigError, PackedTaskEncoder, load_tokenizer

NAMES = list(CORPORA)


def parse_args():
    parser = new_parser(
        __doc__.splitlines()[0], "python examples/13_mix_swarm.py swarm --run-dir swarm/runs"
    )
    add = parser.add_argument
    add("folder", help="folder for the token files, written unless they exist")
    add("--mixes", type=count, default=16, help="mixes in the swarm, at least 5")
    add("--target-tokens", type=count, default=1_000_000, help="tokens of the run to simulate")
    add("--seq-length", type=count, default=128, help="positions per row")
    add("--num-workers", type=count_or_none, default=0, help="worker processes per rank")
    add_arguments(parser)
    parser.set_defaults(
        train_iters=60,
        save_interval=60,
        eval_iters=8 * len(NAMES),
        global_batch_rows=8,
        micro_batch_rows=None,
        seed=1,
        num_layers=1,
        hidden_size=64,
        lr=1e-2,
        lr_warmup_iters=5,
        log_interval=60,
    )
    return parser.parse_args()


def work(args):
    if args.tensor_model_parallel_size * args.pipeline_model_parallel_size > 1:
        raise ConfigError("This example only uses data parallelism: use one rank per model.")
    if args.mixes < 5:
        raise ConfigError(f"--mixes: {args.mixes} found; at least 5 are needed for the fit.")
    args.eval_interval = args.train_iters
    shares = random_shares(args.mixes, args.seed)
    names = [f"mix{number:02d}" for number in range(len(shares))]
    if dist.get_rank() == 0:
        write_corpora(Path(args.folder) / "data")
        write_base(args)
        write_mixes(args, dict(zip(names, shares)))
    dist.barrier()
    losses = np.array([trained(args, name) for name in names])
    law = fit(shares, losses)
    best = smallest(law)
    chosen = {"predicted-best": best, "equal": np.full(len(NAMES), 1 / len(NAMES))}
    if dist.get_rank() == 0:
        write_mixes(args, chosen)
    dist.barrier()
    checked = {name: trained(args, name) for name in chosen}
    if dist.get_rank() == 0:
        held_out = leave_one_out(shares, losses)
        report(args.run_dir, names, shares, losses, held_out, law, chosen, checked)


# Mixes ------------------------------------------------------------------------------------------


def random_shares(count, seed):
    """Return mixes that are spread evenly over all: float64 [count, sources], rows sum to 1."""
    shares = np.random.default_rng(seed).dirichlet(np.ones(len(NAMES)), count)
    return shares / shares.sum(1, keepdims=True)


def write_base(args):
    """Write the metadataset whose weights the mixes replace; it reads subsets of its sources."""
    data = (Path(args.folder) / "data").resolve()
    fraction = min(1.0, tokens_of(args) / args.target_tokens)
    train = [
        {"path": str(data / name / "train"), "name": name, "subset": {"fraction": fraction}}
        for name in NAMES
    ]
    val = [{"path": str(data / name / "val")} for name in NAMES]
    content = {
        "__module__": "energon_ext",
        "__class__": "ScheduledMetadataset",
        "splits": {"train": {"interleave": train}, "val": {"blend": val}},
    }
    args.run_dir.mkdir(parents=True, exist_ok=True)
    (args.run_dir / "swarm.yaml").write_text(json.dumps(content, indent=1))  # JSON is YAML


def tokens_of(args):
    return args.train_iters * args.global_batch_rows * args.seq_length


def write_mixes(args, mixes):
    """Let the command check the mixes, and write swarm.NAME.yaml for each."""
    table = args.run_dir / "ratios.csv"
    with open(table, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["mix", *NAMES])
        writer.writerows([name, *np.round(shares, 4)] for name, shares in mixes.items())
    command = [sys.executable, "-m", "energon_ext", "plan", args.run_dir / "swarm.yaml"]
    command += ["--mixes", table, "--overwrite", "--train-tokens", tokens_of(args)]
    command += ["--seq-length", args.seq_length, "--global-batch-size", args.global_batch_rows]
    subprocess.run([str(each) for each in command], check=True)


def trained(args, name):
    """Train on a mix; return the loss on unseen text of each source."""
    args = copy(args)
    args.metadataset = args.run_dir / f"swarm.{name}.yaml"
    tokenizer = load_tokenizer("bytes")
    model = build_model(args, tokenizer.padded_vocab_size(128))
    encoder = PackedTaskEncoder(tokenizer, args.seq_length)
    source = build_source(args, encoder)
    evaluate = validation(args, encoder, model)
    train(args, args.run_dir / name, model, source, evaluate=evaluate, may_begin=True)
    return list(last_losses(args.run_dir / name / "metrics.jsonl").values())


# The fit ----------------------------------------------------------------------------------------


def fit(shares, losses):
    """Return the exponents of each loss, and its scale: [sources + 1, losses]."""
    return np.linalg.lstsq(logs_of(shares), np.log(losses), rcond=None)[0]


def predict(law, shares):
    """Return the losses of mixes: the scale times a power of each share."""
    return np.exp(logs_of(shares) @ law)


def logs_of(shares, least=0.02):
    """Return the logarithms of shares, and 1; without a source, others teach a little of it."""
    shares = np.atleast_2d(shares)
    return np.column_stack([np.log(shares + least), np.ones(len(shares))])


def leave_one_out(shares, losses):
    """Predict the losses of each mix from the others."""
    others = [np.arange(len(shares)) != number for number in range(len(shares))]
    return np.array([predict(fit(shares[o], losses[o]), shares[~o])[0] for o in others])


def all_shares(parts=200):
    """Return a grid of all mixes of three sources."""
    numbers = np.mgrid[0 : parts + 1, 0 : parts + 1].reshape(2, -1).T
    numbers = numbers[numbers.sum(1) <= parts]
    return np.column_stack([numbers, parts - numbers.sum(1)]) / parts


def smallest(law):
    """Return the mix with the smallest predicted mean loss."""
    grid = all_shares()
    return grid[predict(law, grid).mean(1).argmin()]


# The result -------------------------------------------------------------------------------------


def report(folder, names, shares, losses, held_out, law, chosen, checked):
    """Print a table, and write losses.csv and mix_swarm.png."""
    head = ["mix", *(f"share of {name}" for name in NAMES), *(f"loss on {n}" for n in NAMES)]
    rows = [[name, *mix, *found] for name, mix, found in zip(names, shares, losses)]
    rows += [[name, *chosen[name], *found] for name, found in checked.items()]
    with open(folder / "losses.csv", "w", newline="") as file:
        csv.writer(file).writerows([head, *rows])
    print(f"\nloss on unseen text, in nats per byte\n{'mix':16}", end="")
    print("".join(f"{name:>8}" for name in NAMES), "  |", "".join(f"{n:>8}" for n in NAMES), end="")
    print(f"{'mean':>8}{'predicted':>11}")
    predicted = [*held_out.mean(1), *(predict(law, chosen[name]).mean() for name in checked)]
    for (name, *values), mean in zip(rows, predicted):
        mix, found = values[: len(NAMES)], values[len(NAMES) :]
        cells = "".join(f"{share:8.1%}" for share in mix), "".join(f"{x:8.3f}" for x in found)
        print(f"{name:16}{cells[0]}   | {cells[1]}{np.mean(found):8.3f}{mean:11.3f}")
    means = losses.mean(1)
    error = np.abs(held_out.mean(1) - means).mean()
    print(f"\neach mix predicted from the others: wrong by {error:.3f} on average, while the mixes")
    print(f"differ by {means.std():.3f} (standard deviation)")
    grid = all_shares()
    surface = grid, predict(law, grid).mean(1)
    draw(folder / "mix_swarm.png", NAMES, shares, losses, held_out, surface, chosen)
    print(folder / "mix_swarm.png")


if __name__ == "__main__":
    run(work, parse_args())
