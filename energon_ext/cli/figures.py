# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The pictures of a run, planned against drawn, loss, reward; and that of a forecast."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from energon_ext.cli import counted
from energon_ext.cli import figure_style as style
from energon_ext.cli.figure_style import COLORS, FAINT, INK, ROUND_TICKS, Picture, Sums
from energon_ext.cli.metrics import Run, short_labels
from energon_ext.cli.spikes import Spike
from energon_ext.plan.forecast import Forecast

#: How far a dot of a blend may be off, and one of an interleave.
ALLOWED = ("two standard deviations of independent draws", "two rows of an interleave")
EXPECTED = ("independent draws put about 95 % there", "an interleave keeps all of them there")


def mix_picture(run: Run) -> Picture:
    """Scheduled share of every source, and what was drawn."""
    run = for_pictures(run)
    add, steps = style.windows(run.step)
    drawn = style.shares(add(run.tokens))
    expected = add(run.planned_share) / steps[:, None]
    rows = run.rows_per_step * steps
    spread = _spread(run, expected, rows[:, None])
    kinds = [kind for kind in (0, 1) if kind in np.sign(run.interleaves)]
    allowed = ", ".join(ALLOWED[kind] for kind in kinds)

    read = (
        f"lines: scheduled share · dots: tokens drawn in {style.each_of(steps)} · bars: {allowed}"
    )
    figure, (axes,) = style.new_figure("Planned and drawn mix", read)
    # Bars beside each other: the colours of bands that overlap would become grey.
    aside = (np.arange(len(run.sources)) + 0.5) / len(run.sources) - 0.5
    thin = min(3.0, 240 / drawn.size)
    for index, color in enumerate(COLORS[: len(run.sources)]):
        seen = (expected[:, index] > 0) | (drawn[:, index] > 0)
        places = (add(run.step) / steps + 0.8 * steps * aside[index])[seen]
        middle, off = expected[seen, index], spread[seen, index]
        low, high = 100 * np.clip((middle - off, middle + off), 0, 1)
        axes.vlines(places, low, high, color=color, alpha=0.3, linewidth=thin)
        axes.plot(places, 100 * drawn[seen, index], "o", color=color, markersize=3.6)
    axes.set_ylim(-2, min(102, 115 * max(run.planned_share.max(), drawn.max())))
    style.draw_steps(
        axes, np.append(run.step, run.step[-1] + 1) - 0.5, run.planned_share, run.labels
    )
    axes.set_ylabel("share of the tokens")
    style.steps_axis(axes, run)
    inside = (np.abs(drawn - expected) <= spread + 1e-9)[expected > 0]
    dots = f"{inside.sum()} of {counted(inside.size, 'dot')} on the bars"
    return Picture("mix", figure, f"{dots}; {', '.join(EXPECTED[kind] for kind in kinds)}.")


def loss_picture(run: Run, spikes: Sequence[Spike] = ()) -> Picture:
    """Training loss, of all tokens and of each source, and unusually high ones."""
    run = for_pictures(run)
    add, steps = style.windows(run.step)
    centres = add(run.step) / steps
    total = _mean_loss(run.loss, np.ones_like(run.step), add)
    by_source = _mean_loss(run.source_loss, run.tokens, add)
    lines = [(centres, losses) for losses in (*by_source.T, total)]
    read = f"black: all sources · coloured: each source · means of {style.each_of(steps)}"
    figure, (axes,) = style.new_figure("Training loss", read)
    axes.plot(run.step, run.loss, color=FAINT, linewidth=1)
    colors = (*COLORS[: len(run.sources)], INK)
    style.draw_lines(axes, lines, (*run.labels, "all"), colors)
    if spikes:
        places = [spike.step for spike in spikes], [spike.loss for spike in spikes]
        axes.plot(*places, "v", color=INK, markersize=5)
    axes.set_ylabel("loss (nats per token)")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND_TICKS))
    style.steps_axis(axes, run)
    first, last = style.last_known(total[::-1]), style.last_known(total)
    steps_read = counted(len(run.step), "step")
    goes = f"goes from {first:.2f} to {last:.2f} nats per token over {steps_read}"
    caption = f"The mean loss {goes}; a source's line begins with the first batch that holds it."
    caption += " A triangle is an unusually high loss." * bool(spikes)
    return Picture("loss", figure, caption)


def loss_over_tokens_picture(run: Run) -> Picture:
    """Training loss of each source over what was read of it."""
    run = for_pictures(run)
    add, steps = style.windows(run.step)
    by_source = _mean_loss(run.source_loss, run.tokens, add)
    read = add(run.tokens).cumsum(0)
    subtitle = f"a line for each source, up to all of its tokens · means of {style.each_of(steps)}"
    figure, (axes,) = style.new_figure("Training loss over the tokens of each source", subtitle)
    style.draw_lines(axes, [*zip(read.T, by_source.T)], run.labels)
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlabel("tokens read of the source")
    axes.set_xlim(0, 1.02 * max(int(read.max()), 1))
    axes.xaxis.set_major_formatter(EngFormatter())
    caption = "Where two lines are apart at the same number of tokens, one source is harder, "
    caption += "or another teaches what both have in common."
    return Picture("loss_over_tokens", figure, caption)


def reward_picture(run: Run) -> Picture:
    """Mean reward of the answers sampled for every step, and what was evaluated beside it."""
    figure, (axes,) = style.new_figure(
        "Reward", "line: mean of the answers of a step, before clipping · dots: evaluations"
    )
    names = [name.removeprefix("rollout/") for name in run.measured]
    ends = style.draw_lines(axes, [(run.step, values) for values in run.measured.values()], names)
    style.steps_axis(axes, run)
    return Picture("reward", figure, f"At the end: {', '.join(ends)}.")


