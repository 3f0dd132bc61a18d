# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext prepare``: text and conversations of any kind into token files."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from energon_ext.cli import echo, option, table
from energon_ext.cli.cluster import run_on_ray, run_on_slurm, settings_of
from energon_ext.cli.option import INPUT, PATH
from energon_ext.cli.prepare_input import job_and_units
from energon_ext.documents.token_paths import SPLITS
from energon_ext.errors import ConfigError
from energon_ext.prepare.accounts import check_files, left_out
from energon_ext.prepare.claim import Part
from energon_ext.prepare.job import Record
from energon_ext.prepare.units import run_part, run_units

ON_CLUSTER = ("executor", "tasks", "slurm", "ray", "logs", "render")


@click.command()
@click.argument("output", type=PATH)
@click.argument("files", type=INPUT, nargs=-1)
@click.option("--text", type=INPUT, multiple=True, help="UTF-8 text files, one document each.")
@click.option("--separator", help="Text between two documents of one --text file.")
@click.option("--folder", type=PATH, help="Read the files of a folder.")
@click.option("--glob", default="**/*.txt", help="Which files of --folder.")
@click.option(
    "--jsonl",
    type=INPUT,
    multiple=True,
    help="JSON Lines files, also .gz and .zst, or folders of them; one document a line.",
)
@click.option("--parquet", type=INPUT, multiple=True, help="Parquet files, or folders of them.")
@click.option("--key", default="text", help="Where the text is in JSON, Parquet or HF.")
@click.option("--hf-dataset", metavar="NAME", help="A Hugging Face dataset, or a folder.")
@click.option("--hf-config", metavar="NAME", help="Configuration of --hf-dataset.")
@click.option("--hf-split", default="train", help="Split of --hf-dataset.")
@click.option("--hf-streaming", is_flag=True, help="Read --hf-dataset without downloading it all.")
@click.option("--dataset", type=PATH, help="A prepared webdataset, or a metadataset.")
@click.option(
    "--split",
    multiple=True,
    default=("train", "val"),
    help="Splits of --dataset. Several stay what they are, one is divided by --val.",
)
@option.trusted_module
@click.option(
    "--val",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.05,
    help="Share of the documents for the split val, chosen by a hash of the text.",
)
@click.option("--seed", type=click.IntRange(0, 2**32), default=0, help="Selects another val split.")
@click.option("--min-chars", type=click.IntRange(1), default=1, help="Leave shorter documents out.")
@click.option("--tokenizer", metavar="NAME", help="Needed: 'bytes', a name or a local file.")
@option.special_tokens
@click.option("--chat", is_flag=True, help="Conversations: `messages`, or `prompt` and `response`.")
@option.chat_template
@click.option(
    "--on-error",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    help="What becomes of documents that cannot be read; those left out are counted.",
)
@option.jobs
@click.option("--check", is_flag=True, help="Compare the files of OUTPUT with their hashes.")
@click.option("--force", is_flag=True, help="Make all of OUTPUT anew, whatever is there.")
@option.part
@click.option("--executor", type=click.Choice(["slurm", "ray"]), help="Prepare on a cluster.")
@click.option("--tasks", type=click.IntRange(1), default=1, help="Parts of --executor.")
@click.option("--slurm", metavar="NAME=VALUE", multiple=True, help="Of datatrove or sbatch.")
@click.option("--ray", metavar="NAME=VALUE", multiple=True, help="Of datatrove's executor.")
@click.option("--logs", type=PATH, help="Of --executor.  [default: OUTPUT-logs]")
@click.option("--render", is_flag=True, help="Print the script of --executor slurm, run nothing.")
def prepare(output: Path, check: bool, force: bool, jobs: int, **options: Any) -> None:
    """Write text to OUTPUT as Megatron's token files.

    One kind of input: --text, --folder, --jsonl, --parquet, --hf-dataset or --dataset. FILES are
    further files of --text, --jsonl or --parquet, so a shell pattern works. These three may be in
    an object store: msc://PROFILE/... or s3://BUCKET/...

    \b
    energon-ext prepare data/books --text books/*.txt --tokenizer my/tokenizer.json
    energon-ext prepare data/code --folder src --glob '**/*.py' --tokenizer my/tokenizer.json
    energon-ext prepare data/web --jsonl web-*.jsonl --key content --tokenizer my/tokenizer.json
    energon-ext prepare data/tokens --dataset data/webdataset --tokenizer my/tokenizer.json
    energon-ext prepare data/chat --chat --jsonl chat.jsonl --tokenizer NAME

    Token files are OUTPUT/train/part-00000.bin and so on, and the same for val; a metadataset names
    them as `path: data/web/train`. Those of --chat have weights, so that answers alone are trained
    on. The same command again continues where one was interrupted.

    --part 0/20 to --part 19/20 prepare the same OUTPUT in 20 processes, on any machines that share
    it. The one that ends last gives it its name. --executor does so on a cluster:

    \b
    energon-ext prepare data/web --jsonl web --tokenizer NAME --executor slurm --tasks 500 \\
        --slurm partition=cpu --slurm time=4:00:00
    """
    if output.is_symlink() or output.name in ("", ".."):
        output = output.resolve()
    if check:
        echo(f"{output}: {check_files(output):,} files are as they were written.")
        return
    on_cluster = {name: options.pop(name) for name in ON_CLUSTER}
    part = options.pop("part")
    if force and (part or on_cluster["executor"]):
        raise ConfigError(f"--force: parts do not know each other; remove {output} instead.")
    if on_cluster["executor"]:
        _prepare_on_cluster(output, part, options, **on_cluster)
    elif part:
        prepare_part(output, options, part, jobs)
    else:
        job, units, splits = job_and_units(options)
        made = run_units(job, units, output, jobs=jobs, force=force, splits=splits)
        _show(output, *made)


