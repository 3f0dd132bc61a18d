# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The commands, for runs whose weights come from a controller."""

import json

import pytest

from energon_ext.weights import LiveWeights
from tests.cli.command import energon_ext, error_line
from tests.plan.runs import Run
from tests.saves import save_cursor
from tests.support import write_mix, write_tokens

TOKENS = {"code": 10, "web": 200}
ROWS = ("--global-batch-size", 16, "--seq-length", 64)


@pytest.fixture
def data(tmp_path):
    """A mix of two sources, and lines for the first six steps."""
    for name, token in TOKENS.items():
        write_tokens(tmp_path / name, [[token] * (5 + 7 * n % 50) for n in range(200)])
    mix = write_mix(tmp_path / "mix.yaml", [("code", 1), ("web", 1)], weights_file="live.jsonl")
    content = mix.read_text().replace('"blend"', '"interleave"')
    mix.write_text(content)
    live = LiveWeights(tmp_path / "live.jsonl")
    live.set(2, {"code": 3}, through=3)
    live.set(4, {"code": 0}, through=5)
    return tmp_path


def counts(run, steps):
    """Count the rows of web in each step of a run."""
    return [sum(tokens[0] == TOKENS["web"] for tokens, *_ in step) for step in run.steps(steps)]


def save_after(data, steps):
    run = Run(data / "mix.yaml", batch=8)
    run.steps(steps)
    return save_cursor(data / "run", steps, json.loads(run.state()))


def test_plan_shows_the_shares_of_every_line_and_where_they_end(data):
    result = energon_ext("plan", data / "mix.yaml")
    table = [line.split() for line in result.stdout.splitlines()]
    assert table == [
        ["share", "at", "optimizer", "step", "0", "2", "4"],
        ["code", "50.00%", "75.00%", "0.00%"],
        ["web", "50.00%", "25.00%", "100.00%"],
    ]
    path = data / "live.jsonl"
    warning = f"{path}: no line covers steps from 6 on; the last weights are used.\n"
    assert result.stderr == warning
    assert energon_ext("plan", data / "mix.yaml", "--at", "0,5").stderr == ""


def test_a_forecast_matches_the_run_and_says_where_it_becomes_a_guess(data):
    expected = counts(Run(data / "mix.yaml", batch=8), 6)
    result = energon_ext("plan", data / "mix.yaml", "--steps", 6, *ROWS, "--json")
    web = json.loads(result.stdout)["sources"]["web"]
    assert result.stderr == ""
    assert web["share"] == [0.5, 0.5, 0.25, 0.25, 1, 1]
    assert expected == [8, 8, 4, 4, 16, 16]
    rows = [tokens / 64 for tokens in web["tokens"]]
    assert all(abs(a - b) < 0.5 for a, b in zip(rows, expected))

    later = energon_ext("plan", data / "mix.yaml", "--steps", 8, *ROWS, "--json")
    assert json.loads(later.stdout)["sources"]["web"]["share"][6:] == [1, 1]
    assert "no line covers steps from 6 on" in later.stderr


def test_trace_replays_the_lines_and_says_where_they_end(data):
    save_after(data, 3)

    def web_rows(result):
        return sum(json.loads(line)["source"] == "web" for line in result.stdout.splitlines())

    for step, rows in ((1, 8), (3, 4), (5, 16)):
        result = energon_ext("trace", data / "run", data / "mix.yaml", "--step", step, "--json")
        assert (web_rows(result), result.stderr) == (rows, "")
    result = energon_ext("trace", data / "run", data / "mix.yaml", "--step", 6, "--json")
    assert "no line covers steps from 6 on" in result.stderr


def test_trace_and_diff_refuse_lines_the_checkpoint_did_not_use(data):
    saved = save_after(data, 5)
    LiveWeights(data / "other.jsonl").set(0, {"code": 9})
    (data / "other.jsonl").replace(data / "live.jsonl")
    line = error_line(energon_ext("trace", data / "run", data / "mix.yaml", "--step", 6))
    assert "lines for the steps before 5: saved '2 " in line
    diff = energon_ext("checkpoint", "diff", saved, data / "mix.yaml")
    assert diff.exit_code == 1 and "lines for the steps before 5" in diff.stdout


def test_trace_starts_from_a_state_inside_the_first_step_of_a_line(data):
    run = Run(data / "mix.yaml", batch=8)
    run.steps(2)
    next(iter(run.loaders[0]))
    save_cursor(data / "run", 2, json.loads(run.state()))
    result = energon_ext("trace", data / "run", data / "mix.yaml", "--step", 2, "--json")
    assert sum(json.loads(line)["source"] == "web" for line in result.stdout.splitlines()) == 4


def test_reweight_reports_and_discards_lines_the_checkpoint_did_not_use(data):
    saved = save_after(data, 3)
    result = energon_ext("checkpoint", "reweight", saved, data / "mix.yaml")
    path = data / "live.jsonl"
    assert result.stdout.splitlines() == [
        f"{path}: line 1 now ends after step 2",
        f'{path}: discarded {{"from_step": 4, "through": 5, "weights": {{"code": 0.0}}}}',
        f"{path}: step 3 is the first without a line",
    ]
    assert path.read_text() == '{"from_step": 2, "through": 2, "weights": {"code": 3.0}}\n'
    LiveWeights(path).set(3, {"code": 1, "web": 3})
    state = (saved / "data.json").read_text()
    assert counts(Run(data / "mix.yaml", batch=8).resume(state), 2) == [12, 12]
    # Again: the checkpoint has not used the new line either.
    assert "discarded" in energon_ext("checkpoint", "reweight", saved, data / "mix.yaml").stdout


def test_reweight_refuses_a_file_the_checkpoint_did_not_use(data):
    saved = save_after(data, 5)
    text = (data / "live.jsonl").read_text().replace("3.0", "2.0")
    (data / "live.jsonl").write_text(text)
    line = error_line(energon_ext("checkpoint", "reweight", saved, data / "mix.yaml"))
    assert "lines for the steps before 5" in line
    assert (data / "live.jsonl").read_text() == text


def test_reweight_before_the_first_line_keeps_the_entry_weights(data):
    saved = save_after(data, 1)
    result = energon_ext("checkpoint", "reweight", saved, data / "mix.yaml")
    reported = [line.partition(": ")[2].partition(",")[0] for line in result.stdout.splitlines()]
    assert reported == [
        'discarded {"from_step": 2',
        'discarded {"from_step": 4',
        "step 1 is the first without a line",
    ]
    assert (data / "live.jsonl").read_text() == '{"from_step": 0, "through": 0, "weights": {}}\n'
    LiveWeights(data / "live.jsonl").set(1, {"code": 0})
    state = (saved / "data.json").read_text()
    assert counts(Run(data / "mix.yaml", batch=8).resume(state), 2) == [16, 16]
