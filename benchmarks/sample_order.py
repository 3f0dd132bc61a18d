# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Orders of the samples of an epoch: the requests to storage, and how well samples are mixed.

This is a simulation with lengths and sizes only: samples of 150 kB and 798 tokens on average, one
after another in tar shards; nodes of 8 ranks; rows of 8192 tokens, 8 per rank and step; steps of
10 s.

* global: one permutation of the epoch.
* blocks B x M: blocks of B samples in a random order, M blocks at a time shuffled together. The
  rows of a step go to ranks in turn, or ("by node") consecutive ones to the same node.
* lanes L: the run has L streams, each with every L-th group of M blocks and with its own pack
  plans. Each step takes the same number of rows from each lane; consecutive lanes belong to one
  node.
* stock: each of 2 workers per rank has a contiguous part of the source and draws from 16 of its
  shards at a time, through a shuffle buffer and a packing buffer of 512 samples. The figures
  assume that it merges its reads, although Energon itself reads one sample at a time.

A node requests all samples of its next 64 rows per rank at once, or ("whole groups") all samples
that it will use from a group when it needs the first one. It merges neighbours into one request,
smallest gaps first, while the gaps are in total at most a tenth of the bytes used, and each at most
1 MB.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from timing import markdown

from energon_ext.keyed import stable_hash
from energon_ext.packing import BestFitPacker, Pieces
from energon_ext.plan.cost import AttentionCost
from energon_ext.plan.order import EpochOrder
from energon_ext.plan.topology import Topology, balance

SEQ_LEN, SAMPLES, KEY = 8192, 8_000_000, "images"
RANKS_PER_NODE, ROWS_PER_RANK, STEPS_AHEAD, SECONDS_PER_STEP = 8, 8, 8, 10
MOST_WASTE, MOST_GAP = 0.1, 1_000_000
SHARD_SIZES = (100_000_000, 400_000_000, 1_000_000_000)  # requests end at shards of the second
WORKERS, SLICES, STOCK_BUFFER = 2, 16, 512
#: Ranks, and steps that are simulated; an eighth of these steps is enough if all steps are alike.
RUNS = {8: 1024, 64: 256, 512: 32, 1024: 16}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One order, see above, with the documents per pack plan and stock Energon's shuffle buffer."""

    block: int = 1
    mixed: int = 1
    by_node: bool = False
    lanes: int = 1
    documents: int = 4096
    whole_groups: bool = False
    stock: int = 0

    @property
    def group(self):
        return self.block * self.mixed if self.block > 1 else SAMPLES

    def __str__(self):
        if self.stock:
            return f"stock, shuffle buffer {self.stock}"
        parts = [f"blocks {self.block} x {self.mixed}" if self.block > 1 else "global"]
        parts += [f"lanes {self.lanes}"] if self.lanes > 1 else ["by node"] * self.by_node
        parts += [f"plans of {self.documents}"] * (self.documents != 4096)
        return ", ".join(parts + ["whole groups"] * self.whole_groups)


class Source:
    """Lengths of all samples in tokens, and their positions in the concatenated shards."""

    def __init__(self):
        rng = np.random.default_rng(0)
        lengths = rng.lognormal(np.log(798) - 0.32, 0.8, SAMPLES)
        self.lengths = lengths.clip(16, SEQ_LEN).astype(np.int64)
        self.sizes = rng.lognormal(np.log(150e3) - 0.125, 0.5, SAMPLES).astype(np.int64)
        self.begins = np.concatenate(([0], np.cumsum(self.sizes)))
        self.costs = AttentionCost()(self.lengths)


def joined(streams, rows_per_step):
    """Return samples, groups and rows of a run with the same number of rows per stream and step."""
    own = rows_per_step // len(streams)
    samples, groups, row = map(np.concatenate, zip(*streams))
    stream = np.repeat(np.arange(len(streams)), [len(each[0]) for each in streams])
    row = row // own * rows_per_step + stream * own + row % own
    order = np.argsort(row, kind="stable")
    return samples[order], groups[order], row[order]


def packed(samples, groups, source, first, stop, documents, carry=0.3):
    """Return samples, groups and rows of the rows ``first .. stop - 1`` of a stream."""
    packer = BestFitPacker(SEQ_LEN - 1, carry=carry)  # a row has one more token than positions
    order = np.argsort(samples, kind="stable")
    carried, parts, made, taken = Pieces.none(), [], 0, 0
    while made < stop:
        own = slice(taken, taken + documents - len(carried))
        new = Pieces.whole(samples[own], source.lengths[samples[own]])
        plan = packer.plan(carried, new, rows_before=made)
        rows = made + np.repeat(np.arange(len(plan)), np.diff(plan.ends, prepend=0))
        places = np.searchsorted(samples, plan.pieces.documents, sorter=order)
        parts.append((plan.pieces.documents, groups[order[places]], rows))
        carried, made, taken = plan.carried, made + len(plan), own.stop
    samples, groups, rows = map(np.concatenate, zip(*parts))
    part = slice(*np.searchsorted(rows, (first, stop)).tolist())
    return samples[part], groups[part], rows[part] - first


