# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Loss spikes of a run, and how the report leads to the documents read at a spike."""

import json

import pytest

from energon_ext.cli.spikes import spikes_of
from energon_ext.metrics.file import Run
from tests.cli.command import energon_ext
from tests.cli.runs import write_run

SOURCES = ("data/web:train", "data/code:train")


def run_with(folder, losses, **by_source):
    """Write a run with a loss per step, and different losses for some sources."""
    write_run(folder, steps=len(losses), sources=SOURCES)
    path = folder / "metrics.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()]
    for event in events:
        if event["event"] == "step":
            event["loss"] = losses[event["step"] - 1]
            event["loss_by_source"] = {
                key: by_source.get(name, losses)[event["step"] - 1]
                for key, name in zip(SOURCES, ("web", "code"))
            }
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def usual(count):
    """Return 1.9, 2.0 and 2.1 in turn: the median is 2.0, changes are 0.1, 0.1 and 0.2."""
    return [1.9 + 0.1 * (step % 3) for step in range(count)]


def test_a_spike_is_reported_with_its_source_and_the_usual_loss(tmp_path):
    code = usual(60)
    code[40] = 7.5
    (spike,) = spikes_of(Run.load(run_with(tmp_path, usual(60), code=code)))
    assert (spike.step, spike.source) == (41, SOURCES[1])
    assert (spike.loss, spike.usual) == (7.5, pytest.approx(2.0))
    assert str(spike) == "step 41: the loss of data/code:train is 7.50, usually 2.00"


@pytest.mark.parametrize(
    ("loss", "stands_out"),
    [(2.65, True), (2.55, False), (0.5, False)],  # six times 0.1 above the median
)
def test_only_losses_far_above_the_median_stand_out(tmp_path, loss, stands_out):
    losses = usual(60)
    losses[40] = loss
    assert bool(spikes_of(Run.load(run_with(tmp_path, losses)))) == stands_out


def test_steady_losses_need_a_rise_of_five_percent(tmp_path):
    losses = [2.0] * 60
    losses[30], losses[50] = 2.09, 2.11
    steps = {spike.step for spike in spikes_of(Run.load(run_with(tmp_path, losses)))}
    assert steps == {51}


@pytest.mark.parametrize(
    "losses",
    [
        usual(8),
        [10.0 / (1 + step / 20) for step in range(200)],  # a loss that falls
        [float("nan")] * 40,
    ],
)
def test_an_ordinary_run_has_no_spikes(tmp_path, losses):
    assert spikes_of(Run.load(run_with(tmp_path, losses))) == []


def test_the_ten_highest_spikes_are_reported_highest_first(tmp_path):
    losses = usual(400)
    for number in range(15):
        losses[40 + 20 * number] = 5.0 + number
    found = spikes_of(Run.load(run_with(tmp_path, losses, web=usual(400), code=usual(400))))
    assert [spike.loss for spike in found] == [19.0 - n for n in range(10)]


def test_the_report_shows_the_command_to_trace_a_spike(tmp_path):
    losses = usual(60)
    losses[40] = 7.5
    run = run_with(tmp_path / "run", losses, web=usual(60), code=usual(60))
    result = energon_ext("report", run, "--out", tmp_path / "out")
    command = f"energon-ext trace {run} METADATASET --step 40"
    assert result.stdout.splitlines()[-1].endswith(f"usually 2.00: {command}")
    assert f"<td>{command}</td>" in (tmp_path / "out" / "report.html").read_text()
