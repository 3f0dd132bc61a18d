# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a loop must do before it can run the micro-batches of a layout."""

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.errors import ConfigError
from energon_ext.megatron import (
    create_context_groups,
    draw_step,
    follow_context_groups,
    forward_step,
    get_batch,
    measure_context_times,
)
from energon_ext.megatron.gathered_attention import attend_over_ranks
from tests.megatron.small_gpt import BALANCED_MOE, megatron, small_config, small_model

pytestmark = pytest.mark.skipif(
    not hasattr(PackedSeqParams, "cp_group"), reason="megatron-core 0.15 takes no group of a batch"
)


def batch_of(size):
    row = Row([np.arange(9)], source="web", documents=1)
    batch = BatchAssembler(16, alignment=2 * size)([row], ["web"])
    batch.context_size = size
    return batch


@pytest.fixture(autouse=True)
def one_rank():
    with megatron():
        yield


def test_a_batch_for_a_group_that_was_not_created_is_refused():
    with pytest.raises(ConfigError, match=r"for 2 context-parallel ranks was drawn, .*groups"):
        get_batch(iter([batch_of(2)]))


def test_a_model_that_does_not_follow_the_groups_is_refused():
    model = small_model(small_config())
    with pytest.raises(ConfigError, match=r"call energon_ext\.megatron\.follow_context_groups"):
        forward_step(iter([batch_of(1)]), model)
    follow_context_groups(model)
    output, _ = forward_step(iter([batch_of(1)]), model)
    assert output.shape == (1, 16)


def test_blocks_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ConfigError, match="blocks of 2 ranks do not divide 1 data-parallel ranks"):
        create_context_groups((1, 2))


def test_models_that_need_whole_documents_are_refused():
    with pytest.raises(ConfigError, match="moe_aux_loss_coeff=0.5 found"):
        follow_context_groups(small_model(small_config(**BALANCED_MOE)))


def test_virtual_stages_of_two_pipeline_stages_are_refused_before_the_first_batch():
    model = small_model(small_config())
    sizes = (
        parallel_state.set_pipeline_model_parallel_world_size,
        parallel_state.set_virtual_pipeline_model_parallel_world_size,
    )
    message = "virtual_pipeline_model_parallel_size: 2 found; .* with two pipeline stages, where"
    try:
        for set_size in sizes:
            set_size(2)
        with pytest.raises(ConfigError, match=message):
            follow_context_groups(model)
    finally:
        for set_size in sizes:
            set_size(None)
    follow_context_groups(model)


def test_a_step_needs_a_loader_on_the_rank_that_loads():
    with pytest.raises(ConfigError, match="draw_step: tensor-parallel rank 0 has no loader"):
        draw_step(None)


def test_a_wrapped_model_is_not_measured(tmp_path):
    wrapped = torch.nn.Module()
    wrapped.module = small_model(small_config())
    with pytest.raises(ConfigError, match="a Module found; measure the model before it is wrapped"):
        measure_context_times(wrapped, tmp_path / "times", sizes=(1,), budget=8)


def test_default_measurements_fill_the_budget(tmp_path):
    model = small_model(small_config())
    follow_context_groups(model)
    times = measure_context_times(model, tmp_path / "times", sizes=(1,), budget=32, repeats=1)
    assert [each.lengths for each in times] == [[32], [16], [4], [4] * 8, [1] * 32]


def test_gathered_attention_on_one_rank_is_plain_attention():
    """Written out: softmax of the scores of earlier positions of the same segment."""
    random = torch.Generator().manual_seed(0)
    query = torch.randn(6, 2, 4, generator=random)
    key, value = torch.randn(2, 6, 1, 4, generator=random)
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    found = attend_over_ranks(query, key, value, ends, torch.distributed.group.WORLD, 0.5)
    for position in range(6):
        first = 0 if position < 2 else 2
        for head in range(2):
            scores = 0.5 * key[first : position + 1, 0] @ query[position, head]
            expected = scores.softmax(0) @ value[first : position + 1, 0]
            assert found[position, 4 * head : 4 * head + 4].allclose(expected, atol=1e-6)
