# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Weights for a server: complete exports, and the script that starts a server with the newest."""

import fcntl
import os
import queue
import signal
import subprocess
import sys
import time
from threading import Thread

import pytest

from tests.rl.inference_server import Server
from tests.rl.server_weights import EXAMPLES, finish_export, sync_sglang, sync_vllm


@pytest.fixture
def server():
    server = Server()
    yield server
    server.stop()


def write_export(folder, name):
    """Write a complete export of a file that contains its name."""
    partial = folder / f"{name}.partial"
    partial.mkdir(parents=True)
    (partial / "weights").write_text(name)
    os.utime(partial, (0, 0))  # as if it had been written long before
    return finish_export(partial)


# Exports ----------------------------------------------------------------------------------------


def test_an_export_appears_under_its_name_when_it_is_complete(tmp_path):
    (tmp_path / "step.7.partial").mkdir()
    assert finish_export(tmp_path / "step.7.partial") == tmp_path / "step.7"
    assert [path.name for path in tmp_path.iterdir()] == ["step.7"]


def test_an_export_replaces_that_of_a_run_that_was_resumed(tmp_path):
    old = write_export(tmp_path, "7")
    (old / "more").touch()
    (tmp_path / "7.old.partial").mkdir()  # left by a killed process
    assert write_export(tmp_path, "7") == old
    assert [path.name for path in old.iterdir()] == ["weights"]
    assert [path.name for path in tmp_path.iterdir()] == ["7"]


def test_an_export_stays_if_it_is_finished_twice(tmp_path):
    folder = write_export(tmp_path, "7")
    with pytest.raises(FileNotFoundError, match="7.partial"):
        finish_export(tmp_path / "7.partial")
    assert [path.name for path in folder.iterdir()] == ["weights"]


def test_a_folder_that_would_be_served_while_it_is_written_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"7: an export is written as NAME.partial"):
        finish_export(tmp_path / "7")


# Requests ---------------------------------------------------------------------------------------


def test_vllm_loads_the_folder_and_then_forgets_what_it_computed_before(server, tmp_path):
    server.misfortunes = [{"results": [None]}, {"success": True}]
    sync_vllm(server.url, tmp_path / "7")
    assert [(path, body) for path, _, body in server.requests] == [
        (
            "/collective_rpc",
            {"method": "reload_weights", "kwargs": {"weights_path": f"{tmp_path}/7"}},
        ),
        ("/reset_prefix_cache", {}),
    ]


def test_a_prefix_cache_that_is_not_reset_is_an_error(server, tmp_path):
    server.misfortunes = [{"results": [None]}, {"success": False}]
    with pytest.raises(RuntimeError, match="the prefix cache was not reset, as requests are runn"):
        sync_vllm(server.url, tmp_path)


@pytest.mark.parametrize("sync", [sync_vllm, sync_sglang])
def test_weights_that_are_not_loaded_are_an_error_with_the_servers_words(server, tmp_path, sync):
    server.says = "no weights there"
    server.misfortunes = [(500, ())]
    with pytest.raises(RuntimeError, match="http.* answered status 500: .*no weights there"):
        sync(server.url, tmp_path)
    assert len(server.requests) == 1


@pytest.mark.parametrize("outage", ["drop", (503, ())])
def test_weights_wait_for_a_server_that_restarts(server, tmp_path, outage):
    server.misfortunes = [outage, {"success": True}]
    sync_sglang(server.url, tmp_path)
    assert [body for _, _, body in server.requests] == [{"model_path": str(tmp_path)}] * 2


def test_weights_do_not_wait_for_ever(tmp_path):
    gone = Server()
    gone.stop()
    with pytest.raises(OSError, match="refused"):
        sync_sglang(gone.url, tmp_path, outage_seconds=0)


# The script -------------------------------------------------------------------------------------

#: Says what it serves. It and its worker share a lock.
FAKE_SERVER = """
import fcntl, os, subprocess, sys
locks, folder = sys.argv[1:]
lock = open(f"{locks}/{os.getpid()}", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
worker = subprocess.Popen(["sleep", "600"], pass_fds=[lock.fileno()])
print(os.getpid(), open(f"{folder}/weights").read(), folder, flush=True)
sys.exit(worker.wait() and 3)
"""


#: What a busy machine may take; no wait is longer.
LIMIT_SECONDS = 120


