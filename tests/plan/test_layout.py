# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Layouts of a step: where each document runs."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_ext import ConfigError
from energon_ext.plan.layout import ContextOptions, Units, lay_out
from energon_ext.plan.topology import Topology, balance

BUDGET = 32


@dataclasses.dataclass
class Cost:
    """Seconds of a small model, whose larger blocks lose time: written down for tests."""

    fixed: float = 20.0
    per_rank: float = 3.0
    quadratic: float = 0.05

    def __call__(self, lengths, size):
        n = lengths.astype(np.float64)
        return (n + self.quadratic * n * (n + 1)) / size

    def overhead(self, size):
        return self.fixed + self.per_rank * (size - 1)


def draw_units(seed, ranks, largest, groups=1):
    """Return units of skewed lengths, up to what the largest block holds, in rows of some."""
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 12 * ranks))
    capacity = largest * BUDGET // groups
    lengths = np.minimum(random.lognormal(2.5, 1.2, count * groups).astype(int) + 1, capacity + 1)
    if groups > 1:
        lengths = np.minimum(lengths, capacity - 2 * largest)
    rows = np.sort(random.integers(0, max(1, count // 3), count))
    return Units(lengths.astype(np.int64), np.arange(1, count + 1) * groups, rows)


def pieces_of(units, micro_batch):
    begins = [0, *units.ends.tolist()]
    return [
        length
        for number in micro_batch.units
        for length in units.lengths[begins[number] : begins[number + 1]].tolist()
    ]


def positions_of(lengths, alignment):
    """Return the positions up to the last token of documents that begin at multiples."""
    end = 0
    for length in lengths:
        end += -end % alignment + length
    return end


def seconds_of(units, micro_batch, cost):
    return seconds_on(pieces_of(units, micro_batch), micro_batch.size, cost)


def seconds_on(lengths, size, cost):
    """Return the seconds of documents with the padding that aligns them, up to a full block."""
    step = 1 if size == 1 else 2 * size
    lengths = [max(n, min(n + -n % step, size * BUDGET)) for n in lengths]
    return cost.overhead(size) + float(cost(np.array(lengths, np.int64), size).sum())


def run_stages(layout, units, cost, ranks, stages):
    """Run 1F1B on all ranks and stages, event by event; return the end and the longest wait of a
    rank for others of its block. A backward pass takes twice as long as a forward pass."""
    lists = [layout.of_rank(rank) for rank in range(ranks)]
    orders = {}
    for rank in range(ranks):
        count = len(lists[rank])
        for stage in range(stages):
            warm = min(stages - stage - 1, count)
            order = [("F", n) for n in range(warm)]
            for n in range(count - warm):
                order += [("F", warm + n), ("B", n)]
            orders[rank, stage] = order + [("B", n) for n in range(count - warm, count)]
    done, free, waited = {}, dict.fromkeys(orders, 0.0), 0.0
    while any(orders.values()):
        moved = False
        for (rank, stage), order in orders.items():
            if not order:
                continue
            kind, number = order[0]
            block = lists[rank][number]
            mates = list(block.ranks)
            if any(not orders[m, stage] or orders[m, stage][0] != (kind, number) for m in mates):
                continue
            before = {"F": stage - 1, "B": stage + 1}[kind]
            needed = [(kind, m, before, number) for m in mates if 0 <= before < stages]
            if any(each not in done for each in needed):
                continue
            ready = [
                max(free[m, stage], *(done[each] for each in needed if each[1] == m), 0.0)
                for m in mates
            ]
            waited = max(waited, max(ready) - min(ready))
            took = seconds_of(units, block, cost) / stages * {"F": 1 / 3, "B": 2 / 3}[kind]
            for m in mates:
                orders[m, stage].pop(0)
                free[m, stage] = done[kind, m, stage, number] = max(ready) + took
            moved = True
        assert moved, "the ranks wait for each other forever"
    return max(free.values()), waited


cases = given(
    seed=st.integers(0, 10**6),
    ranks=st.sampled_from([1, 2, 4, 8, 12]),
    groups=st.sampled_from([1, 1, 2]),
    stages=st.sampled_from([1, 1, 2, 4]),
    multiple=st.sampled_from([1, 2]),
)


@cases
def test_every_unit_is_in_one_micro_batch_that_holds_it(seed, ranks, groups, stages, multiple):
    sizes = [size for size in (1, 2, 4) if ranks % size == 0]
    units = draw_units(seed, ranks, sizes[-1], groups)
    layout = lay_out(
        units,
        Topology(ranks, ranks=ranks),
        budget=BUDGET,
        sizes=sizes,
        cost=Cost(),
        stages=stages,
        multiple_of=multiple,
    )
    numbers = sorted(number for each in layout.micro_batches for number in each.units)
    assert numbers == list(range(len(units)))
    for each in layout.micro_batches:
        alignment = 1 if each.size == 1 else 2 * each.size
        assert positions_of(pieces_of(units, each), alignment) <= each.size * BUDGET + 1
        assert each.size in sizes and each.ranks.stop <= ranks
    counts = {len(layout.of_rank(rank)) for rank in range(ranks)}
    assert counts == {layout.count} and layout.count % multiple == 0


@cases
def test_nobody_waits_without_stages_and_the_time_is_that_of_the_slowest_rank(
    seed, ranks, groups, stages, multiple
):
    sizes = [size for size in (1, 2, 4) if ranks % size == 0]
    units, cost = draw_units(seed, ranks, sizes[-1], groups), Cost()
    options = {"budget": BUDGET, "cost": cost, "multiple_of": multiple}
    layout = lay_out(units, Topology(ranks, ranks=ranks), sizes=sizes, stages=stages, **options)
    end, waited = run_stages(layout, units, cost, ranks, stages)
    assert layout.seconds == pytest.approx(end, rel=1e-6)
    if stages == 1:
        assert waited == pytest.approx(0, abs=1e-6)


@cases
def test_no_fixed_size_is_predicted_faster(seed, ranks, groups, stages, multiple):
    sizes = [size for size in (1, 2, 4) if ranks % size == 0]
    units, topology = draw_units(seed, ranks, sizes[-1], groups), Topology(ranks, ranks=ranks)
    # Larger blocks may have less overhead, too.
    cost = Cost(per_rank=[3.0, -4.0, 0.0][seed % 3])
    options = {"budget": BUDGET, "cost": cost, "stages": stages, "multiple_of": multiple}
    mixed = lay_out(units, topology, sizes=sizes, **options)
    fixed = [lay_out(units, topology, sizes=(sizes[-1],), **options).seconds]
    for size in sizes[:-1]:
        try:
            fixed.append(lay_out(units, topology, sizes=(size,), **options).seconds)
        except ConfigError as error:
            assert "does not fit" in str(error)
    assert mixed.seconds <= min(fixed)
    rows = rows_of(units)
    whole = all(positions_of(row, 2 * sizes[-1]) <= sizes[-1] * BUDGET for row in rows)
    blocks = ranks // sizes[-1]
    if whole and multiple == stages == 1 and len(rows) % blocks == 0:
        times = np.array([seconds_on(row, sizes[-1], cost) for row in rows])
        order = balance(times, Topology(len(rows), ranks=blocks))
        today = times[order].reshape(-1, blocks).sum(0).max()
        assert mixed.seconds <= today * (1 + 1e-9)


def rows_of(units):
    begins = [0, *units.ends.tolist()]
    rows = {}
    for number, row in enumerate(units.rows.tolist()):
        rows.setdefault(row, []).extend(units.lengths[begins[number] : begins[number + 1]].tolist())
    return list(rows.values())


def test_a_long_document_is_spread_and_short_ones_stay_on_one_rank():
    """One of 64 and eight of 16 on two ranks: cut in two, the long one takes as long as 32."""
    cost = Cost(fixed=1.0, per_rank=1.0, quadratic=0)
    layout = lay_out(
        Units.of_documents([64, *[16] * 8]),
        Topology(2, ranks=2),
        budget=32,
        sizes=[1, 2],
        cost=cost,
    )
    assert [(each.size, each.block, len(each.units)) for each in layout.micro_batches] == [
        (2, 0, 1),
        (1, 0, 2),
        (1, 0, 2),
        (1, 1, 2),
        (1, 1, 2),
    ]
    assert layout.seconds == (2 + 32) + 2 * (1 + 32) and layout.count == 3


def test_the_last_token_of_a_full_micro_batch_is_only_a_label():
    fits = lay_out(
        Units.of_documents([33, 65]), Topology(2, ranks=2), budget=32, sizes=[1, 2], cost=Cost()
    )
    assert [len(each.units) for each in fits.micro_batches] == [1, 1]
    with pytest.raises(ConfigError, match="a unit of 66 tokens does not fit on 2 ranks"):
        lay_out(
            Units.of_documents([66]), Topology(2, ranks=2), budget=32, sizes=[1, 2], cost=Cost()
        )


def test_a_fixed_count_is_kept_or_refused():
    units, topology = Units.of_documents([30, 30, 30, 2, 2]), Topology(2, ranks=2)
    options = {"budget": 32, "sizes": [1, 2], "cost": Cost()}
    for count in (2, 3, 8):
        layout = lay_out(units, topology, count=count, **options)
        assert [len(layout.of_rank(rank)) for rank in range(2)] == [count, count]
    with pytest.raises(ConfigError, match="count: 1 found, but a step of 94 tokens needs 2 micro"):
        lay_out(units, topology, count=1, **options)


def test_the_same_units_run_on_any_number_of_ranks():
    units = draw_units(3, 16, 4)
    for ranks in (4, 16, 64):
        layout = lay_out(
            units, Topology(ranks, ranks=ranks), budget=BUDGET, sizes=[1, 2, 4], cost=Cost()
        )
        assert sum(len(each.units) for each in layout.micro_batches) == len(units)


def test_layouts_do_not_depend_on_the_unit_of_the_cost():
    units, topology = draw_units(7, 8, 4), Topology(8, ranks=8)

    class Flops(Cost):
        def __call__(self, lengths, size):
            return super().__call__(lengths, size) * 2.0**50

        def overhead(self, size):
            return super().overhead(size) * 2.0**50

    layouts = [
        lay_out(units, topology, budget=BUDGET, sizes=[1, 2, 4], cost=cost)
        for cost in (Cost(), Flops())
    ]
    assert layouts[0].micro_batches == layouts[1].micro_batches
    assert layouts[1].seconds == layouts[0].seconds * 2.0**50


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes": (3,)}, r"sizes: \[3\] found, powers of two"),
        ({"sizes": ()}, r"sizes: \[\] found"),
        ({"budget": 33}, "budget: 33 found; it must be a multiple of 2"),
        ({"budget": 0}, "budget: 0 found"),
        ({"count": 3, "multiple_of": 2}, "count: 3 found, a multiple of multiple_of = 2"),
        ({"stages": 0}, "stages: 0 found"),
    ],
)
def test_wrong_options_are_refused_by_name(options, message):
    given = {"budget": 32, "sizes": (1, 2), "cost": Cost(), **options}
    with pytest.raises(ConfigError, match=message):
        ContextOptions(**given)


def test_blocks_must_divide_the_ranks():
    with pytest.raises(ConfigError, match="blocks of 4 ranks do not divide 6 ranks"):
        lay_out(Units.of_documents([5]), Topology(6, ranks=6), budget=8, sizes=[1, 4], cost=Cost())
