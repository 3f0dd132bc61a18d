# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows of a step are balanced so that no rank waits for another."""

import json

import numpy as np
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from energon_ext import ConfigError, PackedTaskEncoder
from energon_ext.encoders.splice import MultiSpliceTaskEncoder
from energon_ext.packing import BestFitPacker, Pieces
from energon_ext.plan.cost import AttentionCost, VisionCost
from energon_ext.plan.topology import Topology, balance
from energon_ext.splice import MultiSpliceConfig
from tests.plan.runs import SEQ_LEN, Run, write_split
from tests.plan.test_topology import ROWS, blend, check_equal_everywhere, entry
from tests.plan.test_topology import data as data
from tests.support import LargeTokenizer

#: Attention alone, so that the costs of rows differ as much as possible.
SQUARES = AttentionCost(linear=0, quadratic=1)


def encoder(balance="attention", cost=SQUARES):
    return PackedTaskEncoder(LargeTokenizer(), SEQ_LEN, balance=balance, cost=cost)


def micro_batch_costs(costs, order, topology):
    """Return the cost of each micro-batch, [rounds, ranks], if rows are assigned in ``order``."""
    even = np.empty((topology.rounds, topology.ranks))
    for rank in range(topology.ranks):
        of_rank = Topology(
            topology.rows_per_step, topology.batch_rows, topology.ranks, rank, topology.workers
        )
        for number in range(topology.rounds):
            even[number, rank] = sum(costs[order[place]] for place in of_rank.rows_of(number))
    return even


# Balancing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_row_is_dealt_once(ranks, batch):
    topology = Topology(12 * batch, batch, ranks)
    costs = np.random.default_rng(0).random(12 * batch)
    order = balance(costs, topology)
    assert sorted(order.tolist()) == list(range(12 * batch))
    assert order.tolist() == balance(costs, topology).tolist()


def test_expensive_rows_are_paired_with_cheap_ones():
    """Rows of 8, 7, 2, 1 on two ranks: 8 + 1 and 7 + 2, the expensive ones in one round."""
    topology = Topology(rows_per_step=4, ranks=2)
    order = balance(np.array([1.0, 8.0, 2.0, 7.0]), topology)
    assert micro_batch_costs([1.0, 8.0, 2.0, 7.0], order, topology).tolist() == [[8, 7], [1, 2]]


def test_rows_of_equal_cost_keep_their_order():
    """On every machine: sorting must be stable."""
    alone = Topology(rows_per_step=64)
    odd, even = list(range(1, 64, 2)), list(range(0, 64, 2))
    assert balance(np.array([1.0, 2.0] * 32), alone).tolist() == odd + even
    for ranks in (1, 2, 4):
        topology = Topology(rows_per_step=64, ranks=ranks)
        assert balance(np.full(64, 3.0), topology).tolist() == list(range(64))


def test_batches_of_several_rows_cost_about_the_same():
    topology = Topology(rows_per_step=8, batch_rows=2, ranks=2)
    costs = np.array([8.0, 7, 6, 5, 4, 3, 2, 1])
    found = micro_batch_costs(costs, balance(costs, topology), topology)
    assert found.sum() == 36
    assert found.max() - found.min() <= 1


def packed_costs(documents, seq_len, cost, seed=0):
    lengths = np.exp(np.random.default_rng(seed).normal(6.2, 1.2, documents)).astype(np.int64)
    lengths = lengths.clip(1, 200_000)
    numbers = np.arange(documents)
    plan = BestFitPacker(seq_len).plan(Pieces.none(), Pieces.whole(numbers, lengths))
    sizes = plan.pieces.stops - plan.pieces.starts
    return np.diff(np.cumsum(cost(sizes))[plan.ends - 1], prepend=0.0)


