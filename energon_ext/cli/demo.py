# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext demo``: the whole path on real text, ending in the proof that a resume is exact."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import numpy as np

from energon_ext.cli.metrics import Comparison
from energon_ext.cli.report import FOLDER, headline, import_figures, write_report
from energon_ext.errors import ConfigError

CHECKOUT = Path(__file__).parents[2]
TRAINING_SCRIPT = CHECKOUT / "examples" / "01_pretrain_gpt.py"
CURRICULUM = CHECKOUT / "metadatasets" / "curriculum.yaml"
DATA_IN_CURRICULUM = "../demo/data/"
MIN_CHARS = 200
VAL_FRACTION = 0.1
VAL_SEED = 2


@click.command()
@click.option("--dir", "folder", type=FOLDER, default="demo", help="Where to work.")
@click.option("--steps", type=click.IntRange(4), default=150)
def demo(folder: Path, steps: int) -> None:
    """Train on real text, stop, resume and compare.

    Prepares three corpora that come with Python in DIR/data, trains twice in DIR/runs (earlier runs
    of the demo are replaced) and writes DIR/report.html. Needs a source checkout.
    """
    _check_requirements()
    _prepare(folder / "data")
    blend = _curriculum(folder)
    resumed, uninterrupted = folder / "runs" / "resumed", folder / "runs" / "uninterrupted"
    for run_dir in (resumed, uninterrupted):
        shutil.rmtree(run_dir, ignore_errors=True)
    half = steps // 2
    _train(f"train {half} of {steps} steps, then stop", blend, resumed, steps, "--stop-after", half)
    _train("resume in a new process", blend, resumed, steps, "--resume")
    _train("train the same without a stop, to compare", blend, uninterrupted, steps)

    written = write_report(resumed, folder, uninterrupted)
    click.secho("\nreport", bold=True)
    for value, name in headline(written.run, written.comparison):
        click.echo(f"  {value:>16}  {name}")
    for path in (*written.pictures, written.page):
        click.echo(f"  {path}")
    assert written.comparison is not None  # with the uninterrupted run
    _check_identical(written.comparison, steps)


def _check_requirements() -> None:
    for path in (TRAINING_SCRIPT, CURRICULUM):
        if not path.is_file():
            raise ConfigError(
                f"{path}: not there. The demo runs the examples of a source checkout: clone the "
                "repository and call `make demo` in it."
            )
    if importlib.util.find_spec("megatron.core") is None:
        raise ConfigError(
            "The demo trains with Megatron-core: pip install 'energon_ext[megatron,report]'."
        )
    import_figures()


def _prepare(data: Path) -> None:
    from energon_ext.cli.corpora import CORPORA
    from energon_ext.cli.dataset_writer import WriteOptions, write_text_dataset
    from energon_ext.cli.prepare import summary

    options = WriteOptions(val_fraction=VAL_FRACTION, seed=VAL_SEED, min_chars=MIN_CHARS)
    click.secho("prepare three corpora of real text", bold=True)
    for name, read in CORPORA.items():
        if (data / name).exists():
            click.echo(f"{data / name}: there already.")
        else:
            click.echo(summary(data / name, write_text_dataset(read(), data / name, options)))


def _curriculum(folder: Path) -> Path:
    """The curriculum itself, or a copy that finds its data where ``--dir`` put it."""
    if (CURRICULUM.parent / DATA_IN_CURRICULUM).resolve() == (folder / "data").resolve():
        return CURRICULUM
    copy = folder / CURRICULUM.name
    copy.write_text(CURRICULUM.read_text().replace(DATA_IN_CURRICULUM, "data/"))
    return copy


def _train(stage: str, blend: Path, run_dir: Path, steps: int, *options: object) -> None:
    click.secho(f"\n{stage}", bold=True)
    arguments = [blend, "--run-dir", run_dir, "--train-iters", steps, "--save-interval", steps // 2]
    command = [sys.executable, *map(str, (TRAINING_SCRIPT, *arguments, *options))]
    # Megatron-core warns a dozen times of optional GPU libraries, which the demo does not need.
    environment = {**os.environ, "PYTHONWARNINGS": "ignore::UserWarning"}
    status = subprocess.run(command, env=environment).returncode
    if status != 0:
        raise click.ClickException(f"The stage {stage!r} ended with exit code {status}, see above.")


def _check_identical(comparison: Comparison, steps: int) -> None:
    if comparison.steps != steps:
        raise click.ClickException(f"Only {comparison.steps} of {steps} steps to compare.")
    if not comparison.identical:
        differs = ~comparison.same_batch | (comparison.loss_difference != 0)
        raise click.ClickException(
            f"The resumed run differs from the uninterrupted one, first at step "
            f"{np.flatnonzero(differs)[0] + 1}: {comparison}."
        )
