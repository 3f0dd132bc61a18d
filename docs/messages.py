# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Write the page of all user errors, from the code.

    python docs/messages.py PAGE

Every ``raise`` and ``return`` of an error type of ``energon_ext.errors`` is a row. Words that a
function has put together before are in their places. Values that only a run knows are shown as the
expressions in the code. ``conf.py`` calls this at every build.
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
    tree = ast.parse(code)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    found = {}
    for scope in (tree, *functions):  # the innermost function of an error comes last
        for node in ast.walk(scope):
            value = {ast.Raise: "exc", ast.Return: "value"}.get(type(node))
            call = value and getattr(node, value)
            if isinstance(call, ast.Call) and getattr(call.func, "id", None) in types:
                found[node.lineno] = call.func.id, _text(call, _words_before(node, scope))
    return [each for _, each in sorted(found.items())]


def _words_before(error, scope):
    """Texts by their names that a function makes above an error, the nearest of each name."""
    words = {}
    for node in sorted(ast.walk(scope), key=lambda node: getattr(node, "lineno", 0)):
        is_name = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if is_name and node.lineno < error.lineno:
            is_text = isinstance(node.value, ast.JoinedStr)
            is_text |= isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            words[node.targets[0].id] = node.value if is_text else node.targets[0]
    return words


def _text(call, words):
    """The message of an error, with expressions in braces."""
    if not call.args:
        return "{...}"
    return " ".join(_part(call.args[0], words).split())


def _part(node, words):
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_part(each, words) for each in node.values)
    if isinstance(node, ast.FormattedValue):
        made = words.get(getattr(node.value, "id", None))
        known = {name: own for name, own in words.items() if own is not made}  # no circles
        if made is not None and not isinstance(made, ast.Name):
            return _part(made, known)
        return "{" + ast.unparse(node.value) + "}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _part(node.left, words) + _part(node.right, words)
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
