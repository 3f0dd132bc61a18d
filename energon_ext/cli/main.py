# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The entry point: lists the commands and prints user errors as one line."""

import importlib
import keyword
import warnings
from typing import Any

import click

from energon_ext.errors import EnergonExtError

#: One line of help per command, so that listing them imports nothing.
COMMANDS = {
    "check": "Check all token files that PATH names, and write their catalog.",
    "checkpoint": "Inspect a checkpoint, or forecast what follows it.",
    "import": "Convert Megatron's --data-path to the metadataset OUTPUT.",
    "measure": "Measure the sample lengths of METADATASET before a run.",
    "peek": "Show the first rows that a run on METADATASET would read.",
    "plan": "Show the planned shares of METADATASET, or forecast a run.",
    "prepare": "Tokenize text into Megatron token files in OUTPUT.",
    "report": "Report what a training run read, planned against actual.",
    "tokenize": "Tokenize the text of METADATASET before a run.",
    "trace": "Show which documents a step of RUN read, and from which files.",
}


class Commands(click.Group):
    """A group that imports commands on demand and reports user and disk errors in one line."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and load_command(name or ""), rest

    def invoke(self, ctx: click.Context) -> Any:
        # Megatron-core warns of missing kernels, Energon of a missing GPU; no command uses either.
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        warnings.filterwarnings("ignore", message=".*pin_memory")
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `energon-ext ... | head`: click exits silently.
        except (EnergonExtError, OSError) as error:
            raise click.UsageError(" ".join(str(error).split())) from error


def load_command(name: str) -> click.Command:
    """Import a command from the module of the same name."""
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
