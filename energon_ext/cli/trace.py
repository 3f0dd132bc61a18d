# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext trace``: show the documents of a step, or the steps that read a document."""

import re
from pathlib import Path
from typing import Any, Callable, Sequence

import click

from energon_ext.arguments import choices
from energon_ext.cli import echo, echo_json, option
from energon_ext.cli.mix import open_mix, warn_of_undecided_weights
from energon_ext.cli.replay import PlannedStep, Replay, StepRange
from energon_ext.cli.saved import SavedCursor, saved_cursors
from energon_ext.encoders.written_tokenizer import tokenizer_of_plan
from energon_ext.errors import ConfigError, EnergonExtError, printable
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.remarks import describe_subsets
from energon_ext.plan.run import Run
from energon_ext.plan.spec import SAMPLES
from energon_ext.plan.trace import TracedRow, trace_step
from energon_ext.state.match import KEPT, compare_sources
from energon_ext.tokenizers.tokenizers import load_tokenizer


@click.command()
@click.argument("run", type=option.PATH)
@click.argument(
    "metadatasets", metavar="METADATASET...", type=option.INPUT, nargs=-1, required=True
)
@click.option("--step", type=option.Count(0), help="Step to show, counted from 0.")
@click.option(
    "--document", metavar="SOURCE:NUMBER", help="Show steps that read this document, up to --step."
)
@click.option("--rank", type=click.IntRange(0), help="Show only rows of this data-parallel rank.")
@click.option("--world-size", "ranks", type=option.Count(1), default=1, help="Data-parallel ranks.")
@click.option(
    "--micro-batch-size", "batch_size", type=option.Count(1), default=1, help="Rows per batch."
)
@click.option(
    "--global-batch-size", "rows_per_step", type=option.Count(1), help="Rows per step of the run."
)
@click.option("--tokenizer", help="Tokenizer, to show the beginning of each document as text.")
@click.option("--seq-length", type=option.ROW_TOKENS, help="Positions per row, without a state.")
@click.option("--packing", type=option.PackerName(), help="Packing, without a state.")
@click.option("--seed", type=int, help="Seed of the run, without a state.")
@click.option(
    "--exclude-lines", is_flag=True, help="Print lines for the file of `exclude`, nothing else."
)
@option.split
@option.encoder
@option.module
@option.trusted_module
@option.as_json
def trace(
    run: Path,
    metadatasets: tuple[Path, ...],
    step: int | None,
    document: str | None,
    tokenizer: str | None,
    rank: int | None,
    exclude_lines: bool,
    as_json: bool,
    seq_length: int | None,
    packing: str | None,
    seed: int | None,
    **options: Any,
) -> None:
    """Show which documents a step of RUN read, and from which files.

    RUN is the folder of a run, of its checkpoints, or of Megatron-LM's --dataloader-save. Each row
    is shown with its rank and micro-batch. The command plans again from the newest state before the
    step, or from the beginning; it reads no tokens. If the mix has changed during the run, give the
    METADATASET of each time: the states say which steps were planned with which. Steps of a plan
    count from 0: step 5 is the sixth optimizer step.

    \b
    energon-ext trace runs/a mix.yaml --step 1203 --world-size 64 --rank 7
    energon-ext trace runs/a mix.yaml before.yaml --document web:17
    energon-ext trace runs/a mix.yaml --step 1203 --exclude-lines >> excluded.txt
    """
    settings = {"seq_length": seq_length, "packing": packing, "seed": seed}
    given: dict[str, Any] = {name: value for name, value in settings.items() if value is not None}
    cursors = saved_cursors(run, may_be_none=True)
    if cursors and given:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ConfigError(f"{named}: {run} has states, which contain it; leave it out.")
    has_encoder = seq_length is not None or options["encoder"] is not None
    if not cursors and not (has_encoder and options["rows_per_step"] is not None):
        raise ConfigError(
            f"{run}: no data.json of a planned run, and no train_dataloader_dprank000.pt of "
            f"Megatron-LM; give the folder of a run, or --seq-length and --global-batch-size of a "
            f"run that has saved nothing yet."
        )

    def open_blend(metadataset: Path, cursor: SavedCursor | None) -> Run:
        if cursor is None:
            # With an encoder of the user's, the tokenizer only shows the text.
            own: dict[str, Any] = {"default_tokenizer": tokenizer_of_plan}
            if not options["encoder"]:
                own |= {"tokenizer": tokenizer, "eos_token": None, "bos_token": None}
            return find_blend(open_mix(metadataset, **own, **given, **options)[0])
        return cursor.dataset(metadataset, **options)

    replay = Replay(cursors, metadatasets, open_blend)
    if document is not None:
        last = step if step is not None or not cursors else cursors[-1].step - 1
        if last is None or exclude_lines:
            raise ConfigError("Give the --step to search to, and no --exclude-lines.")
        _show_document(replay, document, last, as_json)
        return
    if step is None:
        raise ConfigError("Give the --step to show, or the --document to search for.")
    planned = _planned_step(replay, step)
    blend = planned.blend
    doubts = replay.doubt(step, blend), None if not cursors else cursors[-1].doubt_order()
    for doubt in filter(None, doubts):
        click.echo(doubt, err=True)
    if (saved := replay.saved_before(step)) is not None:
        _print_changes(saved, blend)
    for line in describe_subsets(blend):
        click.echo(printable(line), err=True)
    if rank is not None and rank >= blend.topology.ranks:
        raise ConfigError(f"--rank {rank}: must be below {blend.topology.ranks}; see --world-size.")
    if blend.clock.is_skipped(step):
        click.echo(f"Step {step} is skipped by the metadataset.", err=True)
    warn_of_undecided_weights(blend, step)
    rows = [
        row for row in trace_step(planned.step, planned.blend) if rank is None or rank in row.ranks
    ]
    decode = load_tokenizer(tokenizer).decode if tokenizer else None
    if exclude_lines:
        _print_exclude_lines(step, rows, blend)
        return
    for row in rows:
        files = _files(row, blend, decode)
        text = "\n    ".join([_where(row, planned), *(file["text"] for file in files)])
        length = {"row_tokens": planned.step.row_tokens}
        _print({"step": step, **row.to_json(), **length, "files": files}, as_json, text)


