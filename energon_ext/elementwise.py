# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Functions of the ``math`` module for every number of an array.

NumPy's own ``exp``, ``log``, ``sin`` and powers differ in the last bit between CPUs with and
without AVX-512. What a plan depends on must be equal on every rank, so it uses these.
"""

from typing import Callable

import numpy as np


def apply(function: Callable[[float], float], numbers: np.ndarray) -> np.ndarray:
    """Return the value of a function for each number, float64 of the same shape.

    Example:
        >>> import math
        >>> apply(math.exp, np.array([0.0, 1.0])).tolist() == [1.0, math.e]
        True
    """
    values = [function(number) for number in numbers.reshape(-1).tolist()]
    return np.array(values, np.float64).reshape(numbers.shape)


def power(numbers: np.ndarray, exponent: float) -> np.ndarray:
    """Return each number to the power of ``exponent``."""
    return apply(lambda number: number**exponent, numbers)
