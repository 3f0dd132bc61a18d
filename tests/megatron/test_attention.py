# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A packed batch is its documents, each run alone; the real GPTModel, dense and MoE."""

import inspect
import math
from types import SimpleNamespace

import megatron.core
import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import L2Norm
from megatron.core.transformer.transformer_config import TransformerConfig

from energon_ext import ConfigError
from energon_ext.megatron import attention, gpt_layer_spec
from energon_ext.megatron.attention import SegmentAttention, TorchNorm
from tests.megatron.small_gpt import (
    MOE,
    VOCABULARY,
    documents_of,
    run_packed,
    small_config,
    small_model,
    synthetic_batch,
)

pytestmark = pytest.mark.usefixtures("one_rank")

ARCHITECTURES = {
    "dense": {},
    "layer norm and qk norm": {"normalization": "LayerNorm", "qk_layernorm": True},
    "moe": MOE,
    "moe on every second layer": {**MOE, "moe_layer_freq": [0, 1]},
}


def document_logits(model, tokens):
    return model(tokens[None], torch.arange(len(tokens), device=tokens.device)[None], None)[0]


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_packed_batch_equals_its_documents_alone(architecture, place):
    model = place.model(**ARCHITECTURES[architecture])
    batch = synthetic_batch(seed=1).to(place.device)
    pick = torch.randn(batch.num_tokens, VOCABULARY, generator=torch.Generator().manual_seed(2))
    pick = pick.to(place.device)
    parts = documents_of(batch)
    assert len(parts) >= 4

    packed = run_packed(model, batch)
    alone = [document_logits(model, batch.tokens[part]) for part in parts]
    place.check_close([packed[part] for part in parts], alone, rtol=0, atol=1e-5)
    packed_loss = sum((packed[part] * pick[part]).mean() for part in parts)
    alone_loss = sum((logits * pick[part]).mean() for part, logits in zip(parts, alone))
    packed_gradients = gradients(model, packed_loss)
    place.check_close(packed_gradients, gradients(model, alone_loss), rtol=0, atol=1e-5)


# The tokens of an expert are one matrix, and how a row of it is rounded depends on its size.
@pytest.mark.parametrize(("architecture", "tolerance"), [("dense", 0), ("moe", 1e-12)])
def test_perturbing_one_document_leaves_the_others_unchanged(architecture, tolerance):
    model = small_model(small_config(**ARCHITECTURES[architecture])).double()
    batch = synthetic_batch(seed=3)
    changed, *others = documents_of(batch)
    with torch.no_grad():
        before = run_packed(model, batch)
        batch.tokens[changed] = (batch.tokens[changed] + 1) % VOCABULARY
        after = run_packed(model, batch)
    assert (before[changed] - after[changed]).abs().max() > 1e-3
    for other in others:
        torch.testing.assert_close(before[other], after[other], rtol=0, atol=tolerance)


def slow_attention(query, key, value, segment_ends, scale):
    """One position at a time, in double precision."""
    heads_per_group = query.shape[1] // key.shape[1]
    output = torch.zeros_like(query, dtype=torch.float64)
    for start, end in zip(segment_ends, segment_ends[1:]):
        for position in range(start, end):
            for head in range(query.shape[1]):
                group = head // heads_per_group
                keys = key[start : position + 1, group].double()
                scores = keys @ query[position, head].double() * scale
                output[position, head] = (
                    scores.softmax(0) @ value[start : position + 1, group].double()
                )
    return output.flatten(-2).float()


def random_query_key_value(positions=11, heads=4, groups=2, channels=8):
    generator = torch.Generator().manual_seed(5)
    return [
        torch.randn(positions, count, channels, generator=generator)
        for count in (heads, groups, groups)
    ]


def packed_params(ends, device="cpu"):
    ends = torch.tensor(ends, dtype=torch.int32, device=device)
    longest = int(ends.diff().max())
    return PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)


def test_segment_attention_is_causal_attention_inside_each_segment():
    core = SegmentAttention(small_config(), 1, None, "self")
    query, key, value = random_query_key_value()
    ends = [0, 4, 5, 11]
    expected = slow_attention(query, key, value, ends, scale=1 / math.sqrt(8))
    found = core(query, key, value, packed_seq_params=packed_params(ends))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_packed", [True, False])
def test_groups_give_the_results_and_gradients_of_repeated_keys_and_values(is_packed, place):
    core = SegmentAttention(small_config(), 1, None, "self")
    params = packed_params([0, 4, 5, 11], place.device) if is_packed else None
    found = []
    for is_repeated in (True, False):
        inputs = [
            each.to(place.device, place.dtype).requires_grad_()
            for each in random_query_key_value(heads=8, channels=64)
        ]
        query, key, value = inputs
        if is_repeated:
            key, value = (each.repeat_interleave(4, dim=1) for each in (key, value))
        each = [x if is_packed else x[:, None] for x in (query, key, value)]
        output = core(*each, packed_seq_params=params)
        output.square().sum().backward()
        found.append([output.detach(), *(x.grad for x in inputs)])
    repeated, grouped = found
    place.check_close(grouped, repeated, rtol=0, atol=1e-5)


def test_without_packing_every_sequence_is_one_segment():
    core = SegmentAttention(small_config(), 1, None, "self", softmax_scale=0.5)
    query, key, value = random_query_key_value(positions=10)
    ends = [0, 5, 10]
    expected = slow_attention(query, key, value, ends, scale=0.5)
    two_sequences = (x.view(2, 5, *x.shape[1:]).transpose(0, 1) for x in (query, key, value))
    found = core(*two_sequences)  # [s, b, ...]
    torch.testing.assert_close(found.transpose(0, 1).flatten(0, 1), expected, rtol=0, atol=1e-6)


