# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs whose weights a controller sets while they read."""

import itertools
import json
import logging
import os
import shutil
import threading
import time
import warnings

import megatron.energon
import pytest
from megatron.energon import DefaultTaskEncoder

from energon_ext import (
    DynamicBlendMixin,
    ExactDataLoader,
    PackedTaskEncoder,
    ScheduleAxis,
    get_train_dataset,
)
from energon_ext.errors import ConfigError, StateMismatchError, WorkerError
from energon_ext.mixture.checks import BlendWarning
from energon_ext.plan.cursor import fork_at, save_cursor
from energon_ext.plan.lookup import find_blend
from energon_ext.weights import LiveWeights
from tests.plan.runs import SEQ_LEN, Run, edit_yaml, rows_of, write_numbered, write_split
from tests.support import LargeTokenizer, config, stock_loader_for, take, write_dataset, write_mix

#: First token id of each source.
FIRST = {"code": 20_000, "web": 50_000}
ROWS = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("live")
    for seed, (name, first) in enumerate(FIRST.items()):
        write_numbered(folder / name, 400, first, seed)
    return folder


@pytest.fixture
def mix(data, tmp_path):
    """A function that writes a mix of both sources with a file of weights."""

    def write(rule="interleave", **fields):
        entries = [{"path": str(data / name), "weight": 1} for name in FIRST]
        node = {rule: entries, "weights_file": "live.jsonl", **fields}
        return write_split(tmp_path / "mix.yaml", node)

    return write


@pytest.fixture
def live(tmp_path, data):
    """A function that appends lines: first step, last step, weights of code and web."""

    def set_lines(*lines):
        for first, through, code, web in lines:
            names = [os.path.relpath(data / name, tmp_path) for name in FIRST]
            weights = dict(zip(names, (code, web)))
            LiveWeights(tmp_path / "live.jsonl").set(first, weights, through)

    return set_lines


def set_second(**fields):
    """Return a change of the second entry, for ``edit_yaml``."""
    return lambda split: split["interleave"][1].update(fields)


def web_rows(step):
    """Count the rows of a step that come from web."""
    return sum(tokens[0] >= FIRST["web"] for tokens, *_ in step)


LINES = (2, 3, 3, 1), (4, 5, 1, 0), (6, None, 1, 3)


@pytest.mark.parametrize(
    ("ranks", "workers"), [(1, 2), (2, 0), pytest.param(2, 2, marks=pytest.mark.nightly)]
)
def test_each_step_has_the_shares_of_its_line(mix, live, ranks, workers):
    live(*LINES)
    run = Run(mix(), ranks=ranks, workers=workers, batch=4)
    # 16 rows: the entries' weights 1 : 1, then 3 : 1, 1 : 0 and 1 : 3.
    assert [web_rows(step) for step in run.steps(8)] == [8, 8, 4, 4, 0, 0, 12, 12]


def test_an_interleave_stays_within_a_row_of_its_live_weights(mix, live):
    shares = [(1, 2), (5, 3), (2, 7), (1, 1), (4, 1), (3, 7)]
    live(*((step, step, *pair) for step, pair in enumerate(shares)))
    run = Run(mix(), batch=4)
    due = read = 0.0
    for code, web in shares:
        due += ROWS * web / (code + web)
        read += web_rows(run.step())
        assert abs(due - read) < 1.1  # rows lack at most a few tokens


def test_a_blend_draws_only_sources_with_a_weight(mix, live):
    live((0, 1, 1, 0), (2, None, 0, 1))
    run = Run(mix("blend"), batch=4)
    assert [web_rows(step) for step in run.steps(4)] == [0, 0, 16, 16]


@pytest.mark.parametrize("workers", (0, 2))
def test_the_time_at_which_lines_are_written_does_not_matter(mix, live, workers, tmp_path):
    blocks = [(first, first + 1, 1 + first % 3, 2) for first in range(0, 16, 2)]
    live(*blocks)
    expected = Run(mix(), workers=workers, batch=8).steps(8)

    (tmp_path / "live.jsonl").unlink()
    run = Run(mix(), workers=workers, batch=8)

    def control():
        for block in blocks:
            time.sleep(0.05)
            live(block)

    controller = threading.Thread(target=control)
    controller.start()
    assert run.steps(8) == expected
    controller.join()


