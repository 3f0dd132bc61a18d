# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The log of a Megatron-LM run on one rank: its file, its boards and the hashes of its steps.

``test_inside_megatron_lm.py`` runs it on several ranks inside the real loop.
"""

import functools
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from energon_ext.batch.row_hashes import StepHash, hash_of_parts
from energon_ext.megatron.lm.log import DataLog
from energon_ext.metrics.file import Run
from energon_ext.plan.lookup import find_blend
from tests.megatron.small_gpt import model_parallel
from tests.megatron.small_training import run_ranks
from tests.megatron.test_megatron_lm import launch as launch
from tests.megatron.test_megatron_lm import launch_arguments, pretend_megatron_lm, provide
from tests.megatron.test_megatron_lm import mix as mix
from tests.megatron.test_megatron_lm import planned as planned

STEPS = 4


class RecordedRun:
    """Stands in for the module wandb, whose run Megatron-LM has started."""

    def __init__(self):
        self.logged, self.settings = [], {}
        self.config = SimpleNamespace(
            update=lambda new, allow_val_change: self.settings.update(new)
        )

    def log(self, scalars, step):
        self.logged.append((step, scalars))


def log_steps(args, folder, **options):
    """Log some steps; return their batches, the lines of the file, and both boards."""
    loader = provide()
    vars(args).update(energon_run_dir=str(folder), tensorboard_log_interval=1, **options)
    writer, wandb = SummaryWriter(folder / "boards"), RecordedRun()
    training = sys.modules["megatron.training"]
    training.get_tensorboard_writer, training.get_wandb_writer = lambda: writer, lambda: wandb
    log, steps = DataLog(loader, args), []
    for iteration in range(1, STEPS + 1):
        steps.append([next(loader) for _ in range(args.global_batch_size)])
        log.step({"lm loss": torch.tensor(2.5)}, iteration)
    writer.close()
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    boards = EventAccumulator(str(folder / "boards")).Reload()
    return steps, lines, boards, wandb, find_blend(loader.loader)


def test_each_step_has_the_hash_of_its_rows_in_the_file_and_on_boards(launch, planned, tmp_path):
    launch.data_path = [str(planned)]
    steps, (start, *lines), boards, wandb, blend = log_steps(launch, tmp_path)
    expected = []
    for batches in steps:
        rows = StepHash()
        for batch in reversed(batches):
            rows.add(batch, 32)
        expected.append(hash_of_parts(rows.take()))
    assert [line["batch_hash"] for line in lines] == expected and len(set(expected)) == STEPS
    assert Run.load(tmp_path).batch_hash == tuple(expected)
    shown = [scalar.value for scalar in boards.Scalars("data/batch_hash")]
    assert len(set(shown)) == STEPS and all(value == int(value) for value in shown)
    assert [scalars["data/batch_hash"] for _, scalars in wandb.logged] == shown
    assert start["data_digest"] == blend.data_digest == wandb.settings["data/digest"]
    (text,) = boards.Tensors("data/digest/text_summary")
    assert text.tensor_proto.string_val == [blend.data_digest.encode()]
    for key in blend.keys:
        counted = sum(batch.tokens_per_source().get(key, 0) for each in steps for batch in each)
        assert boards.Scalars(f"data/tokens/{key}")[-1].value == counted
        assert sum(line["tokens"].get(key, 0) for line in lines) == counted


@pytest.mark.parametrize("is_hashed", [True, False])
def test_hashes_can_be_switched_off(launch, planned, tmp_path, is_hashed):
    launch.data_path = [str(planned)]
    _, (_, *lines), boards, _, _ = log_steps(launch, tmp_path, energon_batch_hash=is_hashed)
    assert all(bool(line["batch_hash"]) is is_hashed for line in lines)
    assert ("data/batch_hash" in boards.Tags()["scalars"]) is is_hashed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # file left open
def test_a_later_run_of_the_process_without_a_log_writes_none(launch, planned, tmp_path):
    training = sys.modules["megatron.training"]
    training.get_tensorboard_writer = training.get_wandb_writer = lambda: None
    training.training.training_log = lambda loss_dict: "logged"
    launch.data_path, launch.tensorboard_log_interval = [str(planned)], 1
    for folder, lines in ((str(tmp_path), 2), (None, 2)):
        launch.energon_run_dir = folder
        loader = provide()
        for _ in range(launch.global_batch_size):
            next(loader)
        assert training.training.training_log({"lm loss": torch.tensor(2.5)}) == "logged"
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == lines


LAYOUTS = {"data": {}, "tensor": {"tensor_model_parallel_size": 2}}


def log_on_two_ranks(mix, folder):
    """Log some steps on these ranks, as data-parallel and as tensor-parallel ones."""
    for name, sizes in LAYOUTS.items():
        args = launch_arguments(mix, f"{folder}/{name}/data")
        vars(args).update(energon_run_dir=None, tensorboard_log_interval=1)
        pretend_megatron_lm(args)
        training = sys.modules["megatron.training"]
        training.get_tensorboard_writer = training.get_wandb_writer = lambda: None
        with model_parallel(**sizes):
            loader = provide()
            args.energon_run_dir = f"{folder}/{name}"
            log = DataLog(loader, args)
            for iteration in range(1, STEPS + 1):
                for _ in range(args.global_batch_size // (1 if sizes else 2)):
                    if loader is not None:
                        next(loader)
                log.step({"lm loss": torch.tensor(2.5)}, iteration)


def test_the_hash_of_a_step_does_not_depend_on_ranks(launch, planned, tmp_path):
    run_ranks(2, functools.partial(log_on_two_ranks, str(planned), str(tmp_path)), tmp_path)
    launch.data_path = [str(planned)]
    _, (start, *lines), *_ = log_steps(launch, tmp_path / "alone")
    for name in LAYOUTS:
        other, *others = map(json.loads, (tmp_path / name / "metrics.jsonl").open())
        assert other["data_digest"] == start["data_digest"]
        for field in ("batch_hash", "tokens", "documents", "planned_share"):
            assert [each[field] for each in others] == [each[field] for each in lines], field
