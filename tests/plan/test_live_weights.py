# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs whose weights a controller decides while they read."""

import json
import os
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
from energon_ext.plan.lookup import find_blend
from energon_ext.weights import LiveWeights
from tests.plan.runs import SEQ_LEN, Run, rows_of, write_numbered
from tests.support import LargeTokenizer, config, stock_loader_for, take, write_dataset, write_mix

#: First token of each source; documents of a source have tokens of its own.
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
    """A function that writes a mix of both sources, by a file of weights."""

    def write(rule="interleave", **fields):
        entries = [{"path": str(data / name), "weight": 1} for name in FIRST]
        content = json.loads(write_mix(tmp_path / "mix.yaml", []).read_text())
        content["splits"]["train"] = {rule: entries, "weights_file": "live.jsonl", **fields}
        (tmp_path / "mix.yaml").write_text(json.dumps(content))
        return tmp_path / "mix.yaml"

    return write


@pytest.fixture
def live(tmp_path, data):
    """Appends lines: first step, last step, weights of code and web."""

    def set_lines(*lines):
        for first, through, code, web in lines:
            names = [os.path.relpath(data / name, tmp_path) for name in FIRST]
            weights = dict(zip(names, (code, web)))
            LiveWeights(tmp_path / "live.jsonl").set(first, weights, through)

    return set_lines


def web_rows(step):
    """Rows of a step that hold the documents of web."""
    return sum(tokens[0] >= FIRST["web"] for tokens, *_ in step)


LINES = (2, 3, 3, 1), (4, 5, 1, 0), (6, None, 1, 3)


@pytest.mark.parametrize("workers", (0, 2))
@pytest.mark.parametrize("ranks", (1, 2))
def test_each_step_has_the_shares_of_its_line(mix, live, ranks, workers):
    live(*LINES)
    run = Run(mix(), ranks=ranks, workers=workers, batch=4)
    # Of 16 rows: own weights 1 : 1, then 3 : 1, 1 : 0 and 1 : 3; nothing is left over.
    assert [web_rows(step) for step in run.steps(8)] == [8, 8, 4, 4, 0, 0, 12, 12]


def test_an_interleave_stays_within_a_row_of_the_weights_that_held(mix, live):
    shares = [(1, 2), (5, 3), (2, 7), (1, 1), (4, 1), (3, 7)]
    live(*((step, step, *pair) for step, pair in enumerate(shares)))
    run = Run(mix(), batch=4)
    due = read = 0.0
    for code, web in shares:
        due += ROWS * web / (code + web)
        read += web_rows(run.step())
        assert abs(due - read) < 1.1  # rows are full but for a few tokens


def test_a_blend_draws_only_what_has_a_weight(mix, live):
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


@pytest.mark.parametrize("workers", (0, 2))
@pytest.mark.parametrize("batch", (2, 8))
def test_a_controller_in_the_loop_that_covers_what_is_planned_never_waits(
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


def test_planned_through_counts_what_workers_read_ahead_and_skipped_steps(mix, tmp_path, live):
    live((0, None, 1, 1))
    path = mix()
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "skip": [[3, 5]]}))
    run = Run(path, batch=4)  # four batches a step
    found = [run.loaders[0].planned_through]
    for _ in range(4):
        run.step()
        found.append(run.loaders[0].planned_through)
    assert found == [0, 1, 2, 5, 6]
    # Two workers have two batches each, one step in all; the planner is two steps ahead of that.
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
    expected = Run(mix(), **options).steps(8)
    for stop in (1, 3, 4):
        run = Run(mix(), **options)
        assert run.steps(stop) == expected[:stop]
        state = run.state()
        run.close()
        other = Run(mix(), batch=8, workers=2 - workers).resume(state)
        assert other.steps(8 - stop) == expected[stop:]
        other.close()


def test_a_resume_inside_a_step_reads_the_rest_of_it(mix, live):
    live(*LINES)
    expected = Run(mix(), batch=4).steps(4)
    run = Run(mix(), batch=4)
    run.steps(2)
    first = next(iter(run.loaders[0]))
    state = run.state()
    assert json.loads(state)["weights"]["live.jsonl"]["lines"] == 1  # of the step that is open
    other = Run(mix(), batch=4).resume(state)
    rest = [next(iter(other.loaders[0])) for _ in range(3)]
    assert sorted(row for each in (first, *rest) for row in rows_of(each)) == expected[2]


