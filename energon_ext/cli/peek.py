# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext peek``: the rows that a run would read, as text, before it does."""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.cli import echo, option
from energon_ext.cli.mix import mix_options, open_mix
from energon_ext.encoders.prompts import Prompt
from energon_ext.encoders.quiet import quiet_energon
from energon_ext.encoders.tokenizers import Tokenizer
from energon_ext.errors import ConfigError, printable
from energon_ext.loader.streamed import open_loader
from energon_ext.plan.lookup import find_blend

#: Source, numbers, and the text, with < and > around what is not trained on.
Segment = tuple[str, str, str]

#: Characters of a segment that are shown without --text.
MOST_CHARACTERS = 300

#: Rows that are looked at for those of one source.
MOST_ROWS = 10_000


@click.command()
@mix_options
@click.option(
    "--task",
    type=click.Choice(["text", "chat", "prompts"]),
    default="text",
    help="What the data is for: pretraining, fine-tuning or reinforcement.",
)
@option.chat_template
@click.option("--rows", type=click.IntRange(1), default=4, help="How many rows to show.")
@click.option("--source", default="", help="Show rows of this source; a part of its key is enough.")
@click.option("--text", is_flag=True, help="Show all of the text.")
def peek(metadataset: Path, rows: int, source: str, text: bool, **options: Any) -> None:
    """Show the first rows that METADATASET gives, before any training.

    Every row is a list of segments with their sources. What stands between < and > is read and not
    trained on: prompts, frames of a splice, what came before a cut. Token files and spliced
    documents come in the order in which a run reads them.

    \b
    energon-ext peek mix.yaml --tokenizer my/tokenizer.json --source web --rows 2 --text
    energon-ext peek chats.yaml --task chat --chat-template NAME --tokenizer NAME
    """
    dataset, tokenizer = open_mix(metadataset, **options)
    blend = find_blend(dataset)
    keys = blend.keys
    titles = {key: f"{name} ({key})" for key, name in blend.names.items()}
    if not any(source in titles.get(key, key) for key in keys):
        raise ConfigError(f"--source {source}: none of {', '.join(keys)}.")
    shown = 0
    loader = open_loader(dataset)
    batches = iter(loader)
    for number in range(MOST_ROWS):
        with quiet_energon():
            batch = next(batches, None)
        if batch is None:
            break
        show = _prompts if isinstance(batch, list) else _segments
        segments = list(show(batch, tokenizer))
        if not any(source in titles.get(key, key) for key, *_ in segments if key):
            continue
        echo(f"row {number}: {_summary(batch)}")
        for key, about, content in segments:
            echo(f"  {titles.get(key, key) or 'padding'}: {about}")
            if len(content) > MOST_CHARACTERS and not text:
                content = f"{content[:MOST_CHARACTERS]} ..."
            if content:
                click.echo(f"    {printable(content, sys.maxsize)}")
        shown += 1
        if shown == rows:
            return
    echo(f"{shown} of {rows} rows found.")


def _summary(batch: Any) -> str:
    if isinstance(batch, list):
        return f"{len(batch)} prompt"
    trained = int((batch.token_weights != 0).sum())
    filled = sum(batch.tokens_per_source().values())
    return f"{filled} of {batch.num_tokens} positions, {trained} trained"


def _segments(batch: PackedBatch, tokenizer: Tokenizer) -> Iterator[Segment]:
    """The segments of a row; padding has no text."""
    ends = batch.cu_seqlens.tolist()
    for first, end, source in zip(ends, ends[1:], batch.source_ids.tolist()):
        if source < 0:
            yield "", f"{end - first} positions", ""
            continue
        weights = batch.token_weights[first:end]
        about = f"{end - first} tokens, {int((weights != 0).sum())} trained"
        # A label is the next token; the last one may be of another document.
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
        about = f"{len(prompt.tokens)} tokens; beside them {sorted(prompt.metadata)}"
        yield prompt.source, about, tokenizer.decode(prompt.tokens)
