# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows of samples balanced by the cost of their tokens and images."""

import dataclasses

import numpy as np
import pytest

from energon_ext.errors import ConfigError, StateMismatchError
from energon_ext.plan.cost import AttentionCost
from tests.samples.test_packed_samples import alone
from tests.samples.test_planned_samples import dataset_of
from tests.samples.vision import PackedCaptions, PlannedCaptions, length_of_number, write_images
from tests.support import loader_for, take

ROWS = 8


class Expensive(PackedCaptions):
    """A token costs 1 and an image ``image_cost``."""

    encoding_fingerprint = {"version": "expensive"}
    cost = AttentionCost(linear=1, quadratic=0)
    image_cost = 100

    def length_of(self, encoded):
        return encoded.total_len, self.image_cost * len(encoded.greys)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("balanced")
    write_images(folder / "photos", 60)
    return folder


def cost_of(row):
    return sum(length + 100 * len(greys) for _, length, greys in row)


def test_row_cost_sums_tokens_and_images(data):
    dataset = dataset_of(alone(data), encoder=Expensive())
    run = dataset.run
    run.options = dataclasses.replace(run.options, cost=None)  # in their natural order
    step = next(run.fork().draw_steps())
    for row, cost in enumerate(step.costs(AttentionCost(1, 0), ROWS).tolist()):
        taken, place, _ = step.row(row)
        numbers, *_ = taken.description(place)
        assert cost == sum(length_of_number(n) + 100 * (n % 3) for n in numbers)


def test_balancing_evens_out_ranks_without_changing_a_steps_rows(data):
    natural, balanced = PackedCaptions(), Expensive()
    path = alone(data)

    def busy(encoder):
        datasets = [dataset_of(path, 2, rank=rank, encoder=encoder) for rank in range(2)]
        ranks = [take(loader_for(dataset), 6) for dataset in datasets]
        steps = [[sorted(map(str, step)) for step in of_rank] for of_rank in ranks]
        costs = np.array([[sum(map(cost_of, step)) for step in of_rank] for of_rank in ranks])
        return [sorted(a + b) for a, b in zip(*steps)], costs.max(0) / costs.mean(0)

    rows, waits = busy(natural)
    same_rows, shorter_waits = busy(balanced)
    assert rows == same_rows
    assert shorter_waits.mean() - 1 < (waits.mean() - 1) / 2


def test_changed_costs_are_refused_within_a_step_but_not_between_steps(data):
    path = alone(data)

    def resume(batches, encoder):
        loader = loader_for(dataset_of(path, 2, encoder=encoder, batch_size=1))
        take(loader, batches)
        state = loader.state_dict()

        class Other(Expensive):
            image_cost = 500
            encoding_fingerprint = {"version": "other"}

        other = Other()
        other.__class__.__qualname__ = Expensive.__qualname__
        again = loader_for(dataset_of(path, 2, encoder=other, batch_size=1))
        again.load_state_dict(state)
        return again

    take(resume(4, Expensive()), 1)
    with pytest.raises(StateMismatchError, match="costs"):
        resume(1, Expensive())


def test_a_cost_without_effect_is_refused(data):
    unpacked = PlannedCaptions()
    unpacked.cost = AttentionCost()
    with pytest.raises(ConfigError, match="has no length_of"):
        dataset_of(alone(data), encoder=unpacked)
    streamed = Expensive()
    streamed.plan_samples = False
    with pytest.raises(ConfigError, match="plan_samples is False"):
        dataset_of(alone(data), encoder=streamed)
