# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Figures of a run (mix, loss, reward, validation) and of a forecast."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, MaxNLocator

from energon_ext.cli import figure_style as style
from energon_ext.cli import plural
from energon_ext.cli.figure_style import COLORS, FAINT, INK, ROUND_TICKS, Picture, Sums
from energon_ext.cli.spikes import Spike
from energon_ext.metrics.file import Run
from energon_ext.metrics.labels import short_labels
from energon_ext.plan.forecast import Forecast

#: Tolerance of a dot, and how many dots to expect within it, for a blend and an interleave.
TOLERANCES = ("two standard deviations (blend)", "two rows (interleave)")
EXPECTED = ("about 95 % are expected for a blend", "all are expected for an interleave")


def mix_picture(run: Run) -> Picture:
    """Draw the scheduled and the actual share of each source."""
    run = for_pictures(run)
    add, steps = style.windows(run.step)
    drawn = style.shares(add(run.tokens))
    expected = add(run.planned_share) / steps[:, None]
    rows = run.rows_per_step * steps
    spread = _spread(run, expected, rows[:, None])
    kinds = [kind for kind in (0, 1) if kind in np.sign(run.interleaves)]
    tolerances = ", ".join(TOLERANCES[kind] for kind in kinds)

    key = f"lines: scheduled share · dots: actual share over {style.window_size(steps)} · "
    figure, (axes,) = style.new_figure("Planned and actual mix", f"{key}bars: {tolerances}")
    # Bars are drawn side by side, since overlapping bands would blend to grey.
    offsets = (np.arange(len(run.sources)) + 0.5) / len(run.sources) - 0.5
    width = min(3.0, 240 / drawn.size)
    for index, color in enumerate(COLORS[: len(run.sources)]):
        present = (expected[:, index] > 0) | (drawn[:, index] > 0)
        x = (add(run.step) / steps + 0.8 * steps * offsets[index])[present]
        middle, tolerance = expected[present, index], spread[present, index]
        low, high = 100 * np.clip((middle - tolerance, middle + tolerance), 0, 1)
        axes.vlines(x, low, high, color=color, alpha=0.3, linewidth=width)
        axes.plot(x, 100 * drawn[present, index], "o", color=color, markersize=3.6)
    axes.set_ylim(-2, min(102, 115 * max(run.planned_share.max(), drawn.max())))
    style.draw_steps(
        axes, np.append(run.step, run.step[-1] + 1) - 0.5, run.planned_share, run.labels
    )
    axes.set_ylabel("share of tokens")
    style.steps_axis(axes, run)
    inside = (np.abs(drawn - expected) <= spread + 1e-9)[expected > 0]
    dots = f"{inside.sum()} of {plural(inside.size, 'dot')} on the bars"
    return Picture("mix", figure, f"{dots}; {', '.join(EXPECTED[kind] for kind in kinds)}.")


def loss_picture(run: Run, spikes: Sequence[Spike] = ()) -> Picture:
    """Draw the training loss in total and by source, with its spikes."""
    run = for_pictures(run)
    add, steps = style.windows(run.step)
    centres = add(run.step) / steps
    total = _mean_loss(run.loss, np.ones_like(run.step), add)
    by_source = _mean_loss(run.source_loss, run.tokens, add)
    lines = [(centres, losses) for losses in (*by_source.T, total)]
    key = f"black: all sources · coloured: single sources · means over {style.window_size(steps)}"
    key += " · triangles: unusually high losses" * bool(spikes)
    figure, (axes,) = style.new_figure("Training loss", key)
    axes.plot(run.step, run.loss, color=FAINT, linewidth=1)
    colors = (*COLORS[: len(run.sources)], INK)
    style.draw_lines(axes, lines, (*run.labels, "all"), colors)
    if spikes:
        points = [spike.step for spike in spikes], [spike.loss for spike in spikes]
        axes.plot(*points, "v", color=INK, markersize=5)
    axes.set_ylabel("loss (nats per token)")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND_TICKS))
    style.steps_axis(axes, run)
    first, last = style.last_known(total[::-1]), style.last_known(total)
    change = f"from {first:.2f} to {last:.2f} nats per token in {plural(len(run.step), 'step')}"
    caption = f"The mean loss went {change}. The line of a source starts with its first batch."
    return Picture("loss", figure, caption)


