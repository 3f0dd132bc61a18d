# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import hashlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_ext.mixture.blend import BlendSampler, Uniforms
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import IN_ORDER, blend_of
from energon_ext.weights import weight_from_config
from tests.mixture.slow import saved

WEIGHTS = {"a": {"linear": {0: 0, 1000: 10}}, "b": {"step": {0: 4, 500: 0}}, "c": 1}


def mixture(weights=WEIGHTS, seed="7"):
    specs = {key: weight_from_config(value) for key, value in weights.items()}
    return Mixture(blend_of(specs), list(specs), seed=seed)


def counts_at(drawing, position, first, draws):
    assert drawing.open(position)
    drawn = drawing.draw(np.arange(first, first + draws))
    return np.bincount(drawn, minlength=len(drawing.keys))


# The distribution ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "expected"),
    [(0, (0, 0.8, 0.2)), (250, (1 / 3, 8 / 15, 2 / 15)), (500, (5 / 6, 0, 1 / 6))],
)
def test_frequencies_follow_the_current_shares(position, expected):
    """Chi-square: with two degrees of freedom, above 18.4 once in ten thousand; one has 15.1."""
    draws = 40_000
    counts = counts_at(mixture(), position, first=0, draws=draws)
    terms = [(c - draws * p) ** 2 / (draws * p) for c, p in zip(counts, expected) if p]
    assert sum(terms) < {3: 18.4, 2: 15.1}[len(terms)]
    assert all(c == 0 for c, p in zip(counts, expected) if p == 0)


@pytest.mark.parametrize("members", [2, 30, pytest.param(1000, marks=pytest.mark.nightly)])
def test_a_million_draws_follow_the_schedules_in_every_window(members):
    """Schedules are steep and flat, from 0 and to 0, within and across the counted windows."""
    kinds = ("linear", "step", "cosine", "constant")
    weights = {}
    for number in range(members):
        kind = kinds[number % 4]
        points = {100: 1 + number % 7, 500: (number + 1) % 3, 900: 2}
        weights[f"s{number:04d}"] = 1.5 if kind == "constant" else {kind: points}
    specs = [weight_from_config(value) for value in weights.values()]
    drawing, draws = mixture(weights), 1000  # at each of 1000 positions
    for start in range(0, 1000, 100):
        counts, mean, variance = (np.zeros(members) for _ in range(3))
        for position in range(start, start + 100):
            counts += counts_at(drawing, position, position * draws, draws)
            values = np.array([spec.evaluate(position) for spec in specs])
            shares = values / values.sum()
            mean += draws * shares
            variance += draws * shares * (1 - shares)
        assert (np.abs(counts - mean) <= 5 * np.sqrt(variance) + 1e-9).all()
        assert (counts[mean == 0] == 0).all()


def test_a_weight_of_zero_is_never_drawn_from_the_first_position_on():
    drawing = mixture()
    assert counts_at(drawing, 0, 0, 100_000)[0] == 0
    assert counts_at(drawing, 499, 0, 1000)[1] > 0
    for position in (500, 501, 10**6):
        assert counts_at(drawing, position, 0, 100_000)[1] == 0


@given(st.lists(st.sampled_from([0.0, 1e-300, 0.1, 0.3, 1.0]), min_size=1, max_size=8))
def test_rounding_never_draws_a_member_of_share_zero(values):
    """The numbers are as close to 0 and 1 as the generator gets."""
    total = sum(values)
    if not total:
        return
    shares = np.array(values) / total
    sampler = BlendSampler("any")
    sampler._uniforms[0].at = lambda rows: np.array([0.0, 2.0**-53, 0.5, 1 - 2.0**-53])
    picked = sampler.pick(np.arange(4), shares, 0)
    assert (shares[picked] > 0).all()


# Dependence of draws ------------------------------------------------------------------------------


def test_a_draw_depends_only_on_its_number():
    shares = np.array([0.2, 0.5, 0.3])
    expected = BlendSampler("key").pick(np.arange(10_000), shares, 0)
    alone = BlendSampler("key")
    for number in (*range(1000), *range(4000, 4200), 8191, 8192, 9999, 5, 0):
        assert alone.pick(np.array([number]), shares, 0) == expected[number]
    in_parts = [
        BlendSampler("key").pick(np.arange(first, first + 37), shares, 0)
        for first in range(0, 9990, 37)
    ]
    assert np.concatenate(in_parts).tolist() == expected[: 37 * len(in_parts)].tolist()
    with_gaps = np.array([3, 4095, 4096, 7000])
    assert alone.pick(with_gaps, shares, 0).tolist() == expected[with_gaps].tolist()


