# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""SIGKILL at any change of what a start writes once: the next start repairs it and goes on.

The process is killed at its first change of the file system, then at its second, and so on, each
time in a new copy of the data.
"""

import itertools
import json
import os
import re
import shutil
import signal
import sys
import traceback

import pytest

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.rl import RLDataset
from energon_ext.state.files import read_small_json, write_file
from energon_ext.storage.claim import claim
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.tokens import opening
from tests.cli.command import energon_ext
from tests.rl.prompts import Dice, prompt_dataset, write_sums
from tests.samples.vision import PackedCaptions, write_images
from tests.support import batch_hash, config, loader_for, take, write_mix, write_tokens

#: What a killed process may leave: files under temporary names, and its claim.
LEFT_OVER = re.compile(r"\..*(\.tmp|\.claim|\.unfinished)$|\.time-\w+$")


def hashes(mix, encoder, count=3):
    options = {"worker_config": config(), "batch_size": 2, "task_encoder": encoder}
    return [
        batch_hash(batch) for batch in take(loader_for(get_train_dataset(mix, **options)), count)
    ]


# What is written ----------------------------------------------------------------------------------


def write_text(folder):
    lines = (json.dumps({"text": f"{n} " + "word " * (n % 40)}) for n in range(60))
    (folder / "lines.jsonl").write_text("\n".join(lines) + "\n")
    write_mix(folder / "mix.yaml", [("lines.jsonl", 1)])


def tokenize(folder):
    return hashes(folder / "mix.yaml", PackedTaskEncoder(ByteTokenizer(), 64))


def write_pictures(folder):
    write_images(folder / "photos", 30)
    write_mix(folder / "mix.yaml", [("photos", 1)])


def measure(folder):
    encoder = "tests.samples.vision:PackedCaptions"
    result = energon_ext("measure", folder / "mix.yaml", "--encoder", encoder, "--jobs", 1)
    assert result.exit_code == 0, result.output
    return result.stdout.replace(str(folder), "")


def measure_at_a_start(folder):
    options = {"worker_config": config(), "batch_size": 2, "task_encoder": PackedCaptions()}
    loader = loader_for(get_train_dataset(folder / "mix.yaml", **options))
    return loader.state_dict()["data_digests"], [str(batch)[:99] for batch in take(loader, 2)]


def write_pairs(folder):
    for number in range(4):
        write_tokens(folder / "web" / f"part-{number}", [[5 + number, 6, 7]] * 20)
    write_mix(folder / "mix.yaml", [("web", 1)])


def make_catalog(folder):
    opening.FEW_PAIRS = 1
    return hashes(folder / "mix.yaml", PackedTaskEncoder(ByteTokenizer(), 64))


def check_pairs(folder):
    opening.FEW_PAIRS = 1
    result = energon_ext("check", folder / "web")
    assert result.exit_code == 0, result.output
    return [result.stdout.replace(str(folder), ""), make_catalog(folder)]


def save_answers(folder):
    """Save two states of reinforcement learning, and restore what is there."""
    states = folder / "states"
    states.mkdir(exist_ok=True)

    def build():
        prompts = prompt_dataset(folder / "mix.yaml", prompts_per_call=4)
        return RLDataset(prompts, Dice(), seq_len=24, rows=2, groups_per_batch=1)

    saved, dataset = states / "data.json", build()
    if saved.exists():  # of a process that was killed after it
        build().restore_state(read_small_json(saved, 2**26), states)
    for _ in range(2):
        next(dataset)
        write_file(saved, json.dumps(dataset.save_state(states)).encode())
    resumed = build()
    resumed.restore_state(read_small_json(saved, 2**26), states)
    return [batch_hash(batch) for batch in take(resumed, 3)]


def hold_claim(folder):
    with claim(folder / "out"):  # refused if a killed process seems to hold it
        return "held"


WRITERS = {
    "claim": (lambda folder: None, hold_claim),
    "tokens at first use": (write_text, tokenize),
    "measure": (write_pictures, measure),
    "lengths at first use": (write_pictures, measure_at_a_start),
    "catalog at a start": (write_pairs, make_catalog),
    "catalog by check": (write_pairs, check_pairs),
    "answers": (lambda folder: write_sums(folder), save_answers),
}


# Kills --------------------------------------------------------------------------------------------


def kill_at_change(number):
    """Kill this process before its n-th change of the file system from now on."""
    left = iter(range(number - 1))

    def hook(event, arguments):
        is_change = event in (
            "os.rename",
            "os.link",
            "os.remove",
            "os.mkdir",
            "os.utime",
            "os.truncate",
        )
        if event == "open":
            is_change = bool(arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if is_change and str(arguments[0]) != os.devnull and next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def call(work, folder, operation=None):
    """Call ``work(folder)`` in a child, which is killed at a change; return its result."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        found, code = "", 1
        try:
            os.close(reader)
            if operation is not None:
                kill_at_change(operation)
            found, code = json.dumps(work(folder), default=str), 0
        except BaseException:
            found = traceback.format_exc()
        finally:
            os.write(writer, found[-4000:].encode())
            os._exit(code)
    os.close(writer)
    with open(reader) as file:
        found = file.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return None
    assert os.waitstatus_to_exitcode(status) == 0, found
    return json.loads(found)


def files_in(folder):
    names = (
        os.path.relpath(os.path.join(root, name), folder)
        for root, _, files in os.walk(folder)
        for name in files
    )
    return {name for name in names if not LEFT_OVER.search(name)}


def kill_again_and_again(name, folder, results):
    write, work = WRITERS[name]
    template = folder / "template"
    template.mkdir()
    write(template)
    place = folder / "data"  # names in caches depend on it

    def work_again(operation=None):
        shutil.copytree(template, place)
        found = None if operation is None else call(work, place, operation)
        outcome = call(work, place), files_in(place)
        shutil.rmtree(place)
        return found, outcome

    _, expected = work_again()
    for operation in itertools.count(1):
        found, outcome = work_again(operation)
        if outcome != expected:
            results.send((operation, outcome, expected))
            return
        if found is not None:  # it was not killed any more
            results.send((operation, None, None))
            return


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "claim" else pytest.mark.nightly) for n in WRITERS]
)
def test_a_process_killed_at_any_file_operation_costs_only_its_own_work(name, tmp_path, processes):
    here, there = processes.Pipe(duplex=False)
    process = processes.Process(target=kill_again_and_again, args=(name, tmp_path, there))
    process.start()
    there.close()
    try:
        assert here.poll(600), "it hangs"
        operation, found, expected = here.recv()
    finally:
        process.kill()
        process.join()
    assert found == expected and operation > 4
