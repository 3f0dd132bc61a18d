# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Write the page of all user errors, from the code.

    python docs/messages.py PAGE

Every ``raise`` and ``return`` of an error type of ``energon_ext.errors`` is a row. Values that only
a run knows are shown as the expressions in the code. ``conf.py`` calls this at every build.
"""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "energon_ext"

HEADER = """# Messages

Every error that the package raises for a mistake in a file, an argument, a state or the data, by
module. The table is generated from the code. A name in braces stands for a value of the run. Search
this page for a few words of a message to find where it is raised.

| error | raised in | message |
| --- | --- | --- |
"""


def error_types():
    """Names of the exceptions that users see."""
    tree = ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return {name for name in classes if name.endswith("Error")}


def messages_in(code, types):
    """Errors that some code raises or returns, as (type, text), in order."""
    found = []
    for node in ast.walk(ast.parse(code)):
        value = {ast.Raise: "exc", ast.Return: "value"}.get(type(node))
        call = value and getattr(node, value)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in types:
            found.append((node.lineno, call.func.id, _text(call)))
    return [(name, text) for _, name, text in sorted(found)]


def _text(call):
    """The message of an error, with expressions in braces."""
    if not call.args:
        return "{...}"
    return " ".join(_part(call.args[0]).split())


def _part(node):
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_part, node.values))
    if isinstance(node, ast.FormattedValue):
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _part(node.left) + _part(node.right)
    return "{" + ast.unparse(node) + "}"


def page():
    """The page as Markdown."""
    types = error_types()
    lines = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for name, text in messages_in(path.read_text(encoding="utf-8"), types):
            shown = text.replace("|", "\\|").replace("`", "'")
            lines.append(f"| {name} | `{module}` | `` {shown} `` |\n")
    return HEADER + "".join(lines)


def write_page(path):
    """Write the page where its content has changed, so that Sphinx builds it again only then."""
    content = page()
    if not path.is_file() or path.read_text(encoding="utf-8") != content:
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))