class Supervisor:
    """``serve_newest.sh`` with a fake server."""

    def __init__(self, exports, locks):
        self.locks = locks
        locks.mkdir()
        script = ["bash", EXAMPLES / "serve_newest.sh", exports]
        self.process = subprocess.Popen(
            [*script, sys.executable, "-c", FAKE_SERVER, locks, "{}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PAUSE_SECONDS": "0.1"},
            preexec_fn=_ignore_no_signal,
        )
        self._lines = {}
        for stream in (self.process.stdout, self.process.stderr):
            self._lines[stream] = lines = queue.Queue()
            Thread(target=_put_lines, args=(stream, lines), daemon=True).start()

    def next_server(self):
        """Wait for a server; return its process, and the name and the folder that it serves."""
        line = self._lines[self.process.stdout].get(timeout=LIMIT_SECONDS)
        process, name, folder = line.split(" ", 2)
        return int(process), name, folder.rstrip()

    def wait_for_message(self, text):
        """Wait until the script has printed a line with a text to its standard error."""
        while text not in self._lines[self.process.stderr].get(timeout=LIMIT_SECONDS):
            pass

    def wait_for_end(self, process):
        """Wait until a server and its worker have ended."""
        deadline = time.monotonic() + LIMIT_SECONDS
        with open(self.locks / str(process)) as lock:
            while True:
                try:
                    return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        pytest.fail(f"server {process} or its worker has not ended")
                    time.sleep(0.02)

    def stop(self):
        """End the script and its servers."""
        self.process.terminate()
        try:
            self.process.wait(LIMIT_SECONDS)
        finally:
            self.process.kill()
        for lock in self.locks.iterdir():
            self.wait_for_end(lock.name)


def _ignore_no_signal():
    """As in a terminal: a shell cannot trap what is ignored when it starts, as under ``nohup``."""
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)


def _put_lines(stream, lines):
    for line in stream:
        lines.put(line)


@pytest.fixture
def supervise(tmp_path):
    started = []

    def start(exports):
        started.append(Supervisor(exports, tmp_path / "locks"))
        return started[-1]

    yield start
    for supervisor in started:
        supervisor.stop()


def test_a_killed_server_starts_again_with_the_newest_complete_export(supervise, tmp_path):
    exports = tmp_path / "my exports & more"
    write_export(exports, "10")
    write_export(exports, "9")  # newer, though its name is not
    interrupted = exports / "11.partial"
    interrupted.mkdir()
    (interrupted / "weights").write_text("half")
    os.utime(interrupted, (2**31, 2**31))  # the newest folder
    (exports / "newer_file").touch()
    supervisor = supervise(exports)
    killed, name, folder = supervisor.next_server()
    assert (name, folder) == ("9", str(exports / "9"))
    os.kill(killed, signal.SIGKILL)
    killed, name, _ = supervisor.next_server()
    assert name == "9"
    (interrupted / "weights").write_text("whole")
    finish_export(interrupted)
    os.kill(killed, signal.SIGKILL)
    assert supervisor.next_server()[1] == "whole"


def test_a_run_that_was_resumed_serves_its_own_export(supervise, tmp_path):
    for name in ("7", "8"):
        write_export(tmp_path / "exports", name)
    again = tmp_path / "exports" / "7.partial"
    again.mkdir()
    (again / "weights").write_text("7_again")
    finish_export(again)
    assert supervise(tmp_path / "exports").next_server()[1] == "7_again"


def test_the_workers_of_a_killed_server_end_before_the_next_one_starts(supervise, tmp_path):
    write_export(tmp_path / "exports", "0")
    supervisor = supervise(tmp_path / "exports")
    killed, *_ = supervisor.next_server()
    os.kill(killed, signal.SIGKILL)
    supervisor.wait_for_end(killed)
    assert supervisor.next_server()[1] == "0"


def test_a_server_that_ends_by_itself_is_started_again(supervise, tmp_path):
    write_export(tmp_path / "exports", "0")
    supervisor = supervise(tmp_path / "exports")
    first, *_ = supervisor.next_server()
    worker = subprocess.run(["pgrep", "-P", str(first)], capture_output=True, text=True).stdout
    os.kill(int(worker), signal.SIGTERM)
    assert supervisor.next_server()[1] == "0"
    supervisor.wait_for_message(f"process {first} ended with status 3")


def test_the_script_waits_for_the_first_export(supervise, tmp_path):
    exports = tmp_path / "exports"
    supervisor = supervise(exports)
    supervisor.wait_for_message("no complete export in")
    write_export(exports, "0")
    assert supervisor.next_server()[1] == "0"


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_server_and_its_workers_end_with_the_script(supervise, tmp_path, ending):
    write_export(tmp_path / "exports", "0")
    supervisor = supervise(tmp_path / "exports")
    server, *_ = supervisor.next_server()
    supervisor.process.send_signal(ending)
    supervisor.wait_for_end(server)
    assert supervisor.process.wait(LIMIT_SECONDS) == 128 + ending
