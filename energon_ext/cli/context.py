# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The forecast of ``energon-ext plan --context-sizes``: where long documents would run."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from energon_ext.cli import option, plural, table
from energon_ext.cli.forecast import BALANCED_STEPS
from energon_ext.errors import ConfigError
from energon_ext.plan.blend import Blend
from energon_ext.plan.context_cost import HOW_TO_MEASURE, MeasuredCost, load_context_times
from energon_ext.plan.layout import ContextOptions, Layout, Units, lay_out_step
from energon_ext.plan.run import Run


class _Sizes(click.ParamType):  # type: ignore[type-arg]  # a class without any in older click
    """Numbers of context-parallel ranks."""

    name = "sizes"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(sorted({int(each) for each in value.split(",")}))
        except ValueError:
            self.fail(f"{value!r:.80} found; sizes such as 1,2,8 are needed.", param, ctx)


context_options: Callable[[Any], Any] = option.together(
    click.option(
        "--context-sizes",
        type=_Sizes(),
        help="Forecast steps whose documents run on one of these numbers of context-parallel "
        "ranks each, such as 1,8.",
    ),
    click.option(
        "--context-times",
        type=option.FILE,
        help="Measured times of micro-batches, for --context-sizes.",
    ),
    click.option(
        "--context-budget",
        type=option.Count(1),
        help="Positions of a micro-batch on one rank.  [default: a row on the largest size]",
    ),
    click.option(
        "--pipeline-stages",
        type=option.Count(1),
        default=1,
        help="Pipeline stages, for --context-sizes.",
    ),
)


@dataclass(frozen=True)
class ContextForecast:
    """Predicted times of the first steps, in layouts of several sizes and of one size.

    Attributes:
        options: what the layouts depend on.
        ranks: those of data and context parallelism together.
        mixed: a layout of each step.
        fixed: layouts of each step with one size for all, by size; those that hold all documents.
        shares: part of the tokens on blocks of each size.
        cost: the measured cost.
        longest: tokens of the longest document.
    """

    options: ContextOptions
    ranks: int
    mixed: list[Layout]
    fixed: dict[int, list[Layout]]
    shares: dict[int, float]
    cost: MeasuredCost
    longest: int

    def to_json(self) -> dict[str, Any]:
        fixed = {str(size): _seconds(layouts) for size, layouts in self.fixed.items()}
        return {
            "ranks": self.ranks,
            "budget": self.options.budget,
            "sizes": list(self.options.sizes),
            "seconds": _seconds(self.mixed),
            "fixed": fixed,
            "micro_batches": [layout.count for layout in self.mixed],
            "shares": {str(size): share for size, share in self.shares.items()},
        }

    def text(self) -> str:
        """Return the forecast as lines of text."""
        budget = self.options.budget
        title = f"{self.ranks} ranks, {budget:,} positions per rank and micro-batch"
        rows = [[title, "s per step", "micro-batches", "of the time"]]
        best = min(_seconds(self.fixed[s]) for s in self.options.sizes if s in self.fixed)
        for name, layouts in [
            *((f"all on {size}", layouts) for size, layouts in self.fixed.items()),
            (f"each on {_listed(self.options.sizes)}", self.mixed),
        ]:
            seconds, counts = _seconds(layouts), [layout.count for layout in layouts]
            count = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else counts[0]
            rows.append([name, f"{seconds:.3f}", str(count), f"{seconds / best:.1%}"])
        lines = [table(rows), *self._remarks(best)]
        return "\n".join(lines)

    def _remarks(self, best: float) -> list[str]:
        shares = [f"{share:.1%} on {size}" for size, share in self.shares.items()]
        steps = plural(len(self.mixed), "step")
        lines = [f"Means of the first {steps}. Tokens of the mixed layout: {', '.join(shares)}."]
        for size, layouts in self.fixed.items():
            if size not in self.options.sizes and _seconds(layouts) < best:
                lines.append(f"All on {size} is faster than each fixed size given; add {size}.")
        sizes = [size for size in self.cost.errors if size in self.options.sizes]
        errors = ", ".join(f"{self.cost.errors[size]:.1%} on {size}" for size in sizes)
        lines.append(f"The measured times differ from the fitted ones by up to {errors}.")
        measured = max(self.cost.longest[size] for size in sizes)
        if self.longest > measured:
            lines.append(
                f"The longest document has {self.longest:,} tokens, but the longest measured one "
                f"only {measured:,}: measure longer ones."
            )
        return lines


def forecast_context(
    blend: Blend,
    ranks: int,
    sizes: tuple[int, ...],
    times: Path | None,
    *,
    budget: int | None,
    stages: int,
    steps: int | None,
) -> ContextForecast:
    """Lay out the next steps of a plan, at most :data:`BALANCED_STEPS`.

    Raises:
        ConfigError: sources are streamed, no times were measured on some size, or documents do not
            fit.
    """
    if not isinstance(blend, Run):
        raise ConfigError("--context-sizes: rows of streamed sources are unknown until read.")
    if times is None:
        raise ConfigError(
            f"--context-sizes: give --context-times FILE with times of your model; "
            f"{HOW_TO_MEASURE}."
        )
    cost = MeasuredCost.fit(load_context_times(times))
    if budget is None:
        budget = -(-blend.clock.row_tokens // max(sizes))
        budget += budget % 2
    options = ContextOptions(budget=budget, sizes=sizes, cost=cost, stages=stages)
    drawn = itertools.islice(
        blend.fork().draw_steps(), min(BALANCED_STEPS, steps or BALANCED_STEPS)
    )
    units = [step.units for step in drawn]
    if not units:
        raise ConfigError("--context-sizes: the sources have no step of this size.")
    mixed = [_lay_out(each, ranks, options, sizes) for each in units]
    fixed = {}
    for size in sorted({*cost.by_size, *sizes}):
        try:
            fixed[size] = [_lay_out(each, ranks, options, (size,)) for each in units]
        except ConfigError:  # documents do not fit, or blocks do not divide the ranks
            if size in sizes and size == max(sizes):
                raise
    longest = max(int(each.lengths.max()) for each in units)
    return ContextForecast(options, ranks, mixed, fixed, _shares(units, mixed), cost, longest)


def _lay_out(units: Units, ranks: int, options: ContextOptions, sizes: Sequence[int]) -> Layout:
    return lay_out_step(units, ranks, replace(options, sizes=tuple(sizes)))


def _shares(units: Sequence[Units], layouts: Sequence[Layout]) -> dict[int, float]:
    """Return the part of the tokens on blocks of each size."""
    tokens: dict[int, int] = {}
    for each, layout in zip(units, layouts):
        for found in layout.micro_batches:
            count = int(each.lengths[list(found.units)].sum())
            tokens[found.size] = tokens.get(found.size, 0) + count
    total = max(1, sum(tokens.values()))
    return {size: tokens[size] / total for size in sorted(tokens)}


def _seconds(layouts: Sequence[Layout]) -> float:
    return float(np.mean([layout.seconds for layout in layouts]))


def _listed(sizes: Sequence[int]) -> str:
    *others, last = map(str, sizes)
    return f"{', '.join(others)} or {last}" if others else last
