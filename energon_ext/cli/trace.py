# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext trace``: the documents that a step reads, and the steps that read a document."""

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
from energon_ext.cli.mix import tell_undecided
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
@click.option("--step", type=option.Count(0), help="Steps before it: 0 is first.")
@click.option(
    "--document",
    metavar="SOURCE:NUMBER",
    help="Show every step that read it, up to --step or to the newest state.",
)
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
    step: int | None,
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
        raise ConfigError("--step: a number is needed, or a --document whose steps are shown.")
    before = [each for each in cursors if each.step <= step]
    cursor = before[-1] if before else cursors[0]
    blend = open_blend(_packed_then(cursors, cursor) if before else cursor)
    _say_changes(cursor, blend)
    if rank is not None and rank >= blend.topology.ranks:
        raise ConfigError(f"--rank {rank}: of {blend.topology.ranks}; see --world-size.")
    if blend.clock.is_skipped(step):
        click.echo(f"Step {step} is skipped: the metadataset says so.", err=True)
    tell_undecided(blend, step)
    decode = load_tokenizer(tokenizer).decode if tokenizer else None
    start, state = (cursor.step, cursor.state) if before else (0, None)
    rows = list(_rows(blend, start, blend.planned_steps(state), step, step))
    if not rows:
        raise ConfigError(f"--step {step}: the run ends before it; all sources have ended.")
    for _, row in rows:
        if rank in (None, row.rank):
            files = _files(row, blend, decode)
            text = "\n    ".join([_where(row), *(each["text"] for each in files)])
            _say({"step": step, **row.to_json(), "files": files}, as_json, text)


def _say_changes(cursor: SavedCursor, blend: PlannedDataset) -> None:
    for change in compare_sources([cursor.state["plan"]["sources"]], blend.source_names):
        if change.change != KEPT:
            click.echo(f"{change.key}: {change.change}, beside the saved state.", err=True)
    if said := blend.clock.axis.change_from(cursor.state["axis"]):
        click.echo(said, err=True)


def _packed_then(cursors: Sequence[SavedCursor], cursor: SavedCursor) -> SavedCursor:
    """The cursor that has the packing of the steps behind one: the next, where it was changed."""
    later = next((each for each in cursors if each.step > cursor.step), cursor)
    is_changed = repacking(cursor.state["fingerprint"], later.state["fingerprint"])
    return later if is_changed else cursor


def _show_document(
    cursors: Sequence[SavedCursor],
    open_blend: Callable[[SavedCursor], PlannedDataset],
    text: str,
    last: int,
    as_json: bool,
) -> None:
    """Print the steps up to one that read a document; every state puts the plan right again.

    Steps between two states count where their plan leads from the one to the other.
    """
    later = [each for each in cursors if 0 < each.step <= last]
    starts = [0, *(each.step for each in later)]
    ends = [*(start - 1 for start in starts[1:]), last]
    unread: list[tuple[int, int]] = []
    is_read = False
    for before, start, end, after in zip([None, *later], starts, ends, [*later, None]):
        blend = open_blend(after or (_packed_then(cursors, before) if before else cursors[0]))
        source, number = _document(text, blend)
        steps = blend.planned_steps(None if before is None else before.state)
        found = [
            (step, row)
            for step, row in _rows(blend, start, steps, start, end)
            if row.source == source and any(each == number for each, *_ in row.contents)
        ]
        if after is not None and not _has_reached(blend, after):
            said = f"Steps from {start} to {end}: other rows were read than are planned now"
            click.echo(f"{said}; name the metadataset of that time.", err=True)
            continue
        for step, row in found:
            skipped = ", skipped" if blend.clock.is_skipped(step) else ""
            where = f"step {step}{skipped}, {_where(row)}"
            _say({"step": step, **row.to_json()}, as_json, where)
        is_read = is_read or bool(found)
        begin = unread.pop()[0] if unread and unread[-1][1] == start - 1 else start
        unread.append((begin, end))
    if unread and not is_read:
        named = ", ".join(f"from {start} to {end}" for start, end in unread)
        click.echo(f"{printable(text)}: not read in the steps {named}.", err=True)


def _has_reached(blend: PlannedDataset, cursor: SavedCursor) -> bool:
    """True if the sources of a plan are at the positions of a cursor."""
    blend.plan.begin_here()
    plan = blend.plan.to_json(blend.plan.advance(), list(blend.source_names.values()))
    saved = cursor.state["plan"]["sources"]
    matched = match_sources(saved, blend.source_names)
    return all(
        key in matched and own["rows"] == saved[matched[key]]["rows"]
        for key, own in json.loads(json.dumps(plan["sources"])).items()
    )


def _rows(
    blend: PlannedDataset, start: int, steps: Iterator[Step], first: int, last: int
) -> Iterator[tuple[int, TracedRow]]:
    """The rows of the steps from ``first`` to ``last``; planning begins at ``start``."""
    count = last + 1 - start
    planned = tqdm(
        itertools.islice(steps, count), "planning", count, unit="step", leave=False, disable=None
    )
    for number, step in enumerate(planned, start):
        if number >= first:
            for row in rows_of(step, blend.topology, blend.keys):
                yield number, _numbered(row, blend)


def _numbered(row: TracedRow, blend: PlannedDataset) -> TracedRow:
    """A row with the numbers of documents in their source; a splice has chosen some of them."""
    rows = None if row.source is None else blend.sources[row.source].rows
    if not isinstance(rows, SpliceSource):
        return row
    numbers = [about["document"] for about in rows.metadata]
    contents = [(numbers[chosen], start, stop) for chosen, start, stop in row.contents]
    return dataclasses.replace(row, contents=contents)


def _document(text: str, blend: PlannedDataset) -> tuple[str, int]:
    """The key of a source, which may be given by its name, and a number of a document."""
    name, _, number = text.rpartition(":")
    keys = {shown: key for key, shown in blend.names.items()}
    source = keys.get(name, name)
    if source not in blend.sources or not re.fullmatch("[0-9]{1,18}", number):
        known = choices(name, [*blend.sources, *keys])
        raise ConfigError(f"--document {text}: SOURCE:NUMBER is needed; sources are {known}")
    count = blend.sources[source].documents
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
    """File, position and first words of the contents of a row."""
    if row.source is None:
        return []
    rows = blend.sources[row.source].rows
    found: list[dict[str, Any]] = []
    for document, start, stop in row.contents:
        text = f"document {document} [{start}, {stop})"
        if isinstance(rows, SpliceSource):
            found.append({"document": document, "text": text})
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
        found.append({"document": document, **place})
    return found


def _say(content: dict[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        echo_json(content)
    else:
        echo(text)
