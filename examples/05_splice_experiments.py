# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Show the effects of splice settings on a small model: five experiments on a CPU.

    python examples/05_splice_experiments.py demo/data/prose/train --output figures

Each run writes its settings into a metadataset, as ``splice:`` on its entries. The model has one
layer, hidden size 64, and learned absolute positions, so that offsets matter. There is one seed.
"""

import json
import logging
from pathlib import Path

import numpy as np
import torch.distributed as dist
from options import count, new_parser
from splice_figures import draw_lines
from splice_model import ALONE, build_model, measure, start_megatron, train

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.splice.frames import splices_of
from energon_ext.tokenizers.tokenizers import ByteTokenizer

CONTENT = 64
PROMPT = 16
SMALL = {"doc_select_mode": "shortest", "content_length": CONTENT, "pack_contents": True}


def main():
    parser = new_parser(
        __doc__.splitlines()[0], "python examples/05_splice_experiments.py demo/data/prose/train"
    )
    parser.add_argument("data", type=Path, help="a prepared folder or token file")
    parser.add_argument("--steps", type=count, default=400, help="steps of each model")
    parser.add_argument("--experiment", choices=EXPERIMENTS, help="run only one; default: all")
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for figures")
    args = parser.parse_args()
    logging.getLogger("energon_ext").setLevel(logging.ERROR)
    args.output.mkdir(parents=True, exist_ok=True)
    start_megatron()
    for name in [args.experiment] if args.experiment else EXPERIMENTS:
        print(f"{name}:")
        EXPERIMENTS[name](args)
    dist.destroy_process_group()


def documents(args):
    """Measure P(z) of the first tokens of 1, 5, 10 and 50 documents, by offset in the frame."""
    curves = {}
    for number in (1, 5, 10, 50):
        splice = {**SMALL, "num_docs": number, "balance_mode": "by_document"}
        run = Run(args, {**splice, "content_start_mode": "anchor_start"}, starts=1, offsets=17)
        losses = run.train().measure()
        memorized = np.array(list(losses.memorized().values()))
        print(
            f"  of {number}: mean P(z) {memorized.mean():.3f}, "
            f"smallest {memorized.min():.3f}, largest {memorized.max():.3f}; "
            f"mean loss {losses.losses.mean():.3f}"
        )
        by_offset = mean_by(losses.contents.offsets, np.exp(losses.log_probabilities))
        curves[f"{number} documents" if number > 1 else "1 document"] = by_offset
    draw_lines(
        curves,
        args.output / "documents.png",
        "Probability of reproducing documents verbatim",
        f"Mean P(z) of {CONTENT - PROMPT} tokens after the first {PROMPT} of a document, by its "
        f"offset; {args.steps} steps each.",
        ("offset", "P(z)"),
    )


def balance(args):
    """Measure the effect of balancing five documents of different lengths."""
    losses = {}
    for name, fields in (
        ("tau 1", {"balance_tau": 1.0}),
        ("tau 0.5", {"balance_tau": 0.5}),
        ("by document", {"balance_mode": "by_document"}),
    ):
        splice = {"num_docs": 5, "doc_select_mode": "random", "max_doc_length": 1000}
        splice |= {"content_length": CONTENT, "epoch_length": 16 * args.steps, **fields}
        run = Run(args, splice, starts=12, offsets=1, seq_len=CONTENT, times=4)
        (source,) = run.sources()
        order = np.argsort(source.examples.doc_lengths)
        lengths = source.examples.doc_lengths[order]
        views = source.examples.coverage()[order]
        means = np.array(list(run.train().measure().per_document().values()))[order]
        losses[name] = (lengths.tolist(), means.tolist())
        print(
            f"  {name}: views per token {views[0]:.0f} in {lengths[0]} tokens, {views[-1]:.0f} "
            f"in {lengths[-1]}; loss {means[0]:.2f} and {means[-1]:.2f}, mean {means.mean():.2f}"
        )
    draw_lines(
        losses,
        args.output / "balance.png",
        "Five documents of different lengths",
        f"Mean loss of a document's contents by its length; {4 * args.steps} steps each.",
        ("tokens of the document", "loss"),
    )


def edges(args):
    """Measure the loss by the start of a content, with three edge weights."""
    curves = {}
    for alpha in (0.0, 0.5, 1.0):
        splice = {"num_docs": 1, "min_doc_length": 1000, "max_doc_length": 1400}
        splice |= {"content_length": CONTENT, "alpha": alpha}
        run = Run(args, splice, starts=100, offsets=1, seq_len=CONTENT)
        losses = run.train().measure()
        starts = losses.contents.starts
        near = (starts < CONTENT // 2) | (starts > starts.max() - CONTENT // 2)
        print(
            f"  alpha {alpha}: mean loss {losses.losses.mean():.3f}, of starts within "
            f"{CONTENT // 2} of an edge {losses.losses[near].mean():.3f}"
        )
        curves[f"alpha {alpha:g}"] = mean_by(starts, losses.losses)
    draw_lines(
        curves,
        args.output / "edges.png",
        "Edges of a document by alpha",
        f"Loss of a content of {CONTENT} tokens by its start; {args.steps} steps each.",
        ("start in the document", "loss"),
    )


def places(args):
    """Measure the loss by offset, with jitter and strides."""
    curves = {}
    slide = {"content_start_mode": "slide_within"}
    for name, fields in (
        ("last place", {}),
        ("jitter 16", {"offset_jitter": 16}),
        ("stride 16", {**slide, "offset_stride": 16}),
        ("every offset", slide),
    ):
        run = Run(args, {**SMALL, "num_docs": 1, **fields}, starts=5, offsets=65)
        losses = run.train().measure()
        whole = losses.contents.copy_lens == CONTENT
        offsets, means = mean_by(losses.contents.offsets[whole], losses.losses[whole])
        print(f"  {name}: mean loss {np.mean(means):.3f}, smallest {min(means):.3f}")
        curves[name] = offsets, means
    draw_lines(
        curves,
        args.output / "places.png",
        "Trained offsets and others",
        f"Mean loss of contents of {CONTENT} tokens by offset; {args.steps} steps each.",
        ("offset", "loss"),
    )


def curriculum(args):
    """Compare short contents, long contents, and a schedule from short to long."""
    short = {**SMALL, "num_docs": 5, "content_length": 16, "content_start_mode": "slide_within"}
    long = {**short, "content_length": CONTENT}
    end, curves = args.steps, {}
    for name, weights in (
        ("short", (1, 0)),
        ("long", (0, 1)),
        ("short to long", ({"linear": {0: 1, end // 2: 0}}, {"linear": {0: 0, end // 2: 1}})),
    ):
        entries = [
            {"weight": weight, "splice": splice, "subflavors": {"stage": stage}}
            for weight, splice, stage in zip(weights, (short, long), ("short", "long"))
            if weight
        ]
        grid = Run(args, long, starts=6, offsets=6)
        run = Run(args, entries, starts=6, offsets=6)
        steps, means = [], []
        for step in run.steps():
            if step % max(1, end // 10) == 0:
                steps.append(step)
                means.append(float(grid.measure(run.model).losses.mean()))
        print(f"  {name}: loss of long contents {means[0]:.3f} at step {steps[0]}, {means[-1]:.3f}")
        curves[name] = steps, means
    draw_lines(
        curves,
        args.output / "curriculum.png",
        "From short to long contents",
        f"Mean loss of contents of {CONTENT} tokens of five documents, by step.",
        ("step", "loss"),
    )


EXPERIMENTS = {each.__name__: each for each in (documents, balance, edges, places, curriculum)}


class Run:
    """One model trained on a metadataset of its settings."""

    def __init__(self, args, splice, *, starts, offsets, seq_len=2 * CONTENT, times=1):
        entries = splice if isinstance(splice, list) else [{"splice": splice}]
        blend = [{"path": str(args.data.resolve()), **entry} for entry in entries]
        self._path = args.output / "metadataset.yaml"
        self._content = {
            "__module__": "energon_ext",
            "__class__": "ScheduledMetadataset",
            "splits": {"train": {"blend": blend}},
        }
        self._steps = times * args.steps
        self._encoder = PackedTaskEncoder(ByteTokenizer(), seq_len)
        self._encoder.validation_starts = starts
        self._encoder.validation_offsets = offsets
        self.model = build_model(seq_len, hidden_size=64)

    def sources(self):
        dataset = get_train_dataset(
            self._write(), worker_config=ALONE, batch_size=1, task_encoder=self._encoder
        )
        return splices_of(dataset)

    def steps(self):
        options = {"batch_size": 4, "lr": 4e-3, "decay": True}
        return train(self.model, self._write(), self._encoder, self._steps, **options)

    def train(self):
        for _ in self.steps():
            pass
        return self

    def measure(self, model=None):
        model = model or self.model
        return measure(model, self._write(), self._encoder, prompt_tokens=PROMPT, batch_size=8)

    def _write(self):
        self._path.write_text(json.dumps(self._content))
        return self._path


def mean_by(positions, values):
    """Return the distinct positions and the mean of the values at each."""
    distinct, index = np.unique(positions, return_inverse=True)
    return distinct.tolist(), (np.bincount(index, values) / np.bincount(index)).tolist()


if __name__ == "__main__":
    main()
