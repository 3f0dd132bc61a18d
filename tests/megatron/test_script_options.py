# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Options that Megatron-LM implements in its own launch scripts, whose functions do not run."""

import argparse
import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest

from energon_ext import ConfigError
from energon_ext.megatron.lm.script_options import MODEL_OPTIONS, STEP_OPTIONS, options_read_by

#: Made by .ci/list_script_options.py.
LISTS = json.loads(Path(__file__).with_name("script_options.json").read_text())
TABLES = pytest.mark.parametrize("table", [STEP_OPTIONS, MODEL_OPTIONS], ids=["step", "model"])


@TABLES
@pytest.mark.parametrize("version", LISTS)
def test_every_option_that_a_script_of_megatron_lm_reads_is_in_the_table(version, table):
    read = {name for script in table.scripts for name in LISTS[version].get(script, "").split()}
    assert len(read) > 15
    assert read - table.known == set()


@TABLES
def test_every_option_of_the_table_has_one_effect(table):
    assert len(table.known) == len(table.works) + len(table.without_effect) + len(table.refused)


@TABLES
@pytest.mark.nightly
def test_every_option_that_an_installed_script_reads_is_in_the_table(table):
    found = importlib.util.find_spec("megatron.training")
    folder = Path(found.origin).parents[2] if found else Path()
    read = [options_read_by(folder / name) for name in table.scripts if (folder / name).is_file()]
    if not read:
        pytest.skip("wheels of megatron-core do not hold Megatron-LM's scripts")
    assert set().union(*read) - table.known == set()


def test_options_are_found_however_a_script_reads_them(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "args = get_args()\n"
        "if args.one and getattr(args, 'two', None) or hasattr(args, 'three'):\n"
        "    config.no = other.no + getattr(config, 'no') + get_args().four\n"
        "use(f'{args.five.six}', lambda: getattr(args, name))\n"
    )
    assert options_read_by(script) == {"one", "two", "three", "four", "five"}
    script.write_text("args.one = = 2")
    with pytest.raises(ConfigError, match="script.py: the options it reads cannot be found: inval"):
        options_read_by(script)


@pytest.mark.parametrize(
    ("table", "name", "value", "reason"),
    [
        (STEP_OPTIONS, "logits_load_dir", "missing", "see docs/tasks/distillation.md"),
        (STEP_OPTIONS, "export_kd_teacher_load", "teacher", "pass distillation to forward_step"),
        (STEP_OPTIONS, "yaml_cfg", "run.yaml", "none of the options of energon_ext"),
        (MODEL_OPTIONS, "spec", ["module", "name"], "use your own"),
        (MODEL_OPTIONS, "hybrid_layer_pattern", "M*-", "builds only GPT models"),
    ],
)
def test_options_of_functions_that_do_not_run_are_refused(checkout, table, name, value, reason):
    table.check(argparse.Namespace(**{name: None}))
    with pytest.raises(ConfigError) as error:
        table.check(argparse.Namespace(**{name: value}))
    flag = f"--{name.replace('_', '-')} must be left out ("
    assert str(error.value).startswith(flag) and reason in str(error.value)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of a Megatron-LM with options that this package does not know."""

    def add_megatron_arguments(parser):
        parser.add_argument("--smooth-loss", type=float, default=0.1)
        parser.add_argument("--deep-model", action="store_true")
        parser.add_argument("--seq-length", type=int)
        return parser

    training = types.ModuleType("megatron.training")
    training.arguments = types.ModuleType("megatron.training.arguments")
    training.arguments.add_megatron_arguments = add_megatron_arguments
    training.__file__ = str(tmp_path / "megatron" / "training" / "__init__.py")
    for module in (training, training.arguments):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "pretrain_hybrid.py").write_text("args.smooth_loss + args.seq_length + args.made")
    (tmp_path / "gpt_builders.py").write_text("args.deep_model")
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--seq-length", "8", "--energon-packing", "x"])
    return tmp_path


def test_unknown_options_of_the_installed_scripts_are_refused_if_they_are_given(checkout):
    args = argparse.Namespace(smooth_loss=0.3, deep_model=False, seq_length=8, made=1)
    for table in (STEP_OPTIONS, MODEL_OPTIONS):
        table.check(args)  # Megatron-LM has changed 0.1, not the user
    sys.argv += ["--smooth-loss", "0.1"]
    STEP_OPTIONS.check(args)
    sys.argv += ["--smooth-loss", "0.2", "--deep-model", "--teacher=x"]
    with pytest.raises(ConfigError, match=r"^--smooth-loss must be left out \(pretrain_hybrid.py "):
        STEP_OPTIONS.check(args)
    (checkout / "pretrain_hybrid.py").write_text("args.teacher")  # an argument of the script
    with pytest.raises(ConfigError, match=r"^--teacher must .*, got 'x'"):
        STEP_OPTIONS.check(argparse.Namespace(teacher="x"))
    with pytest.raises(ConfigError, match=r"^--deep-model must be left out \(gpt_builders.py of "):
        MODEL_OPTIONS.check(args)
