# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Losses that stand out in a run, and where the report says which documents were read then."""

import json

import pytest

from energon_ext.cli.metrics import Run
from energon_ext.cli.spikes import spikes_of
from tests.cli.command import energon_ext
from tests.cli.runs import write_run

SOURCES = ("data/web:train", "data/code:train")


def run_with(folder, losses, **by_source):
    """A run with a loss for each step, and losses of sources where they are another one."""
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
    """1.9, 2.0 and 2.1 in turn: a median of 2.0, and changes of 0.1, 0.1 and 0.2."""
    return [1.9 + 0.1 * (step % 3) for step in range(count)]


def test_a_spike_is_named_with_its_source_and_what_is_usual(tmp_path):
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
def test_only_what_is_far_above_stands_out(tmp_path, loss, stands_out):
    losses = usual(60)
    losses[40] = loss
    assert bool(spikes_of(Run.load(run_with(tmp_path, losses)))) == stands_out


def test_losses_that_hardly_vary_need_a_twentieth(tmp_path):
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
def test_an_ordinary_run_has_none(tmp_path, losses):
    assert spikes_of(Run.load(run_with(tmp_path, losses))) == []


def test_the_highest_come_first_and_ten_of_them(tmp_path):
    losses = usual(400)
    for number in range(15):
        losses[40 + 20 * number] = 5.0 + number
    found = spikes_of(Run.load(run_with(tmp_path, losses, web=usual(400), code=usual(400))))
    assert [spike.loss for spike in found] == [19.0 - n for n in range(10)]


def test_the_report_gives_the_command_that_names_the_documents(tmp_path):
    losses = usual(60)
    losses[40] = 7.5
    run = run_with(tmp_path / "run", losses, web=usual(60), code=usual(60))
    result = energon_ext("report", run, "--out", tmp_path / "out")
    command = f"energon-ext trace {run} METADATASET --step 40"
    assert result.stdout.splitlines()[-1].endswith(f"usually 2.00: {command}")
    assert f"<td>{command}</td>" in (tmp_path / "out" / "report.html").read_text()
