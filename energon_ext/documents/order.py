# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The order of documents, epoch after epoch."""

from dataclasses import dataclass, field

import numpy as np

from energon_ext.arguments import check_integer
from energon_ext.documents.permutation import KeyedPermutation, keyed_draws, stable_hash

#: Size of a sequence without an end.
ENDLESS = 2**62

#: Places of a group are sorted by numbers below this one.
_DRAWN = np.array(2**31)


@dataclass(kw_only=True, eq=False)
class EpochOrder:
    """The documents of a source in the order they are read; computed, never stored.

    With ``block=1`` an epoch is one random permutation. A larger block keeps documents that are
    stored side by side near each other, so that they can be read in one request:

    1. The numbers are rotated by a random amount, and cut into blocks of ``block`` consecutive
       ones. What is left over is a shorter block.
    2. The blocks are put in a random order, with the shorter one at the end.
    3. In this order ``mixed`` blocks at a time form a group, whose documents are shuffled.

    A hash of the key and the epoch decides all of it. To take some documents, those of their groups
    are sorted: ``block * mixed`` should not be much larger than what is taken at once.

    Args:
        size: documents in an epoch.
        key: names the order; another key, another order.
        epochs: most passes, None for no end.
        shuffled: False reads in order.
        block: documents that are kept together.
        mixed: blocks whose documents are shuffled together; no effect if ``block`` is 1.

    Attributes:
        epoch, position: how many epochs were finished, and places taken of the present one; all
            there is to save. ``epochs`` may be another one after a restore.

    Raises:
        ConfigError: ``block`` or ``mixed`` is less than 1.

    Example:
        >>> order = EpochOrder(5, "web", epochs=1)
        >>> sorted(order.take(3).tolist() + order.take(9).tolist())
        [0, 1, 2, 3, 4]
        >>> order.ended
        True

        The blocks 4-6 and 10-0 are mixed, and so are 7-9 and 1-3.

        >>> EpochOrder(12, "images", block=3, mixed=2).take(12).tolist()
        [0, 6, 4, 10, 11, 5, 8, 9, 7, 3, 1, 2]
    """

    size: int = field(kw_only=False)
    key: str = field(kw_only=False)
    epochs: int | None = None
    shuffled: bool = True
    block: int = 1
    mixed: int = 256

    def __post_init__(self) -> None:
        check_integer("block", self.block, 1)
        check_integer("mixed", self.mixed, 1)
        self._permutation: tuple[int, KeyedPermutation] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin with the first epoch again."""
        self.epoch = self.position = 0

    @property
    def is_finite(self) -> bool:
        """True if there is a last epoch."""
        return self.epochs is not None

    @property
    def ended(self) -> bool:
        """True if nothing is left."""
        while self.epochs is None or self.epoch < self.epochs:
            if self.position < self.size:
                return False
            self.epoch, self.position = self.epoch + 1, 0
        return True

    def peek(self, count: int) -> np.ndarray:
        """The next documents of the present epoch, int64; fewer than ``count`` where it ends."""
        return np.zeros(0, np.int64) if self.ended else self._here(count)

    def take(self, count: int) -> np.ndarray:
        """The next documents of the present epoch, whatever ``epochs`` is by now."""
        taken = self._here(count)
        self.position += len(taken)
        return taken

    def _here(self, count: int) -> np.ndarray:
        stop = min(self.position + count, self.size)
        if not self.shuffled:
            return np.arange(self.position, stop)
        if self.block == 1:
            return self._permute(np.arange(self.position, stop))
        return self._in_blocks(self._mixed_places(stop))

    def _permute(self, numbers: np.ndarray) -> np.ndarray:
        """Put documents, or blocks of full length, in the random order of the present epoch."""
        if self._permutation is None or self._permutation[0] != self.epoch:
            permutation = KeyedPermutation(self.size // self.block, f"{self.key}/{self.epoch}")
            self._permutation = self.epoch, permutation
        return self._permutation[1](numbers)

    def _mixed_places(self, stop: int) -> np.ndarray:
        """Places from the present one to ``stop``, where those of each group are shuffled."""
        group = self.block * self.mixed
        first = self.position // group * group
        places = np.arange(first, min(-(-stop // group) * group, self.size))
        drawn = keyed_draws(places, _DRAWN, f"{self.key}/{self.epoch}/mixed")
        places = places[np.lexsort((drawn, places // group))]
        return places[self.position - first : stop - first]

    def _in_blocks(self, places: np.ndarray) -> np.ndarray:
        """The documents at some places of the blocks in their random order."""
        numbers = places.copy()
        in_full_block = places < self.size // self.block * self.block
        blocks, inside = np.divmod(places[in_full_block], self.block)
        if len(blocks):
            numbers[in_full_block] = self._permute(blocks) * self.block + inside
        return (numbers + stable_hash(f"{self.key}/{self.epoch}/rotated") % self.size) % self.size
