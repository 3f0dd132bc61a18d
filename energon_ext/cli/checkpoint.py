# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext checkpoint``: inspect a checkpoint before a run depends on it."""

import textwrap
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence

import click

from energon_ext.cli import echo, option, table
from energon_ext.cli.forecast import draw_forecast, make_forecast, show_forecast
from energon_ext.cli.mix import refuse_given
from energon_ext.cli.saved import SavedCursor, saved_cursors
from energon_ext.errors import EncoderNeededError, EnergonExtError
from energon_ext.plan.cursor import digest_of_state, restore_cursor
from energon_ext.plan.packed_rows import PackedRows
from energon_ext.plan.remarks import describe_loss_weights
from energon_ext.plan.row_schedule import describe_points, describe_row_change
from energon_ext.plan.run import Run
from energon_ext.plan.spec import PACKING, describe_repacking
from energon_ext.state.files import write_file
from energon_ext.state.match import ENCODER, SourceChange
from energon_ext.tokenizers.tokenizers import load_tokenizer
from energon_ext.weights import ScheduleAxis


@click.group()
def checkpoint() -> None:
    """Inspect a checkpoint, or forecast what follows it.

    Example: energon-ext checkpoint diff runs/a mix.yaml
    """


_packing = option.together(
    click.option("--seq-length", type=option.ROW_TOKENS, help="Positions per row in the next run."),
    click.option("--packing", help="Packing of the next run."),
)


@checkpoint.command()
@click.argument("saved", metavar="CHECKPOINT", type=option.PATH)
def show(saved: Path) -> None:
    """Show the newest data state of CHECKPOINT, without reading data.

    CHECKPOINT is the folder of a run, of one checkpoint, or of Megatron-LM's data states.

    Example: energon-ext checkpoint show runs/a
    """
    cursor = saved_cursors(saved)[-1]
    state, progress = cursor.state, ""
    if cursor.inside:
        progress = f", {state['done']:,} rows of the next step, on {cursor.inside['ranks']} rank(s)"
    echo(f"{cursor.folder}: {cursor.step:,} steps of {state['rows_per_step']:,} rows{progress}")
    echo(f"data digest {state['data_digests'][-1][1]}, state digest {digest_of_state(state)}")
    echo(f"breakpoints count {state['axis']}")
    for line in _row_lengths(state):
        echo(line)
    echo(", ".join(f"{k}={v!r}" for k, v in sorted(cursor.spec.compared().items())))
    rows = [("source", "documents read", "tokens read")]
    for key, source in state["plan"]["sources"].items():
        rows.append((key, f"{source['documents']:,}", f"{source['tokens']:,}"))
    echo(textwrap.indent(table(rows), "  "))


@checkpoint.command()
@click.argument("saved", metavar="CHECKPOINT", type=option.PATH)
@option.metadataset
@option.split
@click.option(
    "--world-size", "ranks", type=option.Count(1), help="Data-parallel ranks of the next run."
)
@click.option(
    "--num-workers", "workers", type=click.IntRange(0), default=0, help="Workers per rank."
)
@click.option("--tokenizer", help="Tokenizer of the next run.")
@option.special_tokens
@_packing
@option.encoder
@option.module
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
    """Show how a resume from CHECKPOINT would treat each source of METADATASET, with its share.

    CHECKPOINT is the folder of a run (its newest checkpoint is used), of one checkpoint, or of
    Megatron-LM's data states. The data is opened and restored by the same code as in a real resume.
    Settings not given as options default to those of the saved run. Exits with status 1 if the
    resume would be refused.

    Example: energon-ext checkpoint diff runs/a mix.yaml --world-size 64
    """
    cursor = saved_cursors(saved)[-1]
    rows = cursor.state["plan"]["row"] + cursor.state["done"]
    echo(f"{cursor.folder}: saved after {rows:,} rows")
    changed: dict[str, Any] = {"seq_len": seq_length, "packing": packing}
    if tokenizer is None:
        refuse_given(["eos_token", "bos_token"], "is for --tokenizer; give both")
    try:
        if tokenizer is not None:
            changed["tokenizer"] = load_tokenizer(
                tokenizer, eos_token=eos_token, bos_token=bos_token
            )
        dataset = cursor.dataset(metadataset, changed=changed, **options)
        changes = restore_cursor(dataset, cursor.state)
    except EncoderNeededError:  # this is no answer
        raise
    except EnergonExtError as error:
        echo(f"refused: {' '.join(str(error).split())}")
        ctx.exit(1)
    echo(_changes(changes, dataset.shares_of_sources(dataset.next_position)))
    unit = dataset.clock.axis.change_from(cursor.state["axis"])
    packed = describe_repacking(cursor.spec.compared(), dataset.fingerprint)
    row_change = describe_row_change(
        cursor.state.get("row_schedule"), dataset.clock.rows, dataset.clock.axis.one
    )
    weights = describe_loss_weights(dataset, changes, cursor.state)
    steps, documents = _skipped_steps(cursor, dataset), _changed_documents(dataset)
    for line in filter(None, (unit, packed, row_change, *weights, *steps, *documents)):
        echo(line)
    may_change = {}
    if not cursor.inside and all(rows.may_be_repacked for rows in dataset.rows):
        may_change = {k: v for k, v in dataset.fingerprint.items() if k in PACKING}
    fixed = {k: v for k, v in dataset.fingerprint.items() if k not in (ENCODER, *may_change)}
    for rule, fields in (("must stay", fixed), ("may change", may_change)):
        if fields:
            echo(f"{rule}: " + ", ".join(f"{k}={v!r}" for k, v in sorted(fields.items())))
    topology = "any number of ranks and workers"
    if cursor.inside:
        topology = f"{cursor.inside['ranks']} rank(s), since it was saved inside a step"
    echo(f"can resume on {topology}")