def test_padded_segment_ends_win_over_unpadded_ones():
    core = SegmentAttention(small_config(), 1, None, "self")
    query, key, value = random_query_key_value(positions=8)
    params = packed_params([0, 3, 7])
    params.cu_seqlens_q_padded = torch.tensor([0, 4, 8], dtype=torch.int32)
    expected = slow_attention(query, key, value, [0, 4, 8], scale=1 / math.sqrt(8))
    found = core(query, key, value, packed_seq_params=params)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_the_varlen_kernel_is_used_if_available(monkeypatch):
    calls, real = [], attention.varlen_attn
    on_gpu = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    has_kernel = attention._has_varlen_kernel(on_gpu)

    def kernel(query, key, value, ends_q, ends_k, max_q, max_k, *, scale, window_size, **groups):
        calls.append((max_q, max_k, window_size))
        assert (query.shape[1], key.shape[1], value.shape[1]) == (4, 2, 2)  # not repeated
        if has_kernel:
            inspect.signature(real).bind(
                query, key, value, ends_q, ends_k, max_q, max_k,
                scale=scale, window_size=window_size, **groups,
            )  # fmt: skip
        assert ends_q.dtype == ends_k.dtype == torch.int32
        return slow_attention(query, key, value, ends_q.tolist(), scale).view_as(query)

    monkeypatch.setattr(attention, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "_has_varlen_kernel", lambda query: True)
    core = SegmentAttention(small_config(), 1, None, "self")
    query, key, value = random_query_key_value()
    found = core(query, key, value, packed_seq_params=packed_params([0, 4, 11]))
    monkeypatch.undo()
    expected = core(query, key, value, packed_seq_params=packed_params([0, 4, 11]))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
    assert calls == [(7, 7, (-1, 0))]


def test_the_kernel_is_for_half_precision_on_gpus_only():
    def tensor(is_cuda, dtype):
        return SimpleNamespace(is_cuda=is_cuda, dtype=dtype)

    has_kernel = "window_size" in attention._KERNEL_OPTIONS  # not in torch 2.10
    assert attention._has_varlen_kernel(tensor(True, torch.bfloat16)) is has_kernel
    assert not attention._has_varlen_kernel(tensor(True, torch.float32))
    assert not attention._has_varlen_kernel(tensor(False, torch.bfloat16))


def test_masks_are_refused_and_not_ignored():
    core = SegmentAttention(small_config(), 1, None, "self")
    mask = torch.ones(1, 1, 11, 11, dtype=torch.bool)
    with pytest.raises(ConfigError, match="takes no attention mask"):
        core(*random_query_key_value(), attention_mask=mask)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("attention_dropout", 0.1),
        ("window_size", (8, 0)),
        ("softmax_type", "learnable"),
        ("layernorm_zero_centered_gamma", True),
    ],
)
def test_features_of_transformer_engine_are_refused_without_it(field, value):
    with pytest.raises(ConfigError, match=f"{field}=.* needs Transformer Engine"):
        gpt_layer_spec(small_config(**{field: value}))


def test_context_parallelism_is_refused():
    config = small_config()
    config.context_parallel_size = 2
    with pytest.raises(ConfigError, match="context_parallel_size=2"):
        gpt_layer_spec(config)


@pytest.mark.skipif(
    not hasattr(TransformerConfig, "qk_l2_norm"), reason="megatron-core 0.15.0 has no L2 norms"
)
def test_l2_norms_follow_the_config():
    block = gpt_layer_spec(small_config(qk_layernorm=True, qk_l2_norm=True))
    submodules = block.layer_specs[0].submodules.self_attention.submodules
    assert submodules.q_layernorm is submodules.k_layernorm is L2Norm


@pytest.fixture
def router_without_its_global(monkeypatch):
    """With a GPU, ``enable_cpu`` does not set what the router of megatron-core 0.16 reads."""
    monkeypatch.delattr(moe_utils, "te_general_gemm", raising=False)


@pytest.mark.usefixtures("router_without_its_global")
def test_experts_whose_router_would_fail_are_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(megatron.core, "__version__", "0.16.1")
    with pytest.raises(ConfigError) as error:
        gpt_layer_spec(small_config(**MOE))
    assert str(error.value) == (
        "TransformerConfig.num_moe_experts=4: without Transformer Engine the router of "
        "megatron-core 0.16.1 ends with a NameError (te_general_gemm); use megatron-core 0.17 or "
        "later, or install Transformer Engine."
    )


@pytest.mark.usefixtures("router_without_its_global")
def test_other_models_and_versions_are_not_refused(monkeypatch):
    monkeypatch.setattr(megatron.core, "__version__", "0.16.1")
    gpt_layer_spec(small_config())
    monkeypatch.setattr(megatron.core, "__version__", "0.19.2")
    gpt_layer_spec(small_config(**MOE))


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_norms_are_marked_for_sequence_parallelism(normalization):
    config = small_config(
        normalization=normalization, tensor_model_parallel_size=2, sequence_parallel=True
    )
    norm = TorchNorm(config, hidden_size=8, eps=1e-3)
    assert type(norm).__name__ == normalization
    assert norm.eps == 1e-3
    assert all(parameter.sequence_parallel for parameter in norm.parameters())
