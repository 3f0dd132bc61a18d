# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loss of a GPTModel in chunks of positions on two ranks.

The expected values come from the hidden states and the joined weight of the output layer, by the
formula in double precision; the gradients of all other weights from Megatron's whole logits.
"""

import pytest
import torch
import torch._dynamo
import torch.distributed as dist

from energon_ext.errors import ConfigError
from energon_ext.megatron import forward_step, slice_for_context_parallel
from tests.megatron.small_gpt import (
    megatron,
    model_parallel,
    small_config,
    small_model,
    synthetic_batch,
)
from tests.megatron.small_training import run_ranks, run_schedule
from tests.megatron.test_context_parallel import LENGTHS, aligned_batch

TENSOR = {"tensor_model_parallel_size": 2}

#: Name -> (sizes of model parallelism, configuration of the model, whether embeddings are tied)
LAYOUTS = {
    "tensor parallel": (TENSOR, {}, False),
    "tensor parallel, tied": (TENSOR, {}, True),
    "tensor and sequence parallel": (TENSOR, {"sequence_parallel": True}, False),
    "tensor and sequence parallel, tied": (TENSOR, {"sequence_parallel": True}, True),
    "tensor parallel, native fusion": (TENSOR, {"cross_entropy_loss_fusion": True}, False),
    "context parallel": ({"context_parallel_size": 2}, {}, False),
    "pipeline parallel, tied": ({"pipeline_model_parallel_size": 2}, {}, True),
}
CHUNK = 5  # neither 64 positions nor the 32 of a sequence-parallel rank are a multiple of it


def batch_of(sizes):
    return aligned_batch(LENGTHS, 2) if "context_parallel_size" in sizes else synthetic_batch(0)


def run(sizes, config, tied, chunk):
    """Return losses, hidden states, their gradient and those of all weights on this rank."""
    model = small_model(small_config(**sizes, **config), tied=tied)
    seen = {}

    def keep(layer, arguments):
        (hidden,) = arguments
        hidden.retain_grad()
        seen["hidden"] = hidden

    if model.post_process:
        model.output_layer.register_forward_pre_hook(keep)

    def step(data_iterator, model):
        output, loss_func = forward_step(data_iterator, model, loss_chunk=chunk)
        seen["output"] = output
        return output, loss_func

    run_schedule(model, [batch_of(sizes)], step)
    result = {"gradients": [each.grad.tolist() for each in model.parameters()]}
    if model.post_process:
        hidden = seen["hidden"]
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        result |= {
            "losses": seen["output"].flatten().tolist(),
            "hidden": _gather(hidden.detach(), config).tolist(),
            "hidden gradient": _gather(hidden.grad, config).tolist(),
            "weight": weight.tolist(),
            "weight gradient": weight.grad.tolist(),
            "own methods left": "forward" in vars(model.output_layer),
        }
    return result


def _gather(values, config):
    """Return the values of all positions, which sequence parallelism splits."""
    if not config.get("sequence_parallel"):
        return values[:, 0]
    parts = [torch.empty_like(values) for _ in range(2)]
    dist.all_gather(parts, values.contiguous())
    return torch.cat(parts)[:, 0]


def on_two_ranks():
    # Megatron's fused cross-entropy is compiled, and the compiler does not know enable_cpu.
    torch._dynamo.config.disable = True
    results = {}
    for name, (sizes, config, tied) in LAYOUTS.items():
        with model_parallel(**sizes):
            results[name] = [run(sizes, config, tied, chunk) for chunk in (CHUNK, None)]
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(2, on_two_ranks, tmp_path_factory.mktemp("ranks"))


def assert_close(found, expected):
    found, expected = torch.tensor(found).double(), torch.as_tensor(expected).double()
    scale = expected.abs().max()
    assert found.shape == expected.shape
    assert (found - expected).abs().max() <= 1e-6 * scale


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_and_gradients_are_those_of_the_formula(layout, ranks):
    found = [rank[layout][0] for rank in ranks if "losses" in rank[layout][0]]
    assert len(found) == (1 if "pipeline" in layout else 2)
    if layout == "context parallel":
        for rank, each in enumerate(found):
            check([each], slice_for_context_parallel(aligned_batch(LENGTHS, 2), 2, rank), layout)
    else:
        check(found, synthetic_batch(0), layout)


def check(found, batch, layout):
    """Compare ranks that have the same positions, and each a part of the words, with the formula.

    The schedule divides gradients by the count later.
    """
    weight = torch.tensor(sum([each["weight"] for each in found], [])).double().requires_grad_()
    hidden = torch.tensor(found[0]["hidden"]).double().requires_grad_()
    log_probs = torch.log_softmax(hidden @ weight.T, -1)
    losses = -log_probs.gather(1, batch.labels[:, None])[:, 0]
    (losses * batch.token_weights).sum().backward()
    for each in found:
        assert_close(each["losses"], losses.detach())
        assert not each["own methods left"]
    if "fusion" in layout:
        return  # Megatron rounds this gradient to bfloat16, of whole logits as well
    for each in found:
        assert_close(each["hidden gradient"], hidden.grad)
    if layout == "pipeline parallel, tied" or "tied" not in layout:
        assert_close(sum([each["weight gradient"] for each in found], []), weight.grad)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_gradient_is_that_of_whole_logits(layout, ranks):
    for rank in ranks:
        chunked, whole = rank[layout]
        assert chunked["gradients"]
        for found, expected in zip(chunked["gradients"], whole["gradients"], strict=True):
            assert_close(found, expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"mtp_num_layers": 1}, "mtp_num_layers: multi-token prediction"),
        (
            {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"},
            "cross_entropy_fusion_impl='linear' has no logits; use one of native, te",
        ),
        ({"defer_embedding_wgrad_compute": True}, "defer_embedding_wgrad_compute: each chunk"),
    ],
)
def test_what_cannot_be_computed_in_chunks_is_refused_by_name(config, message):
    with megatron():
        model = small_model(small_config())
        vars(model.config).update(config)
        with pytest.raises(ConfigError, match=f"loss_chunk=8: {message}"):
            forward_step(iter([synthetic_batch(0)]), model, loss_chunk=8)
