# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows change their length by schedule: the rows are those of several runs, joined by resumes."""

import json
import random
from collections import Counter

import numpy as np
import pytest

from energon_ext import PackedTaskEncoder
from energon_ext.errors import StateMismatchError
from energon_ext.plan.lookup import find_blend
from tests.plan.runs import open_loaders, write_split
from tests.support import LargeTokenizer, close_loaders, trained_transitions, write_tokens

#: Positions of the longest row, rows of that length in a step, and in a batch of one of one rank.
LONGEST, ROWS = 64, 8
STEP = LONGEST * ROWS


def documents(count, first_id, seed):
    """Return documents of unique token ids, from one token to several of the longest rows."""
    rng = np.random.default_rng(seed)
    lengths = np.where(rng.random(count) < 0.2, rng.integers(70, 200, count), 0)
    lengths = np.where(lengths, lengths, rng.integers(1, 40, count))
    ends = first_id + np.cumsum(lengths + 1)
    return [list(range(end - length, end)) for end, length in zip(ends, lengths)]


CORPORA = {name: documents(150, 100 + 20_000 * n, n) for n, name in enumerate("abc")}
WEIGHTS = {"a": {"linear": {0: 3, 20 * STEP: 1}}, "b": 1, "c": {"step": {0: 1, 5 * STEP: 3}}}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    for name, tokens in CORPORA.items():
        write_tokens(folder / name, tokens, np.int32)
    return folder


def write(folder, points=None, rule="interleave", *, epochs=None, axis="tokens", **fields):
    """Write a mix whose rows change their length at steps; None for rows of one length."""
    unit = STEP if axis == "tokens" else 1
    if points is not None:
        fields["row_tokens"] = {"step": {step * unit: length for step, length in points.items()}}
    entries = [{"path": name, "weight": weight} for name, weight in WEIGHTS.items()]
    entries = [{**each, **({"max_epochs": epochs} if epochs else {})} for each in entries]
    name = f"mix{abs(hash(json.dumps([points, rule, epochs, axis, fields])))}.yaml"
    return write_split(folder / name, {rule: entries}, schedule_axis=axis, **fields)


def content(batch):
    fields = "tokens", "labels", "token_weights", "position_ids", "cu_seqlens", "source_ids"
    return batch.row_tokens, *(getattr(batch, name).tolist() for name in fields)


class Run:
    """A run that is resumed several times, each time with other options."""

    def __init__(self):
        self.state, self.batches, self.ended = None, [], False

    def read(
        self, mix, batches, *, ranks=1, batch=ROWS, workers=0, seq_len=LONGEST, parts=1, **options
    ):
        """Read so many batches of each rank; all sizes in rows that are ``parts`` times as many."""
        encoder = PackedTaskEncoder(LargeTokenizer(), seq_len, packing_buffer_docs=20, **options)
        loaders = open_loaders(mix, encoder, ranks, workers, batch * parts, ROWS * parts)
        for loader in loaders if self.state is not None else ():
            loader.load_state_dict(json.loads(self.state))
        iterators = [iter(loader) for loader in loaders]
        for _ in range(batches):
            drawn = [next(each, None) for each in iterators]
            if drawn[0] is None:
                self.ended = True
                break
            self.batches += drawn
        texts = {json.dumps(loader.state_dict(), sort_keys=True) for loader in loaders}
        assert len(texts) == 1, "ranks disagree on the state"
        self.state = texts.pop()
        close_loaders()
        return loaders[0]

    def contents(self):
        return [content(batch.validate()) for batch in self.batches]


def read_joined(folder, points, steps, *, batches_per_step=1, **options):
    """Return a run of as many steps, resumed with another row length as today at each point."""
    run, mix = Run(), write(folder, rule=options.pop("rule", "interleave"))
    bounds = [*sorted(points), steps]
    for begin, end in zip(bounds, bounds[1:]):
        length = points[begin]
        sizes = {"seq_len": length, "parts": LONGEST // length}
        run.read(mix, (end - begin) * batches_per_step, **sizes, **options)
    return run


POINTS = {0: 16, 3: 64, 6: 32, 8: 8, 9: 64}


@pytest.mark.parametrize("packing", ["bin", "sequential"])
@pytest.mark.parametrize("rule", ["interleave", "blend"])
def test_rows_are_those_of_runs_that_are_joined_by_resumes(data, rule, packing):
    options = {"batch": 2, "ranks": 2, "packing": packing, "balance": "attention"}
    joined = read_joined(data, POINTS, 12, rule=rule, batches_per_step=2, **options)
    run = Run()
    run.read(write(data, POINTS, rule), 24, **options)
    assert run.contents() == joined.contents()
    lengths = [length for n in range(12) for length in 4 * [POINTS[max(p for p in POINTS if p <= n)]]]
    assert [batch.row_tokens for batch in run.batches] == lengths
    assert {batch.num_tokens for batch in run.batches} == {2 * LONGEST}
    found, expected = json.loads(run.state), json.loads(joined.state)
    assert found["row_lengths"] == expected["row_lengths"] == [[96, 16], [120, 64], [152, 32], [216, 8]]
    assert found["plan"] == expected["plan"]