def loss_over_tokens_picture(run: Run) -> Picture:
    """Draw the training loss of each source against its own tokens."""
    run = for_pictures(run)
    add, steps = style.windows(run.step)
    by_source = _mean_loss(run.source_loss, run.tokens, add)
    read = add(run.tokens).cumsum(0)
    key = f"one line per source · means over {style.window_size(steps)}"
    figure, (axes,) = style.new_figure("Training loss by tokens of each source", key)
    style.draw_lines(axes, [*zip(read.T, by_source.T)], run.labels)
    axes.set_ylabel("loss (nats per token)")
    axes.set_xlabel("tokens read from the source")
    axes.set_xlim(0, 1.02 * max(int(read.max()), 1))
    axes.xaxis.set_major_formatter(EngFormatter())
    caption = "Different losses at equal numbers of tokens mean that one source is harder, or that "
    caption += "the other benefits from what it shares with more sources."
    return Picture("loss_over_tokens", figure, caption)


def reward_picture(run: Run) -> Picture:
    """Draw the mean reward of each step's answers, if there are any, and the evaluations."""
    has_rewards = any(name.startswith("rollout/") for name in run.measured)
    key = "line: mean over the answers of a step, before clipping · " * has_rewards
    title = "Reward" if has_rewards else "Evaluations"
    figure, (axes,) = style.new_figure(title, f"{key}dots: evaluations")
    names = [name.removeprefix("rollout/") for name in run.measured]
    ends = style.draw_lines(axes, [(run.step, values) for values in run.measured.values()], names)
    style.steps_axis(axes, run)
    return Picture("reward", figure, f"At the end: {', '.join(ends)}.")


def validation_picture(run: Run) -> Picture:
    """Draw the loss of the split val, and how well its spliced documents are memorized."""
    likely, losses = run.validation_curves("val/memorized"), run.validation_curves("val/loss")
    keys = [*likely, *(key for key in losses if key not in likely)]
    shown = keys[: len(COLORS)]
    subset = f"{len(shown)} of {len(keys)}" if len(keys) > len(shown) else "single"
    figure, panels = style.new_figure(
        "Validation",
        f"loss of the split val · black: total · coloured: {subset} sources and documents"
        + " · below: P(z) of documents" * bool(likely),
        height=6.4 if likely else 4.2,
        height_ratios=(1, 1) if likely else (1,),
    )
    labels = [*style.clip_labels(short_labels(shown)), "all"]
    for axes, curves, label in zip(panels, (losses, likely), ("loss (nats per token)", "P(z)")):
        lines = [curves.get(key, np.empty((2, 0))) for key in shown]
        lines += [run.validation["val/loss"]] if curves is losses else []
        axes.set_ylabel(label)
        style.draw_lines(axes, lines, labels, (*COLORS[: len(shown)], INK), dots=True)
        style.steps_axis(axes, run, named=axes is panels[0])
    caption = "Every evaluation reads the same rows."
    if likely:
        panels[0].set_xlabel("")
        panels[0].tick_params(labelbottom=False)
        panels[1].set_ylim(-0.03, 1.03)
        caption += " P(z) is the probability that the model continues a content verbatim from its "
        caption += "first token, averaged over the contents of a document."
    return Picture("validation", figure, caption)


