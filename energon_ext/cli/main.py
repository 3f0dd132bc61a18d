# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The entry point: names the commands and prints what a user did wrong as one line."""

import importlib
import keyword
import warnings
from typing import Any

import click

from energon_ext.errors import EnergonExtError

#: The help of each command in one line, so that nothing need be imported to list them.
COMMANDS = {
    "checkpoint": "Look into a checkpoint.",
    "import": "Write the metadataset OUTPUT from Megatron's --data-path.",
    "measure": "Measure the samples of METADATASET once, for rows of whole samples.",
    "peek": "Show the first rows that METADATASET gives, before any training.",
    "plan": "Show the shares that METADATASET plans, and what a splice would show.",
    "prepare": "Write text to OUTPUT as Megatron's token files.",
    "report": "Show what a training run read, planned against actual.",
    "tokenize": "Tokenize the text of METADATASET once, for all runs on it.",
    "trace": "Show every row of a step of RUN: its documents, rank, micro-batch and files.",
}


class Commands(click.Group):
    """Commands that are imported when called; errors of a user or the disk end in one line."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load_command(name or ""), rest

    def invoke(self, ctx: click.Context) -> Any:
        # Megatron-core misses kernels, and Energon's loader a GPU; no command here uses any.
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        warnings.filterwarnings("ignore", message=".*pin_memory")
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `energon-ext ... | head`: click ends such a command in silence.
        except (EnergonExtError, OSError) as error:
            raise click.UsageError(" ".join(str(error).split())) from error


def load_command(name: str) -> click.Command:
    """Import a command, which has the name of its module."""
    name += "_" * keyword.iskeyword(name)
    command: click.Command = getattr(importlib.import_module(f"energon_ext.cli.{name}"), name)
    return command


@click.group(
    cls=Commands,
    commands={name: click.Command(name, help=text) for name, text in COMMANDS.items()},
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(package_name="energon_ext")
def main() -> None:
    """Scheduled blends, exact resume and packed batches for Megatron-Energon.

    Example: energon-ext plan mix.yaml --steps 1000 --seq-length 4096
    """


if __name__ == "__main__":
    main()
