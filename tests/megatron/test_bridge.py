# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The recipe inside the real Megatron-Bridge: it trains, evaluates, is saved and resumed."""

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from energon_ext import PackedTaskEncoder, SFTTaskEncoder, get_train_dataset
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron import processes
from tests.support import batch_hash, config, loader_for, take, write_mix, write_tokens

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.bridge") is None,
        reason="Megatron-Bridge is not installed: pip install megatron-bridge, for Python 3.12",
    ),
]

ROWS, STEPS, SECONDS = 4, 6, 600


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name, animals in {"a": ("cat", "dog"), "b": ("cow", "hen", "pig")}.items():
        texts = [f"The {animal} sat on the mat. " * 3 for animal in animals] * 20
        write_tokens(folder / name, [ByteTokenizer().encode(text) for text in texts])
    path = write_mix(folder / "mix.yaml", [("a", {"linear": {0: 3, 6: 1}}), ("b", 1)])
    validation = '"val": {"blend": [{"path": "a"}, {"path": "b"}]}'
    path.write_text(path.read_text().replace('"splits": {', f'"splits": {{{validation}, '))
    return path


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chats")
    records = [{"prompt": f"{n} + 1 =" * (n % 3 + 1), "response": f" {n + 1}."} for n in range(80)]
    (folder / "chats.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    path = write_mix(folder / "chats.yaml", [("chats.jsonl", 1)])
    validation = '"val": {"blend": [{"path": "chats.jsonl"}]}'
    path.write_text(path.read_text().replace('"splits": {', f'"splits": {{{validation}, '))
    return path


def bridge(folder, mix, tensor, stages, last, *pretrained):
    """Run Bridge up to an iteration, with the checkpoints in a folder.

    It calls `pretrain`, or with a folder of pretrained weights `finetune`.
    """
    folder.mkdir(exist_ok=True)
    started = []
    port, ranks = processes.free_port(), tensor * stages
    for rank in range(ranks):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks}
        master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables = {name: str(value) for name, value in {**place, **master}.items()}
        arguments = [folder / "drawn", mix, tensor, stages, last, folder / "checkpoints"]
        arguments += pretrained
        command = [sys.executable, "-m", "tests.megatron.bridge_on_cpu", *map(str, arguments)]
        with open(folder / f"log.{rank}", "w") as log:
            options = {"stdout": log, "stderr": log, "env": {**os.environ, **variables}}
            started.append(subprocess.Popen(command, cwd=Path(__file__).parents[2], **options))
    try:
        codes = [process.wait(SECONDS) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert codes == [0] * ranks, (folder / "log.0").read_text()[-3000:]


def drawn(folder, ranks):
    """Return the batches that each rank drew, by kind and iteration, counted."""
    found = []
    for rank in range(ranks):
        lines = [line.split() for line in (folder / f"drawn.{rank}").read_text().splitlines()]
        kinds = {(kind, int(iteration)) for kind, iteration, _ in lines}
        found.append(
            {
                (kind, n): Counter(batch for k, i, batch in lines if (k, int(i)) == (kind, n))
                for kind, n in kinds
            }
        )
    return found


def planned(mix, task_encoder=PackedTaskEncoder):
    """Return the batches of each iteration as planned without Bridge."""
    encoder = task_encoder(ByteTokenizer(), 64)
    options = {"worker_config": config(seed=1234), "batch_size": 1, "rows_per_step": ROWS}
    loader = loader_for(get_train_dataset(mix, task_encoder=encoder, **options))
    hashes = [batch_hash(batch) for batch in take(loader, ROWS * STEPS)]
    return {step + 1: Counter(hashes[ROWS * step :][:ROWS]) for step in range(STEPS)}


@pytest.mark.parametrize(
    ("tensor", "stages"), [(1, 1), (2, 1), (1, 2)], ids=["one rank", "tensor", "virtual stages"]
)
def test_every_iteration_reads_the_rows_of_the_plan_over_a_resume(mix, tmp_path, tensor, stages):
    for last in (3, STEPS):
        bridge(tmp_path, mix, tensor, stages, last)
    chunks = 2 if stages > 1 else 1  # each virtual stage of a rank asks for the micro-batch
    expected = planned(mix)
    for found in drawn(tmp_path, tensor * stages):
        for step in range(1, STEPS + 1):
            batches = {batch: chunks * count for batch, count in expected[step].items()}
            assert found["train", step] == batches
        evaluations = [found["val", step + 1] for step in (3, STEPS)]
        assert evaluations[0] == evaluations[1]  # the same rows in each
        assert sum(evaluations[0].values()) == chunks * ROWS


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (1, 2)], ids=["one rank", "stages"])
def test_rows_grow_by_schedule_over_a_resume(mix, tmp_path, tensor, stages):
    """Rows of 16 positions, of 32 from step 2 on and of 64 from step 4 on; saved after step 3."""
    growing = mix.with_name("growing.yaml")
    fields = {"row_tokens": {"step": {0: 16, 2: 32, 4: 64}}}
    growing.write_text(json.dumps(json.loads(mix.read_text()) | fields))
    for last in (3, STEPS):
        bridge(tmp_path, growing, tensor, stages, last)
    chunks = 2 if stages > 1 else 1
    expected = planned(growing)
    assert expected[1] != planned(mix)[1]
    for found in drawn(tmp_path, tensor * stages):
        for step in range(1, STEPS + 1):
            batches = {batch: chunks * count for batch, count in expected[step].items()}
            assert found["train", step] == batches
        assert sum(found["val", STEPS + 1].values()) == chunks * ROWS


@pytest.mark.parametrize(("tensor", "stages"), [(1, 1), (2, 1)], ids=["one rank", "tensor"])
def test_adapters_are_fine_tuned_on_the_chats_of_the_plan_over_a_resume(
    mix, chats, tmp_path, tensor, stages
):
    """The steps are balanced, which moves no row to another step."""
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    bridge(base, mix, tensor, stages, 3)
    for last in (3, STEPS):
        bridge(tuned, chats, tensor, stages, last, base / "checkpoints")
    expected = planned(chats, SFTTaskEncoder)
    for found in drawn(tuned, tensor * stages):
        assert [found["train", step] for step in range(1, STEPS + 1)] == [*expected.values()]
        assert sum(found["val", STEPS + 1].values()) == ROWS
