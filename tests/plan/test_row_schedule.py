# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows change their length by schedule: the rows are those of several runs, joined by resumes."""

import json
import random
import re

import numpy as np
import pytest

from energon_ext import ConfigError, PackedTaskEncoder, SFTTaskEncoder, get_train_dataset
from energon_ext.errors import StateMismatchError
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.row_schedule import row_schedule_from_config
from tests.cli.command import energon_ext
from tests.plan.runs import open_loaders, write_split
from tests.plan.test_longer_rows import CORPORA, transitions_of
from tests.plan.test_questions import KINDS
from tests.saves import save_cursor
from tests.support import (
    LargeTokenizer,
    close_loaders,
    config,
    stock_loader_for,
    trained_transitions,
    write_dataset,
    write_tokens,
    write_weights,
)
from tests.support import take as take_batches

#: Positions of the longest row, and rows of that length in a step.
LONGEST, ROWS = 64, 8
STEP = LONGEST * ROWS

WEIGHTS = {"a": {"linear": {0: 3, 20 * STEP: 1}}, "b": 1, "c": {"step": {0: 1, 5 * STEP: 3}}}

#: The length of rows from each step on.
POINTS = {0: 16, 3: 64, 6: 32, 8: 8, 9: 64}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    for name, tokens in CORPORA.items():
        write_tokens(folder / name, tokens, np.int32)
    return folder


def write(folder, points=None, rule="interleave", *, names="abc", epochs=None, **fields):
    """Write a mix whose rows change their length at some steps; all in the same file."""
    if points is not None:
        fields["row_tokens"] = {"step": {step * STEP: length for step, length in points.items()}}
    entries = [{"path": name, "weight": WEIGHTS[name]} for name in names]
    if epochs is not None:
        entries = [{**each, "max_epochs": epochs} for each in entries]
    return write_split(
        folder / "mix.yaml", {rule: entries}, **{"schedule_axis": "tokens", **fields}
    )


def content(batch):
    fields = "tokens", "labels", "token_weights", "position_ids", "cu_seqlens", "source_ids"
    return batch.row_tokens, *(getattr(batch, name).tolist() for name in fields)


class Run:
    """A run that is resumed several times, each time with other options."""

    def __init__(self):
        self.state, self.batches, self.ended = None, [], False

    def read(
        self, mix, batches, *, ranks=1, batch=ROWS, rows=ROWS, workers=0, seq_len=LONGEST, **o
    ):
        """Read so many batches of each rank."""
        encoder = PackedTaskEncoder(LargeTokenizer(), seq_len, packing_buffer_docs=20, **o)
        loaders = open_loaders(mix, encoder, ranks, workers, batch, rows)
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


def length_at(points, step):
    return points[max((point for point in points if point <= step), default=min(points))]


def read_plain(run, mix, step, stop, points, *, rounds=1, batch=ROWS, **options):
    """Read steps as today: a run that is resumed with another row length at each point."""
    bounds = [step, *(point for point in sorted(points) if step < point < stop), stop]
    for begin, end in zip(bounds, bounds[1:]):
        length = length_at(points, begin)
        parts = LONGEST // length
        sizes = {"seq_len": length, "batch": batch * parts, "rows": ROWS * parts}
        run.read(mix, (end - begin) * rounds, **sizes, **options)


@pytest.mark.parametrize(
    ("rule", "packing"),
    [
        ("interleave", "bin"),
        ("blend", "sequential"),
        pytest.param("interleave", "sequential", marks=pytest.mark.nightly),
        pytest.param("blend", "bin", marks=pytest.mark.nightly),
    ],
)
def test_rows_are_those_of_runs_that_are_joined_by_resumes(data, rule, packing):
    options = {"batch": 2, "ranks": 2, "packing": packing, "balance": "attention"}
    joined, run = Run(), Run()
    read_plain(joined, write(data, rule=rule), 0, 12, POINTS, rounds=2, **options)
    run.read(write(data, POINTS, rule), 24, **options)
    assert run.contents() == joined.contents()
    lengths = [length_at(POINTS, step) for step in range(12) for _ in range(4)]
    assert [batch.row_tokens for batch in run.batches] == lengths
    assert {batch.num_tokens for batch in run.batches} == {2 * LONGEST}
    found, expected = json.loads(run.state), json.loads(joined.state)
    assert found["row_lengths"] == [[96, 16], [120, 64], [152, 32], [216, 8]]
    assert found["row_lengths"] == expected["row_lengths"]
    assert found["plan"] == expected["plan"]