@pytest.mark.parametrize("seq_len", [8192, 32768])
def test_ranks_share_a_step_of_web_like_rows_evenly(seq_len):
    """64 ranks of 8 micro-batches: the busiest is within 2 % of the mean, or as good as possible.

    The lower bound is the most expensive row with the seven cheapest ones.
    """
    topology = Topology(rows_per_step=512, ranks=64)
    costs = packed_costs(30_000, seq_len, AttentionCost())
    for first in range(0, len(costs) - 511, 512):
        step = costs[first : first + 512]
        even = micro_batch_costs(step, balance(step, topology), topology)
        natural = micro_batch_costs(step, np.arange(512), topology)
        least = step.max() + np.sort(step)[:7].sum()
        assert even.sum(0).max() <= max(1.02 * step.sum() / 64, least * (1 + 1e-12))
        assert even.sum(0).max() <= natural.sum(0).max()
        even_wait, natural_wait = ((c.max(1) / c.mean(1)).mean() - 1 for c in (even, natural))
        assert even_wait < natural_wait / 2


# Costs --------------------------------------------------------------------------------------------


def test_a_token_attends_to_itself_and_all_before_it_in_its_document():
    lengths = np.array([1, 2, 5])
    by_hand = [sum(3 + 2 * (t + 1) for t in range(n)) for n in lengths]
    assert AttentionCost(3, 2)(lengths).tolist() == by_hand
    window = [sum(3 + 2 * min(t + 1, 2) for t in range(n)) for n in lengths]
    assert AttentionCost(3, 2, window=2)(lengths).tolist() == window