def _planned_step(replay: Replay, step: int) -> PlannedStep:
    """Plan one step; raise ConfigError if it cannot be planned as the run did."""

    def refuse(span: StepRange, error: EnergonExtError) -> None:
        raise ConfigError(f"{span}: {error}") from error

    for planned in replay.steps(step, step, refuse):
        if planned.number == step:
            return planned
    raise ConfigError(f"--step {step}: all sources are exhausted before it.")


def _print_changes(cursor: SavedCursor, blend: Run) -> None:
    for change in compare_sources([cursor.state["plan"]["sources"]], blend.source_names):
        if change.change != KEPT:
            click.echo(f"{change.key}: {change.change} since the saved state.", err=True)
    if line := blend.clock.axis.change_from(cursor.state["axis"]):
        click.echo(line, err=True)


def _show_document(replay: Replay, text: str, last: int, as_json: bool) -> None:
    """Print the steps up to ``last`` that read a document."""
    unread: list[tuple[int, int]] = []
    is_read, searched = False, None
    for planned in replay.steps(0, last, _report_unknown):
        blend, number = planned.blend, planned.number
        if searched is None or searched[0] is not blend:
            searched = blend, _document(text, blend)
        source, document = searched[1]
        if unread and unread[-1][1] == number - 1:
            unread[-1] = unread[-1][0], number
        else:
            unread.append((number, number))
        for row in trace_step(planned.step, planned.blend):
            if row.source == source and any(other == document for other, *_ in row.contents):
                is_read = True
                skipped = ", skipped" if blend.clock.is_skipped(number) else ""
                where = f"step {number}{skipped}, {_where(row, planned)}"
                _print({"step": number, **row.to_json()}, as_json, where)
    if unread and not is_read:
        ranges = ", ".join(f"{start} to {end}" for start, end in unread)
        click.echo(f"{printable(text)}: not read in steps {ranges}.", err=True)


def _report_unknown(span: StepRange, error: EnergonExtError) -> None:
    click.echo(printable(f"{span}: {error}"), err=True)


def _document(text: str, blend: Run) -> tuple[str, int]:
    """Parse ``SOURCE:NUMBER``, with the key or the name of a source, and return key and number."""
    name, _, number = text.rpartition(":")
    keys = {title: key for key, title in blend.names.items()}
    source = keys.get(name, name)
    if source not in blend.sources or not re.fullmatch("[0-9]{1,18}", number):
        known = choices(name, [*blend.sources, *keys])
        raise ConfigError(f"--document {text}: SOURCE:NUMBER is needed; the sources are {known}")
    planned = blend.sources[source]
    count = planned.first_rows.stored_documents or planned.documents
    if int(number) >= count:
        raise ConfigError(f"--document {text}: {source} has {count:,} documents, counted from 0.")
    return source, int(number)


def _print_exclude_lines(step: int, rows: Sequence[TracedRow], blend: Run) -> None:
    """Print each document of some rows once, as a line for `exclude` after its place."""
    printed = set()
    for row in rows:
        for file in _files(row, blend, None):
            line = f"{row.source}:{file['document']}"
            if not blend.sources[row.source or ""].first_rows.can_exclude:
                click.echo(f"{printable(line)}: is spliced, so it cannot be excluded.", err=True)
            elif line not in printed:
                printed.add(line)
                echo(f"# step {step}, row {row.row}: {file['text']}")
                echo(line)


def _where(row: TracedRow, planned: PlannedStep) -> str:
    ranks = f"rank {row.rank}"
    if len(row.ranks) > 1:
        ranks = f"ranks {row.rank} to {row.ranks[-1]}"
    place = f"row {row.row}, {ranks}, micro-batch {row.micro_batch}"
    if row.source is None:
        return f"{place}: padding"
    tokens = sum(stop - start for _, start, stop in row.contents)
    found = f"{place}: {row.source}, {len(row.contents)} documents, {tokens:,} tokens"
    has_schedule = planned.blend.clock.rows is not None
    return f"{found} for {planned.step.row_tokens:,} positions" if has_schedule else found


def _files(
    row: TracedRow, blend: Run, decode: Callable[[list[int]], str] | None
) -> list[dict[str, Any]]:
    """Return the file, position and first words of each content of a row."""
    if row.source is None:
        return []
    source = blend.sources[row.source]
    reader, is_tokenized = source.reader, source.first_rows.kind != SAMPLES
    files: list[dict[str, Any]] = []
    for document, start, stop in row.contents:
        file, number, origin = reader.origin(document)
        tokens = reader.tokens(document, start, min(stop, start + 24))
        if not is_tokenized:
            text = f"{row.source}:{document}, {origin} of {file}"
        else:
            text = f"{row.source}:{document} [{start}, {stop})"
            text += f", number {number} of {file}" if file else ""
            text += f" (from {origin})" if origin else ""
            # A document that changes whenever it is read has no tokens here.
            if decode is not None and tokens is not None:
                text += f": {decode(tokens.tolist())!r}"
        place = {"file": file, "number": number, "origin": origin, "text": text}
        files.append({"document": document, **place})
    return files


def _print(content: dict[str, Any], as_json: bool, text: str) -> None:
    if as_json:
        echo_json(content)
    else:
        echo(text)
