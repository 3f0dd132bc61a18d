# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext trace``: which documents a step of a run reads, and which steps read a document."""

import contextlib
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from megatron.energon.state import FlexState
from tqdm import tqdm

from energon_ext.cli import echo
from energon_ext.cli.resume import EncoderOfState, SavedData
from energon_ext.documents.origins import origins_of
from energon_ext.encoders.tokenizers import load_tokenizer
from energon_ext.errors import ConfigError
from energon_ext.loader.compare import names_of
from energon_ext.plan.dataset import BlendedDataset
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.step import Step
from energon_ext.plan.trace import TracedRow, rows_of
from energon_ext.state.checkpoint_folder import checkpoints_in, cursors_in
from energon_ext.state.match import KEPT, compare_sources


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("metadataset", type=click.Path(path_type=Path))
@click.option(
    "--step", type=click.IntRange(0, 10**12), required=True, help="Steps before it: 0 is first."
)
@click.option("--document", metavar="SOURCE:NUMBER", help="Which steps up to --step read it.")
@click.option("--rank", type=click.IntRange(0), help="Only the rows of this data-parallel rank.")
@click.option("--world-size", type=click.IntRange(1), default=1, help="Data-parallel ranks.")
@click.option("--micro-batch-size", type=click.IntRange(1), default=1, help="Rows of a batch.")
@click.option("--global-batch-size", type=click.IntRange(1), help="Rows of a step, if not known.")
@click.option("--tokenizer", help="Show the beginning of each document as text.")
@click.option("--split", default="train", help="Split of the metadataset.")
@click.option("--trusted-module", multiple=True, help="A module that the YAML may name.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a row, or a step.")
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
    """Show every row of a step of RUN: source, documents, tokens of them, rank, micro-batch, file.

    RUN is the folder of a run, of its checkpoints, or Megatron-LM's --dataloader-save. The plan is
    made again from its newest state before the step, with METADATASET as it is now; from the
    beginning where there is none. No token is read. The steps of a plan count from 0: step 5 is
    read by the sixth optimizer step.

    Example: energon-ext trace runs/a mix.yaml --step 1203 --world-size 64 --rank 7
    """
    with contextlib.redirect_stdout(sys.stderr):  # Energon says there what it opens
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
            described = _described(row, blend, decode)
            lines = [_where(row), *(f"    {each['text']}" for each in described)]
            _say({"step": step, **row.to_json(), "files": described}, as_json, "\n".join(lines))


def _planned(
    run: Path,
    metadataset: Path,
    step: int,
    *,
    split: str,
    trusted_module: tuple[str, ...],
    world_size: int,
    micro_batch_size: int,
    global_batch_size: int | None,
) -> tuple[BlendedDataset, int, Iterator[Step]]:
    """The blend, the number of the first step that is planned, and all steps from there on."""
    states = []
    for folder in checkpoints_in(run):
        rank, state = next(cursors_in(folder))  # the cursor, or that of any rank: all have the same
        states.append(SavedData(state, {}) if rank is None else SavedData(None, {0: state}))
    if not states:
        has = "data.json, and no iter_* of Megatron-LM"
        raise ConfigError(f"{run}: no checkpoint with a {has}; a planned run has them.")
    states.sort(key=lambda state: (state.blends[0]["plan"]["step"], state.blends[0]["done"]))
    before = [state for state in states if state.blends[0]["plan"]["step"] <= step]
    saved = (before or states)[-1 if before else 0]
    plan = saved.blends[0]["plan"]
    rows = global_batch_size or saved.rows_per_step
    if rows is None and (not plan["step"] or plan["row"] % plan["step"]):
        raise ConfigError(
            f"{run}: {plan['row']} rows in {plan['step']} steps do not say how many rows a step "
            f"has; give --global-batch-size."
        )
    rows = rows or plan["row"] // plan["step"]
    data = {"path": metadataset, "split_part": split, "trusted_modules": trusted_module}
    encoder = EncoderOfState(saved)
    blend = find_blend(saved.dataset(encoder, data, 0, world_size, 0, micro_batch_size, rows))
    unknown = [
        key for key, source in blend.sources.items() if not hasattr(source.rows, "documents")
    ]
    if unknown:
        raise ConfigError(f"{unknown[0]}: is streamed or spliced; only token files are traced.")
    for change in compare_sources(saved.blends, names_of(blend)):
        if change.change != KEPT:
            click.echo(f"{change.key}: {change.change}, beside the saved state.", err=True)
    if not before:
        return blend, 0, blend.planned_steps()
    # The step that is open is planned from its beginning; which of its rows are out says nothing.
    state = FlexState({**saved.blends[0], "done": 0, "inside": None})
    return blend, plan["step"], blend.planned_steps(state)


def _rows(
    blend: BlendedDataset, start: int, steps: Iterator[Step], first: int, last: int
) -> Iterator[tuple[int, TracedRow]]:
    """The rows of the steps from ``first`` to ``last``; planning begins at ``start``."""
    count = last + 1 - start
    planned = tqdm(itertools.islice(steps, count), "planning", count, unit="step")
    for number, step in enumerate(planned, start):
        if number >= first:
            for row in rows_of(step, blend.topology):
                yield number, row


def _document(text: str, blend: BlendedDataset) -> tuple[str, int]:
    source, _, number = text.rpartition(":")
    if source not in blend.sources or not number.isdecimal():
        known = ", ".join(blend.keys[:4])
        raise ConfigError(f"--document {text}: SOURCE:NUMBER is needed; sources are {known}.")
    rows: Any = blend.sources[source].rows
    if int(number) >= len(rows.documents):
        raise ConfigError(f"--document {text}: {source} has {len(rows.documents):,} documents.")
    return source, int(number)


def _where(row: TracedRow) -> str:
    place = f"row {row.row}, rank {row.rank}, micro-batch {row.micro_batch}"
    if row.source is None:
        return f"{place}: padding"
    tokens = sum(stop - start for _, start, stop in row.contents)
    return f"{place}: {row.source}, {len(row.contents)} documents, {tokens:,} tokens"


def _described(
    row: TracedRow, blend: BlendedDataset, decode: Callable[[list[int]], str] | None
) -> list[dict[str, Any]]:
    """Where in which file the contents of a row are, and how they begin."""
    if row.source is None:
        return []
    rows: Any = blend.sources[row.source].rows
    files, found = rows.documents, []
    for document, start, stop in row.contents:
        prefix, number = files.file_of(document)
        text = f"document {document} [{start}, {stop}), number {number} of {prefix}"
        origins = origins_of(prefix)
        origin = origins[number] if origins is not None and number < len(origins) else None
        text += f" (from {origin})" if origin else ""
        if decode is not None:
            beginning = decode(files.document(document)[start : min(stop, start + 24)].tolist())
            text += f": {beginning!r}"
        where = {"file": prefix, "number": number, "origin": origin}
        found.append({"document": document, **where, "text": text})
    return found


def _say(content: Mapping[str, Any], as_json: bool, text: str) -> None:
    echo(json.dumps(content) if as_json else text)
