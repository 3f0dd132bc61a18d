# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Loader processes without shared memory, on a truncated file, or killed; and their trainer."""

import contextlib
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer

import pytest

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.errors import WorkerError
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.crash.starved import mount_for_itself, outcome, said
from tests.support import batch_hash, config, take, write_mix, write_tokens

SEQ_LEN = 8192
#: Enough for the locks of all queues, but not for a batch of two rows of 28 bytes per position.
SHARED_MEMORY = "400k"
#: torch checks every five seconds whether the trainer is alive.
SOON = 12.0


@pytest.fixture
def mix(tmp_path):
    write_tokens(tmp_path / "tokens", [[n % 200] * 2000 for n in range(90)])
    return write_mix(tmp_path / "mix.yaml", [("tokens", 1)])


def new_loader(mix, workers, seq_len=SEQ_LEN, encoder=PackedTaskEncoder):
    encoder = encoder(ByteTokenizer(), seq_len, packing_buffer_docs=6)
    options = {"worker_config": config(workers), "batch_size": 2, "task_encoder": encoder}
    return ExactDataLoader(get_train_dataset(mix, **options))


def hashes(loader, count):
    return [batch_hash(batch) for batch in take(loader, count)]


def pids():
    """Return the process ids of the readers and, last, of the planner."""
    return [child.pid for child in sorted(multiprocessing.active_children(), key=lambda c: c.pid)]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def still_alive(pids):
    """Return the processes that are still alive after a while."""
    deadline = time.monotonic() + SOON
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return [pid for pid in pids if is_alive(pid)]


# Memory and files ---------------------------------------------------------------------------------