@pytest.mark.parametrize(
    ("workers", "batch"), [(0, 2), (2, 8), pytest.param(2, 2, marks=pytest.mark.nightly)]
)
def test_a_controller_that_covers_planned_steps_never_makes_a_run_wait(
    mix, tmp_path, workers, batch
):
    controller = LiveWeights(tmp_path / "live.jsonl")
    run = Run(mix(), workers=workers, batch=batch)
    (loader,) = run.loaders
    find_blend(loader).live_weights[0].deadline = 5
    for _ in range(6):
        while controller.next_step <= loader.planned_through:
            controller.set(controller.next_step, {}, through=controller.next_step + 1)
        assert len(run.step()) == ROWS


def test_planned_through_counts_steps_read_ahead_and_skipped_steps(mix, tmp_path, live):
    live((0, None, 1, 1))
    path = mix()
    edit_yaml(path, skip=[[3, 5]])
    run = Run(path, batch=4)  # four batches per step
    found = [run.loaders[0].planned_through]
    for _ in range(4):
        run.step()
        found.append(run.loaders[0].planned_through)
    assert found == [0, 1, 2, 5, 6]
    # Two workers hold two batches each, one step in total, and the planner is two steps ahead.
    assert Run(path, batch=4, workers=2).loaders[0].planned_through == 3 + 2


@pytest.mark.parametrize(
    ("workers", "ranks"),
    [
        (0, 1),
        (2, 2),
        pytest.param(2, 1, marks=pytest.mark.nightly),
        pytest.param(0, 2, marks=pytest.mark.nightly),
    ],
)
def test_a_resume_anywhere_reads_what_the_uninterrupted_run_read(mix, live, workers, ranks):
    live(*LINES)
    options = {"workers": workers, "ranks": ranks, "batch": 4}
    run, expected, states = Run(mix(), **options), [], [None]
    for _ in range(8):
        expected.append(run.step())
        states.append(run.state())
    for stop in (1, 3, 4):
        other = Run(mix(), batch=8, workers=2 - workers).resume(states[stop])
        assert other.steps(8 - stop) == expected[stop:]
        other.close()


def test_a_resume_inside_a_step_reads_its_rest(mix, live):
    live(*LINES)
    expected = Run(mix(), batch=4).steps(4)
    run = Run(mix(), batch=4)
    run.steps(2)
    first = next(iter(run.loaders[0]))
    state = run.state()
    assert json.loads(state)["weights"]["live.jsonl"]["lines"] == 1  # of the open step
    other = Run(mix(), batch=4).resume(state)
    rest = [next(iter(other.loaders[0])) for _ in range(3)]
    assert sorted(row for each in (first, *rest) for row in rows_of(each)) == expected[2]


def test_a_killed_run_continues_with_lines_written_ahead(mix, live, tmp_path):
    """The controller was ahead of the state, and its lines remain valid."""
    live(*LINES[:2])
    run = Run(mix(), batch=8)
    run.steps(3)
    state = run.state()
    live(LINES[2])
    expected = run.steps(5)
    assert Run(mix(), batch=8).resume(state).steps(5) == expected


def test_used_lines_may_not_change_but_later_ones_may(mix, live, tmp_path):
    live(*LINES)
    run = Run(mix(), batch=8)
    run.steps(5)
    state, file = run.state(), tmp_path / "live.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    for text in (lines[0], lines[0].replace("3.0", "2.0") + "".join(lines[1:]), ""):
        file.write_text(text)
        with pytest.raises(StateMismatchError, match="lines for the steps before 5"):
            Run(mix(), batch=8).resume(state)
    file.write_text("".join(lines[:2]) + lines[2].replace("3.0", "0.0"))
    steps = Run(mix(), batch=8).resume(state).steps(3)
    assert [web_rows(step) for step in steps] == [0, 0, 0]


def test_between_two_steps_a_weights_file_may_be_added(mix, live, tmp_path):
    path = mix()
    edit_yaml(path, lambda split: split.pop("weights_file"))
    run = Run(path, batch=8)
    run.steps(2)
    state = run.state()
    assert json.loads(state)["weights"] == {}
    live((2, None, 0, 1))
    assert [web_rows(step) for step in Run(mix(), batch=8).resume(state).steps(2)] == [16, 16]


