# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Positions as the batch gives them: an offset of a segment changes nothing, a jump inside does."""

from dataclasses import replace

import pytest
import torch
from megatron.core.models.gpt import GPTModel

from energon_ext import ConfigError
from energon_ext.megatron import build_packed_seq_params, gpt_layer_spec, rope_by_position_ids
from tests.megatron.small_gpt import (
    SEQ_LEN,
    VOCABULARY,
    run_packed,
    small_config,
    small_model,
    synthetic_batch,
)

pytestmark = pytest.mark.usefixtures("one_rank")

CONFIGS = {"halves": {}, "interleaved": {"rotary_interleaved": True}}


def logits(model, batch, position_ids=None):
    batch = batch if position_ids is None else replace(batch, position_ids=position_ids)
    with torch.no_grad():
        return run_packed(model, batch)


def make_models(config):
    stock, ours = (small_model(small_config(**config)) for _ in range(2))
    rope_by_position_ids(ours)
    return stock, ours


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_positions_from_zero_match_megatron(config):
    stock, ours = make_models(config)
    batch = synthetic_batch(1)
    torch.testing.assert_close(logits(ours, batch), logits(stock, batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_moving_a_whole_segment_changes_nothing(config):
    stock, ours = make_models(config)
    batch = synthetic_batch(1)
    moved = batch.position_ids + 100 * torch.repeat_interleave(
        torch.arange(len(batch.source_ids)), batch.segment_lengths().long()
    )
    torch.testing.assert_close(logits(ours, batch, moved), logits(stock, batch), rtol=0, atol=1e-5)


def test_a_jump_inside_a_segment_changes_only_the_rest_of_it():
    stock, ours = make_models({})
    batch = synthetic_batch(1)
    end = int(batch.cu_seqlens[1])
    jumped = batch.position_ids.clone()
    jumped[2:end] += 7
    before, after = logits(ours, batch), logits(ours, batch, jumped)
    assert torch.equal(before[:2], after[:2])
    assert ((before[2:end] - after[2:end]).abs().amax(1) > 1e-3).all()
    assert torch.equal(before[end:], after[end:])
    # Megatron's own module does not look.
    assert torch.equal(logits(stock, batch), logits(stock, batch, jumped))


def test_unpacked_sequences_may_have_their_own_positions():
    _, ours = make_models({})
    tokens = torch.arange(4, 12)[None].repeat(2, 1)
    straight = torch.arange(8)
    positions = torch.stack([straight, straight * 3])
    with torch.no_grad():
        together = ours(tokens, positions, None)
        alone = [ours(tokens[:1], each[None], None)[0] for each in positions]
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=1e-5)
    assert (alone[0] - alone[1]).abs().max() > 1e-3


def test_positions_can_be_passed_by_name_and_the_state_has_no_new_keys():
    stock, ours = make_models({})
    batch = synthetic_batch(1)
    with torch.no_grad():
        named = ours(
            input_ids=batch.tokens[None],
            position_ids=batch.position_ids[None],
            attention_mask=None,
            packed_seq_params=build_packed_seq_params(batch),
        )[0]
    assert torch.equal(named, logits(ours, batch))
    assert set(ours.state_dict()) == set(stock.state_dict())
    assert set(ours.sharded_state_dict()) == set(stock.sharded_state_dict())


def test_positions_are_interpolated_like_megatrons():
    def model():
        config = small_config()
        torch.manual_seed(0)
        return GPTModel(
            config,
            gpt_layer_spec(config),
            VOCABULARY,
            SEQ_LEN,
            position_embedding_type="rope",
            seq_len_interpolation_factor=4.0,
        )

    stock, ours = model(), model()
    ours.load_state_dict(stock.state_dict())
    rope_by_position_ids(ours)
    batch = synthetic_batch(1)
    torch.testing.assert_close(logits(ours, batch), logits(stock, batch), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("model", "position_embedding_type", "yarn"),
        ("config", "apply_rope_fusion", True),
        ("config", "multi_latent_attention", True),
        ("config", "context_parallel_size", 2),
    ],
)
def test_models_without_position_ids_are_refused(where, name, value):
    model = small_model(small_config())
    setattr(model if where == "model" else model.config, name, value)
    with pytest.raises(ConfigError, match=f"rope_by_position_ids: {name}={value!r}"):
        rope_by_position_ids(model)
