# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which document of an indexed source comes next, for each worker, epoch after epoch.

The order of an epoch is one permutation for all workers, computed and never stored. Workers are
dealt its places like cards: of W workers, worker w takes places w, w + W, w + 2 W ... So what was
read is a number, and what is left of an epoch can be dealt anew to any number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

import numpy as np

from energon_ext.permutation import KeyedPermutation


@dataclass(frozen=True)
class Lap:
    """What was left of an epoch when it was dealt.

    Attributes:
        epoch: number of the pass.
        places: int64, single places of the epoch's order, rising.
        tail: and all places from here to the end.
    """

    epoch: int
    places: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    tail: int = 0

    def count(self, size: int) -> int:
        """Places that are left, of a source of ``size`` documents."""
        return len(self.places) + size - self.tail

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        listed = len(self.places)
        places = indices + (self.tail - listed)
        is_listed = indices < listed
        if is_listed.any():
            places[is_listed] = self.places[indices[is_listed]]
        return places


class DocumentOrder:
    """The documents that one worker reads.

    Args:
        size: documents in an epoch.
        key: names the order; another key, another order.
        worker, workers: which of how many, over all ranks.
        epochs: passes, None for no end.
        shuffled: False reads in order.

    Example:
        >>> halves = [DocumentOrder(5, "web", worker, 2, epochs=1) for worker in (0, 1)]
        >>> sorted(halves[0].take(9).tolist() + halves[1].take(9).tolist())
        [0, 1, 2, 3, 4]
    """

    def __init__(
        self,
        size: int,
        key: str,
        worker: int,
        workers: int,
        *,
        epochs: int | None = None,
        shuffled: bool = True,
    ):
        self.size, self.worker, self.workers = size, worker, workers
        self._key, self._epochs, self._shuffled = key, epochs, shuffled
        self._permutation: tuple[int, KeyedPermutation] | None = None
        self.restart()

    def restart(self) -> None:
        """Begin with the first epoch again."""
        self.laps: list[Lap] = []
        self.taken = 0  # by this worker, of the first lap
        self._next_epoch = 0

    @property
    def ended(self) -> bool:
        """Whether nothing is left."""
        while self.laps and self.taken >= self._share(self.laps[0]):
            self.laps.pop(0)
            self.taken = 0
        if not self.laps and self._may_begin():
            self.laps = [Lap(self._next_epoch)]
            self._next_epoch += 1
        return not self.laps

    def _may_begin(self) -> bool:
        """Whether there is another epoch, with documents for this worker."""
        more = self._epochs is None or self._next_epoch < self._epochs
        return more and self.size > self.worker

    def take(self, count: int) -> np.ndarray:
        """The next documents of one epoch, int64; fewer than ``count`` where it ends."""
        if self.ended:
            return np.zeros(0, np.int64)
        lap = self.laps[0]
        number = min(count, self._share(lap) - self.taken)
        own = np.arange(self.taken, self.taken + number) * self.workers + self.worker
        self.taken += number
        return self.documents(lap.epoch, lap[own])

    def documents(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """The documents at places of the order of an epoch."""
        if not self._shuffled:
            return places
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, KeyedPermutation(self.size, f"{self._key}/{epoch}")
        return self._permutation[1](places)

    def places_left(self) -> list[Lap]:
        """What this worker has not taken of the epochs it has begun."""
        left = []
        for number, lap in enumerate(self.laps):
            taken = self.taken if number == 0 else 0
            own = np.arange(taken, self._share(lap)) * self.workers + self.worker
            left.append(Lap(lap.epoch, lap[own], self.size))
        return left

    def _share(self, lap: Lap) -> int:
        return max(0, -(-(lap.count(self.size) - self.worker) // self.workers))

    def save_state(self) -> dict[str, Any]:
        """Plain values; grows with what was dealt anew, not with what was read."""
        return {
            "size": self.size,
            "worker": self.worker,
            "workers": self.workers,
            "laps": [[lap.epoch, lap.places.tobytes(), lap.tail] for lap in self.laps],
            "taken": self.taken,
            "next_epoch": self._next_epoch,
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`save_state` of the same worker of as many, with any ``epochs``."""
        self.laps = laps_from(state["laps"])
        self.taken = state["taken"]
        self._next_epoch = state["next_epoch"]


def laps_from(saved: Sequence[Sequence[Any]]) -> list[Lap]:
    """The laps of a saved state."""
    return [Lap(epoch, np.frombuffer(places, np.int64), tail) for epoch, places, tail in saved]
