# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Steps whose rows are assigned by cost train like those in natural order, on real processes."""

import functools

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.energon import WorkerConfig

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.plan.cost import AttentionCost
from energon_ext.tokenizers.protocol import Tokenizer
from tests.megatron.small_gpt import MOE, SEQ_LEN, VOCABULARY, megatron
from tests.megatron.small_training import run_ranks, train
from tests.support import write_mix, write_tokens

ROWS = 8
STEPS = 3
DOUBLE = {"params_dtype": torch.float64, "pipeline_dtype": torch.float64}
PIPELINE = {"pipeline_model_parallel_size": 2}
EXPERT = {"expert_model_parallel_size": 2}

#: Name -> (sizes of model parallelism, configuration of the model)
LAYOUTS = {
    "dense, data parallel": ({}, {}),
    "dense, data parallel, float64": ({}, DOUBLE),
    "dense, pipeline parallel": (PIPELINE, {}),
    "moe, data parallel": ({}, MOE),
    "moe, expert parallel": (EXPERT, MOE),
}
FLOAT64 = "dense, float64"
ALONE = {
    "dense": ({}, {}),
    FLOAT64: ({}, DOUBLE),
    "moe": ({}, MOE),
}


class SmallVocabulary(Tokenizer):
    bos_id, eos_id, pad_id = None, 0, 0
    add_bos = add_eos = False
    vocab_size = VOCABULARY

    def encode_array(self, text):
        raise AssertionError("token files are not tokenized")

    def decode(self, tokens):
        return str(tokens)

    def fingerprint(self):
        return {"name": "small"}


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    """Learnable documents, from a few tokens to a whole row."""
    folder = tmp_path_factory.mktemp("balanced")
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        lengths = np.where(rng.random(80) < 0.15, SEQ_LEN + 1, rng.integers(3, 9, 80))
        starts = rng.integers(VOCABULARY, size=80)
        documents = [(start + np.arange(n)) % VOCABULARY for start, n in zip(starts, lengths)]
        write_tokens(folder / name, [each.tolist() for each in documents])
    return write_mix(folder / "mix.yaml", [("a", 1), ("b", 2)])


class Draw:
    """Draws the micro-batches of a replica and records the cost of its rows per step."""

    def __init__(self, mix, balance):
        self._mix, self._balance = mix, balance
        self._iterator = None
        self.busy = []

    def __call__(self, step, replica, replicas):
        if self._iterator is None:
            encoder = PackedTaskEncoder(
                SmallVocabulary(),
                SEQ_LEN,
                balance=self._balance,
                cost=AttentionCost(0, 1) if self._balance else None,
            )
            dataset = get_train_dataset(
                self._mix,
                worker_config=WorkerConfig(rank=replica, world_size=replicas, num_workers=0),
                batch_size=1,
                rows_per_step=ROWS,
                task_encoder=encoder,
            )
            self._iterator = iter(ExactDataLoader(dataset))
        batches = [next(self._iterator) for _ in range(ROWS // replicas)]
        self.busy.append(sum(float(batch.position_ids.sum()) for batch in batches))
        return batches


def both_orders(mix, layouts):
    """Return the losses of this rank and the costs of its rows by layout: [natural, balanced]."""
    results = {}
    for name, (sizes, config) in layouts.items():
        draws = [Draw(mix, None), Draw(mix, "attention")]
        results[name] = [train(sizes, config, STEPS, draw) for draw in draws]
        results[f"{name}: busy"] = [draw.busy for draw in draws]
    return results


@pytest.fixture(scope="module")
def ranks(mix, tmp_path_factory):
    work = functools.partial(both_orders, mix, LAYOUTS)
    return run_ranks(2, work, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(scope="module")
def four_ranks(mix, tmp_path_factory):
    work = functools.partial(both_orders, mix, LAYOUTS)
    return run_ranks(4, work, tmp_path_factory.mktemp("four_ranks"))


@pytest.fixture(scope="module")
def alone(mix):
    """Results of one rank in both orders, by kind of model."""

    @functools.cache
    def train_alone(kind):
        with megatron():
            parallel_state.destroy_model_parallel()
            return both_orders(mix, {kind: ALONE[kind]})[kind]

    return train_alone


def tolerance(layout):
    # With float64 weights and gradients the loss is still summed in float32.
    return 1e-6 if "float64" in layout else 1e-5


def check_equal(results, expected, tolerance):
    for one, other in zip(results, expected, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            assert value == pytest.approx(other[name], abs=tolerance), name


@pytest.mark.parametrize("kind", ["dense", "moe", pytest.param(FLOAT64, marks=pytest.mark.nightly)])
def test_one_rank_trains_alike_in_both_orders(alone, kind):
    natural, balanced = alone(kind)
    assert natural[-1]["loss"] < natural[0]["loss"] - 0.1
    check_equal(balanced, natural, tolerance(kind))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_train_alike_in_both_orders_and_like_one(ranks, alone, layout):
    name = layout.partition(",")[0] + (", float64" if "float64" in layout else "")
    for rank in ranks:
        natural, balanced = rank[layout]
        check_equal(balanced, natural, tolerance(layout))
        if "loss" in balanced[0]:
            check_equal(balanced, alone(name)[0], tolerance(layout))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_ranks_train_alike_in_both_orders_and_like_one(four_ranks, alone, layout):
    test_two_ranks_train_alike_in_both_orders_and_like_one(four_ranks, alone, layout)


@pytest.mark.nightly
def test_balancing_evens_out_the_work_of_two_ranks(ranks):
    """Rows differ in cost by up to a factor of nine."""
    by_order = list(zip(*(rank["dense, data parallel: busy"] for rank in ranks)))
    gaps = [[abs(one - other) for one, other in zip(*order)] for order in by_order]
    assert sum(gaps[1]) < 0.5 * sum(gaps[0])
