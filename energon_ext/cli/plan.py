# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext plan``: show what a run would read, before it starts."""

import functools
from pathlib import Path
from typing import Any, Callable, Sequence

import click

from energon_ext.cli import MAX_LISTED, echo, one_of, option, table
from energon_ext.cli.context import ContextForecast, context_options, forecast_context
from energon_ext.cli.file_calls import KINDS, count_file_calls
from energon_ext.cli.forecast import (
    draw_forecast,
    imbalance_of,
    imbalance_table,
    make_forecast,
    show_forecast,
)
from energon_ext.cli.mix import mix_options, open_mix, warn_of_undecided_weights, weights_of
from energon_ext.cli.mixes import plan_mixes
from energon_ext.encoders.written_tokenizer import tokenizer_of_plan, written_tokenizer
from energon_ext.errors import ConfigError
from energon_ext.loader.data_loader import ExactDataLoader
from energon_ext.loader.planned_dataset import PlannedDataset
from energon_ext.plan.blend import Blend
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.remarks import describe_short_sources, describe_subsets
from energon_ext.splice import SpliceIndex
from energon_ext.splice.frames import Frames, splices_of
from energon_ext.weights.axis import MAX_BREAKPOINT, STEPS, parse_breakpoint

COUNT = option.Count(1)


