# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Forecasts from a checkpoint are compared with what the run reads after it."""

import json

import numpy as np
import pytest

from energon_ext import ConfigError, PackedTaskEncoder, get_train_dataset
from energon_ext.plan.cursor import restore_cursor
from energon_ext.plan.estimate import estimate
from energon_ext.plan.forecast import forecast, late_breakpoints
from energon_ext.plan.lookup import find_blend
from tests.cli.command import energon_ext, error_line
from tests.plan.runs import edit_yaml, numbered_documents
from tests.plan.test_forecast import DOCUMENTS, ENDING, FIRST_IDS, MOVING, ROWS, mix
from tests.plan.test_forecast import folder as folder
from tests.saves import save_cursor
from tests.support import LargeTokenizer, config, loader_for, take, write_tokens


def dataset(path, seq_len=64, rows=ROWS):
    return get_train_dataset(
        path,
        worker_config=config(),
        batch_size=rows,
        task_encoder=PackedTaskEncoder(LargeTokenizer(), seq_len),
    )


def read(path, steps, state=None, **options):
    """Return the tokens of each source in every step of a real run, and its state."""
    loader, found = loader_for(dataset(path, **options)), []
    if state is not None:
        loader.load_state_dict(state)
    for _, batch in zip(range(steps), loader):
        found.append(np.histogram(batch.tokens, [*FIRST_IDS.values(), 1 << 30])[0])
    return np.array(found), loader.state_dict()


def content(state):
    return {key: value for key, value in state.items() if key != "energon_ext_digest"}


def from_state(path, steps, state, **options):
    return forecast(find_blend(dataset(path, **options)), steps, state=content(state))


@pytest.mark.parametrize("entries", [MOVING, ENDING], ids=["moving", "ending"])
@pytest.mark.parametrize("options", [{}, {"seq_len": 192}, {"seq_len": 16, "rows": 24}])
def test_a_forecast_from_a_state_is_exact_across_a_change_of_length(folder, entries, options):
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
    epoch_tokens = [
        sum(map(len, numbered_documents(count, FIRST_IDS[name], seed)))
        for seed, (name, count) in enumerate(DOCUMENTS.items())
    ]
    assert found.epochs[-1] == pytest.approx((before.sum(0) + after.sum(0)) / epoch_tokens)
    assert found.epochs_before == pytest.approx(before.sum(0) / epoch_tokens)
    json.dumps(found.to_json())


def test_without_a_change_a_forecast_is_the_rest_of_the_full_one(folder):
    path = mix(folder, MOVING)
    _, state = read(path, 11)
    whole = forecast(find_blend(dataset(path)), 40)
    found = from_state(path, 29, state)
    assert (found.tokens == whole.tokens[11:]).all()
    assert (found.documents == whole.documents[11:]).all()
    assert found.shares.tolist() == whole.shares[11:].tolist()
    assert found.epochs.tolist() == whole.epochs[11:].tolist()


def test_sources_end_at_the_same_steps_as_in_the_run(folder):
    path = mix(folder, ENDING)
    whole = forecast(find_blend(dataset(path)), 400)
    first_end = min(whole.exhausted.values())
    _, state = read(path, first_end + 1)
    found = from_state(path, 400, state)
    assert found.exhausted == {
        key: max(step, first_end + 1) for key, step in whole.exhausted.items()
    }
    assert found.ends[-1] == whole.ends[-1]
    blend = find_blend(dataset(path))
    restore_cursor(blend, content(state))
    guess = estimate(blend, 400)
    assert guess.first == first_end + 1 and guess.exhausted.keys() == found.exhausted.keys()
    for key, step in found.exhausted.items():
        assert guess.exhausted[key] == pytest.approx(step, rel=0.1)


def test_there_is_no_forecast_after_the_end(folder):
    path = mix(folder, ENDING)
    _, state = read(path, 400)
    with pytest.raises(ConfigError, match="No row is left: all sources have ended"):
        from_state(path, 10, state)
    blend = find_blend(dataset(path))
    restore_cursor(blend, content(state))
    with pytest.raises(ConfigError, match="No row is left"):
        estimate(blend, 10)


def test_an_estimate_from_a_state_is_close_to_the_plan(folder):
    path = mix(folder, MOVING, "interleave")
    _, state = read(path, 11)
    exact = from_state(path, 500, state, seq_len=128)
    blend = find_blend(dataset(path, seq_len=128))
    restore_cursor(blend, content(state))
    guess = estimate(blend, 500)
    assert guess.first == 11 and guess.ends[-1] == 511
    assert guess.tokens.sum(0)[:2] == pytest.approx(exact.tokens.sum(0)[:2], rel=0.01)
    assert guess.epochs[-1][:2] == pytest.approx(exact.epochs[-1][:2], rel=0.01)
    assert guess.tokens.sum(0)[2] == 0  # its weight is 0 from step 10 on


