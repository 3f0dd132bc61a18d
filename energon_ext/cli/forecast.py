# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Forecasts as text, as a figure and as an HTML page."""

import itertools
from pathlib import Path
from typing import Any, Iterator, Mapping

import numpy as np

from energon_ext.cli import MAX_LISTED, echo, echo_json, plural, table
from energon_ext.cli.mix import warn_of_undecided_weights
from energon_ext.cli.report import import_figures, page, png_of
from energon_ext.errors import ConfigError
from energon_ext.plan.blend import Blend
from energon_ext.plan.cost import AttentionCost
from energon_ext.plan.estimate import estimate
from energon_ext.plan.forecast import Forecast, epochs_at, forecast, late_breakpoints
from energon_ext.plan.remarks import describe_short_sources, describe_subsets
from energon_ext.plan.row_schedule import describe_points
from energon_ext.plan.run import Run
from energon_ext.plan.topology import imbalance
from energon_ext.progress import passing_bar
from energon_ext.state.files import write_file

#: Up to this many rows are planned exactly by default; beyond that, forecasts are estimated.
_MAX_EXACT_ROWS = 1 << 18

#: The imbalance is averaged over this many first steps.
BALANCED_STEPS = 20

#: Maximum number of breakpoints listed.
MAX_BREAKPOINTS = 5

#: Up to this many epochs are nearly as good as new data (Muennighoff et al., 2023).
GOOD_EPOCHS = 4


def make_forecast(
    blend: Blend,
    steps: int,
    tokens_per_document: float | None,
    exact: bool,
) -> Forecast:
    """Forecast the next steps: exactly if requested or if there are few, otherwise estimated."""
    if plans_rows(blend, steps * blend.topology.rows_per_step, tokens_per_document, exact):
        assert isinstance(blend, Run)
        return forecast(
            blend, steps, lambda drawn: passing_bar("planning", steps, drawn, unit="step")
        )
    return estimate(blend, steps, tokens_per_document)


def plans_rows(blend: Blend, rows: int, tokens_per_document: float | None, exact: bool) -> bool:
    """Return whether a forecast plans each of its rows, as requested or because there are few.

    Raises:
        ConfigError: an option is for streamed sources, and the blend is planned, or the reverse.
    """
    if exact and not blend.is_planned:
        raise ConfigError("--exact: cannot be used; the lengths of streamed sources are unknown.")
    if tokens_per_document is not None and blend.is_planned:
        raise ConfigError(
            "--tokens-per-doc: is for streamed sources, but there is none; remove it."
        )
    return blend.is_planned and (exact or rows <= _MAX_EXACT_ROWS)


def forecast_text(forecast: Forecast, blend: Blend, steps: int, target: int | None = None) -> str:
    """Return the forecast as lines of text.

    Args:
        target: tokens of a larger run, whose epochs are shown, too.
    """
    lines = [_headline(forecast, blend), table([HEAD, *_rows(forecast)], most=MAX_LISTED)]
    if target is not None:
        lines.append(_target_text(forecast, blend, target))
    if forecast.steps < steps:
        end = forecast.first + steps
        lines.append(f"All sources are exhausted after step {forecast.ends[-1]:,} of {end:,}.")
    if late := late_breakpoints(blend, forecast.first + steps):
        named = ", ".join(f"{point:,}" for point in late[:MAX_BREAKPOINTS])
        more = f" and {len(late) - MAX_BREAKPOINTS} more" if len(late) > MAX_BREAKPOINTS else ""
        word = "breakpoints" if len(late) > 1 else "breakpoint"
        lines.append(f"The run ends before the {word} {named}{more}.")
    lines += [
        *describe_rows(blend),
        *describe_subsets(blend),
        *describe_short_sources(blend),
    ]
    if blend.clock.skip:
        named = ", ".join(f"{first:,} to {stop - 1:,}" for first, stop in blend.clock.skip)
        lines.append(f"Steps {named} are planned but skipped; they are counted here.")
    return "\n".join(lines)


def _target_text(forecast: Forecast, blend: Blend, target: int) -> str:
    """Return the epochs of a larger run, and the subset that gives this one as many."""
    epochs = epochs_at(forecast, blend, target)
    rows = [[f"in a run of {target:,} tokens", "epochs", ""]]
    for number in np.argsort(-forecast.tokens.sum(0), kind="stable").tolist():
        known = not np.isnan(epochs[number])
        remark = f"over {GOOD_EPOCHS} epochs" if known and epochs[number] > GOOD_EPOCHS else ""
        rows.append([forecast.titles[number], f"{epochs[number]:,.2f}" if known else "-", remark])
    found = table(rows, most=MAX_LISTED)
    fraction = forecast.positions / target
    if fraction > 1:
        return found
    return f"{found}\n`subset: {{fraction: {fraction:.4g}}}` repeats a source as often in this run."


def describe_rows(blend: Blend) -> Iterator[str]:
    """Yield a line with the lengths of rows, if they have a schedule."""
    if (rows := blend.clock.rows) is not None:
        yield f"Rows have {describe_points(rows.to_json(), blend.clock.axis.one)}."


