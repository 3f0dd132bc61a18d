# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every command helps: ``-h``, an example, defaults; and a shell can complete it."""

import os
import subprocess
import sys

import pytest

from energon_ext.cli.main import main
from tests.cli.command import energon_ext


def commands(command, words=()):
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, (*words, name))


@pytest.mark.parametrize("words", list(commands(main)), ids=" ".join)
def test_help_of_every_command_has_an_example(words):
    result = energon_ext(*words, "-h")
    assert result.exit_code == 0
    assert f"{' '.join(('energon-ext', *words))} " in result.stdout.partition("\n")[2]
    assert energon_ext(*words, "--help").stdout == result.stdout


def test_bash_completes_commands():
    environment = {"_ENERGON_EXT_COMPLETE": "bash_complete", "COMP_WORDS": "energon-ext p"}
    code = "import sys; sys.argv[0] = 'energon-ext'; from energon_ext.cli.main import main; main()"
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment, "COMP_CWORD": "1"},
        capture_output=True,
        text=True,
    )
    assert sorted(result.stdout.split()) == ["plain,peek", "plain,plan", "plain,prepare"]
