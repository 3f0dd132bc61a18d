# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Numbers on the pages come from files that the benchmarks write, with date and machine."""

import re
from importlib.metadata import version
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
SPEC = spec_from_file_location("benchmarks_run", ROOT / "benchmarks" / "run.py")
run = module_from_spec(SPEC)
SPEC.loader.exec_module(run)


def test_a_result_records_its_date_and_machine():
    assert RESULTS
    for path in RESULTS:
        assert path.stem in run.BENCHMARKS
        *_, last = path.read_text().splitlines()
        assert re.fullmatch(r"\*Measured 20\d\d-\d\d-\d\d.* cores .*torch .*\*", last), path
        assert "\n## " not in path.read_text()  # headings belong to the page
    tables = "## A title, 5 rows\n\n| a |\n| --- |\n| 1 |\n\n## Another\n\n| b |\n"
    title, *_, table, _, measured = run.as_result(tables, run.conditions()).splitlines()
    assert (title, table) == ("**A title, 5 rows**", "| b |")
    assert f"torch {version('torch')}" in measured and " cores (" in measured


def test_every_result_is_included_by_one_page_and_never_copied():
    pages = {path: path.read_text() for path in (ROOT / "docs").rglob("*.md")}
    for result in RESULTS:
        including = [
            path
            for path, text in pages.items()
            for found in re.findall(r"```\{include\} (\S+)\n```", text)
            if (path.parent / found).resolve() == result
        ]
        assert len(including) == 1, result
        rows = [line for line in result.read_text().splitlines() if re.match(r"\|.*\d", line)]
        assert rows and not any(row in text for row in rows for text in pages.values())
