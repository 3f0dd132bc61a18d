# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Random draws whose n-th depends on a key and n alone, so that there is nothing to save."""

import numpy as np

from energon_ext.documents.permutation import keyed_hash

_BLOCK_BITS = 12  # numbers are made 4096 at a time


class Uniforms:
    """Random numbers in [0, 1), by index, from a counter-based generator.

    ``numpy.random.Philox`` (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).

    Example:
        >>> uniforms = Uniforms("seed 0/blend")
        >>> bool((uniforms.at(np.array([9, 3])) == uniforms.at(np.array([3, 9]))[::-1]).all())
        True
    """

    def __init__(self, key: str):
        self._key = int.from_bytes(keyed_hash(key, 2).tobytes(), "little")
        self._first, self._numbers = 0, np.zeros(0)

    def at(self, indices: np.ndarray) -> np.ndarray:
        """The numbers at some indices, which lie near each other; float64 [n]."""
        low, high = int(indices.min()), int(indices.max())
        if not self._first <= low <= high < self._first + len(self._numbers):
            blocks = range(low >> _BLOCK_BITS, (high >> _BLOCK_BITS) + 1)
            self._first = blocks[0] << _BLOCK_BITS
            self._numbers = np.concatenate([self._block(number) for number in blocks])
        return self._numbers[indices - self._first]

    def _block(self, number: int) -> np.ndarray:
        # One step of the counter makes four numbers; blocks are far apart in its second word.
        philox = np.random.Philox(key=self._key, counter=number << 64)
        # Raw numbers: NumPy promises that these stay, and not what its generators make of them.
        return (philox.random_raw(1 << _BLOCK_BITS) >> np.uint64(11)) * 2.0**-53


class BlendSampler:
    """Draws members at random, each with a probability of its share.

    Args:
        key: of the run's seed and the node; names the random numbers.
    """

    def __init__(self, key: str):
        self._key = key
        self._uniforms = [Uniforms(key)]

    def pick(self, rows: np.ndarray, shares: np.ndarray, attempt: int) -> np.ndarray:
        """Members for some rows of a run, int64 [n].

        Args:
            rows: int64 [n], their numbers in the run.
            shares: float64 [members], adding up to 1; members of share 0 are never drawn.
            attempt: which draw for these rows this is; above 0 where a source had ended.
        """
        while attempt >= len(self._uniforms):
            self._uniforms.append(Uniforms(f"{self._key}/attempt {len(self._uniforms)}"))
        ends = np.cumsum(shares)
        numbers = self._uniforms[attempt].at(rows) * ends[-1]
        # A product that was rounded up to the total must not reach a member of share 0 behind.
        last = int(np.flatnonzero(shares)[-1])
        return np.minimum(np.searchsorted(ends, numbers, side="right"), last)


class InOrderSampler:
    """Draws the first member that is left."""

    def pick(self, rows: np.ndarray, shares: np.ndarray, attempt: int) -> np.ndarray:
        return np.full(len(rows), int(np.flatnonzero(shares)[0]))
