# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext prepare``: tokenize text and conversations into token files."""

import functools
from pathlib import Path
from typing import Any, Mapping, Sequence

import click
from click.core import ParameterSource

from energon_ext.cli import echo, option, table
from energon_ext.cli.cluster import run_on_ray, run_on_slurm, settings_of
from energon_ext.cli.option import INPUT, PATH
from energon_ext.cli.prepare_input import job_and_units
from energon_ext.errors import ConfigError
from energon_ext.prepare.accounts import (
    are_most_refused,
    check_files,
    list_refused,
    skipped_documents,
    units_read,
)
from energon_ext.prepare.job import Record
from energon_ext.prepare.units import run_part, run_units
from energon_ext.storage.claim import Part
from energon_ext.tokens.splits import SPLITS

ON_CLUSTER = ("executor", "tasks", "slurm", "ray", "logs", "render")


@click.command()
@click.argument("output", type=PATH)
@click.argument("files", type=INPUT, nargs=-1)
@click.option("--text", type=INPUT, multiple=True, help="UTF-8 text file with one document.")
@click.option("--separator", help="Text between documents, if a text file has several.")
@click.option("--folder", type=PATH, help="Folder of text files.")
@click.option("--glob", default="**/*.txt", help="Pattern of files in --folder.")
@click.option("--jsonl", type=INPUT, multiple=True, help="JSON Lines (.gz, .zst) file or folder.")
@click.option("--parquet", type=INPUT, multiple=True, help="Parquet file or folder.")
@click.option("--key", default="text", help="Field of a JSON object or row with the text.")
@click.option(
    "--column",
    metavar="NAME[:TYPE]",
    multiple=True,
    help="Field of a JSON object or row with a number that is kept as a column per document.  "
    "[default type: float32]",
)
@click.option("--hf-dataset", metavar="NAME", help="Hugging Face dataset: a name or a folder.")
@click.option("--hf-config", metavar="NAME", help="Configuration of --hf-dataset.")
@click.option("--hf-split", default="train", help="Split of --hf-dataset.")
@click.option("--hf-streaming", is_flag=True, help="Stream --hf-dataset without downloading it.")
@click.option("--dataset", type=PATH, help="Prepared WebDataset, or a metadataset.")
@click.option(
    "--split",
    multiple=True,
    default=SPLITS,
    help="Splits of --dataset. Two are kept as they are; one alone is divided by --val.",
)
@option.trusted_module
@click.option(
    "--val",
    type=click.FloatRange(0, 1, max_open=True),
    default=0.05,
    help="Fraction of documents for the split val, chosen by a hash of the text.",
)
@click.option("--seed", type=click.IntRange(0, 2**32), default=0, help="Seed of the val split.")
@click.option(
    "--shuffle",
    metavar="SEED",
    type=click.IntRange(0, 2**32),
    help="Write the documents in a random order.  [default: in the order of the input]",
)
@click.option("--min-chars", type=click.IntRange(1), default=1, help="Skip shorter documents.")
@click.option("--tokenizer", metavar="NAME", help="Required: 'bytes', a name or a file.")
@option.special_tokens
@click.option("--chat", is_flag=True, help="Conversations, of which only answers are trained.")
@option.answers
@click.option(
    "--on-error",
    type=click.Choice(["stop", "skip"]),
    default="stop",
    help="Stop at an unreadable document, or skip and count it. With `stop`, the exit status is 1 "
    "if most documents are refused.",
)
@option.jobs
@click.option("--check", is_flag=True, help="Only verify the files of OUTPUT by their hashes.")
@click.option("--force", is_flag=True, help="Prepare everything again, and replace OUTPUT.")
@option.part
@click.option("--executor", type=click.Choice(["slurm", "ray"]), help="Prepare on a cluster.")
@click.option("--tasks", type=click.IntRange(1), default=1, help="Number of tasks for --executor.")
@click.option("--slurm", metavar="NAME=VALUE", multiple=True, help="Option of datatrove or sbatch.")
@click.option("--ray", metavar="NAME=VALUE", multiple=True, help="Option of datatrove's executor.")
@click.option("--logs", type=PATH, help="Folder for logs of --executor.  [default: OUTPUT-logs]")
@click.option("--render", is_flag=True, help="Only print the script of --executor slurm.")
def prepare(output: Path, check: bool, force: bool, jobs: int, **options: Any) -> None:
    """Tokenize text into Megatron token files in OUTPUT.

    Give one kind of input: --text, --folder, --jsonl, --parquet, --hf-dataset or --dataset. FILES
    are more files for --text, --jsonl or --parquet, so that shell patterns work. These three also
    read from object stores: msc://PROFILE/... or s3://BUCKET/...

    \b
    energon-ext prepare data/books --text books/*.txt --tokenizer my/tokenizer.json
    energon-ext prepare data/code --folder src --glob '**/*.py' --tokenizer my/tokenizer.json
    energon-ext prepare data/web --jsonl web-*.jsonl --key content --tokenizer my/tokenizer.json
    energon-ext prepare data/tokens --dataset data/webdataset --tokenizer my/tokenizer.json
    energon-ext prepare data/chat --chat --jsonl chat.jsonl --tokenizer NAME

    The token files are OUTPUT/train/part-00000.bin and so on, and the same for val; a metadataset
    refers to them as `path: data/web/train`. With --chat, they include weights, so that only
    answers are trained on. Run the same command again to continue after an interruption.

    To share the work among 20 commands, on any machines with access to OUTPUT, give --part 0/20 to
    --part 19/20. The last one to finish publishes OUTPUT. --executor runs them on a cluster:

    \b
    energon-ext prepare data/web --jsonl web --tokenizer NAME --executor slurm --tasks 500 \\
        --slurm partition=cpu --slurm time=4:00:00
    """
    if output.is_symlink() or output.name in ("", ".."):
        output = output.resolve()
    if check:
        echo(f"{output}: {check_files(output):,} files are unchanged.")
        return
    on_cluster = {name: options.pop(name) for name in ON_CLUSTER}
    part = options.pop("part")
    if force and (part or on_cluster["executor"]):
        raise ConfigError(f"--force: cannot be combined with parts; remove {output} instead.")
    if on_cluster["executor"]:
        _prepare_on_cluster(output, part, options, on_cluster)
    elif part:
        prepare_part(output, options, part, jobs)
    else:
        job, units, splits = job_and_units(options)
        prepared, remarks = run_units(job, units, output, jobs=jobs, force=force, splits=splits)
        _show(output, prepared, remarks)
        if are_most_refused(prepared) and options["on_error"] == "stop":
            click.get_current_context().exit(1)


