# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The real loaders of three out of 16,384 ranks, with a thousand sources.

Every rank plans the rows of all ranks and reads its own, so a few ranks show the work of each one.
Steps have 16,384 rows of 8192 tokens, and a third of the weights change. The run is saved after
every step, and resumed on 1024 ranks with 16 rows per batch. The states of all ranks must be equal,
and so must those of the resumed run.
"""

import json
import tempfile
import time
from pathlib import Path

from corpora import AnyTokens
from megatron.energon import WorkerConfig
from scale import write_pairs
from timing import draw, fresh_process, markdown

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.plan.lookup import find_blend

SEQ_LEN, ROWS, SOURCES, STEPS = 8192, 16384, 1000, 12
RANKS, OTHER_RANKS = (0, 8191, 16383), (0, 1023)


def run():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "data"
        folder.mkdir()
        write_pairs(folder, SOURCES, 5000)
        rules = "blend", "interleave"
        rows = [(rule, *fresh_process(measure, write_mix(folder, rule))) for rule in rules]
    header = (
        "",
        "first batch, s",
        "step, s",
        "µs per row",
        "state, MB",
        "save, ms",
        "resume on 1024 ranks, s",
        "furthest from its share, rows",
    )
    title = f"{ROWS:,} ranks, {SOURCES:,} sources, {STEPS} steps of {ROWS:,} rows"
    return markdown(
        title, header, [(rule, *row) for rule, row in zip(("blend", "interleave"), rows)]
    )


def write_mix(folder, rule):
    entries = [
        {
            "path": str(path.with_suffix("")),
            "weight": {"cosine": {0: 1, 10: 3}} if number % 3 == 0 else 1.0 + number % 5,
        }
        for number, path in enumerate(sorted(folder.glob("*.idx")))
    ]
    head = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path = folder.with_name(f"{rule}.yaml")
    path.write_text(json.dumps({**head, "splits": {"train": {rule: entries}}}))
    return path


def measure(path):
    """Return the columns of the table."""
    begin = time.perf_counter()
    loaders = [loader_of(path, rank, ROWS, 1) for rank in RANKS]
    iterators = [iter(loader) for loader in loaders]
    for iterator in iterators:
        next(iterator)
    first = (time.perf_counter() - begin) / len(RANKS)
    seconds, saves, states = [], [], [equal_states(loaders)]
    for _ in range(1, STEPS):
        begin = time.perf_counter()
        for iterator in iterators:
            next(iterator)
        seconds.append((time.perf_counter() - begin) / len(RANKS))
        begin = time.perf_counter()
        states.append(equal_states(loaders))
        saves.append((time.perf_counter() - begin) / len(RANKS))
    begin = time.perf_counter()
    others = [loader_of(path, rank, OTHER_RANKS[-1] + 1, 16) for rank in OTHER_RANKS]
    for loader in others:
        loader.load_state_dict(json.loads(states[STEPS // 2]))
    others = [(loader, iter(loader)) for loader in others]
    for _, iterator in others:
        next(iterator)
    resume = (time.perf_counter() - begin) / len(others)
    for loader, iterator in others:
        draw(iterator, STEPS - STEPS // 2 - 2)
        assert json.dumps(loader.state_dict(), sort_keys=True) == states[-1]
    step = sorted(seconds)[len(seconds) // 2]
    return (
        round(first, 2),
        round(step, 2),
        round(1e6 * step / ROWS, 1),
        round(len(states[-1]) / 1e6, 2),
        round(1e3 * min(saves)),
        round(resume, 2),
        round(furthest(find_blend(loaders[0].dataset), list(map(json.loads, states))), 2),
    )


def loader_of(path, rank, ranks, batch_rows):
    dataset = get_train_dataset(
        path,
        worker_config=WorkerConfig(rank=rank, world_size=ranks, num_workers=0),
        batch_size=batch_rows,
        task_encoder=PackedTaskEncoder(AnyTokens(), SEQ_LEN),
    )
    return ExactDataLoader(dataset)


def equal_states(loaders):
    """Return the state as JSON text, after checking that it is the same on all ranks."""
    states = {json.dumps(loader.state_dict(), sort_keys=True) for loader in loaders}
    assert len(states) == 1, "ranks disagree"
    return states.pop()


def furthest(blend, states):
    """Return the largest deviation of any source from its share after any step, in rows."""
    due, worst = dict.fromkeys(blend.keys, 0.0), 0.0
    before = dict.fromkeys(blend.keys, 0)
    for step, state in enumerate(states):
        tokens = {key: each["tokens"] for key, each in state["plan"]["sources"].items()}
        drawn = sum(tokens.values()) - sum(before.values())
        for key, share in blend.shares_at_step(step).items():
            due[key] += share * drawn
            worst = max(worst, abs(tokens[key] - due[key]))
        before = tokens
    return worst / SEQ_LEN
