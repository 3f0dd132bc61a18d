# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Short runs of examples/01_pretrain_gpt.py in their own processes, and their logs."""

import json
from pathlib import Path

from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests import support
from tests.megatron import processes

SCRIPT = Path(__file__).parents[2] / "examples" / "01_pretrain_gpt.py"
SMALL = [
    *("--save-interval", "2", "--lr-warmup-iters", "2", "--num-layers", "2"),
    *("--hidden-size", "32", "--seq-length", "64", "--global-batch-rows", "4"),
]
ANIMALS = ("cat", "dog", "cow", "hen")
PROSE = [f"The {animal} sat on the mat. " * 5 for animal in ANIMALS] * 10
CODE = [text.replace(" ", "_") for text in PROSE]
TIMES = ("tokens_per_second", "step_seconds", "data_seconds", "waiting_share")


def write_mixes(folder, texts=40):
    """Write the same texts as the metadatasets tokens, of token files, and text."""
    write = {"tokens": write_token_file, "text": support.write_dataset}
    weights = {"prose": {"linear": {0: 3, 8: 1}}, "code": {"step": {0: 0, 3: 3}}}
    mixes = {}
    for kind in write:
        for name, documents in (("prose", PROSE), ("code", CODE)):
            write[kind](folder / kind / name, documents[:texts])
        entries = [(f"./{kind}/{name}", weight) for name, weight in weights.items()]
        mixes[kind] = support.write_mix(folder / f"{kind}.yaml", entries)
    return mixes


def write_token_file(prefix, texts):
    tokenizer = ByteTokenizer()
    support.write_tokens(prefix, [tokenizer.encode(text) for text in texts])


def start(mix, run_dir, *options, ranks=1):
    arguments = [mix, "--run-dir", run_dir, *SMALL, "--train-iters", "6", *options]
    return processes.start_script(SCRIPT, arguments, run_dir.with_suffix(".stderr"), ranks)


def run(mix, run_dir, *options, ranks=1, succeeds=True):
    """Run to the end and return the standard error of rank 0."""
    codes = processes.finish(start(mix, run_dir, *options, ranks=ranks))
    stderr = run_dir.with_suffix(".stderr").read_text()
    assert all((code == 0) is succeeds for code in codes), stderr[-3000:]
    return stderr


def events(run_dir, kind):
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def steps_of(run_dir):
    """Return the last record of every step, without times."""
    return {
        event["step"]: {name: value for name, value in event.items() if name not in TIMES}
        for event in events(run_dir, "step")
    }
