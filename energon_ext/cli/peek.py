# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext peek``: show the rows that a run would read as text, before it starts."""

import itertools
import sys
from pathlib import Path
from typing import Any, Iterator

import click
from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.cli import echo, option
from energon_ext.cli.mix import mix_options, open_mix
from energon_ext.cli.stored_samples import ContactSheet, StoredSample, stored_samples
from energon_ext.documents.file_set import TokenFiles
from energon_ext.encoders.prompts import Prompt
from energon_ext.encoders.quiet import quiet_energon
from energon_ext.errors import ConfigError, printable
from energon_ext.loader.streamed import open_loader
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.rows import PlannedRows
from energon_ext.samples.rows import SampleRows
from energon_ext.tokenizers.protocol import Tokenizer

#: Source, summary and text, with < and > around text that is not trained on.
Segment = tuple[str, str, str]

#: Summary and segments of a row, and its stored samples, if it has any.
ShownRow = tuple[str, list[Segment], list[StoredSample]]

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

    Each row is shown as segments with their sources. Text between < and > is read but not trained
    on: prompts, frames of a splice, context before a cut. Token files and spliced documents appear
    in the order in which a run reads them.

    \b
    energon-ext peek mix.yaml --tokenizer my/tokenizer.json --source web --rows 2 --text
    energon-ext peek chats.yaml --task chat --chat-template NAME --tokenizer NAME
    energon-ext peek photos.yaml --encoder my_vlm:encoder --png photos.png
    """
    dataset, tokenizer = open_mix(metadataset, **options)
    blend = find_blend(dataset)
    keys = blend.keys
    titles = {key: f"{name} ({key})" for key, name in blend.names.items()}
    if not any(source in titles.get(key, key) for key in keys):
        raise ConfigError(f"--source {source}: matches none of {', '.join(keys)}.")
    for key, entry in zip(keys, blend.sources.values()):
        files = getattr(entry.rows, "documents", None)
        if isinstance(files, TokenFiles) and not files.names_tokenizer:
            warning = "records no tokenizer; check that --tokenizer is the one that wrote it"
            click.echo(printable(f"{titles.get(key, key)}: {warning}."), err=True)
    sheet, shown = ContactSheet(), 0
    is_stored = blend.is_planned and any(isinstance(rows, SampleRows) for rows in blend.rows)
    all_rows = _planned(blend, tokenizer) if is_stored else _read(dataset, tokenizer)
    for number, (summary, segments, samples) in enumerate(itertools.islice(all_rows, MAX_ROWS)):
        if not any(source in titles.get(key, key) for key, *_ in segments if key):
            continue
        echo(f"row {number}: {summary}")
        sheet.add(f"{number}:", samples)
        for key, about, content in segments:
            echo(f"  {titles.get(key, key) or 'padding'}: {about}")
            if len(content) > MAX_CHARACTERS and not text:
                content = f"{content[:MAX_CHARACTERS]} ..."
            if content:
                click.echo(f"    {printable(content, sys.maxsize)}")
        shown += 1
        if shown == rows:
            break
    if shown < rows:
        echo(f"Found {shown} of {rows} rows.")
    if png is not None:
        sheet.save(png)


def _planned(blend: PlannedDataset, tokenizer: Tokenizer) -> Iterator[ShownRow]:
    """Yield rows with their samples as stored, which works for any encoder."""
    for step in blend.fork().draw_steps():
        for row in range(step.num_rows):
            drawn = step.taken(row)
            assert drawn is not None, "every row of a step is planned"
            taken, place, number = drawn
            key, description = blend.keys[number], taken.description(place)
            rows: Any = blend.rows[number]
            if isinstance(rows, SampleRows):
                samples = stored_samples(rows, description[0])
                segments = [(key, sample.about(), sample.text()) for sample in samples]
                yield f"{len(description[0])} samples", segments, samples
            else:
                slices = [ids.tolist() for ids in PlannedRows.read(rows, description).slices]
                segments = [(key, f"{len(ids)} tokens", tokenizer.decode(ids)) for ids in slices]
                yield "tokens", segments, []


def _read(dataset: SavableDataset, tokenizer: Tokenizer) -> Iterator[ShownRow]:
    """Yield rows or prompts as a run reads them."""
    batches = iter(open_loader(dataset))
    while True:
        with quiet_energon():
            batch = next(batches, None)
        if batch is None:
            return
        if isinstance(batch, list):
            yield f"{len(batch)} prompt", list(_prompts(batch, tokenizer)), []
            continue
        trained = int((batch.token_weights != 0).sum())
        filled = sum(batch.tokens_per_source().values())
        summary = f"{filled} of {batch.num_tokens} positions, {trained} trained"
        yield summary, list(_segments(batch, tokenizer)), []


def _segments(batch: PackedBatch, tokenizer: Tokenizer) -> Iterator[Segment]:
    """Yield the segments of a row; padding has no text."""
    ends = batch.cu_seqlens.tolist()
    for first, end, source in zip(ends, ends[1:], batch.source_ids.tolist()):
        if source < 0:
            yield "", f"{end - first} positions", ""
            continue
        weights = batch.token_weights[first:end]
        about = f"{end - first} tokens, {int((weights != 0).sum())} trained"
        # A label is the next token; the last one may belong to another document.
        ids = [int(batch.tokens[first]), *batch.labels[first:end].tolist()]
        trained = [False, *(weights != 0).tolist()]
        kept = list(zip(trained, ids))[: None if trained[-1] else -1]
        content = ""
        for is_trained, run in itertools.groupby(kept, key=lambda pair: pair[0]):
            piece = tokenizer.decode([token for _, token in run])
            content += piece if is_trained or not piece else f"<{piece}>"
        yield batch.sources[source], about, content


def _prompts(prompts: list[Prompt], tokenizer: Tokenizer) -> Iterator[Segment]:
    for prompt in prompts:
        about = f"{len(prompt.tokens)} tokens; metadata {sorted(prompt.metadata)}"
        yield prompt.source, about, tokenizer.decode(prompt.tokens)
