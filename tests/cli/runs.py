# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Metrics of made-up runs, for the tests of the report."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path

SEQ_LEN = 256
ROWS_PER_STEP = 8


def planned_share(batch_index: int, sources: Sequence[str]) -> dict[str, float]:
    """Return shares: the first source fades out, the second enters at batch 40."""
    weights = [max(1.0, 8.0 - batch_index / 12), 6.0 * (batch_index >= 40)]
    weights += [1.5] * (len(sources) - 2)
    return {key: weight / sum(weights) for key, weight in zip(sources, weights)}


def write_run(
    run_dir: Path,
    *,
    steps: int = 150,
    sources: Sequence[str] = (
        "../demo/data/prose:train",
        "../demo/data/code:train",
        "../demo/data/docs:train",
    ),
    resumed_after: Sequence[int] = (),
) -> Path:
    """Write ``metrics.jsonl`` like a training run with this number of steps.

    Args:
        run_dir: created.
        steps: optimizer steps.
        sources: keys, at least two.
        resumed_after: steps after which another process continues.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    start = {
        "event": "start",
        "sources": list(sources),
        "documents": {key: 40 * (index + 1) for index, key in enumerate(sources)},
        "rows_per_step": ROWS_PER_STEP,
        "config": {"seed": 1, "packing": "bin"},
    }
    events = [{**start, "step": 0}]
    for step in range(1, steps + 1):
        if step - 1 in resumed_after:
            events.append({"event": "end", "step": step - 1, "reason": "stopped"})
            events.append({**start, "step": step - 1})
        events.append(_step(step, sources))
    events.append({"event": "end", "step": steps, "reason": "finished"})
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return run_dir


def _step(step: int, sources: Sequence[str]) -> dict:
    chance = random.Random(step)
    planned = planned_share(step - 1, sources)
    rows = chance.choices(sources, [planned[key] for key in sources], k=ROWS_PER_STEP)
    loss = {
        key: 2.2 + 0.3 * index % 1 + 3.4 * math.exp(-step / 35) + chance.gauss(0, 0.06)
        for index, key in enumerate(sources)
        if key in rows
    }
    return {
        "event": "step",
        "step": step,
        "batch_index": step - 1,
        "loss": sum(loss[key] for key in rows) / len(rows),
        "tokens_per_second": 24000.0 + chance.gauss(0, 900),
        "planned_share": planned,
        "tokens": {key: rows.count(key) * SEQ_LEN for key in loss},
        "documents": {key: chance.randrange(2) for key in loss},
        "loss_by_source": loss,
        "batch_hash": f"{step:064x}",
    }