def test_an_axis_of_tokens_uses_the_row_lengths_of_the_past(tmp_path):
    """Four steps of 8 rows of 64 are 2,048; with 4 rows of 256 then, 6,144 come before step 8."""
    for name, token in (("a", 100), ("b", 10_000)):
        write_tokens(tmp_path / name, [[token] * 2048] * 40, np.int32)
    weights = [("a", {"step": {0: 1, 6144: 0}}), ("b", {"step": {0: 0, 6144: 1}})]
    path = mix(tmp_path, weights)
    edit_yaml(path, schedule_axis="tokens")
    _, state = read(path, 4)
    found = from_state(path, 6, state, seq_len=256, rows=4)
    assert found.shares.tolist() == [[1, 0]] * 4 + [[0, 1]] * 2
    assert (found.tokens[:, 0] > 0).tolist() == [True] * 4 + [False] * 2
    blend = find_blend(dataset(path, seq_len=256, rows=4))
    restore_cursor(blend, content(state))
    assert estimate(blend, 6).shares.tolist() == found.shares.tolist()
    assert (late_breakpoints(blend, 8), late_breakpoints(blend, 9)) == ([6144], [])
    assert estimate(blend, 1200).ends[:3].tolist() == [8, 9, 14]  # windows of five steps


# The command --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save after 5 steps of 4 rows; a row has one document of `web` or two of `code`."""
    folder = tmp_path_factory.mktemp("command")
    write_tokens(folder / "web", [[65] * 40] * 50, np.uint16)
    write_tokens(folder / "code", [[66] * 20] * 30, np.uint16)
    path = mix(folder, [("web", 1), ("code", 1, {"max_epochs": 2})], "interleave")
    _, state = read(path, 5, seq_len=40, rows=4)
    save_cursor(folder / "run", 5, state)
    return folder / "run", path


def forecast_of(saved, *options):
    return energon_ext("checkpoint", "forecast", *saved, *options)


def test_the_command_forecasts_the_steps_after_a_checkpoint(saved, tmp_path):
    result = forecast_of(
        saved, "--steps", 20, "--png", tmp_path / "f.png", "--html", tmp_path / "f"
    )
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:8] == ["after", "step", "5,", "20", "steps", "of", "4", "rows"]
    # 10 of the 30 rows of `code` are read, so 20 are left: two per step up to step 15.
    code = next(line for line in lines if line[0] == "code")
    assert code[3:] == ["800", "25.00%", "40", "2.00", "ends", "at", "step", "15"]
    # 10 rows of `web` before, 10 x 2 alongside `code` and 10 x 4 alone: 70 of 50.
    web = next(line for line in lines if line[0] == "web")
    assert web[3:] == ["2,400", "75.00%", "60", "1.40"]
    assert (tmp_path / "f.png").read_bytes().startswith(b"\x89PNG")


def test_the_command_crosses_a_change_of_length_and_rows_per_step(saved):
    result = forecast_of(
        saved, "--steps", 10, "--seq-length", 160, "--global-batch-size", 1, "--json"
    )
    found = json.loads(result.stdout)
    assert found["first_step"] == 5 and found["positions"] == 10 * 160
    # The 20 remaining rows of 40 are five of 160, which are every other row from the first on.
    assert found["sources"]["code"]["tokens"] == [160, 0] * 5
    assert found["sources"]["code"]["ends_at_step"] == 14
    assert found["sources"]["code"]["epochs"] == 2


def test_the_command_refuses_what_a_resume_refuses(saved, tmp_path):
    """Row length may not change inside a step; an open step is counted in full."""
    path = saved[1]
    encoder = PackedTaskEncoder(LargeTokenizer(), 40)
    options = {"worker_config": config(), "batch_size": 2, "rows_per_step": 4}
    loader = loader_for(get_train_dataset(path, task_encoder=encoder, **options))
    take(loader, 5)
    save_cursor(tmp_path / "run", 5, loader.state_dict())
    inside = tmp_path / "run", path
    message = error_line(forecast_of(inside, "--steps", 3, "--seq-length", 80))
    assert "seq_len: saved 40, now 80" in message
    found = json.loads(forecast_of(inside, "--steps", 3, "--json").stdout)
    assert (found["first_step"], found["positions"]) == (2, 3 * 4 * 40)
