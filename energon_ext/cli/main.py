# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The entry point: collects the commands and prints what a user did wrong as one line."""

import warnings
from typing import Any

import click

from energon_ext.cli.checkpoint import checkpoint
from energon_ext.cli.importing import import_
from energon_ext.cli.peek import peek
from energon_ext.cli.plan import plan
from energon_ext.cli.prepare import prepare
from energon_ext.cli.report import report
from energon_ext.cli.tokenizing import tokenize
from energon_ext.cli.trace import trace
from energon_ext.errors import EnergonExtError


class OneLineErrors(click.Group):
    """A group whose commands end with one line on stderr where a user or the disk is at fault."""

    def invoke(self, ctx: click.Context) -> Any:
        # Megatron-core speaks of kernels that it does not find, which no command here uses.
        warnings.filterwarnings("ignore", module=r"megatron\.core")
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `energon-ext ... | head`: click ends such a command in silence.
        except (EnergonExtError, OSError) as error:
            raise click.UsageError(" ".join(str(error).split())) from error


@click.group(
    cls=OneLineErrors,
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
)
@click.version_option(package_name="energon_ext")
def main() -> None:
    """Scheduled blends, exact resume and packed batches for Megatron-Energon.

    Example: energon-ext plan mix.yaml --steps 1000 --seq-length 4096
    """


for command in (prepare, tokenize, import_, plan, peek, checkpoint, report, trace):
    main.add_command(command)

if __name__ == "__main__":
    main()
