# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""SIGKILL of one of four ranks inside a step: the others take this step, and it comes back.

No process but the killed one starts again. The ranks find each other through a store of the test,
which says who is in the group: what torchft does, without waiting for heartbeats.
"""

import contextlib
import datetime
import io
import itertools
import json
import os
import signal
import subprocess
import time
from collections import Counter, defaultdict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.batch.row_hashes import row_digests
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron import processes
from tests.support import config, write_distinct_rows

SEQ_LEN, RANKS, STEPS = 32, 4, 8
TORCHFT = os.environ.get("ENERGON_EXT_TORCHFT")
EXAMPLE = Path(__file__).parents[2] / "examples" / "14_lost_rank.py"
OPTIONS = (
    *("--train-iters", "30", "--seq-length", "32", "--hidden-size", "32"),
    *("--global-batch-rows", "8", "--num-workers", "1"),
)
LIGHTHOUSE = """
import sys, torchft.coordination
server = torchft.coordination.LighthouseServer("[::]:0", 1, join_timeout_ms=3000)
print(server.address(), flush=True)
sys.stdin.read()
"""

#: The victim dies in this step, and all wait before the other one until it is back.
LOST, BACK = 3, 6
VICTIM = 1
PATIENCE = datetime.timedelta(seconds=processes.TIMEOUT_SECONDS / 2)


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    return write_distinct_rows(tmp_path_factory.mktemp("data"))


def open_loader(mix, rows, workers=0):
    dataset = get_train_dataset(
        mix,
        worker_config=config(workers),
        batch_size=1,
        rows_per_step=rows,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN, packing_buffer_docs=20),
    )
    return ExactDataLoader(dataset)


class Training:
    """A tiny model with momentum, in float64, and its data."""

    def __init__(self, mix, rows, workers=0):
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = torch.nn.Sequential(torch.nn.Embedding(260, 8), torch.nn.Linear(8, 260))
        self.model.double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.loader = open_loader(mix, rows, workers)
        self.batches = iter(self.loader)
        self.start, self.step = self.loader.mark(), 0

    def send(self, store):
        """Give what a process that starts needs, as it was before the current step."""
        parts = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(parts, file := io.BytesIO())
        store.set("parts", file.getvalue().hex())
        store.set("place", json.dumps([self.step, self.loader.state_dict(self.start)]))

    def receive(self, store):
        self.step, self.start = json.loads(store.get("place"))
        parts = torch.load(io.BytesIO(bytes.fromhex(store.get("parts").decode())))
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])

    def try_step(self, rank, ranks, group=None, before=lambda number: None):
        """Take a step together and return what this rank did; RuntimeError if one is lost."""
        self.loader.continue_from(self.start, rank=rank, ranks=ranks)
        self.optimizer.zero_grad(set_to_none=False)
        sums, rows = torch.zeros(2, dtype=torch.float64), []
        for number in itertools.count():
            before(number)
            batch = next(self.batches)
            trained = batch.token_weights != 0
            if trained.any():  # else padding, which completes the step
                rows += [digest.hex() for digest in row_digests(batch, SEQ_LEN)]
                logits = self.model(batch.tokens[trained].long())
                labels = batch.labels[trained].long()
                loss = functional.cross_entropy(logits, labels, reduction="sum")
                loss.backward()
                sums += torch.tensor([float(loss.detach()), len(labels)])
            if self.loader.ends_step:
                break
        parameters = [*self.model.parameters()]
        sums = torch.cat([sums, *(each.grad.flatten() for each in parameters)])
        if group is not None:
            group.allreduce([sums]).wait()
        loss, tokens, *grads = sums.split([1, 1, *map(torch.numel, parameters)])
        for each, grad in zip(parameters, grads):
            each.grad.copy_(grad.view_as(each) / tokens)
        self.optimizer.step()
        done, self.step, self.start = self.step, self.step + 1, self.loader.mark()
        return {"step": done, "rank": rank, "loss": float(loss / tokens), "rows": rows}


def run_rank(number, port, mix, rows, workers, folder, view):
    """Train in process ``number``, first in the group that the store lists under ``view``."""
    store = dist.TCPStore("127.0.0.1", port, timeout=PATIENCE)
    group, members, name = None, [], f"{number}-{view}"
    training = Training(mix, rows, workers)
    store.set(f"ready {name}", "")

    def die(batch):
        if (name, training.step, batch) == (f"{VICTIM}-1", LOST, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    with (folder / f"{name}.jsonl").open("w", buffering=1) as ledger:
        while training.step < STEPS:
            if training.step == BACK and view == 2:
                store.set(f"leaves {number}", "")
                store.wait([f"leaves {each}" for each in members])  # all have received the sums
                view, group = 3, None
            if group is None:
                members = json.loads(store.get(f"view {view}"))  # waits for it
                rank, part = members.index(number), dist.PrefixStore(f"group {view}", store)
                group = dist.ProcessGroupGloo(part, rank, len(members), PATIENCE)
                if rank == 0:
                    training.send(part)
                elif number == VICTIM and view == 3:
                    training.receive(part)
            try:
                line = training.try_step(rank, len(members), group, die)
            except RuntimeError:  # one is lost
                # The others notice closed connections, of which the loader's processes have copies.
                view, group = 2, None
                training.loader.continue_from(training.start)
            else:
                ledger.write(json.dumps(line) + "\n")
    training.loader.close()


@pytest.mark.parametrize(
    ("rows", "workers"),
    [(8, 0), pytest.param(12, 1, marks=pytest.mark.nightly)],  # three ranks do not divide 8
    ids=["uneven", "workers"],
)
def test_a_rank_killed_inside_a_step_costs_no_row_and_the_others_no_restart(
    mix, tmp_path, rows, workers
):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)

    def start(number, view):
        arguments = (number, store.port, mix, rows, workers, tmp_path, view)
        return processes.start(run_rank, arguments, tmp_path / f"{number}-{view}.stderr")

    ranks = [start(number, 1) for number in range(RANKS)]
    store.set("view 1", json.dumps([*range(RANKS)]))
    assert processes.finish([ranks[VICTIM]]) == [-signal.SIGKILL], said(tmp_path)
    store.set("view 2", json.dumps([n for n in range(RANKS) if n != VICTIM]))
    ranks[VICTIM] = start(VICTIM, 3)
    store.wait([f"ready {VICTIM}-3"])
    store.set("view 3", json.dumps([*range(RANKS)]))
    assert processes.finish(ranks) == [0] * RANKS, said(tmp_path)
    check_ledger(tmp_path, mix, rows, [4, 4, 4, 3, 3, 3, 4, 4])


def said(folder):
    return "".join(path.read_text()[-2000:] for path in folder.glob("*.stderr"))


def check_ledger(folder, mix, rows, ranks):
    """Compare what all processes trained in each step with one process that is never killed."""
    found = defaultdict(list)
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            found[json.loads(line)["step"]].append(json.loads(line))
    assert sorted(found) == [*range(STEPS)]
    whole = Training(mix, rows)
    for step, lines in found.items():
        found[step] = sorted(lines, key=lambda line: line["rank"])
    for step in range(STEPS):
        expected, lines = whole.try_step(0, 1), found[step]
        assert [line["rank"] for line in lines] == [*range(ranks[step])], step
        assert Counter(row for line in lines for row in line["rows"]) == Counter(expected["rows"])
        assert len(expected["rows"]) == rows
        assert [line["loss"] for line in lines] == pytest.approx([expected["loss"]] * ranks[step])


@pytest.mark.nightly
@pytest.mark.skipif(
    not TORCHFT, reason="set ENERGON_EXT_TORCHFT to the path of a Python that has torchft"
)
def test_the_example_goes_on_with_torchft_when_a_replica_is_killed(mix, tmp_path):
    with contextlib.ExitStack() as stack:

        def start(*arguments, **options):
            process = subprocess.Popen([TORCHFT, *map(str, arguments)], text=True, **options)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        lighthouse = start("-c", LIGHTHOUSE, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        address = lighthouse.stdout.readline().strip()

        def train(run, replica, role):
            known = {"TORCHFT_LIGHTHOUSE": address, "OMP_NUM_THREADS": "1"}
            known["PYTHONPATH"] = str(EXAMPLE.parents[1])
            stderr = stack.enter_context((tmp_path / f"{run}-{replica}-{role}.stderr").open("w"))
            options = [mix, "--run-dir", tmp_path / run, "--replica", replica, *OPTIONS]
            place = ("-m", "tests.crash.killed_replica", role, tmp_path / "seen", EXAMPLE)
            silent = {"stdout": subprocess.DEVNULL, "stderr": stderr}
            return start(*place, *options, env={**os.environ, **known}, **silent)

        (tmp_path / "seen").mkdir()
        roles = ["dies" if replica == VICTIM else "waits" for replica in range(RANKS)]
        ranks = [train("parts", replica, role) for replica, role in enumerate(roles)]
        limit = processes.TIMEOUT_SECONDS
        assert ranks[VICTIM].wait(limit) == -signal.SIGKILL, said(tmp_path)
        last, until = max(trained(tmp_path / "parts"), default=0), time.monotonic() + limit
        while max(trained(tmp_path / "parts"), default=0) < last + 2 and time.monotonic() < until:
            time.sleep(0.2)  # the others have to go on without it
        ranks[VICTIM] = train("parts", VICTIM, "returns")
        assert [rank.wait(limit) for rank in ranks] == [0] * RANKS, said(tmp_path)
        assert train("whole", 0, "returns").wait(limit) == 0, said(tmp_path)
    found, whole = trained(tmp_path / "parts"), trained(tmp_path / "whole")
    assert sorted(found) == sorted(whole) == [*range(1, 31)]
    for step, lines in found.items():
        (expected,) = whole[step]
        assert Counter(row for line in lines for row in line["rows"]) == Counter(expected["rows"])
        assert len(set(expected["rows"])) == 8
        assert sorted(line["rank"] for line in lines) == [*range(lines[0]["ranks"])]
        losses = [line["loss"] for line in lines]
        assert losses == pytest.approx([expected["loss"]] * len(lines), rel=1e-4)
    ranks = [found[step][0]["ranks"] for step in range(1, 31)]
    assert min(ranks[ranks.index(4) :]) < 4 == ranks[-1], ranks  # all, fewer, and all again


def trained(folder):
    """Return the whole lines of each step that the processes of a run have written."""
    found = defaultdict(list)
    for path in folder.glob("rows-*.jsonl"):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                found[json.loads(line)["step"]].append(json.loads(line))
    return found