def test_a_resume_after_any_batch_reads_what_one_run_reads(data):
    """Also inside a step, at a step at which the length changes, and without having read."""
    mix, options = write(data, POINTS), {"batch": 2, "ranks": 2}
    whole, parts = Run(), Run()
    whole.read(mix, 22, **options)
    for count in (0, 1, 4, 1, 0, 1, 5, 1, 3, 2, 1, 3):
        parts.read(mix, count, **options)
    assert parts.contents() == whole.contents()
    assert json.loads(parts.state)["plan"] == json.loads(whole.state)["plan"]


def test_energons_own_loader_reads_the_same_rows(data):
    mix = write(data, POINTS)
    run = Run()
    run.read(mix, 22, batch=4)

    def stock():
        return stock_loader_for(
            get_train_dataset(
                mix,
                worker_config=config(2),
                batch_size=4,
                rows_per_step=ROWS,
                task_encoder=PackedTaskEncoder(LargeTokenizer(), LONGEST, packing_buffer_docs=20),
            )
        )

    loader = stock()
    batches = take_batches(loader, 11)
    state = loader.save_state_rank()
    later = stock()
    later.restore_state_rank(state)
    batches += take_batches(later, 11)
    assert [content(batch) for batch in batches] == run.contents()


def chain(data, seed, hops):
    """Compare a run whose schedule changes at each hop with one that is only resumed."""
    rng, scheduled, plain, step = random.Random(seed), Run(), Run(), 0
    for _ in range(hops):
        names = rng.choice(("abc", "abc", "ab", "bc"))
        longest = rng.choice((16, 32, 64))
        times = LONGEST // longest
        count = rng.randint(0, 4)
        points = sorted(rng.sample(range(step + 6), rng.randint(1, 4)))
        points = {point: longest >> rng.randint(0, 2) for point in points}
        points[rng.choice((0, step + 9))] = longest
        options = {"ranks": rng.choice((1, 2)), "packing": rng.choice(("bin", "sequential"))}
        rule = rng.choice(("blend", "interleave"))
        workers = rng.choice((0, 0, 1, 2))
        if rng.random() < 0.2:  # one length, as today
            mix, points = write(data, None, rule, names=names), {0: longest}
        else:
            mix = write(data, points, rule, names=names)
        rows = {"rows": ROWS * times, "batch": ROWS * times // options["ranks"]}
        scheduled.read(mix, count, seq_len=longest, workers=workers, **rows, **options)
        mix = write(data, None, rule, names=names)
        batch = ROWS // options["ranks"]
        read_plain(plain, mix, step, step + count, points, batch=batch, **options)
        step += count
        assert scheduled.contents() == plain.contents()
        found, expected = json.loads(scheduled.state), json.loads(plain.state)
        for key, source in expected["plan"]["sources"].items():
            assert found["plan"]["sources"][key]["tokens"] == source["tokens"], key
    return step


@pytest.mark.parametrize(
    "seed", [*range(1), *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 150))]
)
def test_schedules_that_change_between_resumes_read_what_plain_resumes_read(data, seed):
    chain(data, seed, hops=4 if seed == 0 else 10)


@pytest.mark.parametrize("packing", ["bin", "sequential"])
def test_everything_is_read_once_in_rows_of_four_lengths(data, packing):
    mix, run = write(data, {0: 32, 2: 8, 5: 16, 9: 64, 14: 8, 20: 64}, epochs=2), Run()
    run.read(mix, 999, packing=packing)
    assert run.ended and len(run.batches) > 22
    assert trained_transitions(run.batches) == {k: 2 * n for k, n in transitions_of("abc").items()}


