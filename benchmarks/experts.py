# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The experts of each token in a batch: writing it, checking it, and reading a server's answer."""

import base64
import io
import time

import numpy as np
from timing import markdown, microseconds

from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.experts import find_fault
from energon_ext.batch.rows import Row
from energon_ext.rl import RoutedExperts

ROWS, SEQ_LEN = 8, 4096
BATCHES = 8
#: As in Qwen3-30B-A3B.
EXPERTS = RoutedExperts(layers=48, top_k=8, experts=128)
POSITIONS = ROWS * SEQ_LEN


def run():
    random = np.random.default_rng(0)
    column = {EXPERTS.name: EXPERTS.column}
    batches = [[answers(random) for _ in range(ROWS)] for _ in range(BATCHES)]
    plain = [[Row(row.slices, source="web") for row in rows] for rows in batches]
    assemble = BatchAssembler(SEQ_LEN)
    whole = [choose(random, POSITIONS) for _ in range(BATCHES)]
    layers = range(EXPERTS.layers)

    def assembly(calls, rows=plain, columns=()):
        for number in range(calls):
            assemble(rows[number % BATCHES], ["web"], dict(columns))

    def assembly_with(calls):
        assembly(calls, batches, column)

    def copy(calls):
        for number in range(calls):
            whole[number % BATCHES].copy()

    def check(calls):
        for number in range(calls):
            assert find_fault(whole[number % BATCHES], EXPERTS.experts, layers) is None

    file = io.BytesIO()
    np.save(file, whole[0][: SEQ_LEN - 1].astype(np.uint8))
    sent = base64.b64encode(file.getvalue()).decode()

    def read(calls):
        for _ in range(calls):
            EXPERTS.read_npy(sent, SEQ_LEN)

    contenders = {
        f"writing a batch of [{ROWS}, {SEQ_LEN}] without them": assembly,
        "writing it with them": assembly_with,
        "copying their bytes": copy,
        "checking them before a step": check,
        f"reading those of an answer of {SEQ_LEN} tokens from vLLM": read,
    }
    times = microseconds(contenders, calls=2 * BATCHES, rounds=7, clock=time.process_time)
    table = [(name, f"{times[name] / 1000:.2f}") for name in contenders]
    size = POSITIONS * EXPERTS.column.item_bytes
    title = f"Experts of {EXPERTS.layers} layers, {EXPERTS.top_k} each: {size / 1e6:.0f} MB a batch"
    return markdown(title, ("", "processor time, ms"), table)


def answers(random):
    """Return a row of answers with their experts, from places of their own."""
    slices, experts, space = [], [], SEQ_LEN
    while space:
        length = min(int(random.lognormal(6.2, 1.1)) + 1, space)
        slices.append(random.integers(0, 50_000, length))
        experts.append(choose(random, length))
        space -= length
    return Row(slices, source="web", columns={EXPERTS.name: experts})


def choose(random, tokens):
    """Return different experts for each token and layer."""
    first = random.integers(0, EXPERTS.experts, (tokens, EXPERTS.layers, 1))
    steps = np.arange(EXPERTS.top_k) * (EXPERTS.experts // EXPERTS.top_k)
    return ((first + steps) % EXPERTS.experts).astype(np.int16)
