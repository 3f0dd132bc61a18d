# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The order of documents, epoch after epoch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from energon_ext.arguments import check_integer
from energon_ext.keyed import KeyedPermutation, keyed_draws, stable_hash
from energon_ext.plan.arrangement import Arrangement, digest_of_numbers, mix_in_buckets
from energon_ext.plan.budget import nested_subset
from energon_ext.state.match import check_fingerprint

#: Size of an endless sequence.
ENDLESS = 2**62

#: Exclusive upper bound of the random numbers that the places of a group are sorted by.
_DRAW_BOUND = np.array(2**31)


@dataclass(kw_only=True, eq=False)
class EpochOrder:
    """The documents of a source in reading order; computed, and sorted only if an entry asks.

    With ``block=1`` an epoch is one random permutation. A larger block keeps documents that are
    stored next to each other close together, so they can be read in one request:

    1. The numbers are rotated by a random amount and divided into blocks of ``block`` consecutive
       numbers. The remainder is a shorter block.
    2. The blocks are shuffled, except that the shorter one comes last.
    3. Every ``mixed`` consecutive blocks form a group, whose documents are shuffled.

    All of it is a function of the key and the epoch. Taking some documents sorts whole groups, so
    ``block * mixed`` should not be much larger than the number taken at once.

    Args:
        size: documents of the source.
        key: names the order; different keys give different orders.
        epochs: maximum number of passes after the ``first`` ones, None for no limit.
        shuffled: False reads in order.
        block: documents that are kept together.
        mixed: blocks whose documents are shuffled together; no effect if ``block`` is 1.
        arrangement: an order that is not random; None for a random one.
        rank: returns the numbers of all documents as an arrangement sorts them, [size].
        subset: documents of an epoch, a nested subset of them all, see
            :mod:`~energon_ext.plan.budget`; None for all.

    Attributes:
        epoch, position: finished epochs, and documents taken from the current one. Together with
            ``blocks``, ``arranged`` and ``chosen``, nothing else needs to be saved. ``epochs`` may
            change after a restore.
        first: passes that do not count towards ``epochs``; see :meth:`begin_again`.
        blocks: ``(block, mixed)`` of the current epoch. After a restore it may differ from the
            arguments, which then apply from the next epoch on.
        arranged: the arrangement of the current epoch, likewise.
        chosen: the ``subset`` of the current epoch, likewise; ``size`` for all documents after an
            epoch with a subset.

    Raises:
        ConfigError: ``block`` or ``mixed`` is less than 1.

    Example:
        >>> order = EpochOrder(5, "web", epochs=1)
        >>> sorted(order.take(3).tolist() + order.take(9).tolist())
        [0, 1, 2, 3, 4]
        >>> order.ended
        True

        Blocks 4-6 and 10-0 are mixed, and so are blocks 7-9 and 1-3.

        >>> EpochOrder(12, "images", block=3, mixed=2).take(12).tolist()
        [0, 6, 4, 10, 11, 5, 8, 9, 7, 3, 1, 2]
    """

    size: int = field(kw_only=False)
    key: str = field(kw_only=False)
    epochs: int | None = None
    shuffled: bool = True
    block: int = 1
    mixed: int = 256
    arrangement: Arrangement | None = None
    rank: Callable[[Arrangement], np.ndarray] | None = None
    subset: int | None = None

    def __post_init__(self) -> None:
        check_integer("block", self.block, 1)
        check_integer("mixed", self.mixed, 1)
        self._permutation: tuple[tuple[int, ...], KeyedPermutation] | None = None
        self._ranked: dict[tuple[Arrangement, int | None], np.ndarray] = {}
        self._subsets: dict[int, np.ndarray] = {}
        self.restart()
        if self.shuffled and self.arrangement is not None and self.arrangement.by is not None:
            self._numbers_by(self.arrangement)  # a missing column ends the start, not a step

    def restart(self) -> None:
        """Start again with the first epoch."""
        self.first = 0
        self.chosen: int | None = None
        self._begin(0)

    def begin_again(self) -> None:
        """Allow another ``epochs`` passes after the current one, which has been read."""
        self._begin(self.epoch + (self.position >= self.epoch_size))
        self.first = self.epoch

    def _begin(self, epoch: int) -> None:
        self.epoch, self.position, self.blocks = epoch, 0, (self.block, self.mixed)
        self.arranged = self.arrangement
        # Once there was a subset, the state says the size of every epoch: others had other sizes.
        self.chosen = self.size if self.subset is None and self.chosen else self.subset

    @property
    def documents(self) -> int:
        """Documents of an epoch that begins now."""
        return self.size if self.subset is None else self.subset

    @property
    def epoch_size(self) -> int:
        """Documents of the current epoch."""
        return self.size if self.chosen is None else self.chosen

    def among(self, subset: int | None, places: np.ndarray) -> np.ndarray:
        """Return the documents at places of a subset in stored order; None for all documents."""
        if subset in (None, self.size):
            return places
        if subset not in self._subsets:
            self._subsets[subset] = nested_subset(self.size, subset)
        return self._subsets[subset][places].astype(np.int64)

    @property
    def _end(self) -> float:
        """The number of the epoch after the last one."""
        return math.inf if self.epochs is None else self.first + self.epochs

    @property
    def is_finite(self) -> bool:
        """True if there is a last epoch."""
        return self.epochs is not None

    @property
    def ended(self) -> bool:
        """True if no document is left."""
        is_epoch_read = self.position >= self.epoch_size
        return self.epoch + is_epoch_read >= self._end

    def peek(self, count: int) -> np.ndarray:
        """Return the next documents without taking them, int64; fewer at the end of an epoch.

        If the current epoch has been read, the next one begins.
        """
        if self.position >= self.epoch_size and self.epoch < self._end:
            self._begin(self.epoch + 1)
        return np.zeros(0, np.int64) if self.ended else self._next(count)

    def take(self, count: int) -> np.ndarray:
        """Return the next documents of the current epoch, even if ``epochs`` has been reached."""
        taken = self._next(count)
        self.position += len(taken)
        return taken

    def _next(self, count: int) -> np.ndarray:
        stop = min(self.position + count, self.epoch_size)
        places = np.arange(self.position, stop)
        if not self.shuffled:
            return self.among(self.chosen, places)
        if self.arranged is not None:
            return self._arrange(places, self.arranged)
        if self.blocks[0] == 1:
            return self.among(self.chosen, self._permute(places))
        return self.among(self.chosen, self._in_blocks(self._mixed_places(stop)))

    def saved_arrangement(self) -> Any:
        """Return the arrangement of the current epoch as a state contains it, None for random."""
        if self.arranged is None or self.arranged.by is None:
            return None if self.arranged is None else self.arranged.to_json()
        digest = digest_of_numbers(self._numbers_by(self.arranged))
        return replace(self.arranged, digest=digest).to_json()

    def restore_arrangement(self, saved: Arrangement | None) -> None:
        """Continue an epoch that has begun in its own arrangement.

        Raises:
            ConfigError: its column is gone.
            StateMismatchError: its values have changed.
        """
        self.arranged = None if saved is None else saved.plain
        if saved is not None and saved.by is not None:
            now = digest_of_numbers(self._numbers_by(saved.plain))
            advice = "The epoch was begun in the order of its values; use those, or a new run."
            check_fingerprint({saved.by: saved.digest}, {saved.by: now}, "order", advice)

    def _arrange(self, places: np.ndarray, arranged: Arrangement) -> np.ndarray:
        if arranged.by is None:
            return self.among(self.chosen, places)
        if arranged.buckets is not None:
            key = f"{self.key}/{self.epoch}"
            places = mix_in_buckets(places, self.epoch_size, arranged.buckets, key)
        return self._numbers_by(arranged)[places].astype(np.int64)

    def _numbers_by(self, arranged: Arrangement) -> np.ndarray:
        """Return the documents of an epoch in the order of an arrangement, sorted once."""
        if (name := (arranged, self.chosen)) not in self._ranked:
            assert self.rank is not None, "what sorts is given with an arrangement"
            ranked = self.rank(arranged)
            if self.chosen is not None:
                is_chosen = np.zeros(self.size, bool)
                is_chosen[self.among(self.chosen, np.arange(self.chosen))] = True
                ranked = ranked[is_chosen[ranked]]
            self._ranked[name] = ranked
        return self._ranked[name]

    def _permute(self, numbers: np.ndarray) -> np.ndarray:
        """Permute documents, or blocks of full length, by the order of the current epoch."""
        block = self.blocks[0]
        blocks = self.epoch_size // block
        if self._permutation is None or self._permutation[0] != (self.epoch, block, blocks):
            permutation = KeyedPermutation(blocks, f"{self.key}/{self.epoch}")
            self._permutation = (self.epoch, block, blocks), permutation
        return self._permutation[1](numbers)

    def _mixed_places(self, stop: int) -> np.ndarray:
        """Return the places from the current one to ``stop``, shuffled within each group."""
        group = math.prod(self.blocks)
        first = self.position // group * group
        places = np.arange(first, min(-(-stop // group) * group, self.epoch_size))
        drawn = keyed_draws(places, _DRAW_BOUND, f"{self.key}/{self.epoch}/mixed")
        places = places[np.lexsort((drawn, places // group))]
        return places[self.position - first : stop - first]

    def _in_blocks(self, places: np.ndarray) -> np.ndarray:
        """Return the documents at the given places of the shuffled blocks."""
        numbers = places.copy()
        size = self.blocks[0]
        in_full_block = places < self.epoch_size // size * size
        blocks, inside = np.divmod(places[in_full_block], size)
        if len(blocks):
            numbers[in_full_block] = self._permute(blocks) * size + inside
        return (
            numbers + stable_hash(f"{self.key}/{self.epoch}/rotated") % self.epoch_size
        ) % self.epoch_size
