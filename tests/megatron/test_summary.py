# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a step consumed, and what the log of a run says about it, in its file and on boards."""

import dataclasses
import json
import struct
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from energon_ext import ConfigError
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.row_hashes import StepHash, hash_of_parts, row_digests
from energon_ext.batch.rows import Row
from energon_ext.keyed import stable_hash
from energon_ext.metrics.boards import scalars_of
from energon_ext.metrics.file import Run
from tests.megatron.small_gpt import SEQ_LEN, synthetic_batch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from run_log import ProgressLog, summarize_step  # noqa: E402


@pytest.mark.usefixtures("one_rank")
class TestSummary:
    def test_counts_are_those_of_all_micro_batches(self):
        batches = [synthetic_batch(seed) for seed in range(3)]
        summary = summarize_step(batches, SEQ_LEN)
        for count in ("tokens", "documents"):
            for source in ("code", "web"):
                of_batches = [getattr(b, f"{count}_per_source")().get(source, 0) for b in batches]
                assert summary[count][source] == sum(of_batches)
        trained = [int((batch.token_weights != 0).sum()) for batch in batches]
        assert summary["trained_tokens"] == sum(trained)

    def test_the_hash_ignores_order_and_micro_batches(self):
        rows = [row_of(first) for first in range(6)]
        first, *others = [
            summarize_step([assembled(rows[place] for place in part) for part in parts], SEQ_LEN)
            for parts in ([(0, 1, 2, 3, 4, 5)], [(5, 2), (0, 4), (3, 1)], [(1, 0, 3), (2, 5, 4)])
        ]
        assert all(other == first for other in others)

    def test_the_hash_sees_changed_and_repeated_rows(self):
        found = [
            summarize_step([assembled(map(row_of, rows))], SEQ_LEN)["batch_hash"]
            for rows in ((0, 1, 2), (0, 1, 3), (0, 1, 1), (0, 0, 1))
        ]
        assert len(set(found)) == 4


def row_of(first):
    documents = [np.arange(first, first + 5), np.arange(3)]
    return Row(documents, source=("code", "web")[first % 2], documents=2)


def assembled(rows, sources=("code", "web")):
    return BatchAssembler(SEQ_LEN)(list(rows), sources)


@pytest.mark.parametrize(
    "field", ["tokens", "labels", "token_weights", "position_ids", "cu_seqlens"]
)
def test_the_hash_of_a_row_covers_every_field(field):
    batch = synthetic_batch(0)
    changed = getattr(batch, field).clone()
    changed[1] += 1
    other = dataclasses.replace(batch, **{field: changed})
    here, there = ([*row_digests(each, SEQ_LEN)] for each in (batch, other))
    assert here == [*row_digests(synthetic_batch(0), SEQ_LEN)]
    assert here[0] != there[0] and here[1] == there[1]


def test_the_hash_of_a_row_knows_padding_but_not_the_names_of_sources():
    rows = [row_of(0), row_of(1)]
    named = [assembled(rows, s) for s in (("code", "web"), ("web", "code"))]
    named.append(dataclasses.replace(named[0], sources=("/data/code", "../web")))
    found = [[*row_digests(batch, SEQ_LEN)] for batch in named]
    assert found[0] == found[1] == found[2]
    sources = named[0].source_ids.clone()
    sources[sources < 0] = 0  # padding becomes a document without weights
    padded = dataclasses.replace(named[0], source_ids=sources)
    assert all(a != b for a, b in zip(found[0], row_digests(padded, SEQ_LEN)))


def test_ranks_add_the_parts_of_their_hashes_in_a_float():
    """By hand: the sum of the digests as numbers, modulo 2**128."""
    batches = [synthetic_batch(seed) for seed in range(40)]
    digests = [digest for batch in batches for digest in row_digests(batch, SEQ_LEN)]
    total = sum(int.from_bytes(digest, "little") for digest in digests) % 2**128
    ranks = [StepHash() for _ in range(8)]
    for number, batch in enumerate(batches):
        ranks[number % 8].add(batch, SEQ_LEN)
    parts = np.array([rank.take() for rank in ranks], np.float64).sum(0)
    assert hash_of_parts(parts.tolist()) == f"{total:032x}"
    assert ranks[0].take() == [0, 0, 0, 0]


START = {
    "sources": ["data/web:train"],
    "documents": {"data/web:train": 2},
    "seq_len": 32,
    "rows_per_step": 4,
    "config": {},
}
STEP = {
    "loss": 2.5,
    "loss_by_source": {"data/web:train": 2.5},
    "tokens": {"data/web:train": 100},
    "documents": {"data/web:train": 1},
    "batch_hash": "of all rows",
    "planned_share": {"data/web:train": 1.0},
    "step_seconds": 0.5,
    "tokens_per_second": 200.0,
    "rollout/reward/mean": 0.25,
}


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_appends_to_its_log_which_the_report_reads(tmp_path, capsys):
    with ProgressLog(tmp_path, 0, 10, interval=1) as log:
        log.write("start", 0, **START)
        log.write_step(1, STEP)
        log.write_evaluation(1, {})
    with ProgressLog(tmp_path, 1, 10) as resumed:
        resumed.write("start", 1, **START)
        resumed.write("end", 1, reason="stopped")
    events = read(tmp_path)
    assert [(event["event"], event["step"]) for event in events] == [
        ("start", 0),
        ("step", 1),
        ("start", 1),
        ("end", 1),
    ]
    assert events[1] == {"event": "step", "step": 1, **STEP}
    assert capsys.readouterr().err == ("step 1 of 10: loss 2.500, 200 tokens/s, reward 0.25\n")
    assert Run.load(tmp_path).loss.tolist() == [2.5]


