# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The pictures of a run: planned against drawn, loss, reward; and that of a forecast."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from energon_ext.cli.figure_style import (
    COLORS,
    FAINT,
    INK,
    ROUND_TICKS,
    label_ends,
    new_figure,
    steps_axis,
    whole_steps,
)
from energon_ext.cli.metrics import Run, short_labels
from energon_ext.cli.spikes import Spike
from energon_ext.plan.forecast import Forecast

WINDOWS = 30
MAX_LABEL = 18
PERCENT = "{x:.0f} %"

#: Of blends and of interleaves.
BANDS = ("two standard deviations of independent draws", "two rows of an interleave")
EXPECTED = ("independent draws put about 95 % there", "an interleave keeps all of them there")

#: Adds up steps, or sources.
Sums = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure for the report, with the name of its PNG and a caption."""

    name: str
    figure: Figure
    caption: str


def mix_picture(run: Run) -> Picture:
    """Scheduled share of every source, and what was drawn."""
    run = for_pictures(run)
    add, steps = _windows(run.step)
    drawn = _shares(add(run.tokens))
    expected = add(run.planned_share) / steps[:, None]
    rows = run.rows_per_step * steps
    spread = _band(run, expected, rows[:, None])
    step_spread = _band(run, run.planned_share, rows[0])
    kinds = [kind for kind in (0, 1) if kind in np.sign(run.interleaves)]
    bands = ", ".join(BANDS[kind] for kind in kinds)

    figure, (axes,) = new_figure(
        "Planned and drawn mix",
        f"lines: scheduled share · dots: tokens drawn in {_each(steps)} · bands: {bands}",
    )
    low, high = (run.planned_share + sign * step_spread for sign in (-1, 1))
    for index, color in enumerate(COLORS[: len(run.sources)]):
        band = (100 * np.clip(bound[:, index], 0, 1) for bound in (low, high))
        axes.fill_between(run.step, *band, color=color, alpha=0.12, linewidth=0)
        dots = add(run.step) / steps, 100 * drawn[:, index]
        axes.plot(*dots, "o", color=color, markersize=3.6, alpha=0.85)
    axes.set_ylim(-2, min(102, 115 * max(run.planned_share.max(), drawn.max())))
    _lines(axes, run.step, 100 * run.planned_share, run.labels, PERCENT)
    axes.yaxis.set_major_formatter(PERCENT)
    axes.set_ylabel("share of the tokens")
    steps_axis(axes, run)
    inside = (np.abs(drawn - expected) <= spread + 1e-9)[expected > 0]
    return Picture(
        "mix",
        figure,
        f"{inside.sum()} of {inside.size} dots lie in their band; "
        f"{', '.join(EXPECTED[kind] for kind in kinds)}.",
    )


def loss_picture(run: Run, spikes: Sequence[Spike] = ()) -> Picture:
    """Training loss, of all tokens and of each source, and where it stands out."""
    run = for_pictures(run)
    add, steps = _windows(run.step)
    centres = add(run.step) / steps
    total = _mean_loss(run.loss, np.ones_like(run.step), add)
    by_source = _mean_loss(run.source_loss, run.tokens, add)
    lines = np.column_stack([by_source, total])
    figure, (axes,) = new_figure(
        "Training loss",
        f"black: all sources · coloured: each source · means of {_each(steps)}",
    )
    axes.plot(run.step, run.loss, color=FAINT, linewidth=1)
    colors = (*COLORS[: len(run.sources)], INK)
    _lines(axes, centres, lines, (*run.labels, "all"), colors=colors)
    if spikes:
        places = [spike.step for spike in spikes], [spike.loss for spike in spikes]
        axes.plot(*places, "v", color=INK, markersize=5)
    axes.set_ylabel("loss (nats per token)")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND_TICKS))
    steps_axis(axes, run)
    first, last = _last(total[::-1]), _last(total)
    return Picture(
        "loss",
        figure,
        f"The mean loss falls from {first:.2f} to {last:.2f} nats per token over {len(run.step)} "
        "steps; a source's line begins with the first batch that holds it."
        + (" A triangle is a loss that stands out." if spikes else ""),
    )


def loss_over_tokens_picture(run: Run) -> Picture:
    """Training loss of each source over what was read of it."""
    run = for_pictures(run)
    add, steps = _windows(run.step)
    by_source = _mean_loss(run.source_loss, run.tokens, add)
    read = add(run.tokens).cumsum(0)
    figure, (axes,) = new_figure(
        "Training loss over the tokens of each source",
        f"a line for each source, up to all of its tokens · means of {_each(steps)}",
    )
    _lines(axes, read, by_source, run.labels)
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlabel("tokens read of the source")
    axes.set_xlim(0, 1.02 * max(int(read.max()), 1))
    axes.xaxis.set_major_formatter(EngFormatter())
    return Picture(
        "loss_over_tokens",
        figure,
        "Where two lines are apart at the same number of tokens, one source is harder, or another "
        "teaches what both have in common.",
    )


def reward_picture(run: Run) -> Picture:
    """Mean reward of the answers sampled for every step, and what was evaluated beside it."""
    figure, (axes,) = new_figure(
        "Reward", "line: mean of the answers of a step, before clipping · dots: evaluations"
    )
    names = [name.removeprefix("rollout/") for name in run.measured]
    ends = _lines(axes, run.step, np.column_stack(list(run.measured.values())), names)
    steps_axis(axes, run)
    return Picture("reward", figure, f"At the end: {', '.join(ends)}.")


def forecast_picture(found: Forecast) -> Picture:
    """Share and epochs of every source over the steps of a forecast."""
    kept, others, join = _joining(found.tokens.sum(0))
    names = {key: title for key, title in zip(found.keys, found.titles) if key != title}
    labels = _clipped(np.array(short_labels(found.keys, names))[kept].tolist())
    labels += [f"{len(others)} others"] if len(others) else []
    add, windows = _windows(found.ends)
    ends = found.ends[windows.cumsum() - 1]
    lines = 100 * _shares(join(add(found.tokens)))
    epochs = found.epochs[:, kept]
    figure, (upper, lower) = new_figure(
        "What the run will read",
        f"above: share of the tokens in each of {len(ends)} parts of the run · "
        "below: epochs of each source",
        height=6.4,
        height_ratios=(3, 2),
    )
    for axes in (upper, lower):
        whole_steps(axes, int(found.ends[-1]), found.first)
    upper.yaxis.set_major_formatter(PERCENT)
    upper.set_ylabel("share of the tokens")
    upper.set_ylim(0, min(102, 1.15 * lines.max()))
    upper.tick_params(labelbottom=False)
    upper.set_xlabel("")
    lower.set_ylabel("epochs")
    lower.set_ylim(0, 1.1 * max(epochs.max(), 1e-9))
    _lines(upper, (ends + [found.first, *ends[:-1]]) / 2, lines, labels, PERCENT)
    epochs = np.vstack((found.epochs_before[kept], epochs))
    _lines(lower, np.append(found.first, found.ends), epochs, labels)
    ended = f"; {len(found.exhausted)} of them end before" if found.exhausted else ""
    return Picture(
        "forecast",
        figure,
        f"{found.tokens.sum():,.0f} tokens of {len(found.keys):,} sources in {found.steps:,} "
        f"steps{ended}.",
    )


def for_pictures(run: Run) -> Run:
    """The same run with names of bounded length and as many sources as there are colours."""
    kept, others, join = _joining(run.tokens.sum(0))
    labels = _clipped(run.labels)
    if not len(others):
        return replace(run, labels=tuple(labels))
    depth = run.interleaves[others]
    return replace(
        run,
        sources=(*(run.sources[index] for index in kept), "others"),
        labels=(*(labels[index] for index in kept), f"{len(others)} others"),
        epoch_documents=join(run.epoch_documents),
        epoch_tokens=join(run.epoch_tokens),
        interleaves=np.append(run.interleaves[kept], depth.sum() * (depth > 0).all()),
        planned_share=join(run.planned_share),
        tokens=join(run.tokens),
        documents=join(run.documents),
        source_loss=_mean_loss(run.source_loss, run.tokens, join),
    )


def _joining(tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray, Sums]:
    """The sources of most tokens, as many as have a colour; the others; and what adds these up."""
    order = np.argsort(-tokens, kind="stable")
    most = len(COLORS) - (len(order) > len(COLORS))
    kept, others = np.sort(order[:most]), order[most:]
    columns, firsts = [*kept, *others], np.arange(min(len(order), len(COLORS)))
    return kept, others, lambda values: np.add.reduceat(values[..., columns], firsts, axis=-1)


def _band(run: Run, share: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """How far a share of ``rows`` rows may be off; an interleave by a row at each end of them."""
    by_chance = 2 * np.sqrt(share * (1 - share) / rows)
    return np.where((run.interleaves > 0) & (share > 0), 2 * run.interleaves / rows, by_chance)


def _windows(steps: np.ndarray) -> tuple[Sums, np.ndarray]:
    """Sums over windows of one length, but for the last one; and how many steps are in each."""
    firsts = np.arange(0, len(steps), -(-len(steps) // WINDOWS))
    return lambda values: np.add.reduceat(values, firsts), np.diff(firsts, append=len(steps))


def _each(steps: np.ndarray) -> str:
    size, last = int(steps[0]), int(steps[-1])
    return f"{size} step{'s' * (size > 1)}" + (f", {last} at the end" if last < size else "")


def _shares(tokens: np.ndarray) -> np.ndarray:
    return tokens / np.maximum(tokens.sum(1, keepdims=True), 1)


def _mean_loss(losses: np.ndarray, tokens: np.ndarray, add: Sums) -> np.ndarray:
    counted = np.where(np.isfinite(losses), tokens, 0)
    total, weights = add(np.nan_to_num(losses) * counted), add(counted)
    return np.where(weights > 0, total / np.maximum(weights, 1), np.nan)


def _lines(
    axes: Axes,
    places: np.ndarray,
    lines: np.ndarray,
    labels: Sequence[str],
    shown: str = "{x:.2f}",
    colors: Sequence[str] = COLORS,
) -> list[str]:
    """Draw columns as lines through the values that are known, each with its name at its end.

    Args:
        places: of the values, for all lines or a column for each.
        shown: how the last value stands behind a name.

    Returns:
        The names with the values.
    """
    columns = np.broadcast_to(places if places.ndim > 1 else places[:, None], lines.shape)
    for xs, values, color in zip(columns.T, lines.T, colors):
        known = np.isfinite(values)
        style = "-" if known.mean() > 0.5 and len(values) > 1 else "o-"
        axes.plot(xs[known], values[known], style, color=color, linewidth=1.7, markersize=4)
    ends = np.array([_last(values) for values in lines.T])
    names = [f"{label} {shown.format(x=end)}" for label, end in zip(labels, ends)]
    label_ends(axes, ends, names, colors)
    return names


def _last(values: np.ndarray) -> float:
    """The last number, NaN where there is none."""
    known = values[np.isfinite(values)]
    return float(known[-1]) if len(known) else np.nan


def _clipped(labels: Sequence[str]) -> list[str]:
    """Labels that are short in the middle.

    Example:
        >>> _clipped(["a_very_long_name_of_web_pages_1", "code"])
        ['a_very_lo…_pages_1', 'code']
    """
    half = MAX_LABEL // 2
    return [
        label if len(label) <= MAX_LABEL else f"{label[:half]}…{label[1 - half :]}"
        for label in labels
    ]