DENSE = {"num_layers": 3, "hidden_size": 32, "num_attention_heads": 4}
MODELS = {
    "dense": DENSE,
    "grouped queries, gated": {
        **DENSE,
        "num_query_groups": 2,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "ffn_hidden_size": 80,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_linear_cost_is_two_operations_per_weight_of_the_real_model(name):
    from tests.megatron import small_gpt

    config = TransformerConfig(
        **MODELS[name],
        add_bias_linear=False,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    from energon_ext.megatron import gpt_layer_spec

    with small_gpt.megatron():
        layers = small_gpt.GPTModel(
            config=config,
            transformer_layer_spec=gpt_layer_spec(config),
            vocab_size=64,
            max_sequence_length=32,
        ).decoder
        weights = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    cost = AttentionCost.of_model(config, vocab_size=64)
    assert cost.linear == 2 * (weights + 32 * 64)
    # Per layer and channel: the products of queries and keys, and of scores and values.
    assert cost.quadratic == 3 * 2 * 2 * 32


class NoProducts(torch.nn.Module):
    def __init__(self, *args, **options):
        super().__init__()


@pytest.mark.parametrize("q_lora_rank", [None, 12])
def test_linear_cost_of_latent_attention_is_two_operations_per_weight(q_lora_rank, monkeypatch):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from tests.megatron import small_gpt

    config = MLATransformerConfig(
        **DENSE,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=16,
        qk_head_dim=8,
        qk_pos_emb_head_dim=4,
        v_head_dim=6,
        add_bias_linear=False,
        use_cpu_initialization=True,
        rope_type="rope",
    )
    # Megatron-core assumes Transformer Engine if its module can be imported.
    monkeypatch.setattr(multi_latent_attention, "HAVE_TE", False)
    spec = get_gpt_layer_local_spec(multi_latent_attention=True)
    # Core attention has no weights; the version without Transformer Engine takes no key channels.
    spec.submodules.self_attention.submodules.core_attention = NoProducts
    with small_gpt.megatron():
        layers = small_gpt.GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=64,
            max_sequence_length=32,
        ).decoder
        weights = sum(p.numel() for p in layers.parameters() if p.dim() == 2)
    cost = AttentionCost.of_model(config)
    assert cost.linear == 2 * weights
    # Per layer and head: products of 8 + 4 key channels and 6 value channels.
    assert cost.quadratic == 2 * 3 * 4 * (8 + 4 + 6)


def test_a_moe_token_costs_only_the_experts_it_is_routed_to():
    config = TransformerConfig(
        **DENSE, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=16, moe_layer_freq=[0, 1]
    )
    # Projections 4 * 32 * 32; MLP of 128 in layers 0 and 2, two experts of 16 in layer 1.
    weights = 3 * 4 * 32 * 32 + (128 + 2 * 16 + 128) * 32 * 2
    assert AttentionCost.of_model(config).linear == 2 * weights


#: Of the size of Nemotron-H 8B.
HYBRID = TransformerConfig(
    num_layers=52,
    hidden_size=4096,
    ffn_hidden_size=21504,
    num_attention_heads=32,
    num_query_groups=8,
    mamba_num_heads=128,
    mamba_head_dim=64,
    mamba_state_dim=128,
    mamba_num_groups=8,
    is_hybrid_model=True,
)
HYBRID_PATTERN = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"


def test_the_layers_of_a_hybrid_model_are_counted_by_its_pattern():
    assert [HYBRID_PATTERN.count(kind) for kind in "M-*"] == [24, 24, 4]
    attention = 4 * 4096 * (32 + 2 * 8 + 32) * 128
    mlps = 24 * 2 * 4096 * 21504
    into, out, state = 2 * 8192 + 2 * 8 * 128 + 128, 8192, 2 * 8192 * 128
    state_spaces = 24 * (4096 * (into + out) + state)
    output = 4096 * 131_072
    cost = AttentionCost.of_model(HYBRID, 131_072, HYBRID_PATTERN)
    assert cost.linear == 2 * (attention + mlps + state_spaces + output)
    assert cost.quadratic == 2 * 4 * 2 * 4096  # 4 layers, scores and values
    one, many = cost(np.array([32_768]))[0], cost(np.full(32, 1024)).sum()
    assert round(1 - 32_768 * cost.linear / one, 3) == 0.066  # the share of attention
    assert round(one / many, 3) == round((1.5225e10 + 1.0737e9) / (1.5225e10 + 3.36e7), 3) == 1.068
    # With attention in each of 52 layers it would be a third, and rows would be balanced by it.
    layers = AttentionCost.of_model(HYBRID, 131_072, "*-" * 52)
    assert 1 - 32_768 * layers.linear / layers(np.array([32_768]))[0] > 0.3


def test_experts_and_later_tokens_of_a_pattern_are_counted():
    config = TransformerConfig(
        **DENSE, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=16, is_hybrid_model=True
    )
    cost = AttentionCost.of_model(config, pattern="*-|*E/*E")
    assert cost.linear == 2 * (3 * 4 * 32 * 32 + (128 + 2 * (2 * 16)) * 32 * 2)
    assert cost.quadratic == 2 * 3 * 2 * 32


def test_a_hybrid_model_whose_layers_are_unknown_is_refused():
    with pytest.raises(ConfigError, match="hybrid_layer_pattern as pattern"):
        AttentionCost.of_model(HYBRID)
    with pytest.raises(ConfigError, match=r"layers \['G'\] of the pattern 'G-\*-' are not counted"):
        AttentionCost.of_model(HYBRID, pattern="G-*-")


@pytest.mark.parametrize("gated", [True, False])
def test_a_patch_costs_two_operations_per_weight_and_attends_to_its_whole_image(gated):
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.models.vision.multimodal_projector import MultimodalProjector
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_local_spec
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.mlp import MLPSubmodules

    from energon_ext.megatron.attention import TorchNorm
    from tests.megatron import small_gpt

    options = {"add_bias_linear": False, "use_cpu_initialization": True, "gated_linear_unit": gated}
    vision = TransformerConfig(**DENSE, **options)
    vision.vision_model_type = "clip"
    sizes = {"num_layers": 1, "hidden_size": 48, "num_attention_heads": 1, "ffn_hidden_size": 20}
    projection = TransformerConfig(**sizes, **options)
    norms = {"ln_pre_impl": TorchNorm, "ln_post_impl": TorchNorm}
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    with small_gpt.megatron():
        encoder = CLIPViTModel(vision, get_vit_layer_with_local_spec(), **norms)
        projector = MultimodalProjector(projection, mlp, "mlp", 32)
        weights, projection_weights = (
            sum(p.numel() for p in module.parameters() if p.dim() == 2)
            for module in (encoder.decoder, projector)
        )
    assert VisionCost.of_model(vision).linear == 2 * weights
    cost = VisionCost.of_model(vision, projection)
    # Per layer and channel: the products of queries and keys, and of scores and values.
    assert cost.linear == 2 * (weights + projection_weights)
    assert cost.quadratic == 3 * 2 * 2 * 32
    assert cost(np.array([5])).tolist() == [cost.linear * 5 + cost.quadratic * 25]
    frozen = VisionCost.of_model(vision, projection, frozen=True)
    assert frozen(np.array([5, 7])) * 3 == pytest.approx(cost(np.array([5, 7])))


def test_fields_that_megatron_core_fills_in_may_be_missing():
    """A configuration that was not finalised lacks them."""
    filled = TransformerConfig(
        **DENSE, num_moe_experts=4, moe_router_topk=2, moe_shared_expert_intermediate_size=24
    )
    expected = AttentionCost.of_model(filled, 64)
    for field, value in {
        "kv_channels": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 128,
        "moe_ffn_hidden_size": 128,
    }.items():
        assert getattr(filled, field) == value
        setattr(filled, field, None)
        assert AttentionCost.of_model(filled, 64) == expected, field
    # Every layer: projections 4 * 32 * 32; two experts of 128 and a shared one of 24.
    weights = 3 * (4 * 32 * 32 + (2 * 128 + 24) * 32 * 2)
    assert expected == AttentionCost(2.0 * (weights + 64 * 32), 2.0 * 3 * 2 * 32, None)
    filled.window_size, filled.moe_layer_freq = (9, 0), 3  # experts in every third layer
    found = AttentionCost.of_model(filled)
    weights -= 2 * (2 * 128 + 24 - 128) * 32 * 2
    assert (found.linear, found.window) == (2 * weights, 10)


# Runs ---------------------------------------------------------------------------------------------


def test_balancing_changes_no_step_and_no_state_on_any_topology(data):
    path = blend(data)
    check_equal_everywhere(path, encoder(), [(2, 0, 4), (8, 0, 1), (1, 2, 2)])
    natural, even = Run(path, rows=ROWS), Run(path, encoder=encoder(), ranks=4, rows=ROWS)
    for _ in range(6):
        assert even.step() == natural.step()
        assert json.loads(even.state())["plan"] == json.loads(natural.state())["plan"]


def squares(batch):
    """Return the sum of squared lengths of the attention segments of a batch."""
    positions = batch.position_ids.tolist()
    starts = [n for n, p in enumerate(positions) if p == 0 or n % SEQ_LEN == 0]
    lengths = np.diff([*starts, len(positions)])
    return float((lengths * (lengths + 1) / 2).sum())


def spread(run):
    """Return the cost of the heaviest rank over the mean, for each of six steps."""
    iterators = [iter(loader) for loader in run.loaders]
    ratios = []
    for _ in range(6):
        ranks = [sum(squares(next(i)) for _ in range(run.rounds)) for i in iterators]
        ratios.append(max(ranks) / np.mean(ranks))
    return np.array(ratios)


def test_balanced_steps_spread_the_load_more_evenly_over_ranks(data):
    path = blend(data)
    natural = spread(Run(path, ranks=4, rows=ROWS))
    even = spread(Run(path, ranks=4, rows=ROWS, encoder=encoder()))
    assert (even < natural).all()
    assert even.max() < 1.06 < natural.mean()


@pytest.mark.parametrize("pack_contents", [False, True])
def test_spliced_rows_are_balanced_too(data, pack_contents):
    splice = MultiSpliceConfig(num_docs=8, content_length=11, pack_contents=pack_contents)
    node = {"blend": [entry("a"), entry("b", subflavors={"splice": True})]}
    mix = write_split(data / "splice.yaml", node)
    spliced = MultiSpliceTaskEncoder(
        LargeTokenizer(), SEQ_LEN, splice, spliced_subflavors={"splice": True}, balance="attention"
    )
    check_equal_everywhere(mix, spliced, [(4, 0, 2)])


def test_an_unknown_balance_is_refused():
    with pytest.raises(ConfigError, match="balance: 'tokens' found, 'attention' or None"):
        encoder(balance="tokens")
