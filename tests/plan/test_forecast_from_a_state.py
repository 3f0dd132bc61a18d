# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a forecast from a checkpoint says against what the run reads after it."""

import json

import numpy as np
import pytest

from energon_ext import ConfigError, PackedTaskEncoder, get_train_dataset
from energon_ext.plan.estimate import estimated
from energon_ext.plan.forecast import late_breakpoints, planned
from energon_ext.plan.lookup import find_blend
from tests.cli.command import energon_ext, error_line
from tests.plan.runs import numbered_documents, write_numbered
from tests.plan.test_forecast import ENDING, FIRST_IDS, MOVING, mix
from tests.saves import save_cursor
from tests.support import LargeTokenizer, config, loader_for, write_tokens

ROWS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forecast")
    for seed, (name, count) in enumerate({"a": 150, "b": 110, "c": 90}.items()):
        write_numbered(folder / name, count, FIRST_IDS[name], seed)
    return folder


def dataset(path, seq_len=64, rows=ROWS):
    return get_train_dataset(
        path,
        worker_config=config(),
        batch_size=rows,
        task_encoder=PackedTaskEncoder(LargeTokenizer(), seq_len),
    )


def read(path, steps, state=None, **options):
    """Tokens of each source in every step of a real run, counted by their ids, and its state."""
    loader, found = loader_for(dataset(path, **options)), []
    if state is not None:
        loader.load_state_dict(state)
    for _, batch in zip(range(steps), loader):
        found.append(np.histogram(batch.tokens, [*FIRST_IDS.values(), 1 << 30])[0])
    return np.array(found), loader.state_dict()


def content(state):
    return {key: value for key, value in state.items() if key != "energon_ext_digest"}


def from_state(path, steps, state, **options):
    return planned(find_blend(dataset(path, **options)), steps, state=content(state))


@pytest.mark.parametrize("entries", [MOVING, ENDING], ids=["moving", "ending"])
@pytest.mark.parametrize("options", [{}, {"seq_len": 192}, {"seq_len": 16, "rows": 24}])
def test_it_counts_what_the_run_reads_after_the_state_across_a_change_of_length(
    folder, entries, options
):
    path = mix(folder, entries)
    before, state = read(path, 7)
    after, _ = read(path, 20, state, **options)
    found = from_state(path, 20, state, **options)
    assert (found.first, found.steps) == (7, len(after))
    assert found.ends.tolist() == list(range(8, 8 + len(after)))
    assert (found.tokens == after).all()
    assert (found.before[0] == before.sum(0)).all()
    rows, seq_len = options.get("rows", ROWS), options.get("seq_len", 64)
    assert found.positions == len(after) * rows * seq_len
    of_epoch = [sum(map(len, documents)) for documents in documents_of()]
    assert found.epochs[-1] == pytest.approx((before.sum(0) + after.sum(0)) / of_epoch)
    assert found.epochs_before == pytest.approx(before.sum(0) / of_epoch)
    json.dumps(found.to_json())


def documents_of():
    counts = {"a": 150, "b": 110, "c": 90}
    return [
        numbered_documents(count, FIRST_IDS[name], seed)
        for seed, (name, count) in enumerate(counts.items())
    ]


def test_without_a_change_it_is_the_rest_of_the_whole_forecast(folder):
    path = mix(folder, MOVING)
    _, state = read(path, 11)
    whole = planned(find_blend(dataset(path)), 40)
    found = from_state(path, 29, state)
    assert (found.tokens == whole.tokens[11:]).all()
    assert (found.documents == whole.documents[11:]).all()
    assert found.shares.tolist() == whole.shares[11:].tolist()
    assert found.epochs.tolist() == whole.epochs[11:].tolist()


def test_steps_at_which_sources_end_are_those_of_the_run(folder):
    path = mix(folder, ENDING)
    whole = planned(find_blend(dataset(path)), 400)
    first_end = min(whole.exhausted.values())
    _, state = read(path, first_end + 1)
    found = from_state(path, 400, state)
    assert found.exhausted == {
        key: max(step, first_end + 1) for key, step in whole.exhausted.items()
    }
    assert found.ends[-1] == whole.ends[-1]
    blend = find_blend(dataset(path))
    blend.continue_from(content(state))
    guess = estimated(blend, 400)
    assert guess.first == first_end + 1 and guess.exhausted.keys() == found.exhausted.keys()
    for key, step in found.exhausted.items():
        assert guess.exhausted[key] == pytest.approx(step, rel=0.1)


def test_nothing_is_forecast_behind_the_end(folder):
    path = mix(folder, ENDING)
    _, state = read(path, 400)
    with pytest.raises(ConfigError, match="No row is left: all sources have ended"):
        from_state(path, 10, state)
    blend = find_blend(dataset(path))
    blend.continue_from(content(state))
    with pytest.raises(ConfigError, match="No row is left"):
        estimated(blend, 10)