@checkpoint.command()
@click.argument("saved", metavar="CHECKPOINT", type=option.PATH)
@option.metadataset
@option.split
@click.option("--steps", type=option.Count(1), required=True, help="Optimizer steps to forecast.")
@_packing
@click.option("--global-batch-size", type=option.Count(1), help="Rows per step in the next run.")
@option.forecast
@option.encoder
@option.module
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
    """Forecast what a run on METADATASET reads after CHECKPOINT.

    Shows the tokens, documents and epochs of each source, and when it ends, as `energon-ext plan
    --steps` does for a new run. Epochs include what was read before CHECKPOINT. Settings not given
    as options default to those of the saved run. A partly read step counts as a whole step.

    \b
    energon-ext checkpoint forecast runs/a mix.yaml --steps 5k --seq-length 32768
    """
    cursor = saved_cursors(saved)[-1]
    dataset = cursor.dataset(
        metadataset,
        changed={"seq_len": seq_length, "packing": packing},
        rows_per_step=global_batch_size,
        **options,
    )
    restore_cursor(dataset, cursor.state)
    prediction = make_forecast(dataset, steps, None, exact)
    show_forecast(prediction, dataset, steps, as_json)
    draw_forecast(prediction, Path(metadataset).name, png, html)


@checkpoint.command()
@click.argument("saved", metavar="CHECKPOINT", type=option.PATH)
@option.metadataset
@option.split
@option.encoder
@option.module
@option.trusted_module
def reweight(saved: Path, metadataset: Path, **options: Any) -> None:
    """Discard live weights of METADATASET that CHECKPOINT has not used.

    A resume from CHECKPOINT then waits for new weights from its step on. Each discarded line is
    printed. Stop the run first. Later checkpoints can then no longer be resumed.

    Example: energon-ext checkpoint reweight runs/a/checkpoints/iter_0001200 mix.yaml
    """
    cursor = saved_cursors(saved)[-1]
    dataset = cursor.dataset(metadataset, **options)
    restore_cursor(dataset, cursor.state)
    next_step = cursor.step + (cursor.state["done"] > 0)  # the first that has not begun
    for live in dataset.live_weights:
        for number, line in enumerate(live.lines, 1):
            if line.from_step >= next_step:
                echo(f"{live.path}: discarded {line.to_bytes().decode().rstrip()}")
            elif line.stop > next_step:
                echo(f"{live.path}: line {number} now ends after step {next_step - 1}")
        write_file(live.path, b"".join(line.to_bytes() for line in live.before(next_step)))
        echo(f"{live.path}: step {next_step} is the first without a line")


def _row_lengths(state: Mapping[str, Any]) -> Iterator[str]:
    """List the schedule of the lengths of rows, and those that rows have had."""
    if (points := state.get("row_schedule")) is not None:
        yield f"rows have {describe_points(points, ScheduleAxis(state['axis']).one)}"
    begin, usual, last = 0, state["spec"]["row_tokens"], state["plan"]["row"]
    read = []
    for stop, length in [*state["row_lengths"], (last, usual)]:
        if stop > begin:
            read.append(f"{stop - begin:,} of {length:,} positions")
            begin = stop
    if len(read) > 1 or points is not None:
        yield f"rows read: {', '.join(read)}"


def _skipped_steps(cursor: SavedCursor, dataset: Run) -> Iterator[str]:
    """List the ranges of steps that were skipped, and of those that will be."""
    ahead = [
        (max(begin, cursor.step), stop) for begin, stop in dataset.clock.skip if stop > cursor.step
    ]
    for status, ranges in (("skipped", cursor.state["skipped"]), ("to be skipped", ahead)):
        if listed := ", ".join(f"{begin:,} to {stop - 1:,}" for begin, stop in ranges):
            yield f"steps {status}: {listed}"


def _changed_documents(dataset: Run) -> Iterator[str]:
    """Count the documents that are packed again, excluded, or no longer excluded."""
    for key, rows in zip(dataset.keys, dataset.rows):
        if not isinstance(rows, PackedRows):
            continue
        if rows.subset_change is not None:
            now, then = rows.subset_change
            yield f"{key}: the epoch of {now:,} documents ends first, then an epoch has {then:,}"
        repacked = set() if rows.window.taken is not None else set(rows.window.documents.tolist())
        excluded = set(rows.excluded.tolist())
        counts = {
            "not yet drawn are packed again": len(repacked),
            "are excluded": len(excluded),
            "are no longer excluded": len({*rows.window.excluded.tolist()} - excluded),
        }
        yield from (f"{key}: {n:,} documents {change}" for change, n in counts.items() if n)


def _changes(changes: Sequence[SourceChange], shares: Mapping[str, float]) -> str:
    """Return a table of the effect of a resume on each source, and of its share now and before.

    Args:
        shares: of the sources in the rows of the next step.
    """
    rows = [("source", "resume", "documents read", "tokens read", "of all tokens", "next share")]
    total = max(1, sum(change.tokens for change in changes))
    for change in changes:
        was = f" (was {change.saved_key})" if change.saved_key else ""
        read = f"{change.documents:,}", f"{change.tokens:,}", f"{change.tokens / total:.2%}"
        rows.append((change.key, change.change + was, *read, f"{shares.get(change.key, 0):.2%}"))
    return textwrap.indent(table(rows, left=2), "  ")
