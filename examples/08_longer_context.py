# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Continue a run with rows four times as long, and draw the loss by position in a document.

    python examples/08_longer_context.py runs/longer

A run trains two thirds of its steps on rows of 256 bytes. From its checkpoint one run continues
unchanged, and another with rows of 1024, with as many bytes per step and without reading a byte
twice. All three models are then evaluated on the same unseen text in rows of 1024.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from demo_corpora import write_corpora
from megatron.energon import WorkerConfig
from megatron_gpt import build_model, build_optimizer, load_model, start_megatron
from options import add_arguments, count, new_parser

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_val_datasets
from energon_ext.cli.figure_style import COLORS, MUTED, label_ends, new_figure
from energon_ext.megatron import forward_step
from energon_ext.state.checkpoint_folder import tracked_iteration
from energon_ext.tokenizers.tokenizers import ByteTokenizer

SHORT, LONG, BATCH_TOKENS = 256, 1024, 4096
SCRIPT = Path(__file__).with_name("01_pretrain_gpt.py")
MODEL = ["--num-layers", "2", "--hidden-size", "128"]

MIX = """\
__module__: energon_ext
__class__: ScheduledMetadataset
splits:
  train:
    interleave:
      - {path: data/prose/train, weight: 1, max_epochs: 2}
      - {path: data/code/train, weight: 1, max_epochs: 2}
  val:
    blend:
      - {path: data/prose/val, weight: 1}
      - {path: data/code/val, weight: 1}
"""


def main():
    parser = new_parser(__doc__.splitlines()[0], "python examples/08_longer_context.py runs/longer")
    parser.add_argument("folder", type=Path, help="folder for data, runs and longer_context.png")
    parser.add_argument("--train-iters", type=count, default=90, help="steps of each run")
    parser.add_argument("--eval-rows", type=count, default=16, help="unseen rows of each source")
    args = parser.parse_args()
    write_corpora(args.folder / "data")
    (args.folder / "mix.yaml").write_text(MIX)
    runs = train(args.folder, args.train_iters)
    losses = {name: loss_by_position(args, folder) for name, folder in runs.items()}
    for name, values in losses.items():
        print(f"{name:>32}: {', '.join(f'{loss:.3f}' for loss in values)}")
    draw(losses, args.folder / "longer_context.png")
    print(args.folder / "longer_context.png")


def train(folder, steps):
    """Train three runs; return their folders by name."""
    first, same, longer = (folder / "runs" / name for name in ("first", "same", "longer"))
    shutil.rmtree(folder / "runs", ignore_errors=True)
    run(folder, first, steps, SHORT, "--stop-after", steps * 2 // 3)
    for run_dir in (same, longer):
        shutil.copytree(first, run_dir)
    run(folder, same, steps, SHORT, "--resume")
    run(folder, longer, steps, LONG, "--resume")
    return {
        f"{SHORT}, {steps * 2 // 3} steps": first,
        f"{SHORT}, {steps} steps": same,
        f"{SHORT}, then {LONG}": longer,
    }


def run(folder, run_dir, steps, seq_length, *options):
    command = [sys.executable, SCRIPT, folder / "mix.yaml", "--run-dir", run_dir, *MODEL]
    command += ["--train-iters", steps, "--seq-length", seq_length]
    command += ["--global-batch-rows", BATCH_TOKENS // seq_length, *options]
    subprocess.run(list(map(str, command)), check=True)


def loss_by_position(args, run_dir, bins=16):
    """Return the mean loss by position in a document, in equal bins: float64 [bins]."""
    model = saved_model(run_dir)
    datasets = get_val_datasets(
        args.folder / "mix.yaml",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=1,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), LONG),
    )
    sums, counts = np.zeros(bins), np.zeros(bins)
    for dataset, _ in datasets:
        for _, batch in zip(range(args.eval_rows), ExactDataLoader(dataset)):
            with torch.no_grad():
                output, _ = forward_step(iter([batch]), model)
            weights = batch.token_weights.numpy()
            bin_of = batch.position_ids.numpy() * bins // LONG
            sums += np.bincount(bin_of, output.view(-1).numpy() * weights, bins)
            counts += np.bincount(bin_of, weights, bins)
    return sums / np.maximum(counts, 1)


def saved_model(run_dir):
    """Load the model of the newest checkpoint of a run."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    args = parser.parse_args([*MODEL, "--run-dir", str(run_dir)])
    args.seq_length, args.lr, args.seed = LONG, 0.0, 0
    if not torch.distributed.is_initialized():
        start_megatron(args)
    model = build_model(args, ByteTokenizer().padded_vocab_size(128))
    step = tracked_iteration(run_dir / "checkpoints")
    folder = run_dir / "checkpoints" / f"iter_{step:07d}"
    load_model(model, build_optimizer(args, model), folder)
    return model.eval()


def draw(losses, path):
    figure, (axes,) = new_figure(
        "Rows four times as long, in the middle of a run",
        f"loss on unseen text in rows of {LONG}, by position in a document; "
        "all runs read the same number of bytes per step",
        height=3.8,
    )
    names = list(losses)
    curves = np.array([losses[name] for name in names])
    middles = (np.arange(curves.shape[1]) + 0.5) * LONG / curves.shape[1]
    for curve, color in zip(curves, COLORS):
        axes.plot(middles, curve, color=color, linewidth=1.6, marker="o", ms=3)
    axes.axvline(SHORT, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
    above = {"transform": axes.get_xaxis_transform(), "color": MUTED, "fontsize": 8.5}
    axes.text(SHORT, 1.02, f"end of a row of {SHORT}", **above)
    axes.set_xlim(0, LONG)
    axes.set_xlabel("position in the document (bytes)")
    axes.set_ylabel("loss (nats per byte)")
    label_ends(axes, curves[:, -1], names, COLORS)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
