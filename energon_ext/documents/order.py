# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which document comes next, epoch after epoch."""

from dataclasses import dataclass, field

import numpy as np

from energon_ext.documents.permutation import KeyedPermutation

#: Size of a sequence without an end.
ENDLESS = 2**62


@dataclass(kw_only=True, eq=False)
class EpochOrder:
    """The documents of a source in the order they are read; computed, never stored.

    Args:
        size: documents in an epoch.
        key: names the order; another key, another order.
        epochs: most passes, None for no end.
        shuffled: False reads in order.

    Attributes:
        epoch, position: how many epochs were finished, and places taken of the present one; all
            there is to save. ``epochs`` may be another one after a restore.

    Example:
        >>> order = EpochOrder(5, "web", epochs=1)
        >>> sorted(order.take(3).tolist() + order.take(9).tolist())
        [0, 1, 2, 3, 4]
        >>> order.ended
        True
    """

    size: int = field(kw_only=False)
    key: str = field(kw_only=False)
    epochs: int | None = None
    shuffled: bool = True

    def __post_init__(self) -> None:
        self._permutation: tuple[int, KeyedPermutation] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin with the first epoch again."""
        self.epoch = self.position = 0

    @property
    def is_finite(self) -> bool:
        """Whether there is a last epoch."""
        return self.epochs is not None

    @property
    def ended(self) -> bool:
        """Whether nothing is left."""
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
        places = np.arange(self.position, min(self.position + count, self.size))
        if not self.shuffled:
            return places
        if self._permutation is None or self._permutation[0] != self.epoch:
            key = f"{self.key}/{self.epoch}"
            self._permutation = self.epoch, KeyedPermutation(self.size, key)
        return self._permutation[1](places)