def train_without_shared_memory(mix):
    mount_for_itself("-t", "tmpfs", "-o", f"size={SHARED_MEMORY}", "tmpfs", "/dev/shm")
    found = {"alone": hashes(new_loader(mix, 0), 4)}
    begun = new_loader(mix, 2)
    found["in little"] = hashes(begun, 4)
    with open("/dev/shm/full", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    found["in none"] = hashes(begun, 4)
    found["none starts"] = said(take, new_loader(mix, 1), 1)
    begun.close()
    found["pids"] = pids()
    return found


@pytest.mark.nightly
def test_workers_need_shared_memory_only_to_start_and_report_it_if_it_is_full(mix, tmp_path):
    found = outcome(train_without_shared_memory, mix, stderr=tmp_path / "stderr")
    expected = hashes(new_loader(mix, 0), 8)
    assert found["alone"] == found["in little"] == expected[:4]
    assert found["in none"] == expected[4:]
    assert found["none starts"].startswith("WorkerError: Shared memory (/dev/shm) is full, so")
    assert found["none starts"].endswith("or use num_workers=0.")
    assert not still_alive(found["pids"])


def train_on_a_cut_file(mix):
    loader = new_loader(mix, 2)
    drawn = hashes(loader, 4)
    os.truncate(mix.with_name("tokens.bin"), 6000)
    return said(take, loader, 99), drawn, loader.state_dict()["read"], pids()


def test_a_file_truncated_under_workers_is_named_in_the_trainer(mix, tmp_path):
    expected = hashes(new_loader(mix, 0), 4)
    words, drawn, read, left = outcome(train_on_a_cut_file, mix, stderr=tmp_path / "stderr")
    assert words.startswith("ConfigError: ")
    assert "tokens.bin has 6000 bytes, its .idx describes 360000" in words
    # Batches that were read before the cut may still arrive.
    assert drawn == expected and read >= 2 * 4 and read % 2 == 0
    assert not still_alive(left)


def read_from_a_failing_disk(mix):
    """The kernel sends this signal if a page of a mapped file cannot be read."""
    loader = new_loader(mix, 1, seq_len=64)
    hashes(loader, 1)
    reader = pids()[0]

    def go_on():
        os.kill(reader, signal.SIGBUS)  # here, since the error may be raised at once
        take(loader, 500)

    return said(go_on), pids()


def test_a_disk_that_fails_under_a_map_is_suspected_in_the_trainer(mix, tmp_path):
    words, left = outcome(read_from_a_failing_disk, mix, stderr=tmp_path / "stderr")
    assert words.startswith("WorkerError: A data worker died: ")
    assert words.endswith("disk cannot be read: see `dmesg`.")
    assert not still_alive(left)


# Killed processes ---------------------------------------------------------------------------------


def lose_one(mix, place, workers):
    """Kill a process while the trainer waits for it."""
    loader = new_loader(mix, workers, seq_len=64)
    drawn, state = hashes(loader, 3), loader.state_dict()
    victim = pids()[place]
    os.kill(victim, signal.SIGSTOP)
    Timer(1, os.kill, (victim, signal.SIGKILL)).start()
    more = []
    words = said(lambda: more.extend(batch_hash(batch) for batch in loader))
    return words, drawn + more, state, loader.state_dict(), pids()


@pytest.mark.parametrize(("place", "workers"), [(0, 1), (1, 2), (-1, 1), (-1, 2)])
def test_a_killed_reader_or_planner_is_reported_and_the_run_continues_from_its_state(
    mix, tmp_path, place, workers
):
    words, drawn, _, state, left = outcome(
        lose_one, mix, place, workers, stderr=tmp_path / "stderr"
    )
    assert re.fullmatch(
        r"WorkerError: A data worker died: DataLoader worker \(pid.*\) (is killed by signal: "
        r"Killed|exited unexpectedly)\. It may have run out of memory, or a disk cannot be read: "
        r"see `dmesg`\.",
        words,
    )
    assert not still_alive(left)
    expected = hashes(new_loader(mix, 0, 64), len(drawn) + 3)
    assert drawn == expected[:-3]
    resumed = new_loader(mix, 1, 64)
    resumed.load_state_dict(state)
    assert hashes(resumed, 3) == expected[-3:]
    resumed.close()


def lose_one_behind_the_trainer(mix, place):
    """Kill a process while the trainer computes."""
    loader = new_loader(mix, 2, seq_len=64)
    take(loader, 3)
    state, victim = loader.state_dict(), pids()[place]
    with pytest.raises(WorkerError) as raised:
        os.kill(victim, signal.SIGKILL)
        time.sleep(SOON)
    loader.close()
    words, cause = str(raised.value), type(raised.value.__cause__).__name__
    return words, cause, victim, loader.state_dict() == state, pids()


@pytest.mark.parametrize("place", [0, -1])
def test_a_process_that_dies_while_the_trainer_computes_is_reported_at_once(mix, tmp_path, place):
    words, cause, victim, keeps_state, left = outcome(
        lose_one_behind_the_trainer, mix, place, stderr=tmp_path / "stderr"
    )
    assert words == (
        f"A data worker died: DataLoader worker (pid {victim}) is killed by signal: Killed. "
        "It may have run out of memory, or a disk cannot be read: see `dmesg`."
    )
    assert (cause, keeps_state) == ("RuntimeError", True)
    assert not still_alive(left)


class LargeMessages(PackedTaskEncoder):
    def encode_batch(self, batch):
        return super().encode_batch(batch), bytes(100_000)


def at_its_start(frame, event):
    return True


def in_the_event_that_ends_it(frame, event):
    return frame.f_code.co_name == "is_set" and event == "return"


def in_the_middle_of_a_message(frame, event):
    header = 4
    is_sending = frame.f_code.co_name == "_send" and event == "return"
    return is_sending and len(frame.f_locals["buf"]) == header


def lose_one_at(mix, moment):
    """Kill the reader at a moment of its own; torch gets no signal, as the trainer is a thread."""

    def trace(frame, event, _):
        if moment(frame, event):
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    def die_at_the_moment():
        threading.settrace(trace)
        sys.settrace(trace)

    os.register_at_fork(after_in_child=die_at_the_moment)
    loader = new_loader(mix, 1, seq_len=64, encoder=LargeMessages)
    with ThreadPoolExecutor(1) as trainer:
        words = trainer.submit(said, take, loader, 9).result()
    return words, pids()


@pytest.mark.parametrize(
    "moment", [at_its_start, in_the_event_that_ends_it, in_the_middle_of_a_message]
)
def test_a_reader_killed_at_its_worst_moment_is_reported_in_any_thread(mix, tmp_path, moment):
    words, left = outcome(lose_one_at, mix, moment, stderr=tmp_path / "stderr")
    assert words.startswith("WorkerError: A data worker died: DataLoader worker (pid(s) ")
    assert not still_alive(left)


def start_and_return(mix, batches, pause):
    os.register_at_fork(
        after_in_child=lambda: time.sleep(pause)
    )  # they may start after it has died
    start_and_return.kept = loader = new_loader(mix, 2, seq_len=64)
    iterator = iter(loader)
    start_and_return.iterator = iterator
    if batches:
        take(loader, batches)
    else:
        Timer(0.2, next, (iterator,)).start()
        while len(pids()) < 3:
            time.sleep(0.01)
    return pids()


@pytest.mark.parametrize(("batches", "pause"), [(1, 0.0), (0, 0.5)])
def test_processes_end_if_their_trainer_is_killed(mix, tmp_path, batches, pause):
    """Processes that have not started yet end as well."""
    left = outcome(
        start_and_return, mix, batches, pause, stderr=tmp_path / "stderr", is_killed=True
    )
    assert len(left) == 3
    assert not still_alive(left)


SCRIPT = """
import sys
from pathlib import Path
from tests.crash.test_starved_workers import hashes, new_loader
mix = Path(sys.argv[1])
first, second = new_loader(mix, 2, 64), new_loader(mix, 1, 64)
one, other = iter(first), iter(second)
for _ in range(3):
    next(one), next(other)
first.close()
print(*hashes(new_loader(mix, 2, 64), 3))
"""


@pytest.mark.nightly
def test_a_program_that_leaves_its_loaders_open_exits_silently(mix):
    """Processes forked between those of another loader exit silently, too."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, str(mix)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == hashes(new_loader(mix, 0, 64), 3)
