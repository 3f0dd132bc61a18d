# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run the benchmarks: ``python benchmarks/run.py [NAME ...]``.

Most figures are ratios to something measured in the same run, because machines differ and are
noisy. Tables are printed and, with the conditions of the measurement, written to
benchmarks/results/NAME.md. These files are committed and included in the page on performance, so
that no figure has a second copy.
"""

import importlib
import os
import platform
import re
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

import torch

FOLDER = Path(__file__).resolve().parent
BENCHMARKS = (
    "planning",
    "scale",
    "simulation",
    "token_source",
    "assembly",
    "experts",
    "beside_tokens",
    "packing",
    "sample_order",
    "balance",
    "balanced_training",
    "splice",
    "text_source",
    "prepare",
    "prepare_chats",
    "object_store",
    "any_dataset",
    "memory",
    "loss_memory",
    "start",
    "sampling_ahead",
    "threads",
    "gpu",
)


def main():
    # The demo's texts are in examples/, and a store is in tests/. Processes inherit this path.
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "examples"), str(FOLDER.parent)]
    # Without a GPU "gpu" has nothing to measure; its table stays as it was.
    names = [name for name in BENCHMARKS if name != "gpu" or torch.cuda.is_available()]
    if unknown := [name for name in sys.argv[1:] if name not in BENCHMARKS]:
        sys.exit(f"{unknown[0]}: no such benchmark; there are {', '.join(BENCHMARKS)}.")
    for name in sys.argv[1:] or names:
        machine, begin = conditions(), time.perf_counter()
        table = importlib.import_module(name).run()
        seconds = time.perf_counter() - begin
        print(f"{table}\n({name}: {seconds:.0f} s)\n", flush=True)
        results = FOLDER / "results"
        results.mkdir(exist_ok=True)
        text = as_result(table, f"{machine}; took {seconds:.0f} s")
        (results / f"{name}.md").write_text(text, encoding="utf-8")


def conditions():
    """Return the conditions of a measurement; the load shows other work on the machine."""
    libraries = ("torch", "numpy", "megatron-energon", "megatron-core")
    versions = ", ".join(f"{name} {version(name)}" for name in libraries)
    cores = len(os.sched_getaffinity(0))
    return (
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {cores} cores ({platform.machine()}), load "
        f"{os.getloadavg()[0]:.1f} before, Python {platform.python_version()}, {versions}"
    )


def as_result(tables, measured):
    """Return tables as a page includes them, without headings, and the conditions."""
    titled = re.sub("^## (.*)$", r"**\1**", tables.strip(), flags=re.MULTILINE)
    return f"{titled}\n\n*Measured {measured}.*\n"


if __name__ == "__main__":
    main()
