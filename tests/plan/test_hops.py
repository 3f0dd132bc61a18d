# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs are compared with list models that share no code with them."""

import math
import random
import shutil
from fractions import Fraction

import pytest

from tests.mixture.slow import places_of_equals, uniform
from tests.plan.runs import Run, edit_yaml, rows_of, tokens_of, write_numbered, write_split
from tests.support import take, write_tokens

ROWS = 16
ROUNDING = Fraction(1, 10**9)
TOPOLOGIES = [(1, 0, 1), (1, 0, 16), (2, 0, 4), (4, 0, 2), (8, 0, 1), (2, 0, 8), (16, 0, 1)]
WITH_WORKERS = [(1, 3, 4), (2, 2, 2)]


class ListModel:
    """An interleave over lists of rows, row by row.

    Among the sources that are owed at least e = 1 / (2 n - 2) rows, the next is the one that would
    first be owed 1 - e rows. Ties are broken by a hash.

    Args:
        streams: Rows of each source, in the order in which it yields them when it is read alone.
    """

    def __init__(self, streams):
        self.streams = streams
        self.next_row = dict.fromkeys(streams, 0)
        self.owed = dict.fromkeys((*streams, "inner"), 0.0)
        self.row = 0  # rows of all sources so far

    def step(self, weights):
        """Return the sorted rows of a step under the given weights."""
        names = sorted(weights)
        total = sum(map(Fraction, weights.values()))
        share = {name: Fraction(weights[name]) / total for name in names}
        least = Fraction(1, max(2 * len(names) - 2, 2))
        provisional = {name: Fraction(self.owed[name]) / 64 for name in names}
        equals = dict(zip(names, places_of_equals(len(names))))
        rows = []
        for _ in range(ROWS):
            for name in names:
                provisional[name] += share[name]
            due = [name for name in names if provisional[name] >= least - ROUNDING] or names
            turns = {
                name: math.floor((1 - least - provisional[name]) / share[name] + ROUNDING)
                for name in due
            }
            best = min(due, key=lambda name: (turns[name], equals[name]))
            provisional[best] -= 1
            rows.append((best, self.take(best)))
        read = dict.fromkeys(names, 0)
        for name, row in rows:
            read[name] += _length(row)
        for name in names:
            self.owed[name] += float(share[name]) * sum(read.values()) - read[name]
        return sorted(row for _, row in rows)

    def take(self, name):
        """Return the next row of a source."""
        self.row += 1
        row = self.streams[name][self.next_row[name]]
        self.next_row[name] += 1
        return row


class NestedListModel(ListModel):
    """An interleave of ``a`` and of a blend of ``b``, with weight 2, and ``c``, with weight 1."""

    def take(self, name):
        if name == "inner":
            name = "b" if uniform("0/inner.yaml:train", self.row) < 2 / 3 else "c"
        return super().take(name)


def _length(row):
    """Return the number of positions before the padding, which has id 0."""
    tokens, _, _, positions = row
    used = [i for i, token in enumerate(tokens) if token]
    return used[-1] + 1


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hops")
    for number, name in enumerate("abcd"):
        write_numbered(folder / name, 260, 100 + 15_000 * number, seed=number)
    return folder


def write(folder, weights, name, rule="interleave"):
    mix = folder / name
    mix.parent.mkdir(exist_ok=True)
    depth = len(mix.relative_to(folder).parts) - 1
    entries = [{"path": "../" * depth + key, "weight": w} for key, w in weights.items()]
    return write_split(mix, {rule: entries})


@pytest.fixture(scope="module")
def streams(data):
    """The rows of each source alone, in their order."""
    found = {}
    for name in "abcd":
        run = Run(write(data, {name: 1}, f"alone_{name}.yaml"), batch=50, rows=50)
        found[name] = [row for batch in take(run.loaders[0], 10) for row in rows_of(batch)]
        run.close()
    return found


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]
)
def test_ten_hops_over_topologies_and_mixes_read_what_the_list_model_reads(data, streams, seed):
    rng = random.Random(seed)
    model = ListModel(streams)
    state = None
    for hop in range(10):
        names = rng.sample("abcd", rng.randint(1, 4))  # added and removed, in any order
        weights = {name: rng.choice([1, 2, 3, 0.25]) for name in names}  # reweighted
        place = rng.choice(["mix.yaml", "deep/mix.yaml", "deep/other.yaml"])  # moved
        ranks, workers, batch = rng.choice(WITH_WORKERS if hop in (3, 7) else TOPOLOGIES)
        mix = write(data, weights, place)
        run = Run(mix, ranks=ranks, workers=workers, batch=batch, rows=ROWS)
        if state is not None:
            run.resume(state)
        for number in range(rng.randint(1, 4)):
            where = f"hop {hop}, step {number}: {weights} on {ranks} x {workers} x {batch}"
            assert run.step() == model.step(weights), where
        state = run.state()
        run.close()


