# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext checkpoint``: what a checkpoint holds, before a run depends on it."""

import itertools
import textwrap
from pathlib import Path
from typing import Any, Iterator, Sequence

import click

from energon_ext.cli import echo, option, table
from energon_ext.cli.forecast import draw, made
from energon_ext.cli.forecast import show as show_forecast
from energon_ext.cli.saved import SavedCursor, saved_cursors
from energon_ext.encoders.tokenizers import load_tokenizer
from energon_ext.errors import EnergonExtError
from energon_ext.packing import packing_of, repacking
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.plan.rows import PlannedRows
from energon_ext.state.files import write_file
from energon_ext.state.match import ENCODER, SourceChange


@click.group()
def checkpoint() -> None:
    """Look into a checkpoint.

    Example: energon-ext checkpoint diff runs/a mix.yaml
    """


_packing = option.together(
    click.option(
        "--seq-length", type=click.IntRange(2), help="Positions of a row in the next run."
    ),
    click.option("--packing", help="Of the next run."),
)


@checkpoint.command()
@click.argument("saved", metavar="CHECKPOINT", type=option.PATH)
def show(saved: Path) -> None:
    """Show what the newest data state of CHECKPOINT holds; no data is read.

    CHECKPOINT is the folder of a run, of one checkpoint, or of Megatron-LM's data states.

    Example: energon-ext checkpoint show runs/a
    """
    cursor = saved_cursors(saved)[-1]
    state, begun = cursor.state, ""
    if cursor.inside:
        begun = f", {state['done']:,} rows of the next one, on {cursor.inside['ranks']} rank(s)"
    echo(f"{cursor.folder}: {cursor.step:,} steps of {state['rows_per_step']:,} rows{begun}")
    echo(f"breakpoints count {state['axis']}")
    echo(", ".join(f"{k}={v!r}" for k, v in sorted(state["fingerprint"].items())))
    rows = [("source", "documents read", "tokens read")]
    for key, source in state["plan"]["sources"].items():
        rows.append((key, f"{source['documents']:,}", f"{source['tokens']:,}"))
    echo(textwrap.indent(table(rows), "  "))


@checkpoint.command()
@click.argument("saved", metavar="CHECKPOINT", type=option.PATH)
@option.metadataset
@option.split
@click.option(
    "--world-size", "ranks", type=click.IntRange(1), help="Data-parallel ranks of the next run."
)
@click.option(
    "--num-workers", "workers", type=click.IntRange(0), default=0, help="Workers of a rank in it."
)
@click.option("--tokenizer", help="Of the next run; by default that of the saved one.")
@option.special_tokens
@_packing
@option.trusted_module
@click.pass_context
def diff(
    ctx: click.Context,
    /,
    saved: Path,
    metadataset: Path,
    tokenizer: str | None,
    eos_token: str | None,
    bos_token: str | None,
    seq_length: int | None,
    packing: str | None,
    **options: Any,
) -> None:
    """Show what a resume from CHECKPOINT does with every source of METADATASET.

    CHECKPOINT is the folder of a run (its newest checkpoint is taken), of one checkpoint, or of
    Megatron-LM's data states. The data is built and restored by the code that a run resumes with.
    What no option says of the next run is as the saved one had it. Ends with 1 where the resume
    would be refused.

    Example: energon-ext checkpoint diff runs/a mix.yaml --world-size 64
    """
    cursor = saved_cursors(saved)[-1]
    rows = cursor.state["plan"]["row"] + cursor.state["done"]
    echo(f"{cursor.folder}: planned, after {rows:,} rows")
    encoder: dict[str, Any] = {"seq_len": seq_length, "packing": packing}
    try:
        if tokenizer is not None:
            encoder["tokenizer"] = load_tokenizer(
                tokenizer, eos_token=eos_token, bos_token=bos_token
            )
        dataset = cursor.dataset(metadataset, encoder=encoder, **options)
        changes = dataset.continue_from(cursor.state)
    except EnergonExtError as error:
        echo(f"refused: {' '.join(str(error).split())}")
        ctx.exit(1)
    echo(_changes(changes))
    unit = dataset.clock.axis.change_from(cursor.state["axis"])
    packed = repacking(cursor.state["fingerprint"], dataset.fingerprint)
    others = _skipped(cursor, dataset), _moved_documents(dataset)
    for line in filter(None, (unit, packed, *itertools.chain(*others))):
        echo(line)
    may_change = {}
    if not cursor.inside and all(rows.may_be_repacked for rows in dataset.rows):
        may_change = packing_of(dataset.fingerprint)
    stays = {k: v for k, v in dataset.fingerprint.items() if k not in (ENCODER, *may_change)}
    for what, fields in (("must stay", stays), ("may change", may_change)):
        if fields:
            echo(f"{what}: " + ", ".join(f"{k}={v!r}" for k, v in sorted(fields.items())))
    possible = "any number of ranks and workers"
    if cursor.inside:
        possible = f"{cursor.inside['ranks']} rank(s), as it was saved inside a step"
    echo(f"possible on {possible}")


