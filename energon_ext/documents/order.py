# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which document of an indexed source comes next, for each worker, epoch after epoch.

The order of an epoch is one permutation for all workers, computed and never stored. Workers are
dealt its places like cards: of W workers, worker w takes places w, w + W, w + 2 W ... So what was
read is a number, and what is left of an epoch can be dealt anew to any number of workers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import numpy as np

from energon_ext.documents.permutation import KeyedPermutation

#: Size of a sequence without an end.
ENDLESS = 2**62


@dataclass(frozen=True)
class Share:
    """The places of a sequence that one worker was dealt.

    Attributes:
        worker, workers: which of how many.
        listed: int64, single places; they come first.
        tail: from here on every ``workers``-th place, beginning with ``tail + worker``.

    Example:
        >>> Share(1, 3, np.array([2]), tail=6)[np.arange(3)].tolist()
        [2, 7, 10]
    """

    worker: int
    workers: int
    listed: np.ndarray
    tail: int = 0

    @classmethod
    def fresh(cls, worker: int, workers: int, tail: int = 0) -> "Share":
        return cls(worker, workers, np.zeros(0, np.int64), tail)

    def count(self, size: int) -> int:
        """Places of a sequence of ``size``."""
        return len(self.listed) + max(0, -(-(size - self.tail - self.worker) // self.workers))

    def __getitem__(self, indices: np.ndarray) -> np.ndarray:
        listed = len(self.listed)
        places = self.tail + self.worker + (indices - listed) * self.workers
        is_listed = indices < listed
        if is_listed.any():
            places[is_listed] = self.listed[indices[is_listed]]
        return places

    def without(self, taken: int) -> tuple["Share", int]:
        """The share without its listed places that were taken, and how many were taken of it."""
        gone = min(taken, len(self.listed))
        return Share(self.worker, self.workers, self.listed[gone:], self.tail), taken - gone


def deal_anew(dealt: Sequence[tuple[Share, int]], size: int, worker: int, workers: int) -> Share:
    """What one of ``workers`` gets of all that others had left.

    Workers advance at about the same pace. So few places are left below the one that the fastest
    has reached: those are listed, and all others follow in turn.

    Args:
        dealt: the share of every old worker, and how many of its places it took.
        size: places of the sequence.

    Example:
        >>> old = [(Share.fresh(0, 2), 3), (Share.fresh(1, 2), 1)]  # 0, 2 and 4; 1
        >>> new = deal_anew(old, 8, 0, 1)
        >>> new[np.arange(new.count(8))].tolist()
        [3, 5, 6, 7]
    """
    tail = dealt[0][0].tail
    old_workers = dealt[0][0].workers
    left, steps = zip(*(share.without(taken) for share, taken in dealt))
    furthest = max(steps)
    places = [share.listed for share in left]
    for share, step in zip(left, steps):
        own = tail + share.worker + old_workers * np.arange(step, furthest)
        places.append(own[own < size])
    listed = np.sort(np.concatenate(places))[worker::workers]
    return Share(worker, workers, listed, min(size, tail + old_workers * furthest))


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
        self._shares: dict[int, Share] = {}  # of the epochs that were begun, in order
        self._taken = 0  # of the first of them
        self._next_epoch = 0

    @property
    def ended(self) -> bool:
        """Whether nothing is left."""
        while self._shares:
            epoch, share = next(iter(self._shares.items()))
            if self._taken < share.count(self.size):
                return False
            del self._shares[epoch]
            self._taken = 0
        if not self._may_begin():
            return True
        self._shares[self._next_epoch] = Share.fresh(self.worker, self.workers)
        self._next_epoch += 1
        return False

    def _may_begin(self) -> bool:
        """Whether there is another epoch, with documents for this worker."""
        more = self._epochs is None or self._next_epoch < self._epochs
        return more and self.size > self.worker

    def take(self, count: int) -> np.ndarray:
        """The next documents of one epoch, int64; fewer than ``count`` where it ends."""
        if self.ended:
            return np.zeros(0, np.int64)
        epoch, share = next(iter(self._shares.items()))
        number = min(count, share.count(self.size) - self._taken)
        places = share[np.arange(self._taken, self._taken + number)]
        self._taken += number
        return self.documents(epoch, places)

    def documents(self, epoch: int, places: np.ndarray) -> np.ndarray:
        """The documents at places of the order of an epoch."""
        if not self._shuffled:
            return places
        if self._permutation is None or self._permutation[0] != epoch:
            self._permutation = epoch, KeyedPermutation(self.size, f"{self._key}/{epoch}")
        return self._permutation[1](places)

    def take_over(self, orders: Sequence["DocumentOrder"]) -> None:
        """Continue with this worker's part of what others had left.

        Args:
            orders: of all old workers.
        """
        self.restart()
        self._next_epoch = max(order._next_epoch for order in orders)
        for epoch in range(self._next_epoch):
            tails = [order._shares[epoch].tail for order in orders if epoch in order._shares]
            unbegun = any(epoch >= order._next_epoch for order in orders)
            if not tails and not unbegun:
                continue  # everyone has read it
            dealt = [order._part_of(epoch, tails[0] if tails else 0) for order in orders]
            share = deal_anew(dealt, self.size, self.worker, self.workers)
            if share.count(self.size):
                self._shares[epoch] = share

    def _part_of(self, epoch: int, tail: int) -> tuple[Share, int]:
        """This worker's share of an epoch, and what it took of it."""
        if epoch in self._shares:
            is_first = epoch == next(iter(self._shares))
            return self._shares[epoch], self._taken if is_first else 0
        share = Share.fresh(self.worker, self.workers, tail)
        return share, share.count(self.size) if epoch < self._next_epoch else 0

    def save_state(self) -> dict[str, Any]:
        """JSON values; grow with what was dealt anew, not with what was read."""
        taken, shares = self._taken, []
        for epoch, share in self._shares.items():
            if not shares:
                share, taken = share.without(taken)
            shares.append([epoch, share.listed.tolist(), share.tail])
        return {
            "size": self.size,
            "worker": self.worker,
            "workers": self.workers,
            "shares": shares,
            "taken": taken,
            "next_epoch": self._next_epoch,
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`save_state` of the same worker of as many, with any ``epochs``."""
        self._shares = {
            epoch: Share(self.worker, self.workers, np.array(listed, np.int64), tail)
            for epoch, listed, tail in state["shares"]
        }
        self._taken = state["taken"]
        self._next_epoch = state["next_epoch"]
