# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Data workers that are killed, and workers whose trainer is killed."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.state.checkpoint_folder import read_state
from tests.support import (
    batch_hash,
    config,
    loader_for,
    take,
    write_dataset,
    write_mix,
    write_tokens,
)

#: torch looks every five seconds whether a worker is still there.
SOON = 12.0


@pytest.fixture(scope="module")
def mixes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed_worker")
    write_tokens(folder / "tokens", [[n % 200] * (5 + n % 40) for n in range(90)])
    write_dataset(folder / "texts", [f"document {n} " * (n % 5 + 1) for n in range(90)])
    return {
        "planned": write_mix(folder / "planned.yaml", [("tokens", 1)]),
        "streamed": write_mix(folder / "streamed.yaml", [("texts", 1)]),
    }


def new_loader(mix):
    dataset = get_train_dataset(
        mix,
        worker_config=config(2),
        batch_size=2,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), 32, packing_buffer_docs=6),
    )
    return loader_for(dataset)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


# In a process of its own: from the signal on torch raises wherever the process happens to be.
KILLER = """
import os, signal, sys, time
from pathlib import Path
from energon_ext.state.checkpoint_folder import write_state
from tests.crash.test_killed_worker import is_alive, new_loader
loader = new_loader(Path(sys.argv[1]))
iterator = iter(loader)
for _ in range(5):
    next(iterator)
write_state(Path(sys.argv[2]), loader.save_state_rank())
workers = [worker.pid for worker in loader._iterator._workers]
begin = time.monotonic()
try:
    os.kill(workers[1], signal.SIGKILL)
    while True:
        next(iterator)
except RuntimeError as error:
    print(error)
    assert time.monotonic() - begin < 12
loader.close()
print("alive:", sum(map(is_alive, workers)))
"""

TRAINER = """
import sys, time
from pathlib import Path
from tests.crash.test_killed_worker import new_loader
loader = new_loader(Path(sys.argv[1]))
iterator = iter(loader)
next(iterator)
print(*[worker.pid for worker in loader._iterator._workers], flush=True)
time.sleep(600)
"""


def start(script, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["planned", "streamed"])
def test_a_killed_worker_is_an_error_soon_and_the_run_goes_on_from_its_state(mixes, kind, tmp_path):
    expected = [batch_hash(batch) for batch in take(new_loader(mixes[kind]), 12)]
    said = start(KILLER, mixes[kind], tmp_path / "state.json").communicate(timeout=60)[0]
    assert "is killed by signal: Killed." in said
    assert said.endswith("alive: 0\n")
    resumed = new_loader(mixes[kind])
    resumed.restore_state_rank(read_state(tmp_path / "state.json"))
    assert [batch_hash(batch) for batch in take(resumed, 7)] == expected[5:]


@pytest.mark.nightly
def test_workers_of_a_killed_trainer_end_too(mixes):
    trainer = start(TRAINER, mixes["planned"])
    workers = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(workers) == 2
    assert all(map(is_alive, workers))
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + SOON
    while any(map(is_alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(is_alive, workers))
