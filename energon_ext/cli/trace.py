# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext trace``: which documents a step of a run reads, and which steps read a document."""

import itertools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from tqdm import tqdm

from energon_ext.cli import echo, echo_json, option
from energon_ext.cli.saved import saved_cursors
from energon_ext.documents.origins import origins_of
from energon_ext.encoders.tokenizers import load_tokenizer
from energon_ext.errors import ConfigError
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.plan.rows import PlannedRows
from energon_ext.plan.step import Step
from energon_ext.plan.trace import TracedRow, rows_of
from energon_ext.samples.rows import SampleRows
from energon_ext.state.match import KEPT, compare_sources


@click.command()
@click.argument("run", type=option.PATH)
@option.metadataset
@click.option(
    "--step", type=click.IntRange(0, 10**12), required=True, help="Steps before it: 0 is first."
)
@click.option("--document", metavar="SOURCE:NUMBER", help="Which steps up to --step read it.")
@click.option("--rank", type=click.IntRange(0), help="Only the rows of this data-parallel rank.")
@click.option(
    "--world-size", "ranks", type=click.IntRange(1), default=1, help="Data-parallel ranks."
)
@click.option(
    "--micro-batch-size", "batch_size", type=click.IntRange(1), default=1, help="Rows of a batch."
)
@click.option(
    "--global-batch-size",
    "rows_per_step",
    type=click.IntRange(1),
    help="Rows of a step, if not known.",
)
@click.option("--tokenizer", help="Show the beginning of each document as text.")
@option.split
@option.trusted_module
@option.as_json
def trace(
    run: Path,
    metadataset: Path,
    step: int,
    document: str | None,
    tokenizer: str | None,
    rank: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show every row of a step of RUN: its documents, rank, micro-batch and files.

    RUN is the folder of a run, of its checkpoints, or Megatron-LM's --dataloader-save. The plan is
    made again from its newest state before the step, with METADATASET as it is now; from the
    beginning where there is none. No token is read. The steps of a plan count from 0: step 5 is
    read by the sixth optimizer step.

    Example: energon-ext trace runs/a mix.yaml --step 1203 --world-size 64 --rank 7
    """
    blend, start, steps = _planned(run, metadataset, step, **options)
    if document is not None:
        source, number = _document(document, blend)
        for found, row in _rows(blend, start, steps, start, step):
            if row.source == source and any(each == number for each, *_ in row.contents):
                skipped = ", skipped" if blend.clock.is_skipped(found) else ""
                text = f"step {found}{skipped}, {_where(row)}"
                _say({"step": found, **row.to_json()}, as_json, text)
        return
    if rank is not None and rank >= blend.topology.ranks:
        raise ConfigError(f"--rank {rank}: of {blend.topology.ranks}; see --world-size.")
    if blend.clock.is_skipped(step):
        click.echo(f"Step {step} is skipped: the metadataset says so.", err=True)
    decode = load_tokenizer(tokenizer).decode if tokenizer else None
    rows = list(_rows(blend, start, steps, step, step))
    if not rows:
        raise ConfigError(f"--step {step}: the run ends before it; all sources have ended.")
    for _, row in rows:
        if rank in (None, row.rank):
            files = _files(row, blend, decode)
            text = "\n    ".join([_where(row), *(each["text"] for each in files)])
            _say({"step": step, **row.to_json(), "files": files}, as_json, text)


def _planned(
    run: Path, metadataset: Path, step: int, **options: Any
) -> tuple[PlannedDataset, int, Iterator[Step]]:
    """The blend, the number of the first step that is planned, and all steps from there on."""
    cursors = saved_cursors(run)
    before = [each for each in cursors if each.step <= step]
    cursor = before[-1] if before else cursors[0]
    blend = cursor.dataset(metadataset, **options)
    for key, source in blend.sources.items():
        if not isinstance(source.rows, PlannedRows):
            raise ConfigError(f"{key}: is spliced; only documents in rows are traced.")
    for change in compare_sources([cursor.state["plan"]["sources"]], blend.source_names):
        if change.change != KEPT:
            click.echo(f"{change.key}: {change.change}, beside the saved state.", err=True)
    start, state = (cursor.step, cursor.state) if before else (0, None)
    return blend, start, blend.planned_steps(state)


def _rows(
    blend: PlannedDataset, start: int, steps: Iterator[Step], first: int, last: int
) -> Iterator[tuple[int, TracedRow]]:
    """The rows of the steps from ``first`` to ``last``; planning begins at ``start``."""
    count = last + 1 - start
    planned = tqdm(itertools.islice(steps, count), "planning", count, unit="step")
    for number, step in enumerate(planned, start):
        if number >= first:
            for row in rows_of(step, blend.topology, blend.keys):
                yield number, row


def _document(text: str, blend: PlannedDataset) -> tuple[str, int]:
    source, _, number = text.rpartition(":")
    if source not in blend.sources or not re.fullmatch("[0-9]{1,18}", number):
        known = ", ".join(blend.keys[:4])
        raise ConfigError(f"--document {text}: SOURCE:NUMBER is needed; sources are {known}.")
    count = len(blend.sources[source].rows.documents)
    if int(number) >= count:
        raise ConfigError(f"--document {text}: {source} has {count:,} documents.")
    return source, int(number)


def _where(row: TracedRow) -> str:
    place = f"row {row.row}, rank {row.rank}, micro-batch {row.micro_batch}"
    if row.source is None:
        return f"{place}: padding"
    tokens = sum(stop - start for _, start, stop in row.contents)
    return f"{place}: {row.source}, {len(row.contents)} documents, {tokens:,} tokens"


def _files(
    row: TracedRow, blend: PlannedDataset, decode: Callable[[list[int]], str] | None
) -> list[dict[str, Any]]:
    """Where in which file the contents of a row are, and how they begin."""
    if row.source is None:
        return []
    rows = blend.sources[row.source].rows
    if isinstance(rows, SampleRows):
        return [_sample(rows, number) for number, *_ in row.contents]
    files, found = rows.documents, []
    for document, start, stop in row.contents:
        prefix, number = files.file_of(document)
        text = f"document {document} [{start}, {stop}), number {number} of {prefix}"
        origins = origins_of(prefix) or ()
        origin = origins[number] if number < len(origins) else None
        text += f" (from {origin})" if origin else ""
        if decode is not None:
            beginning = decode(files.document(document)[start : min(stop, start + 24)].tolist())
            text += f": {beginning!r}"
        found.append(
            {"document": document, "file": prefix, "number": number, "origin": origin, "text": text}
        )
    return found


def _sample(rows: SampleRows, number: int) -> dict[str, Any]:
    shard, key = rows.place_of(number)
    text = f"sample {number}, {key} of {shard}"
    return {"document": number, "file": shard, "number": number, "origin": key, "text": text}


def _say(content: dict[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        echo_json(content)
    else:
        echo(text)
