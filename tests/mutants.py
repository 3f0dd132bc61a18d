# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Print names of mutants for mutmut: ``python -m tests.mutants weights=1000 plan=80``.

The names are drawn with a fixed seed. Nearly every function is called by tests that read whole
datasets, and a surviving mutant would run all of them, for minutes. So this also limits the tests
of each function to those of its own folder, then others, cheapest first, up to :data:`SECONDS`.
mutmut must have created its mutants before: see CONTRIBUTING.md.
"""

import json
import random
import sys
from pathlib import Path

SEED = 7
SECONDS = 5
STATS = Path("mutants/mutmut-stats.json")


def mutants_of(room: str) -> list[str]:
    metas = Path("mutants/energon_ext").glob("**/*.py.meta")
    names = [name for meta in metas for name in json.loads(meta.read_text())["exit_code_by_key"]]
    return sorted(name for name in names if name.split(".")[1] == room)


def nearest(function: str, tests: list[str], seconds: dict[str, float]) -> list[str]:
    room = function.split(".")[1]

    def distance(test: str) -> tuple[bool, float]:
        return not test.startswith((f"tests/{room}/", f"tests/test_{room}")), seconds[test]

    kept: list[str] = []
    for test in sorted(tests, key=distance):
        if kept and sum(seconds[name] for name in [*kept, test]) > SECONDS:
            break
        kept.append(test)
    return kept


if __name__ == "__main__":
    stats = json.loads(STATS.read_text())
    stats["tests_by_mangled_function_name"] = {
        function: nearest(function, tests, stats["duration_by_test"])
        for function, tests in stats["tests_by_mangled_function_name"].items()
    }
    STATS.write_text(json.dumps(stats))
    for room, count in (argument.split("=") for argument in sys.argv[1:]):
        names = mutants_of(room)
        print("\n".join(random.Random(SEED).sample(names, min(int(count), len(names)))))
