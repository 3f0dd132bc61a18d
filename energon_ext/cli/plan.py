# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext plan``: what a run would read, before it does."""

from pathlib import Path
from typing import Any, Sequence

import click

from energon_ext.cli import MOST_LISTED, echo, forecast, one_of, option, table
from energon_ext.cli.mix import mix_options, open_mix, tell_undecided
from energon_ext.errors import ConfigError
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.source import Blend
from energon_ext.splice import SpliceIndex
from energon_ext.splice.source import SpliceSource, splices_of
from energon_ext.weights.axis import MOST_BREAKPOINT, STEPS, checked_breakpoint

COUNT = option.Count(1)


@click.command()
@mix_options
@click.option(
    "--at",
    show_default="the breakpoints",
    help="Positions, in what breakpoints of the metadataset count: steps as 0,100,500, or 8k,40B.",
)
@click.option("--steps", type=COUNT, help="Forecast a run of this many optimizer steps.")
@click.option(
    "--train-tokens",
    type=option.Count(1, 10**16),
    help="Forecast a run of this many tokens, padding included; as 40B.",
)
@click.option("--global-batch-size", type=COUNT, default=1, help="Rows of a step.")
@click.option("--ranks", type=COUNT, default=1, help="Data-parallel ranks.")
@click.option("--micro-batch-size", type=COUNT, help="Rows.  [default: all of a rank]")
@click.option("--balance", is_flag=True, help="Show how unevenly ranks would be busy.")
@click.option(
    "--tokens-per-doc", type=click.FloatRange(1, 1e9), help="Of streamed sources, on average."
)
@option.forecast
def plan(
    metadataset: Path,
    at: str | None,
    global_batch_size: int,
    ranks: int,
    micro_batch_size: int | None,
    steps: int | None,
    train_tokens: int | None,
    balance: bool,
    tokens_per_doc: float | None,
    exact: bool,
    png: Path | None,
    html: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the shares that METADATASET plans, and what a splice would show.

    A share is one of rows, drawn last: it changes at the step of its breakpoint, without a lag.

    Reads the documents of spliced sources once, and no others.

    With --steps or --train-tokens it forecasts a run: tokens, documents and epochs of every source,
    and when which ends. Up to 262,144 rows are planned exactly, more are estimated from the shares.

    Example: energon-ext plan mix.yaml --steps 1000 --global-batch-size 64 --seq-length 4096
    """
    given = {"--at": at, "--steps": steps, "--train-tokens": train_tokens}
    forecasts = any(given.values()) and one_of(given) != "--at"
    if not forecasts and (png or html or as_json or exact):
        raise ConfigError("--png, --html, --json and --exact are for a forecast: give --steps.")
    dataset, _ = open_mix(
        metadataset,
        ranks=ranks,
        batch_size=micro_batch_size or max(1, global_batch_size // ranks),
        rows_per_step=global_batch_size,
        **options,
    )
    blend = find_blend(dataset)
    if train_tokens is not None:
        steps = _steps_of(blend, train_tokens)
    imbalance = forecast.imbalance_of(blend) if balance else {}
    if steps is None:
        positions = [checked_breakpoint(each, "--at") for each in (at or "").split(",") if each]
        echo(_shares(blend, positions or sorted({0, *blend.tree.breakpoints()})))
        tell_undecided(blend, max(positions, default=MOST_BREAKPOINT))
    else:
        found = forecast.made(blend, steps, tokens_per_doc, exact)
        forecast.show(found, blend, steps, as_json, imbalance=imbalance)
        forecast.draw(found, metadataset.name, png, html)
    if as_json:
        return
    if imbalance:
        echo("\n" + forecast.imbalance_table(imbalance, blend))
    for source in splices_of(dataset):
        echo("\n" + _documents(source, blend))


def _steps_of(blend: Blend, tokens: int) -> int:
    """Optimizer steps in which a run reads some tokens, the last one begun included."""
    of_a_step = blend.topology.rows_per_step * blend.clock.row_tokens
    if not of_a_step:
        raise ConfigError("--train-tokens: rows have no fixed length; give --steps.")
    return -(-tokens // of_a_step)


def _shares(blend: Blend, positions: Sequence[int]) -> str:
    columns = [blend.planned_shares(position) for position in positions]
    axis = blend.clock.axis
    unit = "optimizer step" if axis.counted == STEPS else axis.one
    rows = [[f"share at {unit}", *(f"{position:,}" for position in positions)]]
    for key in columns[0]:
        rows.append([blend.names.get(key, key), *(f"{shares[key]:.2%}" for shares in columns)])
    return table(rows, most=MOST_LISTED)


def _documents(source: SpliceSource, blend: Blend) -> str:
    index = source.examples
    assert isinstance(index, SpliceIndex), "training shows an index, not a grid"
    holds = f"{len(source.names):,} documents, {int(index.doc_lengths.sum()):,} tokens"
    name = blend.names.get(source.key, source.key)
    title = f"{name}: {holds}, {index.size:,} examples in an epoch"
    counts = zip(index.doc_lengths, index.pairs, index.quotas)
    shares = zip(index.token_shares(), index.coverage())
    rows = [["document", "tokens", "pairs", "examples", "share", "views of a token"]]
    for number, (about, own, (share, seen)) in enumerate(zip(source.metadata, counts, shares)):
        views = f"{seen:,.2f}"
        if index.config.alpha and number < MOST_LISTED:  # edges unlike the middle
            each = index.views(number)
            views += f" ({each.min():,.2f} to {each.max():,.2f})"
        # Examples are an average where documents take turns.
        shown = [f"{count:,.2f}".removesuffix(".00") for count in own]
        rows.append([f"doc{about['document']}", *shown, f"{share:.2%}", views])
    return f"{title}\n{table(rows, most=MOST_LISTED)}"
