# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A micro-batch on its way to the GPU: nothing asks the GPU, and one message joins the ranks."""

import functools
import types

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from energon_ext.losses import Distillation, dpo_loss
from energon_ext.megatron import forward_step, mean_losses, replay_experts
from tests.megatron.forced_routing import NEEDS_REPLAY, REPLAYED_MOE, with_experts
from tests.megatron.pretend_gpu import OnGpu, pretend_gpu
from tests.megatron.small_gpt import model_parallel, small_config, small_model, synthetic_batch
from tests.megatron.small_training import run_ranks
from tests.megatron.test_context_parallel import LENGTHS, aligned_batch
from tests.pair_rows import batch_of, random_pair, row_of

LAYOUTS = {
    "one rank": {},
    "tensor parallel": {"tensor_model_parallel_size": 2},
    "context parallel": {"context_parallel_size": 2},
}
MICRO_BATCHES = 4


class Model(torch.nn.Module):
    """Takes what a ``GPTModel`` with experts takes; what such a model waits for is not counted."""

    pre_process = True
    config = types.SimpleNamespace(
        num_moe_experts=4,
        moe_aux_loss_coeff=0.0,
        moe_z_loss_coeff=0.0,
        mtp_num_layers=None,
        sequence_parallel=False,
    )

    def forward(
        self, tokens, position_ids, mask, labels, packed_seq_params, padding_mask=None, **_
    ):
        inputs = tokens, position_ids, labels, packed_seq_params.cu_seqlens_q, padding_mask
        assert all(isinstance(each, OnGpu) for each in inputs)
        return labels.float() * 0.01


def counted(ranks):
    """What each micro-batch costs, and the losses of all."""
    found = {}
    for layout, sizes in LAYOUTS.items():
        if ranks != max([1, *sizes.values()]):
            continue
        with model_parallel(**sizes):
            size = sizes.get("context_parallel_size", 1)
            batches = [batch_for(size, seed) for seed in range(MICRO_BATCHES)]
            loads = parallel_state.get_tensor_model_parallel_rank() == 0
            iterator, reports, costs = iter(batches) if loads else None, [], []
            for _ in batches:
                with pretend_gpu() as counts:
                    output, loss_func = forward_step(iterator, Model(), ratio_limit=2.0)
                    reports.append(loss_func(output)[2])
                costs.append(counts.found())
            with pretend_gpu() as counts:
                losses = mean_losses(reports)
            found[layout] = {"costs": costs, "step": counts.found(), "losses": losses}
    return found


def batch_for(context_parallel_size, seed):
    if context_parallel_size > 1:
        return aligned_batch(LENGTHS, context_parallel_size, seed)
    batch = synthetic_batch(seed)
    batch.log_probs = torch.linspace(-2, 0, batch.num_tokens)
    return batch


@pytest.fixture(scope="module")
def found(one_rank, tmp_path_factory):
    """Of each layout, what its ranks found."""
    parallel_state.destroy_model_parallel()
    alone = counted(1)
    parallel_state.initialize_model_parallel()
    ranks = run_ranks(2, functools.partial(counted, 2), tmp_path_factory.mktemp("two"))
    both = {layout: [rank[layout] for rank in ranks] for layout in ranks[0]}
    return {**{layout: [own] for layout, own in alone.items()}, **both}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_micro_batch_waits_for_the_gpu(layout, found):
    for rank in found[layout]:
        for cost in rank["costs"]:
            assert cost["syncs"] == {}
            assert cost["copies"] == {"in the background": 1}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_parallel_ranks_exchange_one_message_and_others_none(layout, found):
    expected = {"c10d::broadcast_": 1} if layout == "tensor parallel" else {}
    for rank in found[layout]:
        first, *others = (cost["collectives"] for cost in rank["costs"])
        assert others == [expected] * (MICRO_BATCHES - 1)
        assert first in (expected, {"c10d::broadcast_": 2})  # the first one tells the length


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_losses_of_a_step_are_summed_once_and_read_once(layout, found):
    for rank in found[layout]:
        assert rank["step"]["collectives"] == {"c10d::allreduce_": 1}
        assert rank["step"]["syncs"] == {"tolist": 1}
    assert len({str(rank["losses"]) for rank in found[layout]}) == 1


def test_two_ranks_report_the_losses_of_one(found):
    (alone,), (first, _) = found["one rank"], found["tensor parallel"]
    assert first["losses"] == alone["losses"]
    assert set(alone["losses"]["loss_by_source"]) == {"code", "web"}


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_the_loss_of_pairs_waits_for_nothing(kind, one_rank):
    batch = batch_of([row_of([random_pair(np.random.default_rng(0)) for _ in range(3)])], 64)
    losses = functools.partial(dpo_loss, kind=kind)
    with pretend_gpu() as counts:
        step = functools.partial(forward_step, position_losses=losses, denominator="pairs")
        output, loss_func = step(iter([batch]), Model())
        loss, count, _ = loss_func(output)
    assert counts.found()["syncs"] == {}
    assert count.item() == 3 and loss.item() > 0


@NEEDS_REPLAY
def test_given_experts_wait_for_nothing(one_rank):
    model = small_model(small_config(**REPLAYED_MOE))
    batch = with_experts(synthetic_batch(0), 2)

    def free_choice(scores, topk, num_groups, group_topk):
        return scores.topk(topk)

    with pretend_gpu() as counts:
        batch = batch.to(torch.device("cuda"))
        scores = torch.rand(batch.num_tokens, 4).to("cuda", non_blocking=True)
        with replay_experts(model, batch, "experts"):
            for layer in model.decoder.layers:
                replay = layer.mlp.router.router_replay
                _, chosen = replay.get_replay_topk(scores, 2, None, None, free_choice)
                assert isinstance(chosen, OnGpu)
    assert counts.found() == {"syncs": {}, "collectives": {}, "copies": {"in the background": 2}}


class Student(Model):
    post_process, vocab_size = True, 64

    def forward(self, tokens, position_ids, mask, labels, **_):
        words = torch.arange(self.vocab_size, device=tokens.device) * 0.01
        return self.compute_language_model_loss(labels, tokens.view(-1, 1, 1) * words)

    def compute_language_model_loss(self, labels, logits):
        raise AssertionError("a student has another loss")


def test_the_loss_of_a_student_waits_for_nothing(one_rank):
    batch = synthetic_batch(0)
    ids = torch.arange(3, dtype=torch.int32).repeat(batch.num_tokens, 1)
    batch.columns = {"teacher_ids": ids, "teacher_log_probs": torch.full(ids.shape, -2.0)}
    with pretend_gpu() as counts:
        step = functools.partial(forward_step, distillation=Distillation())
        output, loss_func = step(iter([batch]), Student())
        loss, _, report = loss_func(output)
    assert counts.found()["syncs"] == {}
    assert loss.item() > 0 and report["teacher_kl"][0].item() > 0


WAITING = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.any()),
    "int": lambda x: int(x.max()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "a mask": lambda x: x[x > 1],
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "nonzero": lambda x: x.nonzero(),
    "a tensor of host values": lambda x: torch.tensor([1, 2], device=x.device),
}


@pytest.mark.parametrize("name", WAITING)
def test_the_counter_sees_every_wait(name):
    with pretend_gpu() as counts:
        WAITING[name](torch.tensor([1, 2, 3]).to("cuda", non_blocking=True))
    assert sum(counts.syncs.values()) == 1
    with pretend_gpu() as counts:
        torch.tensor([1, 2, 3]).to("cuda")
    assert counts.copies == {"waiting": 1}
