# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Processor time of a batch on its way to the GPU, with one torch thread and with sixteen.

A process that torchrun did not start has as many torch threads as cores. One operation of torch on
a megabyte wakes all of them, and they then spin for a while. A GPU is not needed: the batch goes to
torch's device ``meta``, which does all that a copy to a GPU does on the host but the copy.
"""

import tempfile
import time
from pathlib import Path

import token_source
import torch
from timing import bytes_of, fresh_process, markdown

from energon_ext import ExactDataLoader

THREADS = (1, 16)
BATCHES, ROUNDS = 60, 5
PAUSE_SECONDS = 0.005  # as during a step of the GPU


def run():
    token_source.DOCUMENTS = 4000
    with tempfile.TemporaryDirectory() as name:
        token_source.prepare(Path(name))
        found = [fresh_process(milliseconds, name, threads) for threads in THREADS]
    rows = []
    for contender in found[0]:
        one, many = (each[contender] for each in found)
        rows.append((contender, f"{one:.2f}", f"{many:.2f}", f"{many / one:.2f}x"))
    header = ("processor time per batch", "1 thread, ms", "16 threads, ms", "ratio")
    return markdown("Torch threads, batches of [8, 4096]", header, rows)


def milliseconds(folder, threads):
    """Return the trainer's processor time per batch by contender, the best of some rounds."""
    torch.set_num_threads(threads)
    loaders = {
        f"drawn and sent, {workers} workers": ExactDataLoader(
            token_source.our_dataset(Path(folder), workers)
        )
        for workers in (0, 1, 2)
    }
    contenders = {name: drawing(iter(loader)) for name, loader in loaders.items()}
    contenders["one `torch.cat` of the same bytes"] = concatenating(loaders)
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(ROUNDS):
        for name, function in contenders.items():
            begin = time.process_time()
            for _ in range(BATCHES):
                function()
                time.sleep(PAUSE_SECONDS)
            best[name] = min(best[name], (time.process_time() - begin) / BATCHES * 1e3)
    for loader in loaders.values():
        loader.close()
    return best


def drawing(batches):
    return lambda: next(batches).to("meta")


def concatenating(loaders):
    loader = next(iter(loaders.values()))
    parts = [torch.empty(len(bytes_of(next(iter(loader)))) // 2, dtype=torch.uint8)] * 2
    return lambda: torch.cat(parts)
