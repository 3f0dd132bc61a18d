# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The plain English checker finds its patterns and nothing else."""

import runpy
from pathlib import Path

CHECKER = Path(__file__).parents[1] / ".ci" / "plain_english.py"


def test_findings_name_lines_in_docstrings_comments_and_messages(tmp_path):
    module = tmp_path / "module.py"
    module.write_text(
        '"""What a row holds."""\n'
        "\n"
        "\n"
        "def read(path):\n"
        '    """Rows of a file."""\n'
        "    dearest = 1  # a name is no English; the state of now\n"
        '    raise ValueError(f"{path}: two rows a step, another than before")\n'
    )
    checker = runpy.run_path(str(CHECKER))
    found = [line.split(":", 1)[1] for line in checker["findings"](module)]
    assert [line.split(": ")[:2] for line in found] == [
        ["1", "a docstring that begins with a question word"],
        ["6", "'of now'"],
        ["7", "'another than'"],
        ["7", "'rows a step'"],
    ]


def test_a_plain_page_has_no_findings(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Rows\n\nTwo rows per step. Which documents a row holds depends on lengths.\n"
    )
    checker = runpy.run_path(str(CHECKER))
    assert list(checker["findings"](page)) == []