def test_a_killed_run_goes_on_by_lines_that_were_written_ahead(mix, live, tmp_path):
    """The controller was ahead of the state; what it wrote still holds."""
    live(*LINES[:2])
    run = Run(mix(), batch=8)
    run.steps(3)
    state = run.state()
    live(LINES[2])
    expected = run.steps(5)
    assert Run(mix(), batch=8).resume(state).steps(5) == expected


def test_a_changed_or_shortened_file_is_refused_and_later_lines_may_change(mix, live, tmp_path):
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


def test_a_state_between_two_steps_takes_a_new_file_and_another_mix(mix, live, tmp_path):
    path = mix()
    content = json.loads(path.read_text())
    del content["splits"]["train"]["weights_file"]
    path.write_text(json.dumps(content))
    run = Run(path, batch=8)
    run.steps(2)
    state = run.state()
    assert json.loads(state)["weights"] == {}
    live((2, None, 0, 1))
    assert [web_rows(step) for step in Run(mix(), batch=8).resume(state).steps(2)] == [16, 16]


@pytest.mark.parametrize("ranks", (1, 2))
@pytest.mark.parametrize("workers", (0, 1))
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


def test_the_deadline_is_a_quarter_of_the_timeout_of_the_loader(mix):
    dataset = Run(mix()).loaders[0].dataset
    ExactDataLoader(dataset, timeout=60)
    assert [live.deadline for live in dataset.live_weights] == [15]


def test_a_run_that_has_ended_waits_for_no_line(mix, live, data):
    live((0, 100, 1, 1))
    path = mix()
    content = json.loads(path.read_text())
    for entry in content["splits"]["train"]["interleave"]:
        entry["max_epochs"] = 1
    path.write_text(json.dumps(content))
    run = Run(path, batch=8)
    find_blend(run.loaders[0]).live_weights[0].deadline = 1
    steps = 0
    while run.step() is not None:
        steps += 1
    assert 5 < steps < 100


def test_names_may_be_those_of_people(mix, tmp_path, data):
    path = mix()
    content = json.loads(path.read_text())
    content["splits"]["train"]["interleave"][1]["name"] = "The web"
    path.write_text(json.dumps(content))
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
def test_a_wrong_field_is_one_line(mix, change, words):
    with pytest.raises(ConfigError, match=words):
        Run(mix(**change))


def test_live_weights_count_steps(mix):
    path = mix()
    path.write_text(json.dumps({**json.loads(path.read_text()), "schedule_axis": "tokens"}))
    with pytest.raises(ConfigError, match="counts steps, but .*mix.yaml counts tokens"):
        Run(path)


def test_a_line_by_which_nothing_can_be_drawn_is_an_error(mix, live):
    live((0, 0, 1, 1), (1, 1, 0, 0))
    with pytest.raises(ConfigError, match="Every weight is 0 at step 1"):
        Run(mix())


def test_a_nested_metadataset_is_a_member_by_its_path_and_split(mix, tmp_path, data):
    write_mix(tmp_path / "inner.yaml", [(data / "web", 1)])
    path = mix()
    content = json.loads(path.read_text())
    content["splits"]["train"]["interleave"][1]["path"] = "inner.yaml"
    path.write_text(json.dumps(content))
    LiveWeights(tmp_path / "live.jsonl").set(0, {"inner.yaml:train": 3})
    assert web_rows(Run(path, batch=8).step()) == 12


def test_live_weights_around_a_schedule_need_the_word_of_the_outer_node(mix, tmp_path, data, live):
    entries = [(data / "web", {"linear": {0: 0, 8: 8}}), (data / "code", 1)]
    write_mix(tmp_path / "inner.yaml", entries)
    path = mix()
    content = json.loads(path.read_text())
    content["splits"]["train"]["interleave"][1]["path"] = "inner.yaml"
    path.write_text(json.dumps(content))
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
def test_energons_own_loader_follows_the_lines_too(mix, live, workers):
    live(*LINES)
    expected = Run(mix(), batch=ROWS).steps(8)
    dataset = Run(mix(), batch=ROWS, workers=workers).loaders[0].dataset
    batches = take(stock_loader_for(dataset), 8)
    assert [sorted(rows_of(batch)) for batch in batches] == expected


def test_lines_behind_the_end_of_the_run_are_no_mistake(mix, live):
    """Workers plan beyond the end, so a controller decides steps that are never trained."""
    live((0, 9, 1, 1), (10, None, 1, 2))
    encoder = PackedTaskEncoder(LargeTokenizer(), SEQ_LEN)
    encoder.schedule_axis = ScheduleAxis(end=5)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BlendWarning)
        Run(mix(), encoder=encoder)
