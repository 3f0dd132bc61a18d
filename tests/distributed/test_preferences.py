# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Preferences on two processes: loss and gradient of one formula, and one reference pass.

The expected values come from plain autograd over the logits of the whole global batch, and from a
loop over answers and positions.
"""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from energon_ext import ConfigError, ExactDataLoader, PreferenceTaskEncoder, get_train_dataset
from energon_ext.encoders import reference
from energon_ext.losses import dpo_loss
from energon_ext.megatron import (
    build_packed_seq_params,
    forward_step,
    mean_losses,
    slice_for_context_parallel,
    write_reference_of,
)
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron.small_gpt import megatron, model_parallel, small_config, small_model
from tests.megatron.small_training import (
    SGD,
    position_losses,
    run_ranks,
    run_schedule,
    trainable,
)
from tests.pair_rows import batch_of, random_pair, row_of, slow_losses
from tests.rl.prompts import write_prompts
from tests.support import config

MICRO_BATCHES, BETA, VOCABULARY = 4, 0.5, 260
LAYOUTS = {
    "data parallel": {},
    "pipeline parallel": {"pipeline_model_parallel_size": 2},
    "tensor parallel": {"tensor_model_parallel_size": 2},
}
KINDS = ("sigmoid", "ipo")


def batch(index, alignment=1):
    """Return micro-batch ``index``; they differ in the number of their pairs."""
    random = np.random.default_rng(index)
    rows = [row_of([random_pair(random) for _ in range(1 + index)]) for _ in range(2)]
    return batch_of(rows, 96, alignment=alignment)


def step(kind, sizes):
    """Return loss and gradient norm of one step; no loss on ranks that do not compute it."""
    model, optimizer = trainable(small_config(**sizes), clip_grad=1.0, **SGD)
    replicas = parallel_state.get_data_parallel_world_size()
    own = range(parallel_state.get_data_parallel_rank(), MICRO_BATCHES, replicas)
    losses = functools.partial(dpo_loss, beta=BETA, kind=kind)
    step_func = functools.partial(forward_step, position_losses=losses, denominator="pairs")
    reports = run_schedule(model, [batch(index) for index in own], step_func)
    _, gradient_norm, _ = optimizer.step()
    return {**mean_losses(reports), "norm": gradient_norm}


def expected_step(kind):
    """Return loss and gradient norm by a loop over all pairs."""
    model, losses = small_model(small_config()), []
    for found in map(batch, range(MICRO_BATCHES)):
        logits = model(
            found.tokens[None],
            found.position_ids[None],
            None,
            packed_seq_params=build_packed_seq_params(found),
        )[0]
        log_probs = torch.log_softmax(logits, -1).gather(1, found.labels[:, None])[:, 0]
        losses += slow_losses(found, log_probs, BETA, kind)
    assert len(losses) == 2 * (1 + 2 + 3 + 4)
    loss = sum(losses) / len(losses)
    loss.backward()
    squares = [p.grad.double().square().sum().item() for p in model.parameters()]
    return loss.item(), math.sqrt(sum(squares))


def context_parallel_part(kind):
    """Return this rank's part of the loss and of the gradient of two rows."""
    whole = batch(1, alignment=4)
    log_probs = torch.linspace(-5, -4, whole.num_tokens).requires_grad_()
    part = slice_for_context_parallel(whole, 2, dist.get_rank())
    numbered = dataclasses.replace(
        whole, columns={"places": torch.arange(whole.num_tokens).float()}
    )
    places = slice_for_context_parallel(numbered, 2, dist.get_rank()).columns["places"].long()
    losses = dpo_loss(part, log_probs[places], BETA, kind=kind, group=dist.group.WORLD)
    losses.sum().backward()
    return losses.sum().item(), log_probs.grad.tolist()


def encoder(name):
    return PreferenceTaskEncoder(ByteTokenizer(), 96, reference=name)