def validation_picture(run: Run) -> Picture:
    """Loss of the split val, and how likely its spliced documents are word for word."""
    likely, losses = run.validated("val/memorized"), run.validated("val/loss")
    keys = [*likely, *(key for key in losses if key not in likely)]
    shown = keys[: len(COLORS)]
    some = f"{len(shown)} of {len(keys)}" if len(keys) > len(shown) else "each"
    figure, panels = style.new_figure(
        "Validation",
        f"loss of the split val · black: all · coloured: {some} of its sources and documents"
        + " · below: P(z) of documents" * bool(likely),
        height=6.4 if likely else 4.2,
        height_ratios=(1, 1) if likely else (1,),
    )
    labels = [*style.clipped(short_labels(shown)), "all"]
    for axes, found, what in zip(panels, (losses, likely), ("loss (nats per token)", "P(z)")):
        lines = [found.get(key, np.empty((2, 0))) for key in shown]
        lines += [run.validation["val/loss"]] if found is losses else []
        axes.set_ylabel(what)
        style.draw_lines(axes, lines, labels, (*COLORS[: len(shown)], INK), dots=True)
        style.steps_axis(axes, run, named=axes is panels[0])
    caption = "Every evaluation reads the same rows."
    if likely:
        panels[0].set_xlabel("")
        panels[0].tick_params(labelbottom=False)
        panels[1].set_ylim(-0.03, 1.03)
        caption += " P(z) is how likely a model goes on with a content word for word, given its "
        caption += "first token; the mean of a document's contents."
    return Picture("validation", figure, caption)


def forecast_picture(found: Forecast) -> Picture:
    """Share and epochs of every source over the steps of a forecast."""
    kept, others, join = style.joining(found.tokens.sum(0))
    names = {key: title for key, title in zip(found.keys, found.titles) if key != title}
    labels = style.clipped(np.array(short_labels(found.keys, names))[kept].tolist())
    labels += [f"{len(others)} others"] if len(others) else []
    last = int(found.ends[-1])
    ends = np.array([found.exhausted.get(found.keys[index], last) for index in kept])
    add, sizes = style.windows(found.ends)
    figure, (upper, lower) = style.new_figure(
        "What the run will read",
        f"above: planned shares; dots: of the tokens, in {counted(len(sizes), 'part')} of the run"
        " · below: epochs · dashed: breakpoints · ×: a source ends",
        height=6.4,
        height_ratios=(3, 2),
    )
    points = found.breakpoints
    for axes in (upper, lower):
        style.whole_steps(axes, last, found.first)
        style.mark_steps(axes, np.array(points))
    style.name_steps(upper, "breakpoint" + "s" * (len(points) > 1) + " at", points)
    upper.set_ylabel("share of the tokens")
    upper.tick_params(labelbottom=False)
    upper.set_xlabel("")
    edges, drawn = np.append(found.first, found.ends), 100 * style.shares(join(add(found.tokens)))
    parts = edges[np.append(0, sizes.cumsum())]
    for values, color in zip(drawn.T, COLORS):
        dots = ((parts[1:] + parts[:-1]) / 2)[values > 0], values[values > 0]
        upper.plot(*dots, "o", color=color, markersize=3.6)
    planned = join(found.shares)
    upper.set_ylim(0, min(102, 1.15 * max(100 * planned.max(), drawn.max())))
    style.draw_steps(upper, edges, planned, labels, np.append(ends, [last] * (len(others) > 0)))
    _draw_epochs(lower, found, kept, ends, labels)
    early, sources = len(found.exhausted), counted(len(found.keys), "source")
    ended = f"; {early} of them end{'s' * (early == 1)} before" if early else ""
    caption = f"{found.tokens.sum():,.0f} tokens of {sources} in {counted(found.steps, 'step')}"
    return Picture("forecast", figure, f"{caption}{ended}.")


def _draw_epochs(
    axes: Axes, found: Forecast, kept: np.ndarray, ends: np.ndarray, labels: Sequence[str]
) -> None:
    """Epochs of sources, from the window that reads the first token to the step of the last."""
    read, edges = found.tokens[:, kept] > 0, np.append(found.first, found.ends)
    epochs = np.vstack((found.epochs_before, found.epochs))[:, kept]
    epochs[:, ~read.any(0)] = np.nan
    axes.set_ylabel("epochs")
    axes.set_ylim(0, 1.1 * max(found.epochs[:, kept].max(), 1e-9))
    places = edges[:, None].clip(edges[read.argmax(0)], ends)
    style.draw_lines(axes, [*zip(places.T, epochs.T)], labels)
    for index, end, last, color in zip(kept, ends, epochs[-1], COLORS):
        if found.keys[index] in found.exhausted:
            axes.plot(end, last, "x", color=color, markeredgewidth=2, clip_on=False)


def for_pictures(run: Run) -> Run:
    """The same run with names of bounded length and as many sources as there are colours."""
    kept, others, join = style.joining(run.tokens.sum(0))
    labels = style.clipped(run.labels)
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


def _spread(run: Run, share: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """How far a share of ``rows`` rows may be off; an interleave by a row at each end of them."""
    by_chance = 2 * np.sqrt(share * (1 - share) / rows)
    return np.where((run.interleaves > 0) & (share > 0), 2 * run.interleaves / rows, by_chance)


def _mean_loss(losses: np.ndarray, tokens: np.ndarray, add: Sums) -> np.ndarray:
    counted = np.where(np.isfinite(losses), tokens, 0)
    total, weights = add(np.nan_to_num(losses) * counted), add(counted)
    return np.where(weights > 0, total / np.maximum(weights, 1), np.nan)
