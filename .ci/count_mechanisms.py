# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Count what makes the package harder to read, to compare two versions of it.

    python .ci/count_mechanisms.py [--list]

Prints one line per count, and with ``--list`` each place. There are no bounds.
"""

import argparse
import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "energon_ext"

#: Names of variables that hold a TaskEncoder.
ENCODERS = {"encoder", "task_encoder", "bound"}
#: Modules whose classes are encoders, so that ``self`` is one.
ENCODER_FOLDER = "energon_ext.encoders"
PROBES = {"hasattr", "getattr", "find"}

MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print each place")
    is_listed = parser.parse_args().list
    lines = sum(len(path.read_bytes().splitlines()) for path in MODULES.values())
    print(f"{lines:6,} lines in {len(MODULES)} modules")
    for title, places in counts().items():
        print(f"{len(places):6} {title}")
        for place in places if is_listed else ():
            print(f"         {place}")


def counts():
    """Return the places of each mechanism, by its title."""
    return {
        "arguments and fields `encoder: Any`": places_of(is_untyped_encoder),
        "probes of encoders by hasattr, getattr or find": places_of(is_probe),
        "cast(TaskEncoder, ...)": places_of(is_cast_to_encoder),
        "isinstance(..., TokenFileFactory)": places_of(is_test_of_token_files),
        "tests of entry.documents against None": places_of(is_test_of_documents),
        "type: ignore[override]": comments("type: ignore[override]"),
        "nouns in the glossary": nouns(),
    }


def places_of(condition):
    """Return the places of the nodes of all syntax trees that satisfy a condition."""
    return [
        f"{MODULES[name].relative_to(ROOT)}:{node.lineno}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if condition(node, name)
    ]


def is_untyped_encoder(node, _):
    if isinstance(node, ast.arg):
        name = node.arg
    elif isinstance(node, ast.AnnAssign):
        name = getattr(node.target, "id", None) or getattr(node.target, "attr", None)
    else:
        return False
    return (
        name in ENCODERS and node.annotation is not None and ast.unparse(node.annotation) == "Any"
    )


def is_probe(node, module):
    if called(node) not in PROBES:
        return False
    probed = ast.unparse(node.args[0]).split(".")[-1]
    is_self = probed == "self" and module.startswith(ENCODER_FOLDER)
    return is_self or probed.lstrip("_") in ENCODERS


def is_test_of_token_files(node, _):
    return called(node) == "isinstance" and "TokenFileFactory" in ast.unparse(node.args[1])


def is_cast_to_encoder(node, _):
    return called(node) == "cast" and "TaskEncoder" in ast.unparse(node.args[0])


def is_test_of_documents(node, _):
    return isinstance(node, ast.Compare) and ast.unparse(node.left).endswith("entry.documents")


def called(node):
    """Return the name of the function that a node calls, or None."""
    return node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None


def comments(text):
    return [
        f"{path.relative_to(ROOT)}:{number}"
        for path in MODULES.values()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if text in line
    ]


def nouns():
    """Return the words that the tables of the glossary explain."""
    page = (ROOT / "docs/reference/glossary.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", page, re.MULTILINE)
    words = [word.strip() for cell in cells for word in cell.split(",")]
    return [word for word in words if word not in ("word", "---")]


if __name__ == "__main__":
    main()