def test_padding_completes_the_last_step_in_rows_of_its_length(data):
    """Batches of nothing but padding have rows of the length of the step, too."""
    mix, run = write(data, {0: 64, 1: 8}, epochs=1), Run()
    run.read(mix, 9999, batch=1)
    assert run.ended and len(run.batches) % ROWS == 0
    assert {batch.num_tokens for batch in run.batches} == {LONGEST}
    assert {batch.row_tokens for batch in run.batches[ROWS:]} == {8}
    assert not run.batches[-1].tokens_per_source()
    assert trained_transitions(run.batches) == transitions_of("abc")


def test_skipped_steps_have_their_place_on_the_axis(data):
    whole, run = Run(), Run()
    whole.read(write(data, POINTS), 12)
    run.read(write(data, POINTS, skip=[[2, 4], [8, 9]]), 9)
    kept = [n for n in range(12) if n not in (2, 3, 8)]
    assert run.contents() == [whole.contents()[n] for n in kept]


def test_shares_are_those_of_a_step_wherever_the_run_is(data):
    """``c`` has 1 of 4.9 at step 1, and 3 of 6.5 at step 5, its breakpoint."""
    mix, run = write(data, POINTS), Run()
    for count in (0, 2, 3, 4):
        blend = find_blend(run.read(mix, count).dataset)
        assert blend.shares_at_step(5)["c"] == pytest.approx(3 / 6.5)
        assert blend.shares_at_step(1)["c"] == pytest.approx(1 / 4.9)
        assert blend.position(7) == 7 * STEP
    assert blend.next_position == 9 * STEP


def test_a_state_inside_a_step_keeps_its_schedule(data):
    run = Run()
    run.read(write(data, POINTS), 3, batch=4)
    with pytest.raises(StateMismatchError, match=r"row_tokens: saved \[\[0, 16\], .*now None"):
        run.read(write(data), 1, batch=4)
    with pytest.raises(StateMismatchError, match=r"row_tokens: saved \[\[0, 16\], "):
        run.read(write(data, {**POINTS, 9: 8, 10: 64}), 1, batch=4)
    run.read(write(data, POINTS), 1, batch=4)


# Commands -----------------------------------------------------------------------------------------


def test_commands_show_the_length_of_rows(data, tmp_path):
    points = {0: 16, 3: 64}
    mix, run = write(data, points), Run()
    for count in (2, 2):
        run.read(mix, count)
        save_cursor(tmp_path / "run", len(run.batches), json.loads(run.state))
    size = ("--seq-length", LONGEST)
    shares = energon_ext("plan", mix, *size).stdout
    assert re.search(r"positions of +0 +1,536 .*\na row +16 +64 ", shares)
    forecast = energon_ext("plan", mix, *size, "--steps", 4, "--global-batch-size", ROWS).stdout
    assert "4 steps of 512 positions: " in forecast
    assert "Rows have 16 positions, 64 from token 1,536 on." in forecast
    shown = energon_ext("checkpoint", "show", tmp_path / "run").stdout
    assert "rows have 16 positions, 64 from token 1,536 on" in shown
    assert "rows read: 96 of 16 positions, 8 of 64 positions" in shown
    for step, (rows, length) in ((1, (32, 16)), (3, (8, 64))):
        traced = energon_ext("trace", tmp_path / "run", mix, "--step", step, "--json").stdout
        found = [json.loads(line) for line in traced.splitlines()]
        assert [each["row_tokens"] for each in found] == rows * [length]
    later = write(data, {0: 16, 3: 64, 9: 32})
    changed = energon_ext("checkpoint", "diff", tmp_path / "run", later).stdout
    assert "row_tokens: was 16 positions, 64 from token 1,536 on; from here on 16 pos" in changed


# Refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (64, "mix.yaml: row_tokens: 64 found; rows have one length from a breakpoint on"),
        ({"linear": {0: 8, 4: 64}}, "rows have one length from a breakpoint on, such as {step: "),
        ({"step": {}}, "row_tokens.step: no breakpoints"),
        ({"step": {"x": 8}}, "row_tokens.step: breakpoint 'x' is not an integer from 0"),
        ({"step": {0: 1, 4: 64}}, "row_tokens.step[0]: 1 found, an integer >= 2 is needed"),
        ({"step": {0: 8.5, 4: 64}}, "row_tokens.step[0]: 8.5 found, an integer >= 2 is needed"),
        ({"step": {0: True}}, "row_tokens.step[0]: True is not a finite number"),
        ({"step": {0: 24, 4: 64}}, "rows of 24 and of 64 positions found; the longest must be 2,"),
        ({"step": {0: 16, 4: 48}}, "rows of 16 and of 48 positions found"),
        ({"step": {0: 8, 4: 32}}, "the longest rows have 32 positions, but the seq_len of the "),
        ({"step": {0: 2, 4: 64}}, "rows of 2 positions found; a multiple of 4 is needed"),
    ],
)
def test_a_schedule_that_rows_cannot_follow_is_refused(data, value, message):
    mix = write(data, row_tokens=value)
    with pytest.raises(ConfigError) as raised:
        Run().read(mix, 1, alignment=4)
    assert message in str(raised.value)


@pytest.mark.parametrize("axis", ["samples", "batches"])
def test_an_axis_that_counts_rows_is_refused(data, axis):
    with pytest.raises(ConfigError, match=f"row_tokens: breakpoints count {axis}, of which longer"):
        Run().read(write(data, POINTS, schedule_axis=axis), 1)


def test_two_files_with_a_schedule_are_refused(data):
    write(data, POINTS).rename(data / "inner.yaml")
    node = {"blend": [{"path": "inner.yaml"}]}
    fields = {"schedule_axis": "tokens", "row_tokens": {"step": {0: 64}}}
    outer = write_split(data / "outer.yaml", node, **fields)
    with pytest.raises(ConfigError, match="inner.yaml and .*outer.yaml: `row_tokens` in both"):
        Run().read(outer, 1)


def test_rows_that_depend_on_their_length_are_refused(data, tmp_path):
    write_tokens(tmp_path / "a", [[5, 6, 7, 8]] * 40)
    write_weights(tmp_path / "a", [[0, 0, 1, 1]] * 40, tokenizer=LargeTokenizer())
    rows = {"row_tokens": {"step": {0: 8, 4: 16}}}
    mix = write_split(tmp_path / "mix.yaml", {"blend": [{"path": "a"}]}, **rows)
    options = {"worker_config": config(), "batch_size": 2}
    with pytest.raises(ConfigError, match="row_tokens: a is cut or spliced to the length of a row"):
        get_train_dataset(mix, task_encoder=SFTTaskEncoder(LargeTokenizer(), 16), **options)
    entry = {"path": str(data / "a"), "splice": {"num_docs": 2, "content_length": 8}}
    mix = write_split(tmp_path / "mix.yaml", {"blend": [entry]}, **rows)
    with pytest.raises(ConfigError, match="is cut or spliced to the length of a row"):
        get_train_dataset(mix, task_encoder=PackedTaskEncoder(LargeTokenizer(), 16), **options)


def test_samples_are_refused(tmp_path):
    write_dataset(tmp_path / "a", [f"text {n}" for n in range(40)])
    rows = {"row_tokens": {"step": {0: 8, 4: 16}}}
    mix = write_split(tmp_path / "mix.yaml", {"blend": [{"path": "a"}]}, **rows)
    encoder = KINDS["samples"][1]()
    with pytest.raises(ConfigError, match="row_tokens: the encoder packs samples"):
        get_train_dataset(mix, task_encoder=encoder, worker_config=config(), batch_size=2)
    encoder.plan_samples = False
    with pytest.raises(ConfigError, match="row_tokens: a:train is streamed; only planned rows"):
        get_train_dataset(mix, task_encoder=encoder, worker_config=config(), batch_size=2)


def test_a_schedule_applies_before_its_first_breakpoint():
    schedule = row_schedule_from_config({"step": [["2k", 16], [1000, 8]]}, "mix.yaml")
    assert [schedule.at(n) for n in (0, 999, 1000, 1999, 2000, 10**12)] == [8, 8, 8, 8, 16, 16]
    assert schedule.to_json() == [[1000, 8], [2000, 16]]
