# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Pairs train the same packed into rows and one by one, with the step of every other task."""

import ast
import functools
import inspect

import numpy as np
import pytest
import torch

from energon_ext import ConfigError, PreferenceTaskEncoder, get_train_dataset
from energon_ext.losses import clipped_ratio_losses, dpo_loss
from energon_ext.megatron import (
    forward_step,
    loss,
    mean_losses,
    scale_router_losses,
    step,
    write_reference_of,
)
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests import support
from tests.megatron.small_gpt import BALANCED_MOE, MOE, small_config, small_model, synthetic_batch
from tests.megatron.small_training import run_schedule
from tests.pair_rows import batch_of, random_pair, row_of
from tests.rl.prompts import write_prompts

pytestmark = pytest.mark.usefixtures("one_rank")

DPO = functools.partial(
    forward_step, position_losses=functools.partial(dpo_loss, beta=0.5), denominator="pairs"
)


def gradients(batches, model):
    """Return the gradient of the sum over all pairs, and the mean loss."""
    reports = run_schedule(model, batches, DPO)
    return [parameter.grad.clone() for parameter in model.parameters()], mean_losses(reports)


@pytest.mark.parametrize(
    ("config", "rounding"), [({}, 1e-6), (MOE, 5e-6)], ids=["dense", "experts"]
)
def test_packed_pairs_give_the_gradients_of_single_ones(config, rounding, place):
    random = np.random.default_rng(0)
    pairs = [random_pair(random) for _ in range(6)]
    packed = [batch_of([row_of(pairs[:4]), row_of(pairs[4:])], 64)]
    found, losses = gradients(packed, place.model(**config))
    single = [batch_of([row_of([pair])], 24) for pair in pairs]
    expected, losses_of_single = gradients(single, place.model(**config))
    assert losses["loss"] == pytest.approx(losses_of_single["loss"], abs=1e-6, rel=place.rounding)
    assert max(float(each.abs().max()) for each in expected) > 1e-2
    place.check_close(found, expected, rtol=1e-5, atol=rounding)


def test_losses_that_pairs_would_weigh_wrongly_are_refused():
    batch = batch_of([row_of([random_pair(np.random.default_rng(0))])], 32)
    message = "denominator='pairs': .* divide them by pairs.*set moe_aux_loss_coeff to 0"
    with pytest.raises(ConfigError, match=message):
        DPO(iter([batch]), small_model(small_config(**BALANCED_MOE)))
    model = small_model(small_config())
    model.config.mtp_num_layers = 1
    with pytest.raises(ConfigError, match="Multi-token prediction has no loss on pairs"):
        DPO(iter([batch]), model)


def test_the_reference_of_a_model_with_scaled_router_losses(tmp_path):
    config = small_config(**BALANCED_MOE)
    scale_router_losses(config, 1024)
    path = write_prompts(
        tmp_path / "pairs.jsonl",
        [{"prompt": f"{n}", "chosen": "a", "rejected": "b"} for n in range(9)],
    )
    encoder = PreferenceTaskEncoder(ByteTokenizer(), 32, reference="experts")
    write_reference_of(small_model(config, vocabulary=260), path, encoder)
    dataset = get_train_dataset(
        path, worker_config=support.config(), batch_size=1, task_encoder=encoder
    )
    (batch,) = support.take(support.loader_for(dataset), 1)
    assert (batch.columns["ref_log_probs"] < 0).equal(batch.token_weights != 0)


def with_log_probs(batch):
    batch.log_probs = torch.full((batch.num_tokens,), -4.0)
    return batch


#: Task -> (its batch, options of the step)
TASKS = {
    "pretraining": (lambda: synthetic_batch(0), {}),
    "reinforcement learning": (
        lambda: with_log_probs(synthetic_batch(1)),
        {"position_losses": clipped_ratio_losses, "denominator": "tokens"},
    ),
    "preferences": (lambda: batch_of([row_of([random_pair(np.random.default_rng(2))])], 32), {}),
}
TASKS["preferences"][1].update(DPO.keywords)


@pytest.mark.parametrize("task", TASKS)
def test_the_same_step_trains_every_task(task):
    make, options = TASKS[task]
    model = small_model(small_config())
    losses = []
    for _ in range(3):
        model.zero_grad()
        reports = run_schedule(model, [make()], functools.partial(forward_step, **options))
        losses.append(mean_losses(reports)["loss"])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
    assert losses[0] > losses[1] > losses[2]


def test_the_step_and_its_loss_know_no_task():
    """They import no encoder, no chat and no reinforcement learning, only batches and losses."""
    for module in (step, loss):
        imported = {
            node.module
            for node in ast.walk(ast.parse(inspect.getsource(module)))
            if isinstance(node, ast.ImportFrom) and node.module.startswith("energon_ext.")
        }
        folders = {name.split(".")[1] for name in imported}
        assert folders <= {"arguments", "batch", "errors", "losses", "megatron", "state"}
