# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Imports go downward: a module may import its own layer and those below, and nothing in a circle.

Imports inside functions count as well: a lazy import is for weight, not for a way around a layer.
"""

import ast
from pathlib import Path

import pytest

import energon_ext

PACKAGE = Path(energon_ext.__file__).parent

#: Layer of every module; a package stands for all modules in it.
LAYERS = {
    "errors": 0,
    "arguments": 0,
    "losses": 0,
    "weights": 1,
    "packing": 1,
    "batch": 1,
    "documents": 2,
    "mixture": 3,
    "config": 2,
    "state": 3,
    "plan": 2,
    "encoders": 3,
    "splice": 3,
    "rl": 4,
    "megatron": 4,
    "": 4,  # energon_ext itself: the public names.
    "cli": 5,
}
PURE_LAYERS = (0, 1)
MEGATRON_CORE_IS_FOR = ("megatron", "documents")

MODULES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    .removesuffix("__init__")
    .rstrip("."): (path)
    for path in sorted(PACKAGE.rglob("*.py"))
}


def layer(module):
    return LAYERS.get(module.partition(".")[0], -1)


def imported_names(path, *, lazy=True):
    """Dotted names of everything a file imports, ``from a import b`` as ``a.b``."""
    nodes = [ast.parse(path.read_text(encoding="utf-8"))]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if not lazy and isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        nodes.extend(ast.iter_child_nodes(node))


def imported_modules(module, *, lazy=True):
    """Modules of energon_ext that a module of energon_ext imports."""
    for name in imported_names(MODULES[module], lazy=lazy):
        if name == "energon_ext" or name.startswith("energon_ext."):
            target = name.removeprefix("energon_ext").removeprefix(".")
            yield target if target in MODULES else target.rpartition(".")[0]


def imports_under(path, package):
    return [name for name in imported_names(path) if f"{name}.".startswith(f"{package}.")]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module or "energon_ext")
def test_a_module_imports_no_layer_above_its_own(module):
    above = [other for other in imported_modules(module) if layer(other) > layer(module)]
    assert not above, f"{module or 'energon_ext'} imports {above}"


@pytest.mark.parametrize("module", [module for module in MODULES if layer(module) in PURE_LAYERS])
def test_a_pure_module_knows_neither_energon_nor_megatron(module):
    assert not imports_under(MODULES[module], "megatron")


@pytest.mark.parametrize(
    "module",
    [module for module in MODULES if module.partition(".")[0] not in MEGATRON_CORE_IS_FOR],
    ids=lambda module: module or "energon_ext",
)
def test_megatron_core_stays_in_its_room(module):
    assert not imports_under(MODULES[module], "megatron.core")


def test_no_modules_import_each_other_in_a_circle():
    finished, open_modules = set(), []

    def visit(module):
        if module in finished:
            return
        assert module not in open_modules, " -> ".join([*open_modules, module])
        open_modules.append(module)
        for other in imported_modules(module, lazy=False):
            if other != module:
                visit(other)
        finished.add(open_modules.pop())

    for module in MODULES:
        visit(module)


def test_every_module_has_a_layer_and_the_licence():
    assert [module for module in MODULES if layer(module) < 0] == [], "not in LAYERS"
    for path in MODULES.values():
        assert path.read_text(encoding="utf-8").startswith(
            "# Copyright (c) 2026, energon_ext contributors.\n"
            "# SPDX-License-Identifier: BSD-3-Clause\n"
        ), path
