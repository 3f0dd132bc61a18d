# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run the benchmarks: ``python benchmarks/run.py [NAME ...]``.

Every figure is a ratio to a peer measured in the same run, since machines differ and are noisy.
Tables go to the terminal and, as Markdown, to benchmarks/results/.
"""

import importlib
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
BENCHMARKS = (
    "planning",
    "scale",
    "splice",
    "packing",
    "assembly",
    "token_source",
    "text_source",
    "saving",
    "memory",
)


def main():
    sys.path.insert(0, str(FOLDER))
    for name in sys.argv[1:] or BENCHMARKS:
        table = importlib.import_module(name).run()
        print(table)
        results = FOLDER / "results"
        results.mkdir(exist_ok=True)
        (results / f"{name}.md").write_text(table, encoding="utf-8")


if __name__ == "__main__":
    main()
