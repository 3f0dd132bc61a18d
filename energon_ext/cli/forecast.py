# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A forecast as text, as a picture and as a page."""

import itertools
import sys
from pathlib import Path
from typing import Any, Iterator, Mapping

import numpy as np
from tqdm import tqdm

from energon_ext.cli import MOST_LISTED, counted, echo, echo_json, table
from energon_ext.cli.mix import tell_undecided
from energon_ext.cli.report import import_figures, page, png_of
from energon_ext.errors import ConfigError
from energon_ext.plan.cost import AttentionCost
from energon_ext.plan.dataset import PlannedDataset
from energon_ext.plan.deal import imbalance
from energon_ext.plan.estimate import estimated
from energon_ext.plan.forecast import Forecast, late_breakpoints, planned
from energon_ext.plan.source import Blend
from energon_ext.state.files import write_file

#: Rows that are planned one by one unless asked for; more are estimated.
MOST_EXACT_ROWS = 1 << 18

#: Steps from the first on over which the imbalance is averaged.
BALANCED_STEPS = 20

#: Breakpoints that are listed.
MOST_BREAKPOINTS = 5

#: Epochs that are about as good as new data; Muennighoff and others, 2023.
GOOD_EPOCHS = 4


def made(
    blend: Blend,
    steps: int,
    tokens_per_document: float | None,
    exact: bool,
    state: Mapping[str, Any] | None = None,
) -> Forecast:
    """The forecast of some steps: planned where that is asked for or quick, else estimated.

    Args:
        state: a cursor behind which they are, at which a planned dataset stands.
    """
    if exact and not blend.is_planned:
        raise ConfigError(
            "--exact: a streamed source makes it impossible; the lengths are not known."
        )
    if tokens_per_document is not None and blend.is_planned:
        raise ConfigError("--tokens-per-doc: is for streamed sources; there is none.")
    rows = steps * blend.topology.rows_per_step
    if isinstance(blend, PlannedDataset) and (exact or rows <= MOST_EXACT_ROWS):
        off = None if steps > 1000 and sys.stderr.isatty() else True
        return planned(blend, steps, lambda each: tqdm(each, "planning", steps, disable=off), state)
    return estimated(blend, steps, tokens_per_document)


def text(found: Forecast, blend: Blend, steps: int) -> str:
    """Everything in lines."""
    lines = [_headline(found, blend), table([HEAD, *_rows(found)], most=MOST_LISTED)]
    if found.steps < steps:
        end = found.first + steps
        lines.append(f"All sources have ended after step {found.ends[-1]:,} of {end:,}.")
    if late := late_breakpoints(blend, found.first + steps):
        named = ", ".join(f"{point:,}" for point in late[:MOST_BREAKPOINTS])
        more = f" and {len(late) - MOST_BREAKPOINTS} more" if len(late) > MOST_BREAKPOINTS else ""
        lines.append(f"The run ends before the breakpoints {named}{more}.")
    if blend.clock.skip:
        named = ", ".join(f"{first:,} to {stop - 1:,}" for first, stop in blend.clock.skip)
        lines.append(f"Steps {named} are planned and not read; they are counted here.")
    return "\n".join(lines)


def imbalance_of(blend: Blend) -> dict[str, tuple[float, float]]:
    """Heaviest over mean of ranks and of micro-batches, in the natural order and dealt."""
    if not isinstance(blend, PlannedDataset):
        raise ConfigError("--balance: rows of streamed sources are not known before they are read.")
    some, cost = itertools.islice(blend.planned_steps(), BALANCED_STEPS), AttentionCost()
    rows = blend.topology.rows_per_step
    return imbalance((step.costs(cost, rows) for step in some), blend.topology)


def imbalance_table(found: Mapping[str, tuple[float, float]], blend: Blend) -> str:
    """The same in lines."""
    topology = blend.topology
    title = f"{topology.ranks} ranks x {topology.rounds} micro-batches, first steps"
    rows = [[f"heaviest over mean, {title}", *found]]
    for place, name in enumerate(("ranks", "micro-batches of a round")):
        rows.append([name, *(f"{each[place]:.3f}" for each in found.values())])
    return table(rows)


HEAD = ["source", "first", "last", "tokens", "of all", "documents", "epochs", ""]


def _headline(found: Forecast, blend: Blend) -> str:
    rows, seq_len = blend.topology.rows_per_step, blend.clock.row_tokens
    how = "planned exactly"
    if not found.is_exact:
        how = f"estimated; shares are within {found.spread.max():.2%} with 95 % chance"
    filled = found.tokens.sum() / found.positions if found.positions else 1.0
    behind = f"behind step {found.first:,}, " if found.first else ""
    size = f"{counted(found.steps, 'step')} of {counted(rows, 'row')} of {seq_len:,} positions"
    return f"{behind}{size}: {found.tokens.sum():,.0f} tokens, rows {filled:.2%} full; {how}"


def _rows(found: Forecast) -> Iterator[list[str]]:
    tokens, documents = found.tokens.sum(0), found.documents.sum(0)
    epochs, total = found.epochs[-1], max(found.tokens.sum(), 1)
    for number in np.argsort(-tokens, kind="stable").tolist():
        yield [
            found.titles[number],
            f"{found.shares[0, number]:.2%}",
            f"{found.shares[-1, number]:.2%}",
            f"{tokens[number]:,.0f}",
            f"{tokens[number] / total:.2%}",
            f"{documents[number]:,.0f}",
            f"{epochs[number]:,.2f}",
            _remark(found, number),
        ]


def _remark(found: Forecast, number: int) -> str:
    key, read = found.keys[number], np.flatnonzero(found.tokens[:, number])
    if key in found.exhausted:
        ended = "ends at" if len(read) else "ended before"
        return f"{ended} step {found.exhausted[key]:,}"
    if not len(read):
        return "never read"
    if found.epochs[-1, number] > GOOD_EPOCHS:
        return f"over {GOOD_EPOCHS} epochs"
    weightless = np.flatnonzero(found.shares[:, number] == 0)
    begins = np.concatenate([[found.first], found.ends[:-1]])
    if len(weightless):
        # Up to the end of the first windows in a row that have none.
        last = weightless[np.flatnonzero(np.diff(weightless, append=np.inf) > 1)[0]]
        return f"weight 0 from step {begins[weightless[0]]:,} to {found.ends[last] - 1:,}"
    return ""


def show(found: Forecast, blend: Blend, steps: int, as_json: bool, **beside: Any) -> None:
    """Print the forecast of some steps; as JSON, what is true of ``beside`` is in the object."""
    if as_json:
        echo_json(found.to_json() | {name: value for name, value in beside.items() if value})
    else:
        echo(text(found, blend, steps))
    tell_undecided(blend, found.first + steps - 1)


def draw(found: Forecast, name: str, png: Path | None, html: Path | None) -> None:
    """Write the picture, and the page that holds it."""
    if png is None and html is None:
        return
    picture = import_figures().forecast_picture(found)
    image = png_of(picture)
    if png is not None:
        write_file(png, image)
    if html is not None:
        tiles = [
            (f"{found.steps:,}", "optimizer step" + "s" * (found.steps > 1)),
            (f"{found.tokens.sum():,.0f}", "tokens"),
            (f"{found.epochs[-1].max():.2f}", "epochs of the source that is read most often"),
            ("planned" if found.is_exact else "estimated", "how it was found"),
        ]
        tables = [("Sources", HEAD, _rows(found))]
        pictures = [(picture.caption, image)]
        write_file(html, page(f"What {name} will read", tiles, pictures, tables).encode())