@click.command()
@mix_options
@click.option(
    "--at",
    show_default="the breakpoints",
    help="Positions at which to show shares, in the unit of the breakpoints, such as 0,100,5k.",
)
@click.option("--steps", type=COUNT, help="Forecast this many optimizer steps.")
@click.option(
    "--train-tokens", type=option.Count(1, 10**16), help="Forecast this many tokens, with padding."
)
@click.option("--global-batch-size", type=COUNT, default=1, help="Rows per step.")
@click.option("--ranks", type=COUNT, default=1, help="Data-parallel ranks.")
@click.option("--micro-batch-size", type=COUNT, help="Rows per batch.  [default: all of a rank]")
@click.option(
    "--start", is_flag=True, help="Count the file system calls that a rank makes at its start."
)
@click.option(
    "--target-tokens",
    type=option.Count(1, 10**16),
    help="Show how often a run of this many tokens would read each source, with padding.",
)
@click.option(
    "--mixes",
    type=option.FILE,
    help="Forecast each mix of a CSV table: a column `mix`, and one of weights for each entry. "
    "Writes a metadataset for each next to METADATASET.",
)
@click.option("--overwrite", is_flag=True, help="Replace metadatasets that --mixes writes.")
@click.option("--balance", is_flag=True, help="Show how unevenly the work is divided among ranks.")
@context_options
@click.option(
    "--tokens-per-doc", type=click.FloatRange(1, 1e9), help="Estimate for streamed sources."
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
    start: bool,
    target_tokens: int | None,
    mixes: Path | None,
    overwrite: bool,
    balance: bool,
    context_sizes: tuple[int, ...] | None,
    context_times: Path | None,
    context_budget: int | None,
    pipeline_stages: int,
    tokens_per_doc: float | None,
    exact: bool,
    png: Path | None,
    html: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Show the planned shares of METADATASET, or forecast a run.

    A share is a fraction of rows, and changes exactly at the step of its breakpoint. Without a
    forecast, no text is tokenized and no sample is measured, unless a source is spliced; the
    command then also lists how often each document would be read.

    With --steps or --train-tokens, the command forecasts a run: the tokens, documents and epochs of
    each source, and when it ends. Up to 262,144 rows are planned exactly; beyond that, the forecast
    is estimated from the shares.

    With --target-tokens, the forecast also shows how often a run of that size, with the same shares
    and without limits and subsets, would read each source: what a small run has to simulate.

    With --mixes, the command forecasts a run with each mix of a table, and writes its metadataset.

    With --context-sizes, the command forecasts the time of a step if long documents are cut over
    more ranks than short ones, and compares it with one size for all. --ranks then counts data and
    context parallelism together.

    With --start, the command opens the dataset as rank 0 of --ranks does at a second start, and
    counts its file system calls.

    Example: energon-ext plan mix.yaml --steps 1000 --global-batch-size 64 --seq-length 4096
    """
    given = {"--at": at, "--steps": steps, "--train-tokens": train_tokens}
    forecasts = any(given.values()) and one_of(given) != "--at"
    if not forecasts and (png or html or as_json or exact):
        raise ConfigError("--png, --html, --json and --exact are for a forecast: give --steps.")
    if not forecasts and (mixes or target_tokens):
        found = "--mixes" if mixes else "--target-tokens"
        raise ConfigError(f"{found}: is for a forecast; give --steps or --train-tokens.")
    if overwrite and not mixes:
        raise ConfigError("--overwrite: is for --mixes; remove it.")
    if context_times is not None and not context_sizes:
        raise ConfigError("--context-times: is for --context-sizes; give both.")
    if context_sizes and (balance or start or mixes):
        raise ConfigError(
            "--context-sizes: is for layouts; give --balance, --start and --mixes alone."
        )
    positions = [parse_breakpoint(text, "--at") for text in (at or "").split(",") if text]
    if (
        not forecasts
        and not balance
        and not context_sizes
        and not start
        and (weights := weights_of(metadataset, **options))
    ):
        _show_shares(*weights, positions)
        return
    open_dataset = functools.partial(
        open_mix,
        metadataset,
        ranks=1 if context_sizes else ranks,
        batch_size=1 if context_sizes else micro_batch_size or max(1, global_batch_size // ranks),
        rows_per_step=max(global_batch_size, ranks) if start else global_batch_size,
        default_tokenizer=written_tokenizer if start else tokenizer_of_plan,
        **options,
    )
    dataset, _ = open_dataset()
    if start:
        echo(_start(open_dataset))
        return
    blend = find_blend(dataset)
    if train_tokens is not None:
        steps = _steps_for(blend, train_tokens)
    if target_tokens is not None and not blend.clock.row_tokens:
        raise ConfigError("--target-tokens: rows have no fixed length; remove it.")
    if mixes is not None:
        assert steps is not None, "there is a forecast"
        _refuse_figures(png=png, html=html, balance=balance)
        plan_mixes(
            Path(metadataset),
            mixes,
            blend,
            steps,
            split_part=options["split_part"],
            trusted_modules=options["trusted_modules"],
            tokens_per_doc=tokens_per_doc,
            target=target_tokens,
            exact=exact,
            overwrite=overwrite,
            as_json=as_json,
        )
        return
    imbalance = imbalance_of(blend) if balance else {}
    layouts: ContextForecast | None = None
    if context_sizes:
        layouts = forecast_context(
            blend,
            ranks,
            context_sizes,
            context_times,
            budget=context_budget,
            stages=pipeline_stages,
            steps=steps,
        )
    if steps is None:
        _show_shares(blend, [*describe_subsets(blend)], positions)
    else:
        prediction = make_forecast(blend, steps, tokens_per_doc, exact)
        extra = {"imbalance": imbalance, "context": layouts and layouts.to_json()}
        show_forecast(prediction, blend, steps, as_json, target=target_tokens, **extra)
        draw_forecast(prediction, Path(metadataset).name, png, html)
    if as_json:
        return
    if imbalance:
        echo("\n" + imbalance_table(imbalance, blend))
    if layouts:
        echo("\n" + layouts.text())
    for source in splices_of(dataset):
        echo("\n" + _documents(source, blend))


def _refuse_figures(**given: Any) -> None:
    """Raise ConfigError for an option that shows one mix."""
    for name, value in given.items():
        if value:
            raise ConfigError(f"--{name}: is for one mix; remove it, or --mixes.")


def _start(open_dataset: Callable[[], tuple[Any, Any]]) -> str:
    """Return a table of the file system calls of a start; an earlier one has loaded the modules."""
    (dataset, _), opened = count_file_calls(open_dataset)
    rows = [["", *KINDS], ["dataset", *(f"{opened[kind]:,}" for kind in KINDS)]]
    if isinstance(dataset, PlannedDataset):
        batches = iter(ExactDataLoader(dataset))
        _, read = count_file_calls(lambda: next(batches))
        rows.append(["first batch", *(f"{read[kind]:,}" for kind in KINDS)])
    return table(rows)


def _steps_for(blend: Blend, tokens: int) -> int:
    """Return the number of optimizer steps that read this many tokens, rounded up."""
    tokens_per_step = blend.topology.rows_per_step * blend.clock.row_tokens
    if not tokens_per_step:
        raise ConfigError("--train-tokens: rows have no fixed length; give --steps.")
    return -(-tokens // tokens_per_step)


def _show_shares(blend: Blend, subsets: Sequence[str], positions: Sequence[int]) -> None:
    points = {0, *blend.tree.breakpoints()}
    points.update(*(weight.breakpoints() for weight in blend.loss_weights.values()))
    if (schedule := blend.clock.rows) is not None:
        points.update(schedule.breakpoints)
    shares = _shares(blend, positions or sorted(points))
    echo("\n".join([shares, *subsets, *describe_short_sources(blend)]))
    warn_of_undecided_weights(blend, max(positions, default=MAX_BREAKPOINT))


def _shares(blend: Blend, positions: Sequence[int]) -> str:
    columns = [blend.shares_at(position) for position in positions]
    axis = blend.clock.axis
    unit = "optimizer step" if axis.counted == STEPS else axis.one
    rows = [[f"share at {unit}", *(f"{position:,}" for position in positions)]]
    for key in columns[0]:
        rows.append([blend.names.get(key, key), *(f"{shares[key]:.2%}" for shares in columns)])
    found = table(rows, most=MAX_LISTED)
    if (schedule := blend.clock.rows) is not None:
        lengths = [f"{schedule.at(position):,}" for position in positions]
        found += "\n\n" + table([["positions of", *rows[0][1:]], ["a row", *lengths]])
    if not blend.loss_weights:
        return found
    weights = [blend.loss_weights_at(position) for position in positions]
    rows = [["weight in the loss", *rows[0][1:]]]
    for key in blend.loss_weights:
        rows.append([blend.names.get(key, key), *(f"{each[key]:g}" for each in weights)])
    return f"{found}\n\n{table(rows, most=MAX_LISTED)}"


def _documents(source: Frames, blend: Blend) -> str:
    index = source.examples
    assert isinstance(index, SpliceIndex), "training uses an index, not a grid"
    size = f"{len(source.names):,} documents, {int(index.doc_lengths.sum()):,} tokens"
    name = blend.names.get(source.key, source.key)
    title = f"{name}: {size}, {index.size:,} examples in an epoch"
    counts = zip(index.doc_lengths, index.pairs, index.quotas)
    shares = zip(index.token_shares(), index.coverage())
    rows = [["document", "tokens", "pairs", "examples", "share", "views per token"]]
    for number, (metadata, sizes, (share, mean)) in enumerate(zip(source.metadata, counts, shares)):
        views = f"{mean:,.2f}"
        if index.config.alpha and number < MAX_LISTED:  # edges differ from the middle
            per_token = index.views(number)
            views += f" ({per_token.min():,.2f} to {per_token.max():,.2f})"
        # If documents take turns, the number of examples is an average.
        cells = [f"{size:,.2f}".removesuffix(".00") for size in sizes]
        rows.append([f"doc{metadata['document']}", *cells, f"{share:.2%}", views])
    return f"{title}\n{table(rows, most=MAX_LISTED)}"
