# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Models that predict later tokens too learn them inside a document only."""

import numpy as np
import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import multi_token_prediction

from energon_ext import ConfigError
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.megatron import forward_step, gpt_layer_spec, mtp_block_spec
from tests.megatron.example_code import initialize_weights
from tests.megatron.small_gpt import MTP_NEEDS_TRANSFORMER_ENGINE, small_config

pytestmark = [MTP_NEEDS_TRANSFORMER_ENGINE, pytest.mark.usefixtures("one_rank")]

#: Three documents and two positions of padding; the label 31 has no weight.
ROW = Row(
    [np.array([10, 11, 12, 13]), np.array([20, 21, 22]), np.array([30, 31, 32])],
    label_weights=[np.array([1, 1, 1, 1]), np.array([1, 1, 1]), np.array([1, 0, 1])],
)


@pytest.fixture
def batch():
    return BatchAssembler(12)([ROW], sources=[""])


@pytest.fixture
def model():
    config = small_config(mtp_num_layers=2)
    layers = gpt_layer_spec(config)
    model = GPTModel(
        config,
        layers,
        64,
        12,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        mtp_block_spec=mtp_block_spec(config, layers),
    )
    initialize_weights(model, 0)
    return model


def test_later_tokens_are_weighted_labels_of_the_same_document(model, batch, monkeypatch):
    """Where every loss is 1, what Megatron takes for a loss of later tokens is the mask, scaled."""
    labels, losses = [], []

    def one_everywhere(these, logits):
        labels.append(these[0].tolist())
        return torch.ones_like(these, dtype=torch.float32) + 0 * logits.sum()

    def record(hidden, these):
        losses.append(these[0].tolist())
        return hidden

    monkeypatch.setattr(model, "compute_language_model_loss", one_everywhere)
    monkeypatch.setattr(multi_token_prediction.MTPLossAutoScaler, "apply", record)
    forward_step(iter([batch]), model)
    second, third = (
        [(position, label) for position, (label, loss) in enumerate(zip(*depth)) if loss]
        for depth in zip(labels, losses)
    )
    assert second == [(0, 12), (1, 13), (4, 22), (7, 32)]
    assert third == [(0, 13)]


def test_the_first_prediction_is_the_same_without_the_others(model, batch):
    config = small_config()
    plain = GPTModel(
        config,
        gpt_layer_spec(config),
        64,
        12,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )
    initialize_weights(plain, 0)
    expected, _ = forward_step(iter([batch]), plain)
    found, _ = forward_step(iter([batch]), model)
    assert torch.equal(found, expected)


def test_a_weight_scale_is_refused(model, batch):
    with pytest.raises(ConfigError, match="Multi-token prediction needs weight_scale=1, got 8"):
        forward_step(iter([batch]), model, weight_scale=8)
