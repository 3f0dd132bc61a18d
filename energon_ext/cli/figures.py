# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The pictures of a run: planned against drawn, loss, consumption, and the proof of a resume.

Every function takes a :class:`~energon_ext.cli.metrics.Run` and returns a :class:`Picture`, a
matplotlib figure with one sentence that says what it shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from energon_ext.cli.figure_style import (
    COLORS,
    FAINT,
    INK,
    MUTED,
    ROUND_TICKS,
    WIDE,
    label_ends,
    new_figure,
    steps_axis,
)
from energon_ext.cli.metrics import Comparison, Run

WINDOWS = 30
MAX_LABEL = 16


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure for the report.

    Attributes:
        name: of the PNG, without suffix.
        figure: what to draw.
        caption: one or two sentences under the picture.
    """

    name: str
    figure: Figure
    caption: str


def mix_picture(run: Run) -> Picture:
    """Scheduled share of every source, and what was drawn."""
    run = for_pictures(run)
    windows = _windows(run)
    centres = np.array([run.step[window].mean() for window in windows])
    drawn = np.array([_share(run.tokens[window].sum(0)) for window in windows])
    expected = np.array([run.planned_share[window].mean(0) for window in windows])
    rows = run.rows_per_step * np.array([len(window) for window in windows])
    spread = _chance(expected, rows[:, None])
    step_spread = _chance(run.planned_share, rows[0])

    figure, (axes,) = new_figure(
        "Planned and drawn mix",
        f"lines: scheduled share · dots: tokens drawn, {len(windows[0])} steps each · "
        "bands: two standard deviations of independent draws",
    )
    for index, color in enumerate(_colors(run)):
        share, chance = run.planned_share[:, index], step_spread[:, index]
        axes.plot(run.step, 100 * share, color=color, linewidth=1.8)
        axes.fill_between(
            run.step,
            100 * np.clip(share - chance, 0, 1),
            100 * np.clip(share + chance, 0, 1),
            color=color,
            alpha=0.12,
            linewidth=0,
        )
        axes.plot(centres, 100 * drawn[:, index], "o", color=color, markersize=3.6, alpha=0.85)
    axes.set_ylim(-2, min(102, 115 * max(run.planned_share.max(), drawn.max())))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f} %"))
    axes.set_ylabel("share of the tokens")
    steps_axis(axes, run)
    ends = 100 * run.planned_share[-1]
    names = [f"{label} {end:.0f} %" for label, end in zip(run.labels, ends)]
    label_ends(axes, ends, names, COLORS)
    scheduled = expected > 0
    inside = (np.abs(drawn - expected) <= spread + 1e-9)[scheduled]
    return Picture(
        "mix",
        figure,
        f"{inside.sum()} of {inside.size} dots lie in their band; independent draws by the "
        "schedule put about 95 % there.",
    )


def loss_picture(run: Run) -> Picture:
    """Training loss, of all tokens and of each source."""
    run = for_pictures(run)
    windows = _windows(run)
    centres = np.array([run.step[window].mean() for window in windows])
    total = np.array([run.loss[window].mean() for window in windows])
    by_source = np.array(
        [_mean_loss(run.source_loss[window], run.tokens[window]) for window in windows]
    )

    figure, (axes,) = new_figure(
        "Training loss",
        f"wide: all sources · thin: each source · means over {len(windows[0])} steps",
    )
    axes.plot(run.step, run.loss, color=FAINT, linewidth=1)
    axes.plot(centres, total, color=WIDE, linewidth=5, solid_capstyle="round")
    for index, color in enumerate(_colors(run)):
        present = np.isfinite(by_source[:, index])
        axes.plot(centres[present], by_source[present, index], color=color, linewidth=1.6)
    axes.set_ylabel("loss (nats per token)")
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND_TICKS))
    steps_axis(axes, run)
    ends = np.array([_last_finite(column) for column in (*by_source.T, total)])
    names = [f"{label} {end:.2f}" for label, end in zip((*run.labels, "all"), ends)]
    label_ends(axes, ends, names, (*_colors(run), MUTED))
    return Picture(
        "loss",
        figure,
        f"The mean loss falls from {total[0]:.2f} to {total[-1]:.2f} nats per token over "
        f"{len(run.step)} steps; a source's line begins with the first batch that holds it.",
    )


def consumption_picture(run: Run) -> Picture:
    """Tokens and epochs of every source."""
    run = for_pictures(run)
    tokens = run.tokens.sum(0)
    planned = (run.planned_share * run.tokens.sum(1, keepdims=True)).sum(0)
    documents = run.documents.sum(0)
    epochs = documents / np.maximum(run.epoch_documents, 1)
    rows = np.arange(len(run.labels))[::-1]

    figure, (left, right) = new_figure(
        "Tokens and epochs of each source",
        "bars: read so far · black marks: what the schedule asked for, and one whole epoch",
        height=1.25 + 0.46 * len(rows),
        columns=2,
        top=0.95,
        left=0.03 + 0.0105 * max(map(len, run.labels)),
    )
    for axes, values, marks, texts in (
        (
            left,
            tokens,
            planned,
            [f"{_short(n)}  ({100 * share:.1f} %)" for n, share in zip(tokens, _share(tokens))],
        ),
        (
            right,
            epochs,
            np.ones_like(epochs) if epochs.max() > 0.4 else np.full_like(epochs, np.nan),
            [
                f"{epoch:.2f}  ({n:,} read, {total:,} in all)"
                for epoch, n, total in zip(epochs, documents, run.epoch_documents)
            ],
        ),
    ):
        axes.barh(rows, values, height=0.56, color=_colors(run))
        axes.plot(marks, rows, "|", color=INK, markersize=24, markeredgewidth=1.6)
        for row, value, mark, text in zip(rows, values, marks, texts):
            axes.annotate(
                text,
                (np.nanmax([value, mark]), row),
                xytext=(7, 0),
                textcoords="offset points",
                va="center",
                color=INK,
                fontsize=9,
            )
        axes.set_xlim(0, 2.1 * max(np.nanmax(values), np.nanmax(np.append(marks, 0)), 1e-9))
        axes.set_yticks(rows, run.labels)
        axes.tick_params(axis="y", length=0, labelsize=10)
        axes.spines["bottom"].set_visible(False)
        axes.set_xticks([])
        axes.grid(False)
    left.set_title("tokens", loc="left", fontsize=10, color=MUTED)
    right.set_title("epochs (documents)", loc="left", fontsize=10, color=MUTED)
    right.set_yticks([])
    most = int(np.argmax(epochs))
    return Picture(
        "consumption",
        figure,
        f"{_short(tokens.sum())} tokens were read. {run.labels[most]} was seen most often, "
        f"{epochs[most]:.2f} epochs; tokens differ from the plan by at most "
        f"{100 * np.abs(_share(tokens) - _share(planned)).max():.1f} % of all tokens.",
    )


def resume_picture(run: Run, reference: Run, comparison: Comparison) -> Picture:
    """A run that stopped and resumed over one that never stopped."""
    figure, (axes, strip) = new_figure(
        "The resumed run is the uninterrupted run" if comparison.identical else "The runs differ",
        "wide: the run that never stopped · black: until the stop · blue: a new process, resumed · "
        "strip: batch hashes, green where equal",
        height=4.4,
        height_ratios=(9, 1),
    )
    steps = comparison.steps
    stop = run.resumed_after[0] if run.resumed_after else steps
    axes.plot(reference.step, reference.loss, color=FAINT, linewidth=7, solid_capstyle="round")
    axes.plot(run.step[stop - 1 :], run.loss[stop - 1 :], color=COLORS[0], linewidth=1.5)
    axes.plot(run.step[:stop], run.loss[:stop], color=INK, linewidth=1.5)
    axes.set_ylabel("loss (nats per token)")
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND_TICKS))
    steps_axis(axes, run)
    axes.set_xlabel("")
    axes.tick_params(labelbottom=False)

    colors = np.where(comparison.same_batch, COLORS[2], COLORS[1])
    strip.bar(np.arange(1, steps + 1), 1, width=1, color=colors)
    strip.set(ylim=(0, 1), yticks=[], xlim=axes.get_xlim(), xlabel="optimizer step")
    strip.spines["left"].set_visible(False)
    strip.grid(False)
    same = int(comparison.same_batch.sum())
    strip.annotate(
        f"{same} of {steps}\nbatches equal",
        (1, 0.5),
        xycoords="axes fraction",
        xytext=(8, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color=colors[-1] if same == steps else COLORS[1],
    )
    return Picture("resume", figure, f"Against the uninterrupted run: {comparison}.")


def for_pictures(run: Run, keep: int = len(COLORS) - 1) -> Run:
    """The same run with names of bounded length and as many sources as there are colours.

    All but the ``keep`` sources of most tokens are joined into one.
    """
    run = replace(run, labels=tuple(map(_clip, run.labels)))
    if len(run.sources) <= keep + 1:
        return run
    order = np.argsort(-run.tokens.sum(0), kind="stable")
    kept, merged = np.sort(order[:keep]), order[keep:]

    def add(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[..., kept], values[..., merged].sum(-1, keepdims=True)], -1)

    losses = np.where(run.tokens > 0, np.nan_to_num(run.source_loss), 0) * run.tokens
    tokens = add(run.tokens)
    return replace(
        run,
        sources=(*(run.sources[index] for index in kept), "others"),
        labels=(*(run.labels[index] for index in kept), f"{len(merged)} others"),
        epoch_documents=add(run.epoch_documents),
        planned_share=add(run.planned_share),
        tokens=tokens,
        documents=add(run.documents),
        source_loss=np.where(tokens > 0, add(losses) / np.maximum(tokens, 1), np.nan),
    )


def _chance(share: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Two standard deviations of a share of ``rows`` independent draws."""
    return 2 * np.sqrt(share * (1 - share) / rows)


def _colors(run: Run) -> Sequence[str]:
    return COLORS[: len(run.sources)]


def _windows(run: Run) -> list[np.ndarray]:
    return np.array_split(np.arange(len(run.step)), min(len(run.step), WINDOWS))


def _share(amounts: np.ndarray) -> np.ndarray:
    return amounts / max(amounts.sum(), 1)


def _mean_loss(losses: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    present = np.isfinite(losses) & (tokens > 0)
    weights = np.where(present, tokens, 0).sum(0)
    total = (np.where(present, losses, 0) * np.where(present, tokens, 0)).sum(0)
    return np.where(weights > 0, total / np.maximum(weights, 1), np.nan)


def _clip(label: str) -> str:
    return label if len(label) <= MAX_LABEL else "…" + label[1 - MAX_LABEL :]


def _last_finite(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return finite[-1] if len(finite) else np.nan


def _short(count: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f}"