def reference_pass(layout, sizes, path):
    """Write the reference of a split model; return what a batch has, and its own losses."""
    model = small_model(small_config(**sizes), vocabulary=VOCABULARY)
    model.train()
    write_reference_of(model, path, encoder(layout))
    assert model.training
    dataset = get_train_dataset(
        path, worker_config=config(), batch_size=2, task_encoder=encoder(layout)
    )
    drawn = next(iter(ExactDataLoader(dataset)))
    trained = int((drawn.token_weights != 0).sum())
    return drawn.columns["ref_log_probs"].tolist(), position_losses(model, drawn), trained


def refusals(path):
    with model_parallel(tensor_model_parallel_size=2):
        model = small_model(small_config(tensor_model_parallel_size=2), vocabulary=VOCABULARY)
        with pytest.raises(ConfigError, match="has no reference; give it the name"):
            write_reference_of(model, path, encoder(None))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(math.nan)
        # The rank that reads fails; the other one ends as well.
        with pytest.raises(ConfigError, match="reference 'broken' has a log-probability of nan"):
            write_reference_of(model, path, encoder("broken"))
    return "refused"


def all_results(path):
    results = {}
    reference.UNIT_PAIRS = 8  # so that two replicas share the 30 pairs
    for layout, sizes in LAYOUTS.items():
        with model_parallel(**sizes):
            results[layout] = {kind: step(kind, sizes) for kind in KINDS}
            results[layout]["reference"] = reference_pass(layout, sizes, path)
    results["context parallel"] = {kind: context_parallel_part(kind) for kind in KINDS}
    results["refusals"] = refusals(path)
    return results


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    records = [
        {"prompt": f"{n} plus 1 is", "chosen": f" {n + 1}.", "rejected": f" {n}" + "!" * (n % 5)}
        for n in range(30)
    ]
    return write_prompts(tmp_path_factory.mktemp("pairs") / "pairs.jsonl", records)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory, pairs):
    return run_ranks(2, functools.partial(all_results, pairs), tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def expected():
    with megatron():
        return {kind: expected_step(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_match_the_loss_and_gradient_of_the_formula(kind, layout, ranks, expected):
    loss, norm = expected[kind]
    found = [rank[layout][kind] for rank in ranks]
    with_loss = [result["loss"] for result in found if "loss" in result]
    assert len(with_loss) == (1 if layout == "pipeline parallel" else 2)
    assert with_loss == pytest.approx([loss] * len(with_loss), abs=2e-5)
    assert [result["norm"] for result in found] == pytest.approx([norm] * 2, rel=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_answers_cut_by_context_parallelism_add_up(kind, ranks):
    whole = batch(1, alignment=4)
    log_probs = torch.linspace(-5, -4, whole.num_tokens).requires_grad_()
    loss = sum(slow_losses(whole, log_probs, BETA, kind))
    loss.backward()
    parts = [rank["context parallel"][kind] for rank in ranks]
    assert sum(part for part, _ in parts) == pytest.approx(loss.item(), abs=1e-5)
    total = torch.tensor([gradient for _, gradient in parts]).sum(0)
    assert torch.allclose(total, log_probs.grad, atol=1e-6)
    assert all(torch.tensor(gradient).any() for _, gradient in parts)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_reference_of_a_split_model_is_what_it_says_of_each_label(layout, ranks, pairs):
    found = [rank[layout]["reference"] for rank in ranks]
    columns = [torch.tensor(column) for column, *_ in found]
    assert torch.equal(columns[0], columns[1])
    losses = next(torch.tensor(own) for _, own, _ in found if own is not None)
    trained = columns[0] != 0
    assert trained.sum() == found[0][2] > 40
    assert torch.allclose(columns[0][trained], -losses[trained], atol=1e-5)


def test_the_reference_does_not_depend_on_the_split(ranks):
    columns = [torch.tensor(ranks[0][layout]["reference"][0]) for layout in LAYOUTS]
    assert all(torch.allclose(column, columns[0], atol=1e-5) for column in columns)


def test_a_failed_pass_ends_on_all_ranks(ranks):
    assert [rank["refusals"] for rank in ranks] == ["refused", "refused"]