@checkpoint.command()
@click.argument("saved", metavar="CHECKPOINT", type=option.PATH)
@option.metadataset
@option.split
@click.option("--steps", type=option.Count(1), required=True, help="Optimizer steps to forecast.")
@_packing
@click.option("--global-batch-size", type=option.Count(1), help="Rows of a step in the next run.")
@option.forecast
@option.trusted_module
def forecast(
    saved: Path,
    metadataset: Path,
    steps: int,
    seq_length: int | None,
    packing: str | None,
    global_batch_size: int | None,
    exact: bool,
    png: Path | None,
    html: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Forecast the steps of METADATASET that follow CHECKPOINT.

    What `energon-ext plan --steps` says of a run from its beginning: tokens, documents and epochs
    of every source, those before CHECKPOINT included in the epochs, and when which ends. What no
    option says of the next run is as the saved one had it. A step that was partly read is counted
    whole.

    \b
    energon-ext checkpoint forecast runs/a mix.yaml --steps 5k --seq-length 32768
    """
    cursor = saved_cursors(saved)[-1]
    dataset = cursor.dataset(
        metadataset,
        encoder={"seq_len": seq_length, "packing": packing},
        rows_per_step=global_batch_size,
        **options,
    )
    dataset.continue_from(cursor.state)
    found = made(dataset, steps, None, exact, cursor.state)
    show_forecast(found, dataset, steps, as_json)
    draw(found, metadataset.name, png, html)


@checkpoint.command()
@click.argument("saved", metavar="CHECKPOINT", type=option.PATH)
@option.metadataset
@option.split
@option.trusted_module
def reweight(saved: Path, metadataset: Path, **options: Any) -> None:
    """Discard the live weights of METADATASET that CHECKPOINT has not used.

    A resume from CHECKPOINT then waits for new ones from its step on. Every line that goes is
    printed. End the run before; later checkpoints are refused afterwards.

    Example: energon-ext checkpoint reweight runs/a/checkpoints/iter_0001200 mix.yaml
    """
    cursor = saved_cursors(saved)[-1]
    dataset = cursor.dataset(metadataset, **options)
    dataset.continue_from(cursor.state)
    begun = cursor.step + (cursor.state["done"] > 0)
    for live in dataset.live_weights:
        for number, line in enumerate(live.lines, 1):
            if line.from_step >= begun:
                echo(f"{live.path}: discarded {line.to_bytes().decode().rstrip()}")
            elif line.stop > begun:
                echo(f"{live.path}: line {number} ends with step {begun - 1}")
        write_file(live.path, b"".join(line.to_bytes() for line in live.before(begun)))
        echo(f"{live.path}: step {begun} is the first without a line")


def _skipped(cursor: SavedCursor, dataset: PlannedDataset) -> Iterator[str]:
    """List the steps that were skipped, and those that will be."""
    ahead = [
        (max(begin, cursor.step), stop) for begin, stop in dataset.clock.skip if stop > cursor.step
    ]
    for what, ranges in (("skipped", cursor.state["skipped"]), ("to be skipped", ahead)):
        if named := ", ".join(f"{begin:,} to {stop - 1:,}" for begin, stop in ranges):
            yield f"steps {what}: {named}"


def _moved_documents(dataset: PlannedDataset) -> Iterator[str]:
    """Count the documents that are packed again, that are left out, and that come back."""
    for key, rows in zip(dataset.keys, dataset.rows):
        if not isinstance(rows, PlannedRows):
            continue
        anew = set() if rows.window.taken is not None else set(rows.window.documents.tolist())
        excluded = set(rows.excluded.tolist())
        counts = {
            "not yet drawn are packed anew": len(anew),
            "are excluded": len(excluded),
            "that were excluded come back": len({*rows.window.excluded.tolist()} - excluded),
        }
        yield from (f"{key}: {n:,} documents {what}" for what, n in counts.items() if n)


def _changes(changes: Sequence[SourceChange]) -> str:
    rows = [("source", "resume", "documents read", "tokens read")]
    for change in changes:
        was = f" (was {change.saved_key})" if change.saved_key else ""
        read = f"{change.documents:,}", f"{change.tokens:,}"
        rows.append((change.key, change.change + was, *read))
    return textwrap.indent(table(rows, left=2), "  ")
