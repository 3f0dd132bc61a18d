# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Write the page of all user errors, from the code.

    python docs/messages.py PAGE

Every ``raise`` and ``return`` of an error type of ``energon_ext.errors`` is a row. Texts that a
function assigned to variables before are inserted. Values that are only known at run time are shown
as the expressions in the code. ``conf.py`` calls this in every build.
"""

import ast
import sys
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "energon_ext"

HEADER = """# Messages

Every error that the package raises for a mistake in a file, an argument, a state or the data, by
module. Search this page for a few words of a message to find where it is raised. The table is
generated from the code; an expression in braces stands for its value at run time.

| error | raised in | message |
| --- | --- | --- |
"""


def error_types():
    """Return the names of the exceptions that users see."""
    tree = ast.parse((PACKAGE / "errors.py").read_text(encoding="utf-8"))
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    return {name for name in classes if name.endswith("Error")}


def messages_in(code, types):
    """Return the errors that code raises or returns, as (type, text), in order."""
    tree = ast.parse(code)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = {}
    for scope in (tree, *functions):  # inner functions come last, and replace earlier entries
        for node in ast.walk(scope):
            value = {ast.Raise: "exc", ast.Return: "value"}.get(type(node))
            call = value and getattr(node, value)
            if isinstance(call, ast.Call) and getattr(call.func, "id", None) in types:
                found[node.lineno] = call.func.id, _text(call, _words_before(node, scope))
    return [each for _, each in sorted(found.items())]


def _words_before(error, scope):
    """Return the last value assigned to each name of a function before an error."""
    words = {}
    for node in sorted(ast.walk(scope), key=lambda node: getattr(node, "lineno", 0)):
        is_name = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if is_name and node.lineno < error.lineno:
            is_text = isinstance(node.value, ast.JoinedStr)
            is_text |= isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            words[node.targets[0].id] = node.value if is_text else node.targets[0]
    return words


def _text(call, words):
    """Return the message of an error, with expressions in braces."""
    if not call.args:
        return "{...}"
    return " ".join(_part(call.args[0], words).split())


def _part(node, words):
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_part(each, words) for each in node.values)
    if isinstance(node, ast.FormattedValue):
        value = words.get(getattr(node.value, "id", None))
        others = {name: word for name, word in words.items() if word is not value}  # no cycles
        if value is not None and not isinstance(value, ast.Name):
            return _part(value, others)
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _part(node.left, words) + _part(node.right, words)
    return "{" + ast.unparse(node) + "}"


def page():
    """Return the page as Markdown."""
    types = error_types()
    lines = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for name, text in messages_in(path.read_text(encoding="utf-8"), types):
            shown = text.replace("|", "\\|").replace("`", "'")
            lines.append(f"| {name} | `{module}` | `` {shown} `` |\n")
    return HEADER + "".join(lines)


def write_page(path):
    """Write the page if its content has changed; otherwise Sphinx need not build it again."""
    content = page()
    if not path.is_file() or path.read_text(encoding="utf-8") != content:
        path.write_text(content, encoding="utf-8")


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))
