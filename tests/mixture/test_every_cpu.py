# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a plan depends on is equal, to the last bit, on CPUs with and without AVX-512."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest

from energon_ext.elementwise import apply, power
from energon_ext.weights import ConstantWeight, ScheduledWeight
from energon_ext.weights.schedule import Weights

#: Prints a digest of the credits of an interleave, and of what decides the order of splices.
SCRIPT = """
import hashlib
import numpy as np
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import INTERLEAVE, blend_of
from energon_ext.splice.quotas import document_quotas
from energon_ext.splice.starts import EdgeWeights
from energon_ext.weights import ScheduledWeight

digest = hashlib.sha256()
weights = {
    f"{kind} {number}": ScheduledWeight(kind, {0: 1 + number / 7, 900 + number: 0.3 + number})
    for kind in ("linear", "cosine", "exponential")
    for number in range(20)
}
mixture = Mixture(blend_of(weights, INTERLEAVE), sorted(weights), seed="0", row_tokens=100)
for position in range(300):
    mixture.open(position)
    drawn = mixture.draw(np.arange(8))
    mixture.settle(100 * np.bincount(drawn, minlength=len(weights)))
    digest.update(mixture.credits()[0].credits.tobytes())
lengths = np.random.default_rng(0).integers(100, 9000, 1000)
digest.update(document_quotas(lengths, 10**6, "by_temperature", 0.37).tobytes())
digest.update(EdgeWeights(1000, 1, 0.37).weights(5000).tobytes())
print(digest.hexdigest())
"""


def test_credits_and_splices_are_equal_without_the_vector_instructions_of_this_cpu(capsys):
    found = np.show_config("dicts")["SIMD Extensions"].get("found", [])
    without = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "NPY_DISABLE_CPU_FEATURES": " ".join(found)},
        capture_output=True,
        text=True,
        check=True,
    )
    exec(SCRIPT, {})
    assert without.stdout == capsys.readouterr().out


def test_exponential_and_cosine_weights_equal_the_math_module_bit_for_bit():
    exponential = ScheduledWeight("exponential", {0: 2, 1000: 7})
    cosine = ScheduledWeight("cosine", {0: 2, 1000: 7})
    for position in range(1000):
        t = position / 1000
        half = math.exp(0.5 * t * (math.log(7.0) - math.log(2.0)))
        sine = math.sin(0.5 * math.pi * t)
        assert exponential.evaluate(position) == 2.0 * half * half
        assert cosine.evaluate(position) == 2.0 + sine * sine * (7.0 - 2.0)


@pytest.mark.parametrize("kind", ["linear", "cosine", "exponential"])
def test_many_weights_together_equal_each_alone_bit_for_bit(kind):
    weights = [
        ScheduledWeight(kind, {0: 1 + number / 7, 900 + number: 0.3 + number})
        for number in range(50)
    ]
    together = Weights([ConstantWeight(3), *weights])
    for position in range(0, 1000, 7):
        alone = [weight.evaluate(position) for weight in weights]
        assert together.at(position).tolist() == [3.0, *alone]


def test_functions_of_arrays_equal_those_of_each_number_bit_for_bit():
    numbers = np.random.default_rng(0).random((50, 40)) * 20
    for function in (math.exp, math.sin, math.sqrt):
        expected = [[function(number) for number in row] for row in numbers.tolist()]
        assert apply(function, numbers).tolist() == expected
    lengths = np.arange(1, 3000)
    assert power(lengths, 0.37).tolist() == [math.pow(length, 0.37) for length in range(1, 3000)]
    assert power(lengths[:0], 0.37).shape == (0,)