def planned(case, source, rows_per_step, steps):
    """Return the rows of a run whose lanes are at random places in their pack plans."""
    count, streams = rows_per_step // case.lanes * steps, []
    phases = np.random.default_rng(1).integers(0, case.documents // 10, case.lanes)
    order = EpochOrder(SAMPLES, KEY, block=case.block, mixed=case.mixed)
    for lane, phase in enumerate(phases.tolist()):
        needed = 11 * (phase + count) + 2 * case.documents  # a row has 10.3 samples on average
        groups = lane + case.lanes * np.arange(-(-needed // case.group))
        parts = []
        for order.position in (groups * case.group).tolist():
            parts.append(order.take(min(case.group, needed)))
        groups, samples = np.repeat(groups, [len(part) for part in parts]), np.concatenate(parts)
        streams.append(packed(samples, groups, source, phase, phase + count, case.documents))
    return joined(streams, rows_per_step)


def stock(source, workers, rows_per_step, steps, buffer):
    """Return the rows of a run with stock Energon, and each worker's samples in reading order."""
    rng, count = np.random.default_rng(2), rows_per_step // workers * steps
    shards = np.searchsorted(source.begins, range(0, source.begins[-1], SHARD_SIZES[1]))
    streams, reads = [], []
    for first, stop in np.arange(workers)[:, None] * SAMPLES // workers + [0, SAMPLES // workers]:
        ends = [*shards[(shards > first) & (shards < stop)], stop]
        slices = [np.arange(*ends) for ends in zip([first, *ends], ends)]
        turns = rng.permutation(len(slices)) // SLICES  # slices of the same turn are read together
        times = [turn + np.sort(rng.random(len(own))) for turn, own in zip(turns, slices)]
        read = np.concatenate(slices)[np.argsort(np.concatenate(times))]
        stays = rng.exponential(buffer, len(read))  # draws at random from a full buffer
        given = read[np.argsort(np.arange(len(read)) + stays)][buffer // 2 :]
        reads.append(read[buffer:])
        streams.append(packed(given, given, source, 0, count, STOCK_BUFFER, 0))
    return joined(streams, rows_per_step), reads


def requests(samples, asker, source):
    """Return the number of requests after merging those of each asker, and bytes used and read."""
    order = np.lexsort((samples, asker))
    samples, asker = samples[order], asker[order]
    begins, ends = source.begins[samples], source.begins[samples + 1]
    together = (np.diff(asker) == 0) & (np.diff(begins // SHARD_SIZES[1]) == 0)
    gaps, used = np.sort((begins[1:] - ends[:-1])[together]), (ends - begins).sum()
    waste = np.cumsum(gaps[gaps <= MOST_GAP])
    merged = np.searchsorted(waste, MOST_WASTE * used, "right")
    return len(samples) - merged, used, used + waste[:merged].max(initial=0)


def mixing(samples, step, source):
    """Return distances of neighbours, their share in one step, and the largest shard of a step.

    Distances are limited to a third of the run; neighbours that are further away, or not in the
    run, count as that.
    """
    place, third = np.full(SAMPLES + 1, 1 << 40), len(samples) // 3
    place[samples], mine = np.arange(len(samples)), np.arange(third, 2 * third)
    other = place[samples[mine] + 1]
    distance = np.minimum(np.abs(other - mine), third)
    same = step[np.minimum(other, len(step) - 1)] == step[mine]
    largest, ends = [], np.flatnonzero(np.diff(step)) + 1
    for size in SHARD_SIZES:
        steps = np.split(source.begins[samples] // size, ends)
        largest.append(100 * np.mean([np.bincount(own).max() / len(own) for own in steps]))
    return *np.quantile(distance, (0.5, 0.01)), 100 * same.mean(), *largest


def busiest(costs, ranks, case):
    """Return the cost of the heaviest rank of a step over the mean."""
    if not case.stock:
        by_node = case.by_node or case.lanes > 1
        parts = costs.reshape(-1, RANKS_PER_NODE * ROWS_PER_RANK if by_node else len(costs))
        topology = Topology(parts.shape[1], 1, parts.shape[1] // ROWS_PER_RANK)
        assigned = [part[balance(part, topology)].reshape(-1, topology.ranks) for part in parts]
        costs = np.concatenate([part.T for part in assigned])
    of_rank = costs.reshape(ranks, -1).sum(1)
    return of_rank.max() / of_rank.mean()


def reading(case, source, nodes, steps, samples, groups, step, node):
    """Return MB per request, requests/s, read / used bytes, touched / used blocks, and GB held."""
    step_bytes = source.sizes[samples].sum() / steps / nodes
    asker = (groups if case.whole_groups else step // STEPS_AHEAD) * nodes + node
    if case.whole_groups:  # keep groups that are used up, except for carried-over pieces
        kept = (np.bincount(groups) > 0.95 * case.group)[groups]
        samples, asker, step = samples[kept], asker[kept], step[kept]
    count, used, read = requests(samples, asker, source)
    blocks = (samples - stable_hash(f"{KEY}/0/rotated")) % SAMPLES // case.block
    touched = len(np.unique(asker * SAMPLES + blocks)) * case.block / len(samples)
    first = np.full(asker.max() + 1, steps)
    np.minimum.at(first, asker, step)
    buffers = (case.stock + STOCK_BUFFER) * WORKERS * RANKS_PER_NODE * bool(case.stock)
    held = np.mean(step - first[asker] + 1) * step_bytes + buffers * source.sizes.mean()
    per_second = step_bytes / (used / count) / SECONDS_PER_STEP
    return used / count / 1e6, per_second, per_second * nodes, read / used, touched, held / 1e9


def measure(case, source, ranks):
    """Return a row of the table."""
    steps = RUNS[ranks] if case.stock or case.whole_groups else max(8, RUNS[ranks] // 8)
    nodes, rows_per_step = ranks // RANKS_PER_NODE, ranks * ROWS_PER_RANK
    if case.stock:  # stock Energon reads samples long before it uses them
        (samples, _, row), reads = stock(source, ranks * WORKERS, rows_per_step, steps, case.stock)
        each = len(samples) // len(reads) // steps
        used = np.stack([read[: each * steps] for read in reads], axis=1).reshape(-1)
        use, place = np.divmod(np.arange(len(used)), each * len(reads))
        read = used, used, use, place % len(reads) // (WORKERS * RANKS_PER_NODE)
    else:
        samples, groups, row = planned(case, source, rows_per_step, steps)
        step, place = np.divmod(row, rows_per_step)
        rank = place // ROWS_PER_RANK if case.by_node or case.lanes > 1 else place % ranks
        read = samples, groups, step, rank // RANKS_PER_NODE
    at = (read[2] * nodes + read[3]) * 10**6
    shards = [len(np.unique(at + source.begins[read[0]] // size)) for size in SHARD_SIZES]
    costs = np.bincount(row, source.costs[samples]).reshape(steps, -1)
    return FORMAT.format(
        f"{ranks} ranks: {case}",
        *reading(case, source, nodes, steps, *read),
        *(number / nodes / steps for number in shards),
        100 * source.lengths[samples].sum() / (steps * rows_per_step * SEQ_LEN),
        *mixing(samples, row // rows_per_step, source),
        np.mean([busiest(step, ranks, case) for step in costs[:4]]),
    ).split("|")


COLUMNS = """order; MB per request; requests/s of a node; of the cluster; bytes read / used;
blocks touched / used; GB held by a node; shards a node touches in a step; fill, %; neighbours:
median; 1st percentile; in one step, %; most of a step from a shard, %; heaviest rank / mean"""
FORMAT = (
    "{}|{:.2f}|{:.1f}|{:,.0f}|{:.2f}|{:.2f}|{:.1f}|{:.0f} / {:.0f} / {:.0f}|{:.2f}|"
    "{:,.0f}|{:,.0f}|{:.0f}|{:.2f} / {:.2f} / {:.2f}|{:.4f}"
)


def run():
    source, blocks = Source(), Case(block=16, mixed=256)
    small = replace(blocks, mixed=32, by_node=True, documents=512)
    lanes = replace(blocks, lanes=128, whole_groups=True)
    cases = [Case(stock=100), Case(stock=1000), Case(), blocks, small]
    cases += [replace(small, mixed=10, documents=160), lanes, replace(lanes, block=64, mixed=64)]
    alone = replace(blocks, by_node=True, whole_groups=True)
    orders = [measure(case, source, 8) for case in (*cases[:3], alone)]
    orders += [measure(case, source, ranks) for ranks in (64, 512, 1024) for case in cases]
    orders.append(measure(replace(lanes, lanes=64), source, 1024))
    grid = itertools.product((False, True), (16, 64, 256, 1024), (4, 16, 64, 256))
    sizes = [measure(Case(by_node=n, block=b, mixed=m), source, 512) for n, b, m in grid]
    columns = COLUMNS.replace("\n", " ").split("; ")
    tables = {"Orders of samples": orders, "Sizes of blocks": sizes}
    return "\n".join(markdown(title, columns, table) for title, table in tables.items())
