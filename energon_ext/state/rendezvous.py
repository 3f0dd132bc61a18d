# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Messages of the ranks through the store by which torch.distributed started.

A collective would need a group of exactly the ranks that take part, on a device; it would be mixed
up with another one that a rank is in, and wait as long as that group does for a rank that has
failed. Here a rank posts what it has to say and looks for what others say. It holds nothing while
it waits, and names the ranks that have said nothing in time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from energon_ext.compat import default_store
from energon_ext.errors import RankError, one_line
from energon_ext.keyed import sha256

_PREFIX = "energon_ext/ranks"

#: Between two looks at the store; thousands of ranks may look at the same one.
_FIRST_PAUSE, _LAST_PAUSE = 0.001, 0.25

#: Ranks that a message lists.
_MOST_LISTED = 8


class Board:
    """A board on which ranks post messages, as JSON values, under a title.

    Ranks that open their n-th boards with the same name on the same store share them.

    Args:
        name: of the boards of some ranks.
        store: of torch.distributed.
        rank: of this process.
        patience: seconds to wait for a message.

    Raises:
        RankError: the store does not answer, here and in all methods.
    """

    def __init__(self, name: str, store: Any, rank: int, patience: float):
        self._store, self._patience, self.rank = store, patience, rank
        # The count is kept in the store: a process that starts again has another store.
        self._name = f"{_PREFIX}/{name}"
        self._number = self._ask(store.add, f"{self._name}/{self.rank}", 1)

    def post(self, title: str, message: Any) -> None:
        """Post a message of this rank."""
        self._ask(self._store.set, self._key(self.rank, title), json.dumps(message))

    def read(self, ranks: Sequence[int], title: str) -> list[Any]:
        """Wait for a message of each of some ranks; RankError names those without one."""
        if missing := self.wait(ranks, title, self._patience):
            raise RankError(
                f"{list_ranks(missing)} did not draw a batch within {self._patience:g} s of rank "
                f"{self.rank}, so they cannot be compared; see their own errors. If only some of "
                f"the ranks draw from this loader, create it with compare_ranks=False."
            )
        return [json.loads(self._ask(self._store.get, self._key(rank, title))) for rank in ranks]

    def wait(self, ranks: Sequence[int], title: str, seconds: float) -> list[int]:
        """Wait for messages of some ranks; return the ranks that have posted none in time."""
        keys = [self._key(rank, title) for rank in ranks]
        pause, deadline = _FIRST_PAUSE, time.monotonic() + seconds
        while keys and not self._ask(self._store.check, keys):
            if time.monotonic() > deadline:
                return [r for r, k in zip(ranks, keys) if not self._ask(self._store.check, [k])]
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE)
        return []

    def _key(self, rank: int, title: str) -> str:
        return f"{self._name}/{rank}/{self._number}/{title}"

    def _ask(self, method: Any, *arguments: Any) -> Any:
        try:
            return method(*arguments)
        except RuntimeError as error:  # which torch's errors of stores and connections are
            raise RankError(
                f"The store of torch.distributed does not answer ({one_line(error)}): the process "
                f"that holds it, usually rank 0, has ended; see its error."
            ) from error


def open_board(name: str, patience: float) -> Board | None:
    """Open the next board with a name; None if torch.distributed has no store."""
    store = default_store()
    return None if store is None else Board(name, store, dist.get_rank(), patience)


def board_of(ranks: Sequence[int]) -> str:
    """Return the name of the boards of some ranks."""
    return sha256(json.dumps([*ranks]))[:16]


def list_ranks(ranks: Sequence[int]) -> str:
    """Name ranks at the beginning of a sentence.

    Example:
        >>> list_ranks([3]), list_ranks([8, 9]), list_ranks(range(20))
        ('Rank 3', 'Ranks 8, 9', 'Ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    listed = ", ".join(map(str, ranks[:_MOST_LISTED]))
    more = f" and {len(ranks) - _MOST_LISTED} more" if len(ranks) > _MOST_LISTED else ""
    return f"Rank{'s' * (len(ranks) > 1)} {listed}{more}"
