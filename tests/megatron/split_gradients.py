# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loss and the whole gradient of a step: of a split model, and of one model without packing.

A split model trains on packed rows with Megatron's schedules, wrappers and counts. The expected
values come from autograd over a model that reads one sequence at a time.
"""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

from energon_ext.megatron import (
    forward_step,
    get_batch,
    make_loss_func,
    mean_losses,
)
from energon_ext.megatron.context_parallel import context_parallel_positions
from tests.megatron.small_gpt import documents_of, megatron, small_config, small_model
from tests.megatron.small_training import SGD, run_schedule, trainable

#: Name -> sizes of model parallelism on two ranks
LAYOUTS = {
    "data parallel": {},
    "pipeline parallel": {"pipeline_model_parallel_size": 2},
    "tensor parallel": {"tensor_model_parallel_size": 2},
}


def step_of(batches, sizes, **options):
    """Train one step on this replica's micro-batches.

    Returns:
        Its ``loss``, unless another rank computes it, the ``norm`` that the optimizer clips, the
        ``parts`` of the gradient on this rank, and whether the weights are ``finite`` afterwards.
    """
    model, optimizer = trainable(small_config(**sizes), clip_grad=1.0, **SGD)
    replicas = parallel_state.get_data_parallel_world_size()
    own = batches[parallel_state.get_data_parallel_rank() :: replicas]
    reports = run_schedule(model, own, functools.partial(forward_step, **options))
    gradients = [parameter.main_grad.clone() for parameter in model.parameters()]
    _, norm, _ = optimizer.step()
    finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    parts = _gradient_parts(model.module, gradients)
    return {**mean_losses(reports), "norm": norm, "finite": finite, "parts": parts}


def expected_of(loss_of, all_words=False):
    """Return loss and whole gradient of ``loss_of(read)``, on one rank.

    Args:
        loss_of: a function of ``read``, which returns the log-probabilities of ``tokens[1:]``.
        all_words: it returns those of all words in each place, [tokens - 1, words].
    """
    with megatron():
        model = small_model(small_config())

        def read(tokens):
            places = torch.arange(len(tokens) - 1)
            logits = model(tokens[None, :-1], places[None], None)[0]
            log_probs = torch.log_softmax(logits, -1)
            return log_probs if all_words else log_probs.gather(1, tokens[1:, None])[:, 0]

        loss = loss_of(read)
        loss.backward()
        parts = _gradient_parts(model, [parameter.grad for parameter in model.parameters()])
    return loss.item(), _join([parts])


def read_alone(read, batch):
    """Return the log-probabilities of the labels, [N], of segments that are read one by one."""
    found = torch.zeros(batch.num_tokens)
    for place in documents_of(batch):
        tokens = batch.tokens[place]
        if len(tokens) > 1:
            found[place] = F.pad(read(tokens), (0, 1))
    return found


def assert_equal_steps(found, expected):
    """Compare what the ranks returned with the loss and every element of the gradient."""
    loss, gradient = expected
    with_loss = [rank["loss"] for rank in found if "loss" in rank]
    assert with_loss and with_loss == pytest.approx([loss] * len(with_loss), abs=2e-6)
    joined = _join([rank["parts"] for rank in found])
    assert joined.keys() == gradient.keys()
    norm = math.sqrt(sum(each.double().square().sum().item() for each in gradient.values()))
    for name, wanted in gradient.items():
        assert torch.allclose(joined[name], wanted, rtol=0, atol=1e-6 * max(1, norm)), name
    for rank in found:
        assert rank["finite"]
        assert rank["norm"] == pytest.approx(norm, rel=1e-5, abs=1e-7)


def _gradient_parts(model, gradients):
    """Return the (name, shape, begin, values) of this rank's parts, in whole matrices."""
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients):
            parameter.copy_(gradient)
    sharded = model.sharded_state_dict()
    apply_factories(sharded)
    return [
        (shard.key, shard.global_shape, shard.global_offset, shard.data.tolist())
        for shard in nested_values(sharded)
        if isinstance(shard, ShardedTensor)
    ]


def _join(ranks):
    """Return each whole gradient by name; ranks that have the same part must agree."""
    whole = {}
    for name, shape, begin, values in (part for parts in ranks for part in parts):
        values = torch.tensor(values)
        # The first axes number the layers that share a name.
        sizes = [*[1] * (len(shape) - values.dim()), *values.shape]
        place = tuple(slice(first, first + size) for first, size in zip(begin, sizes))
        target = whole.setdefault(name, torch.full(shape, math.nan))[place]
        known = ~target.isnan()
        assert torch.equal(target[known], values.view(sizes)[known]), name
        target.copy_(values.view(sizes))
    assert whole and not any(bool(each.isnan().any()) for each in whole.values())
    return whole


# Context parallelism: attention over several ranks needs a GPU, so the loss alone ----------------


def log_probs_of(batch):
    """Return log-probabilities of the labels with a gradient, the same on all ranks."""
    return torch.linspace(-5, -4, batch.num_tokens).requires_grad_()


def context_parallel_part(batch, **options):
    """Return this rank's loss, its count, and its part of the gradient by the log-probabilities."""
    log_probs = log_probs_of(batch)
    part = get_batch(iter([batch]))
    ends = batch.cu_seqlens if batch.cu_seqlens_padded is None else batch.cu_seqlens_padded
    rank = parallel_state.get_context_parallel_rank()
    places = context_parallel_positions(ends, 2, rank)
    loss, count, _ = make_loss_func(part, **options)(-log_probs[places][None])
    loss.backward()
    return loss.item(), count.item(), log_probs.grad.tolist()


def assert_equal_parts(parts, losses, log_probs):
    """Compare the parts of two ranks with the loss of each counted position or pair."""
    sum(losses).backward()
    assert sum(loss for loss, *_ in parts) == pytest.approx(sum(losses).item(), abs=1e-5)
    assert sum(count for _, count, _ in parts) == len(losses)
    total = torch.tensor([gradient for *_, gradient in parts]).sum(0)
    assert torch.allclose(total, log_probs.grad, atol=1e-6)
    assert all(torch.tensor(gradient).any() for *_, gradient in parts)
