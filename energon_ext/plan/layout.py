# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Layouts of a step: which documents run on one rank, and which are cut over several.

A *layout* puts the documents of a step into micro-batches, and each micro-batch on an aligned
*block* of 1, 2, 4, ... ranks::

    rank 0   [ a, cut over 4 ranks ] [ b, cut over 2 ] [ d e ] [ f g ]
    rank 1   [ a                   ] [ b             ] [ h i ] [ j   ]
    rank 2   [ a                   ] [ c, cut over 2 ] [ k   ] [ l m ]
    rank 3   [ a                   ] [ c             ] [ n o ] [ p   ]

Every rank runs its largest blocks first. The ranks of a block have then run the same micro-batches
before, so they reach it together and nobody waits inside a step. All ranks run equally many
micro-batches, which pipelines need: their stages take turns in an order that depends on the number.
With stages the ranks of a block may wait a little where sizes change, which predicted times count.

It is a function of the lengths in the step and the number of ranks alone, like the order of
balanced steps, so every rank computes it without communication and a state contains none of it.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError, StateFormatError
from energon_ext.packing.bins import best_fit
from energon_ext.plan.context_cost import ContextCost, MeasuredCost, scale_of
from energon_ext.plan.pipeline_time import time_of_pipelines
from energon_ext.plan.topology import Topology, balance

#: A document is spread over more ranks if it would take longer than this part of a perfect step.
_LIMITS = (0.03, 0.06, 0.12, 0.25, 0.5, 1.0, float("inf"))

#: How full micro-batches are made if there are pipeline stages: a stage that has nothing to do at
#: the beginning or the end of a step has it for the longest micro-batch.
_FILLS = (1.0, 0.5, 0.25)

#: Layouts with one size, and with several, whose pipelines are simulated.
_SIMULATED = 4