def test_each_seed_and_node_draws_in_its_own_order():
    shares = np.array([0.5, 0.5])
    orders = {
        key: tuple(BlendSampler(key).pick(np.arange(200), shares, 0).tolist())
        for key in ("0/", "1/", "0/inner.yaml")
    }
    assert len(set(orders.values())) == 3
    for one in orders.values():
        for other in orders.values():
            if one is not other:  # of 200 coins, 100 +- 7.1 agree
                assert abs(sum(a == b for a, b in zip(one, other)) - 100) <= 5 * 7.1


def test_each_run_seed_gives_another_order():
    orders = []
    for seed in ("1", "2", "1"):
        drawing = mixture(seed=seed)
        drawing.open(300)
        orders.append(drawing.draw(np.arange(50)).tolist())
    assert orders[0] == orders[2] != orders[1]


def test_earlier_draws_do_not_matter():
    """A blend therefore has no state."""
    straight = mixture()
    order = []
    for step in range(600):
        straight.open(step)
        order.append(straight.draw(np.arange(4 * step, 4 * step + 4)).tolist())
        straight.settle(np.array([5, 1, 7]))
    assert saved(straight) == {}
    for step in (1, 300, 599):
        resumed = mixture()
        resumed.open(step)
        assert resumed.draw(np.arange(4 * step, 4 * step + 4)).tolist() == order[step]


def test_an_ordered_node_draws_its_first_remaining_member():
    tree = blend_of({key: weight_from_config(1) for key in "abc"}, IN_ORDER)
    drawing = Mixture(tree, "abc", seed="7")
    for ended in range(3):
        assert drawing.open(0)
        assert drawing.draw(np.arange(5)).tolist() == [ended] * 5
        drawing.ended[ended] = True
    assert not drawing.open(0)


def test_a_second_attempt_for_a_row_is_an_independent_draw():
    shares = np.array([0.5, 0.5])
    sampler = BlendSampler("key")
    first = sampler.pick(np.arange(10_000), shares, 0)
    second = sampler.pick(np.arange(10_000), shares, 1)
    assert abs(int((first == second).sum()) - 5000) <= 5 * 50
    assert second.tolist() == BlendSampler("key").pick(np.arange(10_000), shares, 1).tolist()
    drawing = mixture()
    assert drawing.open(0)
    assert drawing.draw(np.arange(99)).tolist() == drawing.draw(np.arange(99), attempt=0).tolist()


def test_numbers_are_uniform_and_uncorrelated():
    numbers = Uniforms("key").at(np.arange(100_000))
    assert ((numbers >= 0) & (numbers < 1)).all()
    tenths = np.bincount((numbers * 10).astype(int), minlength=10)
    assert ((tenths - 10_000) ** 2 / 10_000).sum() < 33.7  # nine degrees, once in ten thousand
    for lag in (1, 2, 4, 4096):
        correlation = np.corrcoef(numbers[:-lag], numbers[lag:])[0, 1]
        assert abs(correlation) < 5 / math.sqrt(len(numbers) - lag)


def test_random_numbers_never_change_between_versions():
    """Philox is a published function, computed here by hand, so runs resume with any NumPy.

    Rows of a block of 4096 take its first raw numbers, shifted to 53 bits.
    """
    key = int.from_bytes(hashlib.blake2b(b"seed 0", digest_size=16).digest(), "little")
    for block in (0, 1, 70_000):
        expected = [raw >> 11 for raw in philox_4x64_10([1, block, 0, 0], key)]
        rows = np.arange(4096 * block, 4096 * block + 4)
        assert (Uniforms("seed 0").at(rows) * 2.0**53).tolist() == expected


def philox_4x64_10(counter, key):
    """Salmon et al. (2011), figure 2 and table 2."""
    mask = 2**64 - 1
    low_key, high_key = key & mask, key >> 64
    for _ in range(10):
        first, second = counter[0] * 0xD2E7470EE14C6C93, counter[2] * 0xCA5A826395121157
        counter = [
            (second >> 64) ^ counter[1] ^ low_key,
            second & mask,
            (first >> 64) ^ counter[3] ^ high_key,
            first & mask,
        ]
        low_key = (low_key + 0x9E3779B97F4A7C15) & mask
        high_key = (high_key + 0xBB67AE8584CAA73B) & mask
    return counter


# Absent members -----------------------------------------------------------------------------------


def test_an_ended_source_is_drawn_again_when_it_returns():
    drawing = mixture()
    drawing.ended[2] = True
    assert counts_at(drawing, 300, 0, 5000)[2] == 0
    drawing.ended[2] = False
    assert counts_at(drawing, 300, 0, 5000)[2] > 0
