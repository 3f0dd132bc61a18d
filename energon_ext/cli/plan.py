# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext plan``: what a run would read, before it does."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Sequence

import click

from energon_ext.cli import echo, table
from energon_ext.cli.mix import mix_options, open_mix
from energon_ext.errors import ConfigError

if TYPE_CHECKING:
    from energon_ext.plan.dataset import BlendedDataset
    from energon_ext.splice.source import SpliceSource

#: Documents of a source that are listed.
MOST_DOCUMENTS = 40


@click.command()
@mix_options
@click.option("--at", default="", help="Optimizer steps, as 0,100,500.  [default: the breakpoints]")
def plan(metadataset: Path, at: str, **options: Any) -> None:
    """Show the shares that METADATASET plans, and what a splice would show.

    A share is one of rows, drawn last: it changes at the step of its breakpoint, without a lag.
    Steps are optimizer steps, from 0; or what breakpoints of the run count (ScheduleAxis).

    Reads the documents of spliced sources once, and no others.
    """
    from energon_ext.plan.lookup import find_blend
    from energon_ext.splice.source import splices_of

    dataset, _ = open_mix(metadataset, **options)
    blend = find_blend(dataset)
    echo(_shares(blend, _integers(at) or sorted({0, *blend.tree.breakpoints()})))
    for source in splices_of(dataset):
        echo("\n" + _documents(source))


def _shares(blend: BlendedDataset, positions: Sequence[int]) -> str:
    columns = [blend.planned_shares(position) for position in positions]
    rows = [
        [blend.names.get(key, key), *(f"{shares[key]:.2%}" for shares in columns)]
        for key in columns[0]
    ]
    if len(rows) > MOST_DOCUMENTS:
        rows[MOST_DOCUMENTS:] = [[f"... {len(rows) - MOST_DOCUMENTS} more", *[""] * len(columns)]]
    return table([["share at optimizer step", *map(str, positions)], *rows])


def _documents(source: SpliceSource) -> str:
    from energon_ext.splice import SpliceIndex

    index = source.examples
    assert isinstance(index, SpliceIndex), "training shows an index, not a grid"
    counts = zip(index.doc_lengths, index.pairs, index.quotas)
    shares = zip(index.token_shares(), index.coverage())
    rows = [
        [name.rpartition("/")[2], *(f"{count:,}" for count in own), f"{share:.2%}", f"{seen:,.2f}"]
        for name, own, (share, seen) in list(zip(source.names, counts, shares))[:MOST_DOCUMENTS]
    ]
    more = len(source.names) - len(rows)
    title = (
        f"{source.names[0].rpartition('/')[0]}: {len(source.names):,} documents, "
        f"{int(index.doc_lengths.sum()):,} tokens, {index.size:,} examples in an epoch"
    )
    header = ["document", "tokens", "pairs", "examples", "share", "views of a token"]
    return title + "\n" + table([header, *rows]) + (f"\n... {more:,} more" if more else "")


def _integers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [-1]
    if any(number < 0 for number in numbers):
        raise ConfigError(f"--at: {text!r} found; steps like 0,100,500 are needed.")
    return numbers