@dataclass(frozen=True)
class Units:
    """The units of a step, which are never separated: documents, or the answers of a pair.

    Attributes:
        lengths: int64 [pieces], tokens of each document or piece of one, at least 1.
        ends: int64 [units], where each unit ends among the pieces.
        rows: int64 [units], the row that each unit was planned in; those of a row are adjacent.
    """

    lengths: np.ndarray
    ends: np.ndarray
    rows: np.ndarray

    @classmethod
    def of_documents(cls, lengths: Sequence[int], rows: Sequence[int] | None = None) -> Units:
        """Return units of one document each, by default all in rows of their own."""
        count = len(lengths)
        found = range(count) if rows is None else rows
        return cls(np.array(lengths, np.int64), np.arange(1, count + 1), np.array(found, np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    def whole_rows(self) -> Units:
        """Return whole rows as units."""
        is_last = np.append(self.rows[1:] != self.rows[:-1], True)
        return Units(self.lengths, self.ends[is_last], self.rows[is_last])


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a layout.

    Attributes:
        size: ranks that share it.
        block: it runs on the ranks ``[block * size, (block + 1) * size)``.
        units: numbers of its units, in the order in which they are packed; empty for padding, which
            makes the counts of all ranks equal.
    """

    size: int
    block: int
    units: tuple[int, ...]

    @property
    def ranks(self) -> range:
        return range(self.block * self.size, (self.block + 1) * self.size)


@dataclass(frozen=True)
class Layout:
    """The micro-batches of a step.

    Attributes:
        micro_batches: those of all ranks; each rank runs its own in this order.
        count: micro-batches of every rank.
        seconds: predicted time of the step, in the unit of the cost.
    """

    micro_batches: tuple[MicroBatch, ...]
    count: int
    seconds: float

    def of_rank(self, rank: int) -> list[MicroBatch]:
        """Return the micro-batches that a rank runs, in order."""
        return [each for each in self.micro_batches if rank in each.ranks]


@dataclass(frozen=True, kw_only=True)
class ContextOptions:
    """Options of layouts; they also depend on the step and the number of ranks.

    Attributes:
        budget: most positions of a micro-batch on one rank; on a block of s ranks s times as many.
        sizes: allowed numbers of ranks of a block, powers of two.
        cost: time of micro-batches, for the whole model if there are pipeline stages.
        stages: pipeline stages.
        multiple_of: of which the number of micro-batches must be a multiple; interleaved schedules
            of virtual pipeline stages need that of the pipeline stages.
        count: micro-batches of every rank in every step; None for the best number of each step.
        alignment: the positions of a micro-batch on one rank are a multiple of it.
    """

    budget: int
    sizes: tuple[int, ...]
    cost: ContextCost
    stages: int = 1
    multiple_of: int = 1
    count: int | None = None
    alignment: int = 1

    def __post_init__(self) -> None:
        for name in ("budget", "stages", "multiple_of", "alignment"):
            check_integer(name, getattr(self, name), 1)
        for size in self.sizes:
            check_integer("sizes", size, 1)
        object.__setattr__(self, "sizes", tuple(sorted({*map(int, self.sizes)})))
        if not self.sizes or any(size & (size - 1) for size in self.sizes):
            raise ConfigError(
                f"sizes: {list(self.sizes)} found, powers of two such as 1, 2, 8 are needed."
            )
        multiple = self.alignment * (2 if self.sizes[-1] > 1 else 1)
        if self.budget % multiple:
            raise ConfigError(
                f"budget: {self.budget} found; it must be a multiple of {multiple}, since the "
                f"documents of a micro-batch are aligned, and context parallelism cuts each into "
                f"two chunks per rank."
            )
        if self.count is not None:
            check_integer("count", self.count, 1)
            if self.count % self.multiple_of:
                raise ConfigError(
                    f"count: {self.count} found, a multiple of multiple_of = {self.multiple_of} is "
                    f"needed."
                )

    def segment_alignment(self, size: int) -> int:
        """Return the multiple of positions at which documents begin on a block."""
        return segment_alignment(size, self.alignment)

    def positions(self, lengths: np.ndarray, size: int) -> np.ndarray:
        """Return the positions that documents take on a block, with what aligns the next one.

        One that fills a micro-batch takes no more, and its last token may be only a label.
        """
        step = self.segment_alignment(size)
        aligned = -(-lengths // step) * step
        return np.maximum(lengths, np.minimum(aligned, size * self.budget))

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON values."""
        return {**vars(self), "sizes": [*self.sizes], "cost": self.cost.to_json()}

    @classmethod
    def from_json(cls, value: Any) -> ContextOptions:
        """Return options with a measured cost; StateFormatError if the values are none."""
        try:
            cost = MeasuredCost.from_json(value["cost"])
            return cls(**{**value, "sizes": tuple(value["sizes"]), "cost": cost})
        except (ConfigError, TypeError, ValueError, KeyError) as error:
            raise StateFormatError(
                f"contexts: {value!r:.200} found ({error}); the state is damaged."
            ) from error

    def check_rows(self, row_tokens: int) -> None:
        """Raise ConfigError unless a document as long as a row fits on the largest block."""
        if row_tokens > self.sizes[-1] * self.budget:
            raise ConfigError(
                f"contexts: a document of {row_tokens + 1:,} tokens, which fills a row, does not "
                f"fit on {self.sizes[-1]} ranks with a budget of {self.budget:,} positions; allow "
                f"larger blocks, raise budget, or use shorter rows."
            )

    def check_ranks(self, ranks: int) -> None:
        """Raise ConfigError unless blocks of all sizes divide the ranks."""
        if ranks % self.sizes[-1]:
            raise ConfigError(
                f"sizes: blocks of {self.sizes[-1]} ranks do not divide {ranks} ranks; use smaller "
                f"sizes, or another number of ranks."
            )


def segment_alignment(size: int, alignment: int) -> int:
    """Return the multiple of positions at which documents begin if ``size`` ranks share them."""
    return alignment if size == 1 else 2 * alignment * size


def lay_out(
    units: Units,
    topology: Topology,
    *,
    budget: int,
    sizes: Sequence[int],
    cost: ContextCost,
    stages: int = 1,
    multiple_of: int = 1,
    count: int | None = None,
    alignment: int = 1,
) -> Layout:
    """Return the layout of a step with the shortest predicted time among some.

    They are: for every size that holds all units, the rows as they were planned, balanced over its
    blocks; for every size, all units on it; and mixed ones. In a mixed one a unit gets the smallest
    block that holds it, and a larger one while it takes longer than some part of the step and a
    larger one is faster. The units of a size then go, longest first, to the block with the smallest
    total so far (Graham, 1969), and those of a block are packed by best fit. So the time is never
    above that of the best fixed size among ``sizes``.

    Without pipeline stages a step takes as long as its slowest rank. With stages it is simulated,
    see :func:`~energon_ext.plan.pipeline_time.time_of_pipelines`.

    Args:
        units: those of the step. One of ``size * budget + 1`` tokens fits on a block: the last one
            is only a label.
        topology: its ``ranks`` are those of data and context parallelism together.
        budget, sizes, cost, stages, multiple_of, count, alignment: see :class:`ContextOptions`.

    Returns:
        The layout; every unit is in one micro-batch.

    Raises:
        ConfigError: an option is invalid, a unit does not fit on the largest block, or ``count`` is
            too small for the step.

    Example:
        >>> from energon_ext.plan.context_cost import ContextTime, MeasuredCost
        >>> times = [
        ...     ContextTime(context_size=size, lengths=[n], seconds=size + n * n / size)
        ...     for size in (1, 2) for n in (2, 4, 8)
        ... ]
        >>> layout = lay_out(
        ...     Units.of_documents([16, 4, 4]), Topology(2, ranks=2),
        ...     budget=8, sizes=(1, 2), cost=MeasuredCost.fit(times),
        ... )
        >>> [(each.size, each.block, each.units) for each in layout.micro_batches]
        [(2, 0, (0,)), (1, 0, (1,)), (1, 1, (2,))]
    """
    options = ContextOptions(
        budget=budget,
        sizes=tuple(sizes),
        cost=cost,
        stages=stages,
        multiple_of=multiple_of,
        count=count,
        alignment=alignment,
    )
    return lay_out_step(units, topology.ranks, options)


def lay_out_step(units: Units, ranks: int, options: ContextOptions) -> Layout:
    """Return the layout of a step on a number of ranks; see :func:`lay_out`."""
    options.check_ranks(ranks)
    problem = _Problem(units, ranks, options)
    problem.check_lengths()
    # Each fixed size is a problem of its own, with the same result as if it were alone.
    alone = [_Problem(units, ranks, replace(options, sizes=(size,))) for size in options.sizes]
    kinds = [each.fixed() for each in alone if each.fit.all()]
    if len(options.sizes) > 1:
        kinds.append(problem.mixed())
    # With stages only some are simulated: those that would be fastest if no rank waited.
    found = [
        min(sorted(fitting, key=lambda each: each.bound)[:_SIMULATED], key=lambda each: each.time)
        for kind in kinds
        if (fitting := [each for each in kind if each.fits])
    ]
    if not found:
        least = min(each.count for kind in kinds for each in kind)
        raise ConfigError(
            f"count: {options.count} found, but a step of {int(units.lengths.sum()):,} tokens "
            f"needs {least} micro-batches on every rank; raise count or budget, or leave count out."
        )
    return min((each.layout() for each in found), key=lambda layout: layout.seconds)


@dataclass(frozen=True, eq=False)
class _Timed:
    """A micro-batch with its time as an integer."""

    time: int
    units: tuple[int, ...]


@dataclass(eq=False)
class _Candidate:
    """Micro-batches by ``(size, block)``, before all ranks have equally many."""

    problem: _Problem
    placed: dict[tuple[int, int], list[_Timed]]

    @functools.cached_property
    def count(self) -> int:
        """Micro-batches of every rank: the fewest that are allowed."""
        counts = np.zeros(self.problem.ranks, np.int64)
        for (size, block), found in self.placed.items():
            counts[block * size : (block + 1) * size] += len(found)
        step = self.problem.options.multiple_of
        return max(step, -(-int(counts.max()) // step) * step)

    @property
    def fits(self) -> bool:
        wanted = self.problem.options.count
        return wanted is None or self.count <= wanted

    @functools.cached_property
    def full(self) -> dict[tuple[int, int], list[_Timed]]:
        """The same with as many micro-batches on every rank."""
        problem, placed = self.problem, dict(self.placed)
        smallest = min(size for size, _ in placed) if placed else problem.options.sizes[0]
        wanted = problem.options.count or self.count
        for block in range(problem.ranks // smallest):
            rank = block * smallest
            before = sum(
                len(found)
                for (size, other), found in placed.items()
                if size != smallest and other == rank // size
            )
            own = placed.get((smallest, block), [])
            placed[smallest, block] = problem.split(own, smallest, wanted - before)
        return placed

    @functools.cached_property
    def ordered(self) -> list[tuple[int, int, list[_Timed]]]:
        """``(size, block, micro-batches)`` in the order in which ranks run them."""
        found = sorted(self.full.items(), key=lambda each: (-each[0][0], each[0][1]))
        return [(*place, sorted(own, key=lambda each: -each.time)) for place, own in found]

    @functools.cached_property
    def bound(self) -> int:
        """The time of the slowest rank if no stage waited for another rank, times the stages."""
        totals = np.zeros(self.problem.ranks, np.int64)
        longest = np.zeros(self.problem.ranks, np.int64)
        for size, block, found in self.ordered:
            ranks = slice(block * size, (block + 1) * size)
            totals[ranks] += sum(each.time for each in found)
            most = max((each.time for each in found), default=0)
            longest[ranks] = np.maximum(longest[ranks], most)
        return int((totals + (self.problem.options.stages - 1) * longest).max())

    @functools.cached_property
    def time(self) -> int:
        """The time of the slowest rank, in thirds, times the stages."""
        stages, ranks = self.problem.options.stages, self.problem.ranks
        if stages == 1:
            return 3 * self.bound
        count = self.problem.options.count or self.count
        times, sizes = np.zeros((2, ranks, count), np.int64)
        done = [0] * ranks
        for size, block, found in self.ordered:
            own, first = slice(block * size, (block + 1) * size), done[block * size]
            stop = first + len(found)
            times[own, first:stop] = [each.time for each in found]
            sizes[own, first:stop] = size
            done[own] = [stop] * size
        return time_of_pipelines(times, sizes, stages)

    def layout(self) -> Layout:
        problem = self.problem
        found = tuple(
            MicroBatch(size, block, each.units) for size, block, own in self.ordered for each in own
        )
        seconds = self.time / problem.scale / problem.options.stages / 3
        return Layout(found, problem.options.count or self.count, seconds)


class _Problem:
    """The times and positions of all units of a step on blocks of all sizes, as integers."""

    def __init__(self, units: Units, ranks: int, options: ContextOptions):
        self.units, self.ranks, self.options = units, ranks, options
        sizes, cost = options.sizes, options.cost
        costs = [
            np.asarray(cost(options.positions(units.lengths, size), size), np.float64)
            for size in sizes
        ]
        overheads = [cost.overhead(size) for size in sizes]
        largest = max(*(each.max(initial=0.0) for each in costs), *overheads, 0.0)
        self.scale = scale_of(float(largest) or 1.0)
        self._pieces = [np.rint(each * self.scale).astype(np.int64) for each in costs]
        self.overheads = {size: round(each * self.scale) for size, each in zip(sizes, overheads)}
        self.times = np.stack([_sums(each, units.ends) for each in self._pieces])
        self.positions, self.fit = self._positions(units)
        #: Index of the smallest size on which each unit fits.
        self.least = self.fit.argmax(0)

    def _positions(self, units: Units) -> tuple[np.ndarray, np.ndarray]:
        """Return the positions of units on blocks of each size, and whether they fit."""
        positions, fits = [], []
        for size in self.options.sizes:
            step, capacity = self.options.segment_alignment(size), size * self.options.budget
            aligned = -(-units.lengths // step) * step
            whole = _sums(aligned, units.ends)
            last = units.ends - 1
            # The last token of a micro-batch may be a label only.
            fits.append(whole - aligned[last] + units.lengths[last] <= capacity + 1)
            positions.append(np.minimum(whole, capacity))
        return np.stack(positions), np.stack(fits)

    def check_lengths(self) -> None:
        """Raise ConfigError if a unit does not fit on the largest block."""
        if (missing := np.flatnonzero(~self.fit[-1])).size:
            options, first = self.options, missing[0]
            begin = int(self.units.ends[first - 1]) if first else 0
            tokens = int(self.units.lengths[begin : self.units.ends[first]].sum())
            raise ConfigError(
                f"sizes: a unit of {tokens:,} tokens does not fit on {options.sizes[-1]} ranks "
                f"with a budget of {options.budget:,} positions; allow larger blocks, or raise "
                f"budget."
            )

    @property
    def _fills(self) -> tuple[float, ...]:
        return _FILLS if self.options.stages > 1 else _FILLS[:1]

    def fixed(self) -> list[_Candidate]:
        """Return layouts with the only size: of the rows as they were planned, and of all units."""
        whole = np.zeros(len(self.units), np.int64)
        return [*self._whole_rows(), *(self._place(whole, fill) for fill in self._fills)]

    def mixed(self) -> list[_Candidate]:
        """Return layouts with several sizes."""
        sizes = self.options.sizes
        work = np.take_along_axis(self.times, self.least[None], 0)[0] * np.array(sizes)[self.least]
        perfect = int(work.sum()) / self.ranks
        chosen = [self._spread(limit * perfect) for limit in _LIMITS]
        distinct = {each.tobytes(): each for each in chosen}.values()
        return [self._place(each, fill) for each in distinct for fill in self._fills]

    def _spread(self, limit: float) -> np.ndarray:
        """Return the index of the size of each unit, larger if it takes longer than ``limit``."""
        chosen = self.least.copy()
        for index in range(len(self.options.sizes) - 1):
            now, then = self.times[index], self.times[index + 1]
            chosen[(chosen == index) & (now > limit) & (then < now)] = index + 1
        return chosen

    def _whole_rows(self) -> Iterator[_Candidate]:
        """Yield the rows as they were planned, balanced over the blocks, if they fit."""
        rows, (size,) = self.units.whole_rows(), self.options.sizes
        if not self._positions(rows)[1].all():
            return
        firsts = np.searchsorted(self.units.ends, np.append(0, rows.ends[:-1]), "right")
        stops = np.searchsorted(self.units.ends, rows.ends, "right")
        times = _sums(self._pieces[0], rows.ends) + self.overheads[size]
        blocks = self.ranks // size
        per_block = -(-len(rows) // blocks)
        padded = np.zeros(blocks * per_block)
        padded[: len(rows)] = times
        order = balance(padded, Topology(blocks * per_block, ranks=blocks))
        placed: dict[tuple[int, int], list[_Timed]] = {}
        for place, row in enumerate(order.tolist()):
            if row < len(rows):
                found = _Timed(int(times[row]), tuple(range(firsts[row], stops[row])))
                placed.setdefault((size, place % blocks), []).append(found)
        yield _Candidate(self, placed)

    def _place(self, chosen: np.ndarray, fill: float) -> _Candidate:
        """Assign units to blocks of their sizes, the largest first, and pack those of a block."""
        loads = [0] * self.ranks
        placed: dict[tuple[int, int], list[_Timed]] = {}
        for index in reversed(range(len(self.options.sizes))):
            size = self.options.sizes[index]
            numbers = np.flatnonzero(chosen == index)
            if not len(numbers):
                continue
            room = max(1, int(size * self.options.budget * fill))
            times, positions = self.times[index], self.positions[index]
            numbers = numbers[np.argsort(-times[numbers], kind="stable")]
            shares = times[numbers] + positions[numbers] * self.overheads[size] // room
            blocks: list[list[int]] = [[] for _ in range(self.ranks // size)]
            lightest = [(loads[block * size], block) for block in range(len(blocks))]
            heapq.heapify(lightest)
            for number, share in zip(numbers.tolist(), shares.tolist()):
                load, block = lightest[0]
                blocks[block].append(number)
                heapq.heapreplace(lightest, (load + share, block))
            for block, own in enumerate(blocks):
                if not own:
                    continue
                found = self._pack(np.array(own), index, room)
                placed[size, block] = found
                for rank in range(block * size, (block + 1) * size):
                    loads[rank] += sum(each.time for each in found)
        return _Candidate(self, placed)

    def _pack(self, numbers: np.ndarray, index: int, room: int) -> list[_Timed]:
        """Pack units into micro-batches, the longest first."""
        positions = self.positions[index][numbers]
        order = np.argsort(-positions, kind="stable")
        numbers, positions = numbers[order], positions[order]
        bins = best_fit(positions.tolist(), max(room, int(positions[0])))
        by_bin = numbers[np.argsort(bins, kind="stable")]
        ends = np.cumsum(np.bincount(bins))
        return [self._timed(each.tolist(), index) for each in np.split(by_bin, ends[:-1])]

    def _timed(self, units: Sequence[int], index: int) -> _Timed:
        size = self.options.sizes[index]
        time = int(self.times[index][list(units)].sum()) + self.overheads[size]
        return _Timed(time, tuple(units))

    def split(self, found: list[_Timed], size: int, wanted: int) -> list[_Timed]:
        """Make more micro-batches: cut the longest ones in two, then add padding."""
        index = self.options.sizes.index(size)
        times, numbers = self.times[index], itertools.count()
        done: list[_Timed] = []
        longest = [(-each.time, next(numbers), each) for each in found]
        heapq.heapify(longest)
        while longest and len(done) + len(longest) < wanted:
            _, _, each = heapq.heappop(longest)
            if len(each.units) == 1:
                done.append(each)
                continue
            halves: tuple[list[int], list[int]] = ([], [])
            totals = [0, 0]
            for unit in sorted(each.units, key=lambda unit: -int(times[unit])):
                side = int(totals[1] < totals[0])
                halves[side].append(unit)
                totals[side] += max(1, int(times[unit]))
            for units in halves:
                half = self._timed(units, index)
                heapq.heappush(longest, (-half.time, next(numbers), half))
        found = [*done, *(each for _, _, each in longest)]
        return [*found, *[_Timed(self.overheads[size], ())] * (wanted - len(found))]


def _sums(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Return the sums of the parts of an integer array that end at ``ends``."""
    return np.diff(np.cumsum(values)[ends - 1], prepend=0)
