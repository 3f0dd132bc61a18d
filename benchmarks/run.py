# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run the benchmarks: ``python benchmarks/run.py [NAME ...]``.

Most figures are ratios to something measured in the same run, since machines differ and are noisy.
Tables go to the terminal and, as Markdown, to benchmarks/results/.
"""

import importlib
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
BENCHMARKS = (
    "planning",
    "scale",
    "simulation",
    "token_source",
    "assembly",
    "packing",
    "sample_order",
    "balance",
    "balanced_training",
    "splice",
    "text_source",
    "any_dataset",
    "memory",
)


def main():
    # The demo's texts are in examples/. Processes that a benchmark starts get the same path.
    sys.path[:0] = [str(FOLDER), str(FOLDER.parent / "examples")]
    for name in sys.argv[1:] or BENCHMARKS:
        begin = time.perf_counter()
        table = importlib.import_module(name).run()
        print(f"{table}\n({name}: {time.perf_counter() - begin:.0f} s)\n", flush=True)
        results = FOLDER / "results"
        results.mkdir(exist_ok=True)
        (results / f"{name}.md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