def test_an_estimate_from_a_state_is_near_what_is_planned(folder):
    path = mix(folder, MOVING, "interleave")
    _, state = read(path, 11)
    exact = from_state(path, 500, state, seq_len=128)
    blend = find_blend(dataset(path, seq_len=128))
    blend.continue_from(content(state))
    guess = estimated(blend, 500)
    assert guess.first == 11 and guess.ends[-1] == 511
    assert guess.tokens.sum(0)[:2] == pytest.approx(exact.tokens.sum(0)[:2], rel=0.01)
    assert guess.epochs[-1][:2] == pytest.approx(exact.epochs[-1][:2], rel=0.01)
    assert guess.tokens.sum(0)[2] == 0  # its weight is 0 from step 10 on


def test_tokens_of_an_axis_are_counted_by_the_lengths_that_rows_had(tmp_path):
    """Four steps of 8 rows of 64 are 2,048; then 4 rows of 256 a step: 6,144 before step 8."""
    for name, token in (("a", 100), ("b", 10_000)):
        write_tokens(tmp_path / name, [[token] * 2048] * 40, np.int32)
    weights = [("a", {"step": {0: 1, 6144: 0}}), ("b", {"step": {0: 0, 6144: 1}})]
    path = mix(tmp_path, weights)
    path.write_text(path.read_text() + "schedule_axis: tokens\n")
    _, state = read(path, 4)
    found = from_state(path, 6, state, seq_len=256, rows=4)
    assert found.shares.tolist() == [[1, 0]] * 4 + [[0, 1]] * 2
    assert (found.tokens[:, 0] > 0).tolist() == [True] * 4 + [False] * 2
    blend = find_blend(dataset(path, seq_len=256, rows=4))
    blend.continue_from(content(state))
    assert estimated(blend, 6).shares.tolist() == found.shares.tolist()
    assert (late_breakpoints(blend, 8), late_breakpoints(blend, 9)) == ([6144], [])
    assert estimated(blend, 1200).ends[:3].tolist() == [8, 9, 14]  # windows of five steps


# The command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """50 documents of 40 tokens and 30 of 20, two of which fill a row: a step has four rows."""
    folder = tmp_path_factory.mktemp("command")
    write_tokens(folder / "web", [[65] * 40] * 50, np.uint16)
    write_tokens(folder / "code", [[66] * 20] * 30, np.uint16)
    path = mix(folder, [("web", 1), ("code", 1, {"max_epochs": 2})], "interleave")
    _, state = read(path, 5, seq_len=40, rows=4)
    save_cursor(folder / "run", 5, state)
    return folder / "run", path


def forecast(saved, *options):
    return energon_ext("checkpoint", "forecast", *saved, *options)


def test_the_command_forecasts_the_steps_behind_a_checkpoint(saved, tmp_path):
    result = forecast(saved, "--steps", 20, "--png", tmp_path / "f.png", "--html", tmp_path / "f")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:8] == ["after", "step", "5,", "20", "steps", "of", "4", "rows"]
    # 10 of the 30 rows of `code` are read by then, so 20 are left, two a step: up to step 15.
    code = next(line for line in lines if line[0] == "code")
    assert code[3:] == ["800", "25.00%", "40", "2.00", "ends", "at", "step", "15"]
    # 10 rows of `web` before, 10 x 2 beside those of `code`, and 10 x 4 alone: 70 of 50.
    web = next(line for line in lines if line[0] == "web")
    assert web[3:] == ["2,400", "75.00%", "60", "1.40"]
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_crosses_a_change_of_length_and_of_the_rows_of_a_step(saved):
    result = forecast(saved, "--steps", 10, "--seq-length", 160, "--global-batch-size", 1, "--json")
    found = json.loads(result.stdout)
    assert found["first_step"] == 5 and found["positions"] == 10 * 160
    # 20 rows of `code` that 40 tokens filled are five of 160, every other one from the first on.
    assert found["sources"]["code"]["tokens"] == [160, 0] * 5
    assert found["sources"]["code"]["ends_at_step"] == 14
    assert found["sources"]["code"]["epochs"] == 2


def test_the_command_refuses_what_a_resume_would(saved, tmp_path):
    """Inside a step rows keep their length; the step that is open is counted whole."""
    path = saved[1]
    encoder = PackedTaskEncoder(LargeTokenizer(), 40)
    options = {"worker_config": config(), "batch_size": 2, "rows_per_step": 4}
    loader = loader_for(get_train_dataset(path, task_encoder=encoder, **options))
    for _ in zip(range(5), loader):
        pass
    save_cursor(tmp_path / "run", 5, loader.state_dict())
    inside = tmp_path / "run", path
    said = error_line(forecast(inside, "--steps", 3, "--seq-length", 80))
    assert "seq_len: saved 40, now 80" in said
    found = json.loads(forecast(inside, "--steps", 3, "--json").stdout)
    assert (found["first_step"], found["positions"]) == (2, 3 * 4 * 40)
