# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The command ``energon-ext``: one module per command, and shared helpers for printing."""

import json
from typing import Any, Mapping, Sequence

import click

from energon_ext.errors import ConfigError, printable, without_logins

#: Maximum number of sources or documents in a table.
MAX_LISTED = 60


def echo(text: object) -> None:
    """Print lines with control characters escaped: names come from files."""
    click.echo("\n".join(map(printable, str(text).split("\n"))))


def echo_json(content: Any) -> None:
    """Print a JSON object on one line, without logins and with control characters escaped."""
    click.echo(json.dumps(_without_logins(content)).replace("\x7f", "\\u007f"))


def _without_logins(content: Any) -> Any:
    if isinstance(content, str):
        return without_logins(content)
    if isinstance(content, Mapping):
        return {without_logins(key): _without_logins(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_without_logins(value) for value in content]
    return content


def plural(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is 1.

    Example:
        >>> plural(1, "step"), plural(1200, "step")
        ('1 step', '1,200 steps')
    """
    return f"{number:,} {noun}" + "s" * (number != 1)


def table(rows: Sequence[Sequence[str]], *, left: int = 1, most: int = 2**31) -> str:
    """Format rows as columns: the first ``left`` are left-aligned, the others right-aligned.

    At most ``most`` rows are shown below the first one, which is the header.
    """
    shown = rows[: most + 1]
    widths = [max(map(len, column)) for column in zip(*shown)]
    lines = []
    for row in shown:
        cells = [text.ljust(width) for text, width in zip(row[:left], widths)]
        cells += [text.rjust(width) for text, width in zip(row[left:], widths[left:])]
        lines.append("  ".join(cells).rstrip())
    if len(rows) > len(shown):
        lines.append(f"... {len(rows) - len(shown):,} more")
    return "\n".join(lines)


def one_of(given: Mapping[str, Any]) -> str:
    """Return the one name with a value; raise ConfigError if there is none, or several."""
    names = [name for name, value in given.items() if value]
    if len(names) != 1:
        found = " and ".join(names) or "none"
        raise ConfigError(f"Give one of {', '.join(given)}; found {found}.")
    return names[0]
