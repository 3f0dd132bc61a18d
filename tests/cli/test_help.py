# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every command has fast help with an example, and shell completion works."""

import ast
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import energon_ext as package
from energon_ext.cli import echo_json
from energon_ext.cli.main import COMMANDS, load_command, main
from energon_ext.errors import MAX_TEXT
from tests.cli.command import energon_ext

WORDS = [
    (),
    *((name,) for name in COMMANDS),
    *(("checkpoint", name) for name in ("diff", "forecast", "reweight")),
]
CALL = "import sys; sys.argv[0] = 'energon-ext'; from energon_ext.cli.main import main; "
HEAVY = ("torch", "numpy", "megatron", "matplotlib")


def call(code, **environment):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("words", WORDS)
def test_help_of_every_command_has_an_example(words):
    result = energon_ext(*words, "-h")
    assert result.exit_code == 0
    assert f"{' '.join(('energon-ext', *words))} " in result.stdout.partition("\n")[2]
    assert energon_ext(*words, "--help").stdout == result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_list_shows_the_help_of_each(name):
    command = load_command(name)
    assert command.name == name
    assert command.get_short_help_str(limit=1000) == COMMANDS[name]


@pytest.mark.parametrize("option", ["-h", "--version"])
def test_help_and_version_are_fast_and_import_nothing_heavy(option):
    at_exit = "import atexit; atexit.register(lambda: print(*sys.modules))"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = call(f"{CALL} {at_exit}; main(['{option}'])")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    *lines, modules = result.stdout.splitlines()
    assert lines and not {module.partition(".")[0] for module in modules.split()} & {*HEAVY}
    loaded = {m for m in modules.split() if m.startswith("energon_ext.")}
    assert loaded == {"energon_ext.cli", "energon_ext.cli.main", "energon_ext.errors"}
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.3


def test_the_module_runs_the_command():
    command = [sys.executable, "-m", "energon_ext"]
    failed = subprocess.run([*command, "repor"], capture_output=True, text=True)
    assert failed.returncode == 2 and "Traceback" not in failed.stderr
    assert failed.stderr.startswith("Usage: python -m energon_ext ")
    assert "No such command 'repor'" in failed.stderr


def test_bash_completes_commands_and_their_options(monkeypatch, capsys):
    completing = {"_ENERGON_EXT_COMPLETE": "bash_complete"}
    found = call(f"{CALL} main()", **completing, COMP_WORDS="energon-ext p", COMP_CWORD="1")
    assert sorted(found.stdout.split()) == ["plain,peek", "plain,plan", "plain,prepare"]
    monkeypatch.setenv("_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "energon-ext report --r")
    monkeypatch.setenv("COMP_CWORD", "2")
    with pytest.raises(SystemExit):
        main([], prog_name="energon-ext", complete_var="_COMPLETE")
    assert capsys.readouterr().out.split() == ["plain,--reference"]


def test_json_output_is_complete_and_has_no_control_characters(capsys):
    content = {"key": "x" * (3 * MAX_TEXT), "control": "\x1b[31m\x7f\u202e\ud800"}
    echo_json(content)
    printed = capsys.readouterr().out
    assert json.loads(printed) == content
    assert printed.removesuffix("\n").isprintable() and printed.isascii()


def test_public_names_match_what_type_checkers_see():
    tree = ast.parse(Path(package.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    seen = {name.name: node.module for node in imports for name in node.names if name.asname}
    assert seen == package._MODULES and {*seen} == {*package.__all__} <= {*dir(package)}
    for name, module in seen.items():
        assert getattr(package, name) is getattr(sys.modules[module], name)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        package.Nothing  # noqa: B018
