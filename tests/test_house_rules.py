# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rules of the code that no linter knows. Which module may import which stands in .importlinter."""

import ast
from pathlib import Path

MOST_LINES_OF_THE_PACKAGE = 25_250
MOST_LINES_OF_A_MODULE = 330
MOST_FILES_AT_THE_ROOT = 10

HEADER = (
    "# Copyright (c) 2026, energon_ext contributors.\n# SPDX-License-Identifier: BSD-3-Clause\n"
)

PACKAGE = Path(__file__).parents[1] / "energon_ext"
#: Text of each module by its path.
MODULES = {
    str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}
LINES = {module: len(text.splitlines()) for module, text in MODULES.items()}


def test_every_module_begins_with_the_licence():
    assert [module for module, text in MODULES.items() if not text.startswith(HEADER)] == []


def test_every_module_imports_by_full_names():
    relative = [
        f"{module}:{node.lineno}"
        for module, text in MODULES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert relative == []


def test_every_module_is_short():
    assert {m: count for m, count in LINES.items() if count > MOST_LINES_OF_A_MODULE} == {}


def test_few_files_lie_at_the_root():
    files = sorted(path.name for path in PACKAGE.iterdir() if path.is_file())
    assert len(files) <= MOST_FILES_AT_THE_ROOT, files


def test_the_package_is_small():
    assert sum(LINES.values()) <= MOST_LINES_OF_THE_PACKAGE