def prepare_part(output: Path, options: Mapping[str, Any], part: Part, jobs: int) -> None:
    """Prepare one part of an output; ``options`` are those of the command, by name."""
    job, units, splits = job_and_units(options)
    prepared, remarks = run_part(job, units, output, part, jobs=jobs, splits=splits)
    if prepared is None:
        twice = "" if job.shuffle is None else "; with --shuffle, run every part twice"
        line = f"{output}: part {part} is prepared, other parts are not{twice}."
        echo("\n".join([*remarks, line]))
    else:
        _show(output, prepared, remarks)


def _prepare_on_cluster(
    output: Path, part: Part | None, options: Mapping[str, Any], cluster: Mapping[str, Any]
) -> None:
    """Prepare an output by cluster tasks; ``cluster`` are the options in ON_CLUSTER."""
    source = click.get_current_context().get_parameter_source("jobs")
    if part or source is ParameterSource.COMMANDLINE:
        name = "--part" if part else "--jobs"
        raise ConfigError(f"--executor: sets {name} itself, from --tasks and cpus_per_task.")
    job_and_units(options)  # reports mistakes here rather than in a task's log
    executor, tasks, render = (cluster[name] for name in ("executor", "tasks", "render"))
    settings = settings_of(cluster[executor], f"--{executor}")
    make = functools.partial(prepare_part, output, options)
    logs = cluster["logs"] or output.with_name(f"{output.name}-logs")
    folders = [logs] if options["shuffle"] is None else [logs / "pass-1", logs / "pass-2"]
    if executor == "slurm":
        job_id = None
        for folder in folders[:1] if render else folders:
            job_id = run_on_slurm(make, tasks, settings, folder, render=render, after=job_id)
        return
    for folder in folders:
        run_on_ray(make, tasks, settings, folder)
    make(Part(0, tasks), 1)  # everything is prepared; prints the summary


def _show(output: Path, prepared: Record, remarks: Sequence[str]) -> None:
    columns = ("documents", "characters", "tokens")
    counts = {split: [prepared[column].get(split, 0) for column in columns] for split in SPLITS}
    rows = [[split, *(f"{count:,}" for count in counts[split])] for split in SPLITS]
    lines = [f"{output}:", *table([["", *columns], *rows]).splitlines()]
    if too_short := sum(unit["too_short"] for unit in units_read(prepared)):
        lines.append(f"skipped as too short: {too_short:,}")
    for reason, kind in (("unreadable", "unreadable"), ("invalid", "refused")):
        count, first = skipped_documents(prepared, kind)
        if count:
            listed = list_refused(prepared) if kind == "refused" else [f"the first: {first}"]
            lines += [f"skipped as {reason}: {count:,}", *(f"  {each}" for each in listed)]
    lines += [f"{note}: {count:,}" for note, count in sorted(prepared["notes"].items())]
    if are_most_refused(prepared):
        lines.append("Most documents were refused; --on-error skip accepts it.")
    echo("\n".join([*remarks, "\n  ".join(lines)]))
