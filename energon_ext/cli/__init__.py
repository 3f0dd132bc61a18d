# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The command ``energon-ext``: one module per command, and what the commands share."""

import click

from energon_ext.errors import printable


def echo(text: object) -> None:
    """Print lines, in which names come from files and a terminal is to obey none of them."""
    click.echo("\n".join(map(printable, str(text).split("\n"))))
