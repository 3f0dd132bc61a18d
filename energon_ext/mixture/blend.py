# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Random draws: the n-th depends only on a key and on n, so there is no state to save."""

import numpy as np

from energon_ext.keyed import keyed_hash

_BLOCK_BITS = 12  # numbers are generated in blocks of 4096


class Uniforms:
    """Random numbers in [0, 1), addressed by index.

    They come from the counter-based generator ``numpy.random.Philox`` (Salmon et al., "Parallel
    random numbers: as easy as 1, 2, 3", 2011).

    Example:
        >>> uniforms = Uniforms("seed 0/blend")
        >>> bool((uniforms.at(np.array([9, 3])) == uniforms.at(np.array([3, 9]))[::-1]).all())
        True
    """

    def __init__(self, key: str):
        self._key = int.from_bytes(keyed_hash(key, 2).tobytes(), "little")
        self._first, self._numbers = 0, np.zeros(0)

    def at(self, indices: np.ndarray) -> np.ndarray:
        """Return the numbers at some indices, float64 [n]; the indices should be close together."""
        low, high = int(indices.min()), int(indices.max())
        if not self._first <= low <= high < self._first + len(self._numbers):
            blocks = range(low >> _BLOCK_BITS, (high >> _BLOCK_BITS) + 1)
            self._first = blocks[0] << _BLOCK_BITS
            self._numbers = np.concatenate([self._block(number) for number in blocks])
        return self._numbers[indices - self._first]

    def _block(self, number: int) -> np.ndarray:
        # The block number is the second word of the counter, so blocks never overlap.
        philox = np.random.Philox(key=self._key, counter=number << 64)
        # NumPy keeps the raw numbers stable across versions, but not what it derives from them.
        return (philox.random_raw(1 << _BLOCK_BITS) >> np.uint64(11)) * 2.0**-53


class BlendSampler:
    """Draws members at random, each with a probability equal to its share.

    Args:
        key: selects the random numbers; contains the seed of the run and the name of the node.
    """

    def __init__(self, key: str):
        self._key = key
        self._uniforms = [Uniforms(key)]

    def pick(self, rows: np.ndarray, shares: np.ndarray, attempt: int) -> np.ndarray:
        """Return the member to draw each row from, int64 [n].

        Args:
            rows: int64 [n], row numbers within the run.
            shares: float64 [members], adding up to 1; a member with share 0 is never drawn.
            attempt: number of earlier draws for these rows, which hit an ended source.
        """
        while attempt >= len(self._uniforms):
            self._uniforms.append(Uniforms(f"{self._key}/attempt {len(self._uniforms)}"))
        ends = np.cumsum(shares)
        numbers = self._uniforms[attempt].at(rows) * ends[-1]
        # A product rounded up to the total must not select a trailing member with share 0.
        last = int(np.flatnonzero(shares)[-1])
        return np.minimum(np.searchsorted(ends, numbers, side="right"), last)


class InOrderSampler:
    """Draws the first member that has not ended."""

    def pick(self, rows: np.ndarray, shares: np.ndarray, attempt: int) -> np.ndarray:
        return np.full(len(rows), int(np.flatnonzero(shares)[0]))
