# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The example whose controller decides the weights."""

import json
import shutil

import pytest

from energon_ext.weights import LiveWeights
from tests.megatron.pretraining import CODE, PROSE, steps_of
from tests.megatron.test_task_examples import run
from tests.support import write_texts

pytestmark = pytest.mark.nightly  # four trainings of ten seconds

SCRIPT = "07_online_mixing.py"
SMALL = [
    *("--train-iters", 9, "--eval-interval", 2, "--save-interval", 4, "--seq-length", 32),
    *("--num-layers", 1, "--hidden-size", 32, "--lr-warmup-iters", 2),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("online")
    texts = {"prose": PROSE, "code": CODE, "docs": [text.upper() for text in PROSE]}
    for name, own in texts.items():
        write_texts(folder / "data" / name, own)
    run(SCRIPT, folder / "constant", folder, *SMALL, "--weights", "constant")
    return folder


def test_a_killed_controlled_run_equals_the_uninterrupted_one(folder):
    options = (folder, *SMALL, "--reference", folder / "constant")
    run(SCRIPT, folder / "whole", *options)
    killed = folder / "killed"
    run(SCRIPT, killed, *options, "--stop-after", 6)
    # As SIGKILL after step 6 leaves it: the log and the weights are ahead of the last save.
    shutil.rmtree(killed / "checkpoints" / "iter_0000006")
    (killed / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("4")
    run(SCRIPT, killed, *options, "--resume")
    whole = steps_of(folder / "whole")
    assert steps_of(killed) == whole and len(whole) == 9
    files = [(each / "live.jsonl").read_text() for each in (folder / "whole", killed)]
    assert files[0] == files[1]
    shares = [step["planned_share"] for step in whole.values()]
    lines = [json.loads(line) for line in files[0].splitlines()]
    assert [(line["from_step"], line["through"]) for line in lines] == [
        (first, first + 1) for first in range(0, 10, 2)
    ]
    for number, step in enumerate(shares):
        assert sorted(step.values()) == pytest.approx(
            sorted(lines[number // 2]["weights"].values())
        )
    assert shares[0] != shares[8]


def test_with_workers_the_controller_decides_ahead_of_the_plan(folder):
    options = (folder, *SMALL, "--reference", folder / "constant", "--num-workers", 1)
    run(SCRIPT, folder / "workers", *options)
    live = LiveWeights(folder / "workers" / "live.jsonl")
    # One worker reads two batches ahead, a step each; the planner is two steps ahead of that.
    assert live.next_step >= 9 + 4
    assert len(steps_of(folder / "workers")) == 9


def test_a_comparison_draws_a_picture(folder):
    run(SCRIPT, folder / "compared", folder, *SMALL, "--compare", 1)
    assert (folder / "compared" / "online_mixing.png").stat().st_size > 10_000
    stderr = run(SCRIPT, folder / "alone", folder, *SMALL, succeeds=False)
    assert "Give --reference the folder of a run with --weights constant." in stderr