@pytest.mark.parametrize(("workers", "ranks"), [(1, 1), (0, 2)])
def test_every_rank_raises_at_the_deadline(mix, live, workers, ranks, tmp_path):
    live((0, 0, 1, 1))
    run = Run(mix(), ranks=ranks, workers=workers, batch=ROWS // ranks)
    for loader in run.loaders:
        find_blend(loader).live_weights[0].deadline = 0.1
        iterator = iter(loader)
        with pytest.raises(WorkerError) as error:
            next(iterator), next(iterator)
        assert str(error.value).startswith(f"{tmp_path}/live.jsonl: no line covers step 1 after")
        assert "the last line (1) covers steps 0 to 0." in str(error.value)


@pytest.fixture
def log(tmp_path):
    """A file with the log of this process and of those that it forks."""
    handler, logger = logging.FileHandler(tmp_path / "log"), logging.getLogger("energon_ext")
    logger.addHandler(handler)
    yield tmp_path / "log"
    logger.removeHandler(handler)
    handler.close()


@pytest.mark.parametrize("workers", (0, 1))
def test_a_run_that_waits_names_step_and_file(mix, live, workers, tmp_path, log):
    """With workers, another process plans and waits."""
    live((0, 0, 1, 1))
    run = Run(mix(), workers=workers, batch=ROWS)
    find_blend(run.loaders[0]).live_weights[0].patience = 0
    reading = threading.Thread(target=run.steps, args=[2])
    reading.start()
    while reading.is_alive() and not log.read_text():
        time.sleep(0.01)
    live((1, None, 1, 1))
    reading.join()
    begin = f"{tmp_path}/live.jsonl: no line covers step 1 yet; the last line (1) covers"
    assert log.read_text().startswith(begin)


def test_the_deadline_is_a_quarter_of_the_loaders_timeout(mix):
    dataset = Run(mix()).loaders[0].dataset
    ExactDataLoader(dataset, timeout=60)
    assert [live.deadline for live in dataset.run.live_weights] == [15]


def test_other_ranks_log_a_wait_later_than_rank_0(mix):
    loaders = Run(mix(), ranks=2).loaders
    assert [find_blend(loader).live_weights[0].patience for loader in loaders] == [10, 60]


def test_a_source_that_a_used_line_names_is_removed_with_a_new_weights_file(mix, live, tmp_path):
    live((0, 1, 1, 1), (2, None, 1, 3))
    run = Run(mix(), batch=8)
    run.steps(3)
    state = run.state()
    path = mix()
    edit_yaml(path, lambda split: split["interleave"].pop())
    with pytest.raises(ConfigError, match="line 1: no source .*web.* a new weights_file"):
        Run(path, batch=8)
    edit_yaml(path, lambda split: split.update(weights_file="second.jsonl"))
    (name,) = find_blend(Run(path, batch=8).loaders[0]).keys
    LiveWeights(tmp_path / "second.jsonl").set(3, {name: 1})
    steps = Run(path, batch=8).resume(state).steps(2)
    assert [web_rows(step) for step in steps] == [0, 0]


def test_a_source_that_lines_name_by_its_name_may_move(mix, live, data, tmp_path):
    def mix_of(folder):
        path = mix()
        moved = {"path": str(folder / "web"), "name": "The web"}
        edit_yaml(path, lambda split: split["interleave"][1].update(moved))
        return path

    LiveWeights(tmp_path / "live.jsonl").set(0, {"The web": 3})
    run = Run(mix_of(data), batch=8)
    assert [web_rows(step) for step in run.steps(2)] == [12, 12]
    (tmp_path / "new").mkdir()
    for file in data.glob("web.*"):
        shutil.copy(file, tmp_path / "new")
    moved = Run(mix_of(tmp_path / "new"), batch=8).resume(run.state())
    assert [web_rows(step) for step in moved.steps(2)] == [12, 12]


def test_a_fork_never_waits_whatever_it_is_asked(mix, live):
    """It answers questions, with the last weights written."""
    live((0, 4, 1, 3))
    run = find_blend(Run(mix()).loaders[0])
    for fork in (run.fork(), fork_at(run, save_cursor(run))):
        steps = [step.number for step in itertools.islice(fork.draw_own_steps(), 6)]
        assert steps == [0, 1, 2, 3, 4, 5]
    assert len(list(itertools.islice(run.fork().draw_steps(), 6))) == 6


def test_a_run_that_has_ended_does_not_wait_for_a_line(mix, live, data):
    live((0, 100, 1, 1))
    path = mix()
    edit_yaml(path, lambda split: [entry.update(max_epochs=1) for entry in split["interleave"]])
    run = Run(path, batch=8)
    find_blend(run.loaders[0]).live_weights[0].deadline = 1
    assert 5 < sum(1 for _ in iter(run.step, None)) < 100


def test_lines_may_use_display_names(mix, tmp_path, data):
    path = mix()
    edit_yaml(path, set_second(name="The web"))
    LiveWeights(tmp_path / "live.jsonl").set(0, {"The web": 0})
    assert web_rows(Run(path, batch=8).step()) == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights_file": 3}, "weights_file: 3 found, a path is needed"),
        ({"weights_file": ""}, "weights_file: '' found, a path is needed"),
        ({"weights": "live.jsonl"}, "no field 'weights'.*weights_file"),
    ],
)
def test_a_wrong_field_is_a_one_line_error(mix, change, words):
    with pytest.raises(ConfigError, match=words):
        Run(mix(**change))