def test_a_source_returns_where_it_was_after_moves_while_it_was_away(data, streams, tmp_path):
    """First all data moves with its metadataset, then the metadataset alone."""
    folder = shutil.copytree(data, tmp_path / "here")
    model, both = ListModel(streams), {"a": 1, "b": 2}
    first = Run(write(folder, both, "mix.yaml"), batch=16, rows=ROWS)
    assert [first.step() for _ in range(3)] == [model.step(both) for _ in range(3)]
    folder = folder.rename(tmp_path / "there")
    away = Run(write(folder, {"a": 1}, "mix.yaml"), batch=16, rows=ROWS).resume(first.state())
    assert away.step() == model.step({"a": 1})
    back = Run(write(folder, both, "deep/mix.yaml"), batch=16, rows=ROWS).resume(away.state())
    assert [back.step() for _ in range(3)] == [model.step(both) for _ in range(3)]


@pytest.mark.parametrize(("ranks", "workers", "batch"), [(1, 0, 16), (4, 0, 2), (1, 2, 4)])
def test_a_scheduled_blend_reads_what_the_list_model_reads(data, streams, ranks, workers, batch):
    mix = write(data, {"a": {"linear": {0: 3, 8: 0}}, "b": 1, "c": 0.5}, "blend.yaml", "blend")
    run = Run(mix, ranks=ranks, workers=workers, batch=batch, rows=ROWS)
    unread = {name: iter(streams[name]) for name in "abc"}
    for step in range(12):
        of_a = max(3 - 3 * step / 8, 0)
        ends = [of_a / (of_a + 1.5), (of_a + 1) / (of_a + 1.5), 1]
        numbers = [uniform("0/", row) for row in range(ROWS * step, ROWS * (step + 1))]
        drawn = ["abc"[next(i for i, end in enumerate(ends) if u < end)] for u in numbers]
        assert run.step() == sorted(next(unread[name]) for name in drawn), f"step {step}"


@pytest.mark.parametrize(("ranks", "workers", "batch"), [(1, 0, 16), (4, 0, 2), (1, 2, 4)])
def test_a_blend_inside_an_interleave_reads_what_the_list_model_reads(
    data, streams, ranks, workers, batch
):
    write(data, {"b": 2, "c": 1}, "inner.yaml", "blend")
    mix = write(data, {"a": 1, "inner.yaml": 2}, "nested.yaml")
    run = Run(mix, ranks=ranks, workers=workers, batch=batch, rows=ROWS)
    model = NestedListModel(streams)
    for step in range(12):
        assert run.step() == model.step({"a": 1, "inner": 2}), f"step {step}"


@pytest.mark.parametrize(("ranks", "workers", "batch"), [(1, 0, 16), (2, 0, 4), (4, 0, 2)])
def test_a_new_source_is_owed_by_its_weight_at_the_resume(tmp_path, ranks, workers, batch):
    """It has half of the weight until step 15, so after ten steps it is owed half of their tokens.

    It is then read alone until it leaves at step 15.
    """
    for name, token in {"a": 1, "b": 2}.items():
        write_tokens(tmp_path / name, [[token] * 20] * 40)
    run = Run(
        write(tmp_path, {"a": 1}, "old.yaml"), ranks=ranks, workers=workers, batch=batch, rows=ROWS
    )
    run.steps(10)
    both = write(tmp_path, {"a": 1, "b": {"step": {0: 1, 15: 0}}}, "both.yaml")
    edit_yaml(both, lambda split: split.update(new_source="zero"))
    resumed = Run(both, ranks=ranks, workers=workers, batch=batch, rows=ROWS).resume(run.state())
    read = [set(tokens_of([step])) & {1, 2} for step in resumed.steps(7)]
    assert read == [{2}] * 5 + [{1}] * 2
