# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""House rules that no linter checks; allowed imports are in .importlinter."""

import ast
from pathlib import Path

MOST_FILES_AT_THE_ROOT = 11

HEADER = (
    "# Copyright (c) 2026, energon_ext contributors.\n# SPDX-License-Identifier: BSD-3-Clause\n"
)

PACKAGE = Path(__file__).parents[1] / "energon_ext"
#: Text of each module by its path.
MODULES = {
    str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8")
    for path in sorted(PACKAGE.rglob("*.py"))
}


def test_every_module_starts_with_the_license_header():
    assert [module for module, text in MODULES.items() if not text.startswith(HEADER)] == []


def test_every_module_uses_absolute_imports():
    relative = [
        f"{module}:{node.lineno}"
        for module, text in MODULES.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and node.level > 0
    ]
    assert relative == []


def test_the_package_root_has_few_files():
    files = sorted(path.name for path in PACKAGE.iterdir() if path.is_file())
    assert len(files) <= MOST_FILES_AT_THE_ROOT, files
