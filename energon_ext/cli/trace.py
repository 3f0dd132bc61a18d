# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext trace``: show the documents of a step, or the steps that read a document."""

import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import click
from tqdm import tqdm

from energon_ext.arguments import choices
from energon_ext.cli import echo, echo_json, option
from energon_ext.cli.mix import warn_of_undecided_weights
from energon_ext.cli.saved import SavedCursor, saved_cursors
from energon_ext.documents.origins import origins_of
from energon_ext.encoders.tokenizers import load_tokenizer
from energon_ext.errors import ConfigError, printable
from energon_ext.packing import repacking
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.plan.step import Step
from energon_ext.plan.trace import TracedRow, rows_of
from energon_ext.samples.rows import SampleRows
from energon_ext.splice.source import SpliceSource
from energon_ext.state.match import KEPT, compare_sources, match_sources


@click.command()
@click.argument("run", type=option.PATH)
@option.metadataset
@click.option("--step", type=option.Count(0), help="Step to show, counted from 0.")
@click.option(
    "--document", metavar="SOURCE:NUMBER", help="Show steps that read this document, up to --step."
)
@click.option("--rank", type=click.IntRange(0), help="Show only rows of this data-parallel rank.")
@click.option(
    "--world-size", "ranks", type=click.IntRange(1), default=1, help="Data-parallel ranks."
)
@click.option(
    "--micro-batch-size", "batch_size", type=click.IntRange(1), default=1, help="Rows per batch."
)
@click.option(
    "--global-batch-size", "rows_per_step", type=click.IntRange(1), help="Rows per step of the run."
)
@click.option("--tokenizer", help="Tokenizer, to show the beginning of each document as text.")
@option.split
@option.encoder
@option.trusted_module
@option.as_json
def trace(
    run: Path,
    metadataset: Path,
    step: int | None,
    document: str | None,
    tokenizer: str | None,
    rank: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show which documents a step of RUN read, and from which files.

    RUN is the folder of a run, of its checkpoints, or of Megatron-LM's --dataloader-save. Each row
    is shown with its rank and micro-batch. The command plans again from the newest state before the
    step, or from the beginning, with METADATASET as it is now; it reads no tokens. Steps of a plan
    count from 0: step 5 is the sixth optimizer step.

    \b
    energon-ext trace runs/a mix.yaml --step 1203 --world-size 64 --rank 7
    energon-ext trace runs/a mix.yaml --document web:17
    """
    cursors = saved_cursors(run)

    def open_blend(cursor: SavedCursor) -> PlannedDataset:
        return cursor.dataset(metadataset, **options)

    if document is not None:
        last = cursors[-1].step - 1 if step is None else step
        _show_document(cursors, open_blend, document, last, as_json)
        return
    if step is None:
        raise ConfigError("Give the --step to show, or the --document to search for.")
    before = [cursor for cursor in cursors if cursor.step <= step]
    cursor = before[-1] if before else cursors[0]
    blend = open_blend(_with_packing_after(cursors, cursor) if before else cursor)
    _print_changes(cursor, blend)
    if rank is not None and rank >= blend.topology.ranks:
        raise ConfigError(f"--rank {rank}: must be below {blend.topology.ranks}; see --world-size.")
    if blend.clock.is_skipped(step):
        click.echo(f"Step {step} is skipped by the metadataset.", err=True)
    warn_of_undecided_weights(blend, step)
    decode = load_tokenizer(tokenizer).decode if tokenizer else None
    start, state = (cursor.step, cursor.state) if before else (0, None)
    rows = list(_rows(blend, start, blend.planned_steps(state), step, step))
    if not rows:
        raise ConfigError(f"--step {step}: all sources are exhausted before it.")
    for _, row in rows:
        if rank in (None, row.rank):
            files = _files(row, blend, decode)
            text = "\n    ".join([_where(row), *(file["text"] for file in files)])
            _print({"step": step, **row.to_json(), "files": files}, as_json, text)


def _print_changes(cursor: SavedCursor, blend: PlannedDataset) -> None:
    for change in compare_sources([cursor.state["plan"]["sources"]], blend.source_names):
        if change.change != KEPT:
            click.echo(f"{change.key}: {change.change} since the saved state.", err=True)
    if line := blend.clock.axis.change_from(cursor.state["axis"]):
        click.echo(line, err=True)


def _with_packing_after(cursors: Sequence[SavedCursor], cursor: SavedCursor) -> SavedCursor:
    """Return the cursor with the packing after ``cursor``: the next one if packing changed."""
    later = next((other for other in cursors if other.step > cursor.step), cursor)
    is_changed = repacking(cursor.state["fingerprint"], later.state["fingerprint"])
    return later if is_changed else cursor


def _show_document(
    cursors: Sequence[SavedCursor],
    open_blend: Callable[[SavedCursor], PlannedDataset],
    text: str,
    last: int,
    as_json: bool,
) -> None:
    """Print the steps up to ``last`` that read a document; planning restarts at every state.

    Steps between two states count only if planning from the first leads to the second.
    """
    later = [cursor for cursor in cursors if 0 < cursor.step <= last]
    starts = [0, *(cursor.step for cursor in later)]
    ends = [*(start - 1 for start in starts[1:]), last]
    unread: list[tuple[int, int]] = []
    is_read = False
    for before, start, end, after in zip([None, *later], starts, ends, [*later, None]):
        packed = _with_packing_after(cursors, before) if before else cursors[0]
        blend = open_blend(after or packed)
        source, number = _document(text, blend)
        steps = blend.planned_steps(None if before is None else before.state)
        reads = [
            (step, row)
            for step, row in _rows(blend, start, steps, start, end)
            if row.source == source and any(other == number for other, *_ in row.contents)
        ]
        if after is not None and not _has_reached(blend, after):
            reason = "the rows that were read differ from the current plan"
            advice = "give the metadataset used at that time"
            click.echo(f"Steps {start} to {end}: {reason}; {advice}.", err=True)
            continue
        for step, row in reads:
            skipped = ", skipped" if blend.clock.is_skipped(step) else ""
            where = f"step {step}{skipped}, {_where(row)}"
            _print({"step": step, **row.to_json()}, as_json, where)
        is_read = is_read or bool(reads)
        begin = unread.pop()[0] if unread and unread[-1][1] == start - 1 else start
        unread.append((begin, end))
    if unread and not is_read:
        ranges = ", ".join(f"{start} to {end}" for start, end in unread)
        click.echo(f"{printable(text)}: not read in steps {ranges}.", err=True)


def _has_reached(blend: PlannedDataset, cursor: SavedCursor) -> bool:
    """Return True if the sources of a plan are at the positions of a cursor."""
    blend.plan.begin_here()
    plan = blend.plan.to_json(blend.plan.advance(), list(blend.source_names.values()))
    saved = cursor.state["plan"]["sources"]
    matched = match_sources(saved, blend.source_names)
    return all(
        key in matched and source["rows"] == saved[matched[key]]["rows"]
        for key, source in json.loads(json.dumps(plan["sources"])).items()
    )


def _rows(
    blend: PlannedDataset, start: int, steps: Iterator[Step], first: int, last: int
) -> Iterator[tuple[int, TracedRow]]:
    """Yield the rows of steps ``first`` to ``last``; ``steps`` starts with step ``start``."""
    count = last + 1 - start
    planned = tqdm(
        itertools.islice(steps, count), "planning", count, unit="step", leave=False, disable=None
    )
    for number, step in enumerate(planned, start):
        if number >= first:
            for row in rows_of(step, blend.topology, blend.keys):
                yield number, _numbered(row, blend)


def _numbered(row: TracedRow, blend: PlannedDataset) -> TracedRow:
    """Replace a splice's own document indices with the document numbers of its source."""
    rows = None if row.source is None else blend.sources[row.source].rows
    if not isinstance(rows, SpliceSource):
        return row
    numbers = [metadata["document"] for metadata in rows.metadata]
    contents = [(numbers[chosen], start, stop) for chosen, start, stop in row.contents]
    return dataclasses.replace(row, contents=contents)


def _document(text: str, blend: PlannedDataset) -> tuple[str, int]:
    """Parse ``SOURCE:NUMBER``, with the key or the name of a source, and return key and number."""
    name, _, number = text.rpartition(":")
    keys = {title: key for key, title in blend.names.items()}
    source = keys.get(name, name)
    if source not in blend.sources or not re.fullmatch("[0-9]{1,18}", number):
        known = choices(name, [*blend.sources, *keys])
        raise ConfigError(f"--document {text}: SOURCE:NUMBER is needed; the sources are {known}")
    count = blend.sources[source].documents
    if int(number) >= count:
        raise ConfigError(f"--document {text}: {source} has {count:,} documents, counted from 0.")
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
    """Return the file, position and first words of each content of a row."""
    if row.source is None:
        return []
    rows = blend.sources[row.source].rows
    files: list[dict[str, Any]] = []
    for document, start, stop in row.contents:
        text = f"document {document} [{start}, {stop})"
        if isinstance(rows, SpliceSource):
            files.append({"document": document, "text": text})
            continue
        origin: str | None
        if isinstance(rows, SampleRows):
            number = document
            file, origin = rows.place_of(number)
            text = f"sample {number}, {origin} of {file}"
        else:
            file, number = rows.documents.file_of(document)
            origins = origins_of(file) or ()
            origin = origins[number] if number < len(origins) else None
            text += f", number {number} of {file}" + (f" (from {origin})" if origin else "")
            if decode is not None:
                tokens = rows.documents.document(document)[start : min(stop, start + 24)]
                text += f": {decode(tokens.tolist())!r}"
        place = {"file": file, "number": number, "origin": origin, "text": text}
        files.append({"document": document, **place})
    return files


def _print(content: dict[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        echo_json(content)
    else:
        echo(text)
