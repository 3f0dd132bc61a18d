# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The losses of documents in real steps of a GPTModel, against each document alone."""

import functools
import sys
from collections import Counter

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import (
    destroy_num_microbatches_calculator,
    init_num_microbatches_calculator,
)
from megatron.core.rerun_state_machine import get_rerun_state_machine

from energon_ext import ConfigError
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.columns import NUMBERS
from energon_ext.batch.rows import Row
from energon_ext.megatron import DocumentLossLog, forward_step, make_loss_func
from energon_ext.metrics.document_losses import DocumentLosses
from tests.megatron.pretend_gpu import pretend_gpu
from tests.megatron.small_gpt import (
    VOCABULARY,
    model_parallel,
    small_config,
    small_model,
)
from tests.megatron.small_training import position_losses, run_ranks, run_schedule
from tests.megatron.test_megatron_lm import launch as launch
from tests.megatron.test_megatron_lm import mix as mix
from tests.megatron.test_megatron_lm import planned as planned
from tests.megatron.test_megatron_lm import provide
from tests.megatron.test_no_waiting import Model

LENGTHS = [5, 9, 12, 3, 17, 8, 6, 11, 4, 13, 7, 10]
SEQ_LEN, MICRO_BATCHES = 36, 4


def document(number):
    tokens = np.random.default_rng(number).integers(4, VOCABULARY, LENGTHS[number])
    weights = np.where(np.arange(LENGTHS[number]) % 4 == 3, 0.0, 2.0)
    return tokens, weights


def batch_of(numbers, row_of=3):
    """Return a batch of whole documents, some per row, which context parallelism can cut."""
    rows = []
    for first in range(0, len(numbers), row_of):
        own = numbers[first : first + row_of]
        slices, weights = zip(*map(document, own))
        columns = {"document": list(map(np.int64, own)), "visit": [np.int32(0)] * len(own)}
        rows.append(Row([*slices], "web", label_weights=weights, columns=columns))
    return BatchAssembler(SEQ_LEN, alignment=4)(rows, ["code", "web"], NUMBERS)


def micro_batches():
    numbers = range(len(LENGTHS))
    return [batch_of(numbers[first::MICRO_BATCHES]) for first in range(MICRO_BATCHES)]


def write_step(run_dir, sizes):
    """Run one step on these ranks, and write the losses of its documents."""
    with model_parallel(**sizes):
        model = small_model(small_config(**sizes))
        replica = parallel_state.get_data_parallel_rank()
        batches = micro_batches()[replica :: parallel_state.get_data_parallel_world_size()]
        with DocumentLossLog(run_dir) as log:
            log.add(1, run_schedule(model, batches))


def check(run_dir):
    """Compare what was written with each document alone, on one rank."""
    model, expected = small_model(small_config()), {}
    for number in range(len(LENGTHS)):
        batch = batch_of([number])
        losses = torch.tensor(position_losses(model, batch))[batch.token_weights != 0]
        expected[number] = pytest.approx(losses.mean().item(), abs=1e-5), len(losses)
    found = DocumentLosses(run_dir).highest(100)
    assert {each.document: (each.mean, each.tokens) for each in found} == expected
    assert {each.source for each in found} == {"web"}


def test_documents_in_rows_and_micro_batches_have_the_loss_of_each_alone(one_rank, tmp_path):
    parallel_state.destroy_model_parallel()
    write_step(tmp_path, {})
    parallel_state.initialize_model_parallel()
    check(tmp_path)


#: Sizes, and the files that the ranks write.
LAYOUTS = {
    "data": ({}, 2),
    "tensor": ({"tensor_model_parallel_size": 2}, 1),
    "pipeline": ({"pipeline_model_parallel_size": 2}, 1),
    "context": ({"context_parallel_size": 2}, 2),
}


def write_all(folder):
    for name, (sizes, _) in LAYOUTS.items():
        write_step(folder / name, sizes)
    return True


@pytest.mark.nightly
def test_two_ranks_write_each_document_once(one_rank, tmp_path):
    run_ranks(2, functools.partial(write_all, tmp_path), tmp_path)
    for name, (_, files) in LAYOUTS.items():
        check(tmp_path / name)
        assert len([*(tmp_path / name).glob("document_losses/*/*")]) == files


def test_losses_of_documents_wait_for_nothing(one_rank):
    batch = batch_of([0, 1, 2])
    with pretend_gpu() as counts:
        output, loss_func = forward_step(iter([batch]), Model())
        report = loss_func(output)[2]
    assert counts.found() == {"syncs": {}, "collectives": {}, "copies": {"in the background": 1}}
    assert report["document losses"].shape == (len(batch.source_ids), 5)


def test_batches_without_numbers_are_refused_by_name(one_rank, tmp_path):
    with (
        DocumentLossLog(tmp_path) as log,
        pytest.raises(ConfigError, match="document_numbers=True"),
    ):
        log.add(1, [{"lm loss": torch.zeros(2)}])


@pytest.fixture
def eight_micro_batches():
    init_num_microbatches_calculator(0, None, 8, 1, 1)
    yield 8
    destroy_num_microbatches_calculator()


def test_a_run_of_megatron_lm_writes_them_and_a_save_has_them(
    launch, planned, eight_micro_batches, tmp_path
):
    vars(launch).update(
        data_path=[str(planned)], energon_document_losses=True, tensorboard_log_interval=1
    )
    with pytest.raises(ConfigError, match="--energon-run-dir must be given, for --energon-doc"):
        provide()
    launch.energon_run_dir = str(tmp_path / "run")
    modules, expected = sys.modules["megatron.training"], Counter()
    modules.get_tensorboard_writer = modules.get_wandb_writer = lambda: None

    def run_twice(loader):  # as if the result of the first time were rejected
        batches = [next(loader) for _ in range(eight_micro_batches)]
        for _ in range(2):
            for batch in batches:
                make_loss_func(batch)(torch.ones(1, batch.num_tokens))
        for batch in batches:
            numbers, ends = batch.segments["document"].tolist(), batch.cu_seqlens.tolist()
            for source, number, *place in zip(batch.source_ids.tolist(), numbers, ends, ends[1:]):
                expected[source, number] += int(batch.token_weights[slice(*place)].sum())
        return {"lm loss": torch.tensor(1.0)}, 0

    modules.training.train_step = lambda forward_step_func: run_twice(forward_step_func)
    modules.checkpointing.maybe_save_dataloader_state = lambda train_iterator: "saved"
    loader = provide()
    for step in (1, 2):
        get_rerun_state_machine().current_iteration = step
        modules.training.train_step(loader)
        assert modules.checkpointing.maybe_save_dataloader_state(loader) == "saved"
        found = DocumentLosses(tmp_path / "run").highest(10**6)
        sources = loader.blend.keys
        assert {(sources.index(each.source), each.document): each.tokens for each in found} == dict(
            +expected
        )
        assert all(each.mean == 1 for each in found)
    assert {each.last for each in found} == {1, 2}