def forecast_picture(forecast: Forecast) -> Picture:
    """Draw the share and the epochs of each source over the steps of a forecast."""
    kept, others, join = style.largest_sources(forecast.tokens.sum(0))
    names = {key: title for key, title in zip(forecast.keys, forecast.titles) if key != title}
    labels = style.clip_labels(np.array(short_labels(forecast.keys, names))[kept].tolist())
    labels += [f"{len(others)} others"] if len(others) else []
    last = int(forecast.ends[-1])
    ends = np.array([forecast.exhausted.get(forecast.keys[index], last) for index in kept])
    add, sizes = style.windows(forecast.ends)
    figure, (upper, lower) = style.new_figure(
        "What the run will read",
        f"above: planned shares; dots: share of tokens in {plural(len(sizes), 'part')} of the run"
        " · below: epochs · dashed: breakpoints · ×: end of a source",
        height=6.4,
        height_ratios=(3, 2),
    )
    points = forecast.breakpoints
    for axes in (upper, lower):
        style.whole_steps(axes, last, forecast.first)
        style.mark_steps(axes, np.array(points))
    style.name_steps(upper, "breakpoint" + "s" * (len(points) > 1) + " at", points)
    upper.set_ylabel("share of tokens")
    upper.tick_params(labelbottom=False)
    upper.set_xlabel("")
    edges = np.append(forecast.first, forecast.ends)
    drawn = 100 * style.shares(join(add(forecast.tokens)))
    parts = edges[np.append(0, sizes.cumsum())]
    for values, color in zip(drawn.T, COLORS):
        dots = ((parts[1:] + parts[:-1]) / 2)[values > 0], values[values > 0]
        upper.plot(*dots, "o", color=color, markersize=3.6)
    planned = join(forecast.shares)
    upper.set_ylim(0, min(102, 1.15 * max(100 * planned.max(), drawn.max())))
    style.draw_steps(upper, edges, planned, labels, np.append(ends, [last] * (len(others) > 0)))
    _draw_epochs(lower, forecast, kept, ends, labels)
    early, sources = len(forecast.exhausted), plural(len(forecast.keys), "source")
    caption = f"{forecast.tokens.sum():,.0f} tokens from {sources} in "
    caption += plural(forecast.steps, "step")
    caption += f"; {early} of them end{'s' * (early == 1)} early" if early else ""
    return Picture("forecast", figure, f"{caption}.")


def _draw_epochs(
    axes: Axes, forecast: Forecast, kept: np.ndarray, ends: np.ndarray, labels: Sequence[str]
) -> None:
    """Draw the epochs of each source, from the window of its first token to its last step."""
    read, edges = forecast.tokens[:, kept] > 0, np.append(forecast.first, forecast.ends)
    epochs = np.vstack((forecast.epochs_before, forecast.epochs))[:, kept]
    epochs[:, ~read.any(0)] = np.nan
    axes.set_ylabel("epochs")
    axes.set_ylim(0, 1.1 * max(forecast.epochs[:, kept].max(), 1e-9))
    steps = edges[:, None].clip(edges[read.argmax(0)], ends)
    style.draw_lines(axes, [*zip(steps.T, epochs.T)], labels)
    for index, end, last, color in zip(kept, ends, epochs[-1], COLORS):
        if forecast.keys[index] in forecast.exhausted:
            axes.plot(end, last, "x", color=color, markeredgewidth=2, clip_on=False)


def for_pictures(run: Run) -> Run:
    """Shorten the names of sources, and merge sources until there is a colour for each."""
    kept, others, join = style.largest_sources(run.tokens.sum(0))
    labels = style.clip_labels(run.labels)
    if not len(others):
        return replace(run, labels=tuple(labels))
    depth = run.interleaves[others]
    return replace(
        run,
        sources=(*(run.sources[index] for index in kept), "others"),
        labels=(*(labels[index] for index in kept), f"{len(others)} others"),
        epoch_documents=join(run.epoch_documents),
        epochs=join(run.epochs),
        interleaves=np.append(run.interleaves[kept], depth.sum() * (depth > 0).all()),
        planned_share=join(run.planned_share),
        tokens=join(run.tokens),
        documents=join(run.documents),
        source_loss=_mean_loss(run.source_loss, run.tokens, join),
    )


def _spread(run: Run, share: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the tolerance of a share of ``rows`` rows: for an interleave, one row at each end."""
    by_chance = 2 * np.sqrt(share * (1 - share) / rows)
    return np.where((run.interleaves > 0) & (share > 0), 2 * run.interleaves / rows, by_chance)


def _mean_loss(losses: np.ndarray, tokens: np.ndarray, add: Sums) -> np.ndarray:
    weights = np.where(np.isfinite(losses), tokens, 0)
    total, weights = add(np.nan_to_num(losses) * weights), add(weights)
    return np.where(weights > 0, total / np.maximum(weights, 1), np.nan)
