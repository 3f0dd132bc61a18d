# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The command ``energon-ext``: one module per command, and what the commands share."""

import importlib
import textwrap
from collections.abc import Sequence
from typing import Any

import click

from energon_ext.errors import ConfigError, printable


def special_tokens(command: Any) -> Any:
    """The options of a command on what a tokenizer puts around a text."""
    for role, end in (("bos", "begins"), ("eos", "ends")):
        name = f"Token of --tokenizer that {end} a text."
        command = click.option(f"--{role}-token", metavar="TOKEN", help=name)(command)
    return command


def echo(text: object) -> None:
    """Print lines, in which names come from files and a terminal is to obey none of them."""
    click.echo("\n".join(map(printable, str(text).split("\n"))))


def import_for(what: str, package: str, extra: str, module: str | None = None) -> Any:
    """A package, or a module that needs it; ConfigError where it is not installed."""
    try:
        return importlib.import_module(module or package)
    except ImportError as error:
        raise ConfigError(
            f"{what} needs the package `{package}`: pip install 'energon_ext[{extra}]'."
        ) from error


def table(rows: Sequence[Sequence[str]], *, left: int = 1, indent: str = "") -> str:
    """Columns side by side: the first ``left`` to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        [text.ljust(width) for text, width in zip(row[:left], widths)]
        + [text.rjust(width) for text, width in zip(row[left:], widths[left:])]
        for row in rows
    ]
    return textwrap.indent("\n".join("  ".join(line).rstrip() for line in lines), indent)
