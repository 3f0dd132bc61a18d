# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Data workers without shared memory, whose file is cut, or that are killed; and their trainer."""

import contextlib
import os
import re
import signal
import struct
import time
from threading import Timer

import pytest

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.state.checkpoint_folder import read_state, write_state
from tests.crash.starved import mount_for_itself, outcome, said
from tests.crash.test_killed_worker import SOON, is_alive
from tests.support import batch_hash, config, take, write_mix, write_tokens

SEQ_LEN = 8192
#: One batch of two rows, of 28 bytes a position, does not fit; the locks of all queues do.
SHARED_MEMORY = "400k"


@pytest.fixture
def mix(tmp_path):
    write_tokens(tmp_path / "tokens", [[n % 200] * 2000 for n in range(90)])
    return write_mix(tmp_path / "mix.yaml", [("tokens", 1)])


def new_loader(mix, workers, seq_len=SEQ_LEN):
    encoder = PackedTaskEncoder(ByteTokenizer(), seq_len, packing_buffer_docs=6)
    options = {"worker_config": config(workers), "batch_size": 2, "task_encoder": encoder}
    return ExactDataLoader(get_train_dataset(mix, **options), watchdog_timeout_seconds=None)


def pids_of(loader):
    return [worker.pid for worker in loader._iterator._workers]


def train_without_shared_memory(mix, saved):
    mount_for_itself("-t", "tmpfs", "-o", f"size={SHARED_MEMORY}", "tmpfs", "/dev/shm")
    found = {"alone": [batch_hash(batch) for batch in take(new_loader(mix, 0), 4)]}
    too_large = new_loader(mix, 2)
    found["too large"] = said(take, too_large, 4)
    found["pids"] = pids_of(too_large)
    filled = new_loader(mix, 2, seq_len=64)
    found["small"] = [batch_hash(batch) for batch in take(filled, 3)]
    with open("/dev/shm/full", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    write_state(saved, filled.save_state_rank())
    found["full"] = said(take, filled, 9)
    found["none starts"] = said(new_loader, mix, 1)
    found["pids"] += pids_of(filled)
    return found


def test_full_shared_memory_is_named_and_a_run_without_workers_needs_none(mix, tmp_path):
    saved = tmp_path / "state.json"
    found = outcome(train_without_shared_memory, mix, saved, stderr=tmp_path / "stderr")
    assert found["alone"] == [batch_hash(batch) for batch in take(new_loader(mix, 0), 4)]
    for what in ("too large", "full", "none starts"):
        assert found[what].startswith("WorkerError: Shared memory (/dev/shm) is full, or too small")
        assert found[what].endswith("larger (docker: --shm-size=16g), or take num_workers=0.")
    assert not any(map(is_alive, found["pids"]))
    expected = [batch_hash(batch) for batch in take(new_loader(mix, 0, 64), 6)]
    assert found["small"] == expected[:3]
    resumed = new_loader(mix, 0, 64)
    resumed.restore_states([read_state(saved)])
    assert [batch_hash(batch) for batch in take(resumed, 3)] == expected[3:]


def train_on_a_cut_file(mix):
    loader = new_loader(mix, 2)
    take(loader, 4)
    os.truncate(mix.with_name("tokens.bin"), 6000)
    return said(take, loader, 30), said(loader.save_state_rank), pids_of(loader)


def test_a_file_that_is_cut_under_workers_is_named_to_the_trainer(mix, tmp_path):
    drawing, saving, pids = outcome(train_on_a_cut_file, mix, stderr=tmp_path / "stderr")
    assert "tokens.bin has 6000 bytes, its .idx speaks of 360000" in drawing
    assert drawing == saving and drawing.startswith("ConfigError: ")
    assert not any(map(is_alive, pids))


def lose_a_worker(mix):
    loader = new_loader(mix, 1)
    take(loader, 2)
    os.kill(pids_of(loader)[0], signal.SIGKILL)
    return said(loader.save_state_rank), said(take, loader, 9)


def test_a_killed_worker_is_named_by_whatever_needs_it_and_by_nothing_else(mix, tmp_path):
    for found in outcome(lose_a_worker, mix, stderr=tmp_path / "stderr"):
        assert re.fullmatch(
            r"WorkerError: A data worker \(pid \d+\) is killed by signal: Killed. .*`dmesg`.*",
            found,
        )


def lose_a_worker_inside_a_message(mix):
    loader = new_loader(mix, 1)
    take(loader, 2)
    worker = pids_of(loader)[0]
    os.kill(worker, signal.SIGSTOP)
    half = struct.pack("!i", 999) + b"half of it"
    os.write(loader.result_queues[0]._writer.fileno(), half)
    Timer(0.5, os.kill, (worker, signal.SIGKILL)).start()
    return said(loader.save_state_rank)


def test_a_worker_that_is_killed_inside_a_message_is_not_waited_for(mix, tmp_path):
    found = outcome(lose_a_worker_inside_a_message, mix, stderr=tmp_path / "stderr")
    assert "is killed by signal: Killed" in found and found.startswith("WorkerError: ")


def start_workers(mix):
    os.register_at_fork(after_in_child=lambda: time.sleep(0.5))  # they find their trainer gone
    start_workers.kept = iterator = new_loader(mix, 2)._get_iterator()
    return [worker.pid for worker in iterator._workers]


def test_workers_whose_trainer_is_killed_before_they_have_begun_end_too(mix, tmp_path):
    pids = outcome(start_workers, mix, stderr=tmp_path / "stderr", is_killed=True)
    deadline = time.monotonic() + SOON
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))
