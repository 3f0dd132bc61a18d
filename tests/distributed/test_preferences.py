# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Preferences on two processes: loss and gradient, and one reference pass.

The expected values come from a model that reads each answer alone, and from a loop over answers and
positions.
"""

import functools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist

from energon_ext import ConfigError, ExactDataLoader, PreferenceTaskEncoder, get_train_dataset
from energon_ext.encoders import pair_task
from energon_ext.losses import dpo_loss
from energon_ext.megatron import write_reference_of
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron.small_gpt import model_parallel, small_config, small_model
from tests.megatron.small_training import position_losses, run_ranks
from tests.megatron.split_gradients import (
    LAYOUTS,
    assert_equal_parts,
    assert_equal_steps,
    context_parallel_part,
    expected_of,
    log_probs_of,
    read_alone,
    step_of,
)
from tests.pair_rows import batch_of, random_pair, row_of, slow_losses
from tests.rl.prompts import write_prompts
from tests.support import config

BETA, VOCABULARY = 0.5, 260
KINDS = ("sigmoid", "ipo")


def batch(index, alignment=1):
    """Return micro-batch ``index``; they differ in the number of their pairs."""
    random = np.random.default_rng(index)
    rows = [row_of([random_pair(random) for _ in range(1 + index)]) for _ in range(2)]
    return batch_of(rows, 96, alignment=alignment)


BATCHES = [batch(index) for index in range(4)]


def options(kind, group=None):
    losses = functools.partial(dpo_loss, beta=BETA, kind=kind, group=group)
    return {"position_losses": losses, "denominator": "pairs"}


def expected_step(kind):
    """Return loss and gradient of a model that reads each answer alone."""

    def loss_of(read):
        losses = [
            loss
            for each in BATCHES
            for loss in slow_losses(each, read_alone(read, each), BETA, kind)
        ]
        assert len(losses) == 2 * (1 + 2 + 3 + 4)
        return sum(losses) / len(losses)

    return expected_of(loss_of)


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
    pair_task.UNIT_PAIRS = 8  # so that two replicas share the 30 pairs
    for layout, sizes in LAYOUTS.items():
        with model_parallel(**sizes):
            results[layout] = {kind: step_of(BATCHES, sizes, **options(kind)) for kind in KINDS}
            results[layout]["reference"] = reference_pass(layout, sizes, path)
    with model_parallel(context_parallel_size=2):
        results["context parallel"] = {
            kind: context_parallel_part(batch(1, 4), **options(kind, dist.group.WORLD))
            for kind in KINDS
        }
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
    return {kind: expected_step(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_pairs_on_two_ranks_train_like_answers_read_alone(kind, layout, ranks, expected):
    assert_equal_steps([rank[layout][kind] for rank in ranks], expected[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_answers_cut_by_context_parallelism_add_up(kind, ranks):
    whole = batch(1, alignment=4)
    log_probs = log_probs_of(whole)
    parts = [rank["context parallel"][kind] for rank in ranks]
    assert_equal_parts(parts, slow_losses(whole, log_probs, BETA, kind), log_probs)


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
