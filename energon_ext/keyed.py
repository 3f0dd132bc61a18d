# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Orders and random numbers that are computed from keys, not stored, and digests of contents."""

import hashlib
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from energon_ext.errors import ConfigError

MAX_SIZE = 1 << 62

#: Up to this size the order is a table: two parts with few values each would mix too little.
TABLE_SIZE = 1 << 12

ROUNDS = 5

# Odd constants of the 64-bit finalizer of MurmurHash3 (public domain).
_MULTIPLIERS = (np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53))
_HALF = np.uint64(32)


class KeyedPermutation:
    """A permutation of ``0 .. size - 1`` that depends only on the key.

    The index is written as ``high * low_size + low`` with both parts near the square root of the
    size. Alternately, a hash of one part is added to the other, modulo its size (a Feistel network
    with additions). This is a bijection of ``[0, low_size * high_size)`` for any hash. An index
    that falls outside ``[0, size)`` is mapped again until it is inside (cycle walking; Black and
    Rogaway, *Ciphers with Arbitrary Finite Domains*, 2002). Few do, since the product is hardly
    larger than the size. Each index takes constant time and memory, and the order is the same in
    every process and on every machine.

    It is meant for shuffling, not for cryptography.

    Args:
        size: 1 .. 2^62.
        key: names the order; different keys give different orders.

    Raises:
        ConfigError: the size is out of range.

    Example:
        >>> order = KeyedPermutation(10, "web/epoch 0")
        >>> sorted(order(np.arange(10)).tolist())
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
        >>> KeyedPermutation(10**15, "web/epoch 0")(np.array([0, 1, 10**15 - 1])).shape
        (3,)
    """

    def __init__(self, size: int, key: str | int):
        if isinstance(size, bool) or not 1 <= size <= MAX_SIZE:
            raise ConfigError(
                f"size of a permutation: {size!r} found, an integer from 1 to 2^62 is needed."
            )
        self.size = int(size)
        self._round_keys = keyed_hash(str(key), ROUNDS)
        low_size = math.isqrt(self.size - 1) + 1
        self._part_sizes = (np.uint64(low_size), np.uint64(-(-self.size // low_size)))
        self._table = self._sort_by_hash() if self.size <= TABLE_SIZE else None

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Map integers in ``[0, size)``, in any shape, int64; IndexError if out of range."""
        indices = np.asarray(indices)
        if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < self.size:
            raise IndexError(f"index out of range for a permutation of {self.size}")
        if self._table is not None:
            return self._table[indices.astype(np.int64)].astype(np.int64)
        mapped = self._pass(indices.astype(np.uint64).reshape(-1))
        outside = np.flatnonzero(mapped >= self.size)
        while outside.size:
            mapped[outside] = self._pass(mapped[outside])
            outside = outside[mapped[outside] >= self.size]
        return mapped.view(np.int64).reshape(indices.shape)

    def _pass(self, values: np.ndarray) -> np.ndarray:
        """Apply the network once, a bijection of ``[0, low_size * high_size)``."""
        low_size = self._part_sizes[0]
        high = values // low_size
        parts = [values - high * low_size, high]
        for index, round_key in enumerate(self._round_keys):
            size, moved = self._part_sizes[index % 2], parts[index % 2]
            step = _mix(parts[1 - index % 2], round_key)
            step >>= _HALF  # 32 random bits to a number below size, without a division
            step *= size
            step >>= _HALF
            moved += step
            # Unsigned numbers wrap around below 0, so this is moved % size.
            np.minimum(moved, moved - size, out=moved)
        low, high = parts
        high *= low_size
        high += low
        return high

    def _sort_by_hash(self) -> np.ndarray:
        hashes = np.arange(self.size, dtype=np.uint64)
        for round_key in self._round_keys:
            hashes = _mix(hashes, round_key)
        return np.argsort(hashes, kind="stable").astype(np.uint16)  # small: each source keeps one


def keyed_draws(indices: np.ndarray, bounds: np.ndarray, key: str | int) -> np.ndarray:
    """Return a pseudorandom number in ``[0, bound)`` per index, a function of key and index.

    Bounds are 1 .. 2^31.
    """
    hashes = keyed_bits(indices, key)
    return ((hashes >> _HALF) * bounds.astype(np.uint64) >> _HALF).astype(np.int64)


def keyed_bits(indices: np.ndarray, key: str | int) -> np.ndarray:
    """Return 64 pseudorandom bits per index, uint64; those of two indices always differ."""
    keys = keyed_hash(str(key), ROUNDS)
    return _mix(_mix(indices.astype(np.uint64), keys[0]), keys[1])


def keyed_hash(key: str, words: int) -> np.ndarray:
    """Return the BLAKE2b hash of a key, the same in every process, uint64 [words]; 8 at most."""
    digest = hashlib.blake2b(key.encode(), digest_size=8 * words).digest()
    return np.frombuffer(digest, "<u8").astype(np.uint64)


def stable_hash(text: str) -> int:
    """Return a number in ``[0, 2^63)`` that depends only on a text."""
    return int(keyed_hash(text, 1)[0] >> 1)


def sha256(*parts: str | bytes | memoryview) -> str:
    """Return the SHA-256 of parts put together, in hexadecimal; text counts as UTF-8.

    Example:
        >>> sha256("ab", b"c") == sha256("abc")
        True
        >>> sha256("abc")[:16]
        'ba7816bf8f01cfea'
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
    return digest.hexdigest()


def sha256_of_file(path: Path, beat: Callable[[], None] = lambda: None) -> str:
    """Return the SHA-256 of a file of any size, in hexadecimal; call ``beat`` after each MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
            beat()
    return digest.hexdigest()


def _mix(values: np.ndarray, round_key: np.uint64) -> np.ndarray:
    """Mix 64 bits; the upper ones are mixed best."""
    mixed = values ^ round_key
    mixed *= _MULTIPLIERS[0]
    mixed ^= mixed >> _HALF
    mixed *= _MULTIPLIERS[1]
    return mixed