def test_live_weights_need_an_axis_of_steps(mix):
    path = mix()
    edit_yaml(path, schedule_axis="tokens")
    with pytest.raises(ConfigError, match="counts steps, but .*mix.yaml counts tokens"):
        Run(path)


def test_a_line_with_only_zero_weights_is_an_error(mix, live):
    live((0, 0, 1, 1), (1, 1, 0, 0))
    with pytest.raises(ConfigError, match="Every weight is 0 at step 1"):
        Run(mix())


def test_a_nested_metadataset_is_named_by_its_path_and_split(mix, tmp_path, data):
    write_mix(tmp_path / "inner.yaml", [(data / "web", 1)])
    path = mix()
    edit_yaml(path, set_second(path="inner.yaml"))
    LiveWeights(tmp_path / "live.jsonl").set(0, {"inner.yaml:train": 3})
    assert web_rows(Run(path, batch=8).step()) == 12


def test_live_weights_around_a_schedule_must_be_allowed(mix, tmp_path, data, live):
    entries = [(data / "web", {"linear": {0: 0, 8: 8}}), (data / "code", 1)]
    write_mix(tmp_path / "inner.yaml", entries)
    path = mix()
    edit_yaml(path, set_second(path="inner.yaml"))
    with pytest.raises(ConfigError, match="A schedule inside a schedule"):
        Run(path)


def test_stock_encoders_and_streamed_sources_are_refused(tmp_path):
    write_dataset(tmp_path / "text", ["some text"] * 4)
    path = write_mix(tmp_path / "mix.yaml", [("text", 1)], weights_file="live.jsonl")
    options = {"worker_config": config(), "batch_size": 1}
    stages = {"shuffle_buffer_size": None, "max_samples_per_sequence": None}
    with pytest.raises(ConfigError, match="this TaskEncoder does not support .* a weights_file"):
        megatron.energon.get_train_dataset(
            path, task_encoder=DefaultTaskEncoder(), **options, **stages
        )
    with pytest.raises(ConfigError, match="weights_file needs planned steps, but text:train is"):
        get_train_dataset(path, task_encoder=Streamed(), **options)


class Streamed(DynamicBlendMixin, DefaultTaskEncoder):
    plan_samples = False


@pytest.mark.parametrize("workers", (0, 2))
def test_energons_own_loader_follows_live_weights(mix, live, workers):
    live(*LINES)
    expected = Run(mix(), batch=ROWS).steps(8)
    dataset = Run(mix(), batch=ROWS, workers=workers).loaders[0].dataset
    batches = take(stock_loader_for(dataset), 8)
    assert [sorted(rows_of(batch)) for batch in batches] == expected


def test_lines_after_the_end_of_the_run_raise_no_warning(mix, live):
    """Workers plan beyond the end, so a controller sets weights of steps that are never trained."""
    live((0, 9, 1, 1), (10, None, 1, 2))
    encoder = PackedTaskEncoder(LargeTokenizer(), SEQ_LEN)
    encoder.schedule_axis = ScheduleAxis(end=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BlendWarning)
        Run(mix(), encoder=encoder)