def prepare_part(output: Path, options: Mapping[str, Any], part: Part, jobs: int) -> None:
    """Prepare one part of an output; the options are those of the command, by name."""
    job, units, splits = job_and_units(options)
    prepared, remarks = run_part(job, units, output, part, jobs=jobs, splits=splits)
    if prepared is None:
        remarks = [*remarks, f"{output}: part {part} is prepared, other parts are not."]
        echo("\n".join(remarks))
    else:
        _show(output, prepared, remarks)


def _prepare_on_cluster(
    output: Path,
    part: Part | None,
    options: Mapping[str, Any],
    *,
    executor: str,
    tasks: int,
    slurm: Sequence[str],
    ray: Sequence[str],
    logs: Path | None,
    render: bool,
) -> None:
    """Prepare an output by the tasks of an executor."""
    source = click.get_current_context().get_parameter_source("jobs")
    if part or source is ParameterSource.COMMANDLINE:
        name = "--part" if part else "--jobs"
        raise ConfigError(f"--executor: sets {name} itself, by --tasks and cpus_per_task.")
    job_and_units(options)  # their mistakes are reported here, not in a task's log
    settings = settings_of(slurm, "--slurm") if executor == "slurm" else settings_of(ray, "--ray")
    make = functools.partial(prepare_part, output, options)
    logs = logs or output.with_name(f"{output.name}-logs")
    if executor == "slurm":
        run_on_slurm(make, tasks, settings, logs, render=render)
    else:
        run_on_ray(make, tasks, settings, logs)


def _show(output: Path, prepared: Record, remarks: Sequence[str]) -> None:
    echo("\n".join([*remarks, _summary(output, prepared)]))


def _summary(output: Path, prepared: Record) -> str:
    columns = ("documents", "characters", "tokens")
    rows = [["", *columns]]
    for split in SPLITS:
        rows.append([split, *(f"{prepared[column].get(split, 0):,}" for column in columns)])
    lines = [f"{output}:", *table(rows).splitlines()]
    too_short = sum(unit["too_short"] for unit in prepared["units"])
    if too_short:
        lines.append(f"left out as too short: {too_short:,}")
    for to_be, kind in (("read", "unreadable"), ("trained on", "refused")):
        count, first = left_out(prepared, kind)
        if count:
            lines += [f"left out, not to be {to_be}: {count:,}", f"  the first: {first}"]
    return "\n  ".join(lines)
