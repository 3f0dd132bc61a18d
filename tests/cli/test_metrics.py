# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import json

import numpy as np
import pytest

from energon_ext.errors import ConfigError, EnergonExtError
from energon_ext.metrics.file import MetricsFile, Run
from energon_ext.metrics.labels import short_labels


def start(step=0, sources=("web", "code")):
    return {
        "event": "start",
        "step": step,
        "sources": list(sources),
        "documents": dict.fromkeys(sources, 10),
        "rows_per_step": 2,
        "config": {},
    }


def step(number, loss=1.0, batch_hash="h", **counts):
    return {
        "event": "step",
        "step": number,
        "batch_index": number - 1,
        "loss": loss,
        "tokens_per_second": 100.0,
        "planned_share": {"web": 0.5, "code": 0.5},
        "tokens": counts or {"web": 16},
        "documents": {"web": 1},
        "loss_by_source": dict.fromkeys(counts or {"web": 16}, loss),
        "batch_hash": batch_hash,
    }


def load(run_dir, *events):
    lines = [event if isinstance(event, str) else json.dumps(event) for event in events]
    (run_dir / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    return Run.load(run_dir)


def test_epochs_count_tokens_or_else_finished_documents(tmp_path):
    steps = [step(1, web=8, code=8), step(2, web=16)]
    by_documents = load(tmp_path, start(), *steps)
    assert by_documents.epochs.tolist() == [0.2, 0.0]  # 2 of 10 documents, and none
    by_tokens = load(tmp_path, {**start(), "epoch_tokens": {"web": 16, "code": 80}}, *steps)
    assert by_tokens.epochs.tolist() == [1.5, 0.1]


def test_epochs_have_the_size_that_they_had_in_each_process(tmp_path):
    sizes = [{"web": 16, "code": 80}, {"web": 4, "code": 80}]
    starts = [{**start(), "step": n, "epoch_tokens": each} for n, each in enumerate(sizes)]
    run = load(tmp_path, starts[0], step(1, web=8), starts[1], step(2, web=8, code=20))
    assert run.epochs.tolist() == [8 / 16 + 8 / 4, 20 / 80]


def test_a_run_is_read_as_arrays(tmp_path):
    run = load(
        tmp_path,
        start(),
        step(1, loss=3.0, web=8, code=8),
        {"event": "save", "step": 1, "path": "x"},
        step(2, loss=2.0, batch_hash="i", web=16),
        {"event": "end", "step": 2, "reason": "finished"},
    )
    assert run.sources == run.labels == ("web", "code")
    assert run.step.tolist() == [1, 2] and run.loss.tolist() == [3.0, 2.0]
    assert run.tokens.tolist() == [[8, 8], [16, 0]]
    assert run.documents.tolist() == [[1, 0], [1, 0]]
    assert run.epoch_documents.tolist() == [10, 10]
    np.testing.assert_array_equal(run.source_loss, [[3.0, 3.0], [2.0, np.nan]])
    assert run.batch_hash == ("h", "i") and run.resumed_after == ()


def test_steps_repeated_after_a_resume_count_once(tmp_path):
    run = load(
        tmp_path,
        start(),
        *(step(1, loss=5.0), step(2, loss=4.0), step(3, loss=9.0)),
        start(step=2),
        *(step(3, loss=3.0), step(4, loss=2.0)),
    )
    assert run.loss.tolist() == [5.0, 4.0, 3.0, 2.0]
    assert run.resumed_after == (2,)


def test_a_source_added_at_a_resume_has_no_tokens_before(tmp_path):
    run = load(
        tmp_path,
        start(),
        step(1, web=16),
        start(step=1, sources=("math", "web", "code")),
        step(2, math=16),
    )
    assert run.sources == ("web", "code", "math")
    assert run.tokens.tolist() == [[16, 0, 0], [0, 0, 16]]
    assert run.epoch_documents.tolist() == [10, 10, 10]


def without(event, field):
    return {key: value for key, value in event.items() if key != field}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], "metrics.jsonl: no training step"),
        ([start()], "metrics.jsonl: no training step"),
        ([start(), step(1), '{"event": "st'], "metrics.jsonl:3: damaged, not JSON"),
        ([start(), ""], "metrics.jsonl:2: damaged, not JSON"),
        ([start(), "[1]"], "metrics.jsonl:2: damaged, a JSON object with 'event'"),
        ([without(start(), "sources")], "metrics.jsonl:1: start has no sources"),
        ([start(), without(step(1), "loss")], "metrics.jsonl:2: step has no loss"),
        (
            [start(), {**step(1), "loss": "low"}],
            "metrics.jsonl:2: step.loss: 'low' found",
        ),
        ([start(), step(1, web="many")], "metrics.jsonl:2: step.tokens.web: "),
        ([start(), step(1, web=-1)], "metrics.jsonl:2: step.tokens.web: "),
        ([start(), step(1, web=10**30)], "metrics.jsonl:2: damaged, not JSON (the integer 1000"),
        ([start(), {**step(1), "step": True}], "metrics.jsonl:2: step.step: True found"),
        ([start(), step(1), step(3)], "metrics.jsonl:3: step of step 3 found where step 2"),
        ([start(), step(1), start(step=5)], "metrics.jsonl:3: start of step 5 found where step 1"),
        ([step(1)], "metrics.jsonl: no training step"),
    ],
)
def test_damaged_metrics_name_the_line(tmp_path, events, expected):
    with pytest.raises(EnergonExtError) as caught:
        load(tmp_path, *events)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_missing_metrics_name_the_file(tmp_path):
    with pytest.raises(ConfigError, match=r"metrics\.jsonl: does not exist"):
        Run.load(tmp_path / "absent")


@pytest.mark.parametrize(
    ("keys", "labels"),
    [
        (["../demo/data/prose:train", "../demo/data/code:train"], ["prose", "code"]),
        (["web:train", "web:test"], ["web:train", "web:test"]),
        (["a/web:train[0, 0.5]", "a/web:train[0.5, 1]"], ["web[0, 0.5]", "web[0.5, 1]"]),
        (["a/web", "b/web"], ["a/web", "b/web"]),
        (["web"], ["web"]),
        (["s3://bucket/web:train", "s3://bucket/code:train"], ["web", "code"]),
        (["a/web", "web"], ["a/web", "web"]),
    ],
)
def test_labels_are_the_shortest_distinct_names(keys, labels):
    assert list(short_labels(keys)) == labels


def test_a_line_that_a_full_disk_cut_off_is_left_out_and_not_continued(tmp_path, caplog):
    """The process that resumes would append its first event to the rest of that line."""
    load(tmp_path, start(), step(1, loss=5.0), step(2, loss=4.0))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    assert Run.load(tmp_path).loss.tolist() == [5.0]
    assert "metrics.jsonl:3: left out, since it was not written whole" in caplog.text
    with MetricsFile(tmp_path) as file:
        event = step(2, loss=3.0)
        for each in (start(step=1), event):
            file.write(**each)
    assert "metrics.jsonl: removed the last line" in caplog.text
    assert Run.load(tmp_path).loss.tolist() == [5.0, 3.0]
    before = path.read_bytes()
    with MetricsFile(tmp_path):
        assert path.read_bytes() == before
