# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Run ``energon-ext`` in this process, as a shell would."""

from click.testing import CliRunner, Result

from energon_ext.cli.main import main


def energon_ext(*arguments: object) -> Result:
    """Return the result of one call; unexpected exceptions propagate."""
    return CliRunner().invoke(
        main, [str(argument) for argument in arguments], catch_exceptions=False
    )


def error_line(result: Result) -> str:
    """Return the one error line that a failed call prints to stderr, without progress bars."""
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1 and "Traceback" not in result.stderr
    assert result.stderr.rstrip().endswith(lines[0])
    return lines[0].removeprefix("Error: ")
