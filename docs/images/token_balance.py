# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw token_balance.png: a blend by samples and an interleave by tokens, over the same sources.

Both come from real loaders over the same three corpora, whose documents are 200, 630 and 2000 bytes
long on average: JSON Lines for Energon's own blend, token files for the interleave. The script also
prints the figures in docs/mix/token_balance.md.
"""

import json
import random
import tempfile
from pathlib import Path

import megatron.energon
import numpy as np
from megatron.energon import Cooker, DefaultTaskEncoder, WorkerConfig, get_savable_loader
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.cli.figure_style import COLORS, INK, MUTED, new_figure
from energon_ext.encoders.pretrain import cook_text
from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.tokenizers.tokenizers import ByteTokenizer

#: Source -> mean length of its documents in bytes.
MEAN_LENGTHS = {"chat": 200, "web": 630, "papers": 2000}
BYTES_OF_A_SOURCE = 400_000
TOKENS = 1_000_000
SEQ_LEN, ROWS_PER_STEP = 512, 16
OPTIONS = {"worker_config": WorkerConfig(rank=0, world_size=1, num_workers=0), "batch_size": 1}


def main():
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name, mean_length in MEAN_LENGTHS.items():
            write_source(root, name, mean_length)
        counts = {
            "blend of samples (stock Energon)": stock_blend(root),
            "interleave of tokens": interleave(root),
        }
    draw(counts)


class TextEncoder(DefaultTaskEncoder):
    cookers = [Cooker(cook_text)]


def write_source(root, name, mean_length):
    """Write the same documents as JSON Lines and as a token file."""
    generator = random.Random(name)
    lines = root / f"{name}.jsonl"
    (root / name).mkdir()
    tokenizer = ByteTokenizer()
    writer = TokenWriter(root / name / "train", tokenizer.vocab_size)
    with lines.open("w") as file:
        for number in range(BYTES_OF_A_SOURCE // mean_length):
            length = int(generator.uniform(0.5, 1.5) * mean_length)
            text = f"{name} {number} ".ljust(length, ".")
            file.write(json.dumps({"text": text}) + "\n")
            writer.write(tokenizer.encode_array(text))
    writer.close()
    CrudeJsonlDatasetFactory.prepare_dataset(EPath(lines))


def write_mix(path, module, name, rule, paths):
    entries = [{"path": each, "weight": 1} for each in paths]
    content = {"__module__": module, "__class__": name, "splits": {"train": {rule: entries}}}
    path.write_text(json.dumps(content))
    return path


def stock_blend(root):
    """Return the tokens drawn from each source, sample by sample, int64 [draws, sources]."""
    paths = [f"{name}.jsonl" for name in MEAN_LENGTHS]
    mix = write_mix(root / "blend.yaml", "megatron.energon", "MetadatasetV2", "blend", paths)
    dataset = megatron.energon.get_train_dataset(
        mix,
        task_encoder=TextEncoder(),
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
        **OPTIONS,
    )
    tokenizer = ByteTokenizer()
    texts = (text for batch in get_savable_loader(dataset) for text in batch.text)
    return until_enough({text.split()[0]: len(tokenizer.encode(text))} for text in texts)


def interleave(root):
    """Return the tokens drawn from each source, row by row, int64 [draws, sources]."""
    paths = [f"{name}/train" for name in MEAN_LENGTHS]
    mix = write_mix(
        root / "interleave.yaml", "energon_ext", "ScheduledMetadataset", "interleave", paths
    )
    dataset = get_train_dataset(
        mix,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN),
        rows_per_step=ROWS_PER_STEP,
        **OPTIONS,
    )
    return until_enough(
        {key.split("/")[0]: count for key, count in batch.tokens_per_source().items()}
        for batch in ExactDataLoader(dataset)
    )


def until_enough(draws):
    counts, total = [], 0
    while total < TOKENS:
        drawn = next(draws)
        counts.append([drawn.get(source, 0) for source in MEAN_LENGTHS])
        total += sum(counts[-1])
    return np.array(counts)


def draw(counts):
    figure, axes = new_figure(
        "Equal weights, documents of 200, 630 and 2000 bytes",
        "Share of each source in all tokens so far. The dashed line is the share by weight.",
        height=3.4,
        columns=len(counts),
        top=0.95,
        left=0.06,
    )
    for panel, (title, drawn) in zip(axes, counts.items()):
        tokens = drawn.cumsum(axis=0)
        total = tokens.sum(axis=1)
        shares = tokens / total[:, None]
        shown = total > 10_000  # earlier, a single document is a large share
        panel.axhline(1 / 3, color=MUTED, linewidth=0.9, linestyle=(0, (4, 3)))
        for index, (source, color) in enumerate(zip(MEAN_LENGTHS, COLORS)):
            # Different widths keep overlapping lines visible.
            line = {"color": color, "linewidth": 5 - 1.7 * index, "label": source}
            panel.plot(total[shown] / 1000, shares[shown, index], **line)
        worst = np.ptp(tokens, axis=1).max()
        print(f"{title}: {len(drawn)} draws, shares {shares[-1].round(5)}, furthest apart {worst}")
        panel.set_title(title, loc="left", fontsize=10.5, color=INK)
        panel.set_xlim(0, TOKENS / 1000)
        panel.set_ylim(0, 1)
        panel.set_xticks([0, 200, 400, 600, 800])
        box = panel.get_position()
        panel.set_position([box.x0, 0.17, box.width, box.y1 - 0.17])  # room for the x axis
    axes[1].set_yticklabels([])
    axes[1].legend(frameon=False, fontsize=9, loc="upper right")
    figure.text(0.5, 0.03, "thousand tokens", ha="center", fontsize=8.5, color=MUTED)
    figure.savefig(Path(__file__).with_name("token_balance.png"), dpi=120)


if __name__ == "__main__":
    main()