def imbalance_of(blend: Blend) -> dict[str, tuple[float, float]]:
    """Return the imbalance among ranks and among micro-batches, in natural order and balanced."""
    if not isinstance(blend, Run):
        raise ConfigError("--balance: rows of streamed sources are unknown until they are read.")
    steps, cost = itertools.islice(blend.fork().draw_steps(), BALANCED_STEPS), AttentionCost()
    costs = (step.costs(cost, step.topology.rows_per_step) for step in steps)
    return imbalance(costs, blend.topology)


def imbalance_table(orders: Mapping[str, tuple[float, float]], blend: Blend) -> str:
    """Return the imbalance as lines of text."""
    topology = blend.topology
    title = f"{topology.ranks} ranks x {topology.rounds} micro-batches, first steps"
    rows = [[f"heaviest / mean cost, {title}", *orders]]
    for place, name in enumerate(("ranks", "micro-batches of a round")):
        rows.append([name, *(f"{ratios[place]:.3f}" for ratios in orders.values())])
    return table(rows)


HEAD = ["source", "first share", "last share", "tokens", "of tokens", "documents", "epochs", ""]


def _headline(forecast: Forecast, blend: Blend) -> str:
    rows, seq_len = blend.topology.rows_per_step, blend.clock.row_tokens
    method = "planned exactly"
    if not forecast.is_exact:
        method = f"estimated; shares within ±{forecast.spread.max():.2%} with 95 % probability"
    filled = forecast.tokens.sum() / forecast.positions if forecast.positions else 1.0
    start = f"after step {forecast.first:,}, " if forecast.first else ""
    size = f"{plural(forecast.steps, 'step')} of {plural(rows, 'row')} of {seq_len:,} positions"
    if blend.clock.rows is not None:
        size = f"{plural(forecast.steps, 'step')} of {rows * seq_len:,} positions"
    return f"{start}{size}: {forecast.tokens.sum():,.0f} tokens, rows {filled:.2%} full; {method}"


def _rows(forecast: Forecast) -> Iterator[list[str]]:
    tokens, documents = forecast.tokens.sum(0), forecast.documents.sum(0)
    epochs, total = forecast.epochs[-1], max(forecast.tokens.sum(), 1)
    for number in np.argsort(-tokens, kind="stable").tolist():
        yield [
            forecast.titles[number],
            f"{forecast.shares[0, number]:.2%}",
            f"{forecast.shares[-1, number]:.2%}",
            f"{tokens[number]:,.0f}",
            f"{tokens[number] / total:.2%}",
            f"{documents[number]:,.0f}",
            f"{epochs[number]:,.2f}",
            _remark(forecast, number),
        ]


def _remark(forecast: Forecast, number: int) -> str:
    key, read = forecast.keys[number], np.flatnonzero(forecast.tokens[:, number])
    if key in forecast.exhausted:
        verb = "ends at" if len(read) else "ended before"
        return f"{verb} step {forecast.exhausted[key]:,}"
    if not len(read):
        return "never read"
    if forecast.epochs[-1, number] > GOOD_EPOCHS:
        return f"over {GOOD_EPOCHS} epochs"
    weightless = np.flatnonzero(forecast.shares[:, number] == 0)
    begins = np.concatenate([[forecast.first], forecast.ends[:-1]])
    if len(weightless):
        # The first run of consecutive windows with weight 0 ends here.
        last = weightless[np.flatnonzero(np.diff(weightless, append=np.inf) > 1)[0]]
        return f"weight 0 from step {begins[weightless[0]]:,} to {forecast.ends[last] - 1:,}"
    return ""


def show_forecast(
    forecast: Forecast,
    blend: Blend,
    steps: int,
    as_json: bool,
    target: int | None = None,
    **extra: Any,
) -> None:
    """Print the forecast of some steps; JSON also contains the non-empty ``extra`` fields."""
    if blend.clock.rows is not None:
        extra["row_tokens"] = blend.clock.rows.to_json()
    if as_json:
        if target is not None:
            extra["epochs_at_target"] = epochs_by_key(forecast, epochs_at(forecast, blend, target))
        echo_json(forecast.to_json() | {name: value for name, value in extra.items() if value})
    else:
        echo(forecast_text(forecast, blend, steps, target))
    warn_of_undecided_weights(blend, forecast.first + steps - 1)


def epochs_by_key(forecast: Forecast, epochs: np.ndarray) -> dict[str, float | None]:
    """Return epochs by the key of their source, for JSON; None if they are unknown."""
    return {k: None if np.isnan(n) else float(n) for k, n in zip(forecast.keys, epochs)}


def draw_forecast(forecast: Forecast, name: str, png: Path | None, html: Path | None) -> None:
    """Write the figure, and the page that contains it."""
    if png is None and html is None:
        return
    picture = import_figures().forecast_picture(forecast)
    image = png_of(picture)
    if png is not None:
        write_file(png, image)
    if html is not None:
        tiles = [
            (f"{forecast.steps:,}", "optimizer step" + "s" * (forecast.steps > 1)),
            (f"{forecast.tokens.sum():,.0f}", "tokens"),
            (f"{forecast.epochs[-1].max():.2f}", "epochs of the most repeated source"),
            ("planned" if forecast.is_exact else "estimated", "method"),
        ]
        tables = [("Sources", HEAD, _rows(forecast))]
        pictures = [(picture.caption, image)]
        write_file(html, page(f"What {name} will read", tiles, pictures, tables).encode())
