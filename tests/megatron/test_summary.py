# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a step consumed, and what the log of a run says of it."""

import dataclasses
import json

import pytest

from energon_ext.megatron import RunLog, summarize_step
from tests.megatron.small_gpt import synthetic_batch


@pytest.mark.usefixtures("one_rank")
class TestSummary:
    def test_counts_are_those_of_all_micro_batches(self):
        batches = [synthetic_batch(seed) for seed in range(3)]
        summary = summarize_step(batches)
        for count in ("tokens", "documents"):
            for source in ("code", "web"):
                of_batches = [getattr(b, f"{count}_per_source")().get(source, 0) for b in batches]
                assert summary[count][source] == sum(of_batches)

    @pytest.mark.parametrize(
        "field", ["tokens", "labels", "token_weights", "cu_seqlens", "source_ids"]
    )
    def test_the_hash_sees_every_field(self, field):
        batch = synthetic_batch(0)
        changed = getattr(batch, field).clone()
        changed[1] += 1
        other = dataclasses.replace(batch, **{field: changed})
        same = synthetic_batch(0)
        assert summarize_step([batch])["batch_hash"] == summarize_step([same])["batch_hash"]
        assert summarize_step([batch])["batch_hash"] != summarize_step([other])["batch_hash"]

    def test_the_hash_sees_the_order(self):
        first, second = synthetic_batch(0), synthetic_batch(1)
        forward, backward = summarize_step([first, second]), summarize_step([second, first])
        assert forward["batch_hash"] != backward["batch_hash"]


STEP = {
    "seconds": 0.5,
    "loss": 2.5,
    "loss_by_source": {"data/web:train": 2.5},
    "tokens": {"data/web:train": 100},
    "planned_share": {"data/web:train": 1.0},
    "batch_index": 3,
}


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_appends_to_its_log(tmp_path, capsys):
    with RunLog(tmp_path, 0, 10) as log:
        log.write("start", 0, sources=["web"])
        log.write_step(1, **STEP)
    with RunLog(tmp_path, 1, 10) as resumed:
        resumed.write("start", 1, sources=["web"])
        resumed.write("end", 1, reason="stopped")
    events = read(tmp_path)
    assert [(event["event"], event["step"]) for event in events] == [
        ("start", 0),
        ("step", 1),
        ("start", 1),
        ("end", 1),
    ]
    assert events[1]["tokens_per_second"] == 200
    assert events[1]["batch_index"] == 3
    assert "loss 2.500, 200 tokens/s, web 100%" in capsys.readouterr().err


def test_ranks_that_do_not_log_write_nothing(tmp_path):
    with RunLog(tmp_path / "not there", 0, 10, enabled=False) as log:
        log.write("start", 0)
    assert not log.enabled


def test_tensorboard_is_written_on_request(tmp_path):
    pytest.importorskip("tensorboard")
    with RunLog(tmp_path, 0, 10, tensorboard=True) as log:
        log.write_step(1, **STEP)
    assert list((tmp_path / "tensorboard").rglob("events*"))