def test_ranks_that_do_not_log_write_nothing(tmp_path):
    with ProgressLog(tmp_path / "not there", 0, 10, enabled=False) as log:
        log.write("start", 0)
        log.write_step(1, {})


def test_boards_show_the_digest_of_a_saved_state():
    fields = {"path": "checkpoints/5", "state_digest": "ab12"}
    assert scalars_of(fields, {}) == {"data/state_digest": stable_hash("ab12") % 2**24}


SCALARS = {
    "train/loss": 2.5,
    "train/loss/data/web:train": 2.5,
    "data/planned_share/data/web:train": 1.0,
    "data/batch_hash": stable_hash("of all rows") % 2**24,
    "perf/step_seconds": 0.5,
    "perf/tokens_per_second": 200.0,
    "rollout/reward/mean": 0.25,
    "data/tokens/data/web:train": 300,
    "data/share/data/web:train": 0.75,
    "data/epochs/data/web:train": 1.5,
    "data/epochs_left/data/web:train": 0.5,
    "data/tokens/data/gone:train": 100,
    "data/share/data/gone:train": 0.25,
}


def log_a_step(run_dir, digest="", **boards):
    with ProgressLog(run_dir, 0, 10, **boards) as log:
        log.write("start", 0, **START, data_digest=digest)
        log.write_step(1, STEP)
        counts = {
            "datasets": [{"spec": "data/web:train", "row_offset": 3}],  # no scalar
            "tokens_in_all": {"data/web:train": 300, "data/gone:train": 100},
            "shares": {"data/web:train": 0.75, "data/gone:train": 0.25},
            "epochs": {"data/web:train": 1.5},
            "epochs_left": {"data/web:train": 0.5},
        }
        log.write_boards(1, counts)
        log.write("consumption", 1, **counts)  # adds no scalar


def test_tensorboard_gets_a_scalar_for_each_source(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_a_step(tmp_path, tensorboard=True)
    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {tag: board.Scalars(tag) for tag in board.Tags()["scalars"]}
    assert {tag: [event.value for event in events] for tag, events in found.items()} == {
        tag: [value] for tag, value in SCALARS.items()
    }
    assert {event.step for events in found.values() for event in events} == {1}


def test_boards_use_the_display_name_of_a_source(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with ProgressLog(tmp_path, 0, 10, tensorboard=True) as log:
        log.write("start", 0, names={"data/web:train": "Web"})
        log.write_step(1, STEP)
    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert {"train/loss/Web", "data/planned_share/Web"} <= set(board.Tags()["scalars"])


def test_a_resumed_run_replaces_the_scalars_of_repeated_steps(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for first_step, loss in ((0, 9.0), (2, 1.0)):
        if first_step:
            time.sleep(1.1)  # file names contain the second
        with ProgressLog(tmp_path, first_step, 10, tensorboard=True) as log:
            for step in range(first_step + 1, 5):
                log.write_step(step, {**STEP, "loss": loss})
    board = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert found == [(1, 9), (2, 9), (3, 1), (4, 1)]


def test_weights_and_biases_get_the_same_scalars_and_the_data_digest(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log_a_step(tmp_path, wandb_project="tests", digest="c0ffee")
    (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    history, settings = {}, {}
    for record in wandb_records(file):
        for item in record.history.item:
            history["/".join(item.nested_key) or item.key] = json.loads(item.value_json)
        for item in record.config.update:
            settings[item.key or "/".join(item.nested_key)] = json.loads(item.value_json)
    assert {k: v for k, v in history.items() if not k.startswith("_")} == SCALARS
    assert settings["data/digest"] == "c0ffee"


def wandb_records(file):
    """Yield the log of an offline run: protocol buffers in LevelDB's format, blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    content, position, data = file.read_bytes(), 7, b""  # after a header of 7 bytes
    while position + 7 <= len(content):
        if 2**15 - position % 2**15 < 7:  # the rest of a block too short for a header
            position += 2**15 - position % 2**15
        _, length, part = struct.unpack_from("<IHB", content, position)
        data += content[position + 7 : position + 7 + length]
        position += 7 + length
        if part in (1, 4):  # a whole record, or the last part of one
            record, data = wandb_internal_pb2.Record.FromString(data), b""
            yield record


def test_a_missing_wandb_package_is_a_one_line_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="'mine' needs the package `wandb`: pip install"):
        ProgressLog(tmp_path, 0, 10, wandb_project="mine")
