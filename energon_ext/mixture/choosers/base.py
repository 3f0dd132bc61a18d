# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What every chooser has."""

from __future__ import annotations

import random
import struct
from abc import ABC, abstractmethod
from operator import length_hint
from typing import Any, Iterable, Iterator, Mapping, Sequence

from energon_ext.errors import ConfigError, StateFormatError
from energon_ext.weights import WeightSpec, as_weight

STATE_VERSION = 1

#: Random numbers made at a time; a restore makes one block again, whatever was drawn before.
_BLOCK = 1024


class UniformStream:
    """Random numbers in [0, 1); the n-th depends on the seed and n alone.

    Attributes:
        left: what is left of the block at hand, for loops in which a call would be felt::

            for number in stream.left:
                break
            else:
                number = stream.next()
    """

    block_size = _BLOCK

    def __init__(self, seed: int | str):
        self._seed = seed
        self._block_number = -1
        self.left: Iterator[Any] = iter(())

    def next(self) -> Any:
        for number in self.left:
            return number
        self._open_block(self._block_number + 1)
        return next(self.left)

    @property
    def position(self) -> int:
        """n, all there is to save."""
        return (self._block_number + 1) * self.block_size - length_hint(self.left)

    @position.setter
    def position(self, position: int) -> None:
        block_number, offset = divmod(position, self.block_size)
        self._open_block(block_number, offset)

    def _open_block(self, block_number: int, offset: int = 0) -> None:
        generator = random.Random(f"{self._seed}/{block_number}")
        self._block_number = block_number
        self.left = iter(self._numbers(generator)[offset:])

    def _numbers(self, generator: random.Random) -> Sequence[Any]:
        return [generator.random() for _ in range(self.block_size)]


class IntegerStream(UniformStream):
    """Random integers below 2**32, which are made much faster."""

    block_size = 4 * _BLOCK

    def _numbers(self, generator: random.Random) -> Sequence[Any]:
        return struct.unpack(f"<{self.block_size}I", generator.randbytes(4 * self.block_size))


class Chooser(ABC):
    """The protocol of a chooser.

    Args:
        keys: names of the sources, each once.
        weights: one number or :class:`~energon_ext.weights.WeightSpec` per key; 1 each by default.
        seed: int or str; decides ties and draws.
        counts: tokens consumed so far by key, 0 by default.
    """

    def __init__(
        self,
        keys: Sequence[str],
        weights: Sequence[Any] | None = None,
        *,
        seed: int | str = 0,
        counts: Mapping[str, int] | None = None,
    ):
        if len(set(keys)) != len(keys) or not keys:
            raise ConfigError(f"A chooser needs distinct keys, got {list(keys)}.")
        if weights is not None and len(weights) != len(keys):
            raise ConfigError(f"{len(keys)} keys, but {len(weights)} weights; give one for each.")
        specs = dict(zip(keys, map(as_weight, weights or [1.0] * len(keys))))
        self.keys = tuple(sorted(keys))
        self.weights: dict[str, WeightSpec] = {key: specs[key] for key in self.keys}
        self.seed = seed
        self._counts: dict[str, int] = {key: int((counts or {}).get(key, 0)) for key in self.keys}
        self._dropped: set[str] = set()

    @property
    def counts(self) -> dict[str, int]:
        """Tokens consumed so far by key."""
        return self._counts

    @abstractmethod
    def choose(self, batch_index: int = 0) -> str:
        """The key whose sample is next.

        Raises:
            ConfigError: no source is left, or all that are left have weight 0 at this index.
        """

    def consume(self, key: str, tokens: int) -> None:
        """Count ``tokens`` for a source that was just read."""
        self._counts[key] += tokens

    def drop(self, key: str) -> None:
        """Take a source out: it has ended, or has nothing for this worker."""
        self._dropped.add(key)

    def revive(self, keys: Iterable[str] | None = None) -> None:
        """Bring dropped sources back: those named, or all of them for another pass."""
        self._dropped -= self._dropped if keys is None else set(keys)

    @property
    def active_keys(self) -> list[str]:
        """The keys that were not dropped."""
        return [key for key in self.keys if key not in self._dropped]

    def save_state(self) -> dict[str, Any]:
        """The state as JSON values."""
        return {
            "version": STATE_VERSION,
            "counts": dict(self.counts),
            "dropped": sorted(self._dropped),
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`save_state`. Keys that the state does not know start at 0."""
        if state.get("version") != STATE_VERSION:
            raise StateFormatError(
                f"A chooser state of version {state.get('version')!r} was found, "
                f"{STATE_VERSION} is known; use the energon_ext that wrote it, or a newer one."
            )
        self._counts = {key: int(state["counts"].get(key, 0)) for key in self.keys}
        self._dropped = set(state["dropped"]) & set(self.keys)


def nothing_to_draw(chooser: Chooser, batch_index: int) -> str:
    """What to tell a user whose blend has nothing to draw."""
    if not chooser.active_keys:
        return f"Every source has ended at batch index {batch_index}: {list(chooser.keys)}."
    weights = {key: repr(chooser.weights[key]) for key in chooser.active_keys}
    ended = [key for key in chooser.keys if key not in weights]
    return (
        f"Every weight is 0 at batch index {batch_index} among the sources this worker has samples "
        f"of: {weights}{f' ({ended} have ended or have none)' if ended else ''}. Give one of them "
        f"a weight > 0 there, or use fewer workers."
    )
