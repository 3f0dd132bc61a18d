# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext peek``: show the rows that a run would read as text, before it starts."""

import itertools
import sys
from pathlib import Path
from typing import Any, Iterator, NamedTuple, Sequence

import click
from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext.cli import echo, option, plural
from energon_ext.cli.mix import mix_options, open_mix, refuse_given
from energon_ext.cli.shown_rows import ShownSegment, decode, describe_batch, describe_tensors
from energon_ext.cli.stored_samples import ContactSheet, StoredSample, stored_samples
from energon_ext.encoders.quiet import quiet_energon
from energon_ext.errors import ConfigError, printable
from energon_ext.loader.reader import BatchReader
from energon_ext.loader.streamed import open_loader
from energon_ext.metrics import file as metrics
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.remarks import describe_subsets
from energon_ext.plan.run import Run
from energon_ext.plan.source import Reader
from energon_ext.samples.numbered import as_worker


class ShownRow(NamedTuple):
    """A row for display: its stored samples, if it has any, and shapes of its other tensors."""

    summary: str
    segments: list[ShownSegment]
    samples: list[StoredSample]
    shapes: str


#: Characters shown per segment without --text.
MAX_CHARACTERS = 300

#: Maximum number of rows searched for those of --source.
MAX_ROWS = 10_000


@click.command()
@mix_options
@click.option("--rows", type=click.IntRange(1), default=4, help="Number of rows to show.")
@click.option(
    "--source", default="", show_default=False, help="Show only sources with this in their name."
)
@click.option("--text", is_flag=True, help="Show the whole text.")
@click.option("--png", type=option.FILE, help="Save the images of these rows as one PNG.")
def peek(
    metadataset: Path, rows: int, source: str, text: bool, png: Path | None, **options: Any
) -> None:
    """Show the first rows that a run on METADATASET would read.

    Each row is shown as segments with their sources. Text between « and » is read but not trained
    on: prompts, frames of a splice, context before a cut. Special tokens are shown by name. Token
    files and spliced documents appear in the order in which a run reads them. With --encoder, the
    samples of a row are shown as they are stored, and then as the encoder makes a batch of them:
    tokens, lengths and shapes.

    \b
    energon-ext peek mix.yaml --tokenizer my/tokenizer.json --source web --rows 2 --text
    energon-ext peek chats.yaml --task chat --chat-template NAME --tokenizer NAME
    energon-ext peek photos.yaml --encoder my_vlm:encoder --png photos.png

    If METADATASET is the folder of a run with reinforcement learning, the last answers in its
    metrics.jsonl are shown instead: energon-ext peek runs/grpo
    """
    if (Path(metadataset) / metrics.FILE_NAME).is_file():
        ignored = f"has no effect on the answers of the run {metadataset}; remove it"
        refuse_given([*options, "png"], ignored)
        _show_answers(metrics.Run.load(metadataset), rows, source)
        return
    dataset, tokenizer = open_mix(metadataset, **options)
    blend = find_blend(dataset)
    keys = blend.keys
    titles = {key: f"{name} ({key})" for key, name in blend.names.items()}
    if not any(source in titles.get(key, key) for key in keys):
        raise ConfigError(f"--source {source}: matches none of {', '.join(keys)}.")
    for key, entry in zip(keys, blend.sources.values()):
        files = getattr(getattr(entry, "reader", None), "documents", None)
        if files is not None and not files.names_tokenizer:
            warning = "records no tokenizer; check that --tokenizer is the one that wrote it"
            click.echo(printable(f"{titles.get(key, key)}: {warning}."), err=True)
    for line in describe_subsets(blend):
        echo(line)
    sheet, shown = ContactSheet(), 0
    all_rows = _draw(dataset, blend, tokenizer) if blend.is_planned else _read(dataset, tokenizer)
    for number, row in enumerate(itertools.islice(all_rows, MAX_ROWS)):
        if source and not any(source in titles.get(key, key) for key, *_ in row.segments if key):
            continue
        echo(f"row {number}: {row.summary}")
        sheet.add(f"{number}:", row.samples)
        for key, about, content in row.segments:
            echo(f"  {titles.get(key, key) or 'padding'}: {about}")
            if len(content) > MAX_CHARACTERS and not text:
                content = f"{content[:MAX_CHARACTERS]} ..."
            if content:
                click.echo(f"    {printable(content, sys.maxsize)}")
        if row.shapes:
            echo(f"  batch: {row.shapes}")
        shown += 1
        if shown == rows:
            break
    if shown < rows:
        echo(f"Found {shown} of {rows} rows.")
    if png is not None:
        sheet.save(png)


def _show_answers(run: metrics.Run, count: int, source: str) -> None:
    """Show the last answers that a run logged."""
    found = [each for each in run.answers if source in each[1][0]]
    for step, (key, reward, text) in found[-count:]:
        echo(f"step {step}: reward {reward:g}")
        echo(f"  {key}:")
        click.echo(f"    {printable(text, sys.maxsize)}")
    if not found:
        echo("No answers found: a run of reinforcement learning writes some at each evaluation.")
    elif len(found) < count:
        echo(f"Found {len(found)} of {count} answers.")


def _draw(dataset: SavableDataset, run: Run, tokenizer: Any) -> Iterator[ShownRow]:
    """Yield rows with their samples as stored and as the user's encoder makes a batch of them."""
    batches: BatchReader = dataset.batches
    for step in run.fork().draw_steps():
        weights = run.loss_weights_at(step.position)
        for row in range(step.num_rows):
            drawn = step.row(row)
            assert drawn is not None, "every row of a step is planned"
            taken, place, number = drawn
            reader, key = batches.readers[number], run.keys[number]
            with as_worker(), quiet_energon():
                encoded = batches.read_row(number, taken.description(place))
                batch = batches.assemble([encoded], run.describe_rows(step, [row], {}))
            summary, segments = describe_batch(batch, tokenizer, key)
            if key in weights:
                summary += f", weight {weights[key]:g} in the loss"
            shapes = describe_tensors(batch) or ("" if segments else describe_tensors(encoded))
            contents = taken.contents(place)
            samples = stored_samples(reader, contents, bool(run.clock.row_tokens))
            if samples:
                summary = f"{plural(len(samples), 'sample')}, {summary}"
            elif not segments:
                segments = _slices(key, reader, contents, tokenizer)
            stored = [(key, each.about(), each.text()) for each in samples]
            yield ShownRow(summary, [*stored, *segments], samples, shapes)


def _slices(
    key: str, reader: Reader, contents: Sequence[tuple[int, int, int]], tokenizer: Any
) -> list[ShownSegment]:
    """Return the documents of a row of tokens, if its batch has no tokens to be found."""
    slices = [tokens for piece in contents if (tokens := reader.tokens(*piece)) is not None]
    return [(key, f"{len(ids)} tokens", decode(ids.tolist(), tokenizer)) for ids in slices]


def _read(dataset: SavableDataset, tokenizer: Any) -> Iterator[ShownRow]:
    """Yield rows or prompts as a run reads them."""
    batches = iter(open_loader(dataset))
    while True:
        with quiet_energon():
            batch = next(batches, None)
        if batch is None:
            return
        yield ShownRow(*describe_batch(batch, tokenizer), [], describe_tensors(batch))
