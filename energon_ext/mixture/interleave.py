# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draws that keep the token shares of members to a row, by credits.

With every token that a node draws, each member earns its share of it; who is drawn pays what the
row holds::

    credit_i += share_i * tokens        credit_next -= tokens

A credit is the integral of the scheduled share minus what was read. Rates that divide by the weight
do not have this property: a member whose weight grows from near zero would have to wait for the
debts of its first tokens.

Next is, among the members with a credit of at least ``e`` rows, ``e = 1 / (2 n - 2)`` for ``n``
members, the one that would soonest have ``1 - e`` rows if it were not drawn. Where shares stay, no
credit ever reaches ``1 - e`` (Tijdeman, *The chairman assignment problem*, 1980), and the largest
credit would not do: 12 : 12 : 3 : 1 : 1 goes beyond a row. Where rows differ in length, the largest
credit is next; with equal weights that is the source with the fewest tokens so far. Between members
that are due alike, an order decides that depends on the seed.
"""

import heapq
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from energon_ext.documents.permutation import stable_hash

#: Fractions of rows, and credits in tokens, are compared up to these.
ROUNDING, TOKEN_ROUNDING = 1e-9, 1e-6


class Credits(NamedTuple):
    """State of an interleave: credits, float64 [members], and the tokens drawn."""

    credits: np.ndarray
    tokens: int


class InterleaveSampler:
    """Draws the member whose next row is due first.

    Args:
        row_tokens: tokens that a row is taken to have until it is known; 0 where rows differ.
        seed: decides between members that are due alike.

    State: one number per member, and the tokens drawn.

    Example:
        >>> sampler = InterleaveSampler(["a", "b"], row_tokens=10)
        >>> shares = np.array([0.75, 0.25])
        >>> sampler.pick(np.arange(8), shares, 0).tolist()
        [0, 0, 1, 0, 0, 0, 1, 0]
        >>> sampler.settle(shares, np.array([60, 20]))
        >>> sampler.credits.tolist()
        [0.0, 0.0]
    """

    def __init__(self, names: Sequence[str], row_tokens: int = 0, seed: str = ""):
        self.names = list(names)
        self._turns = np.argsort([stable_hash(f"{seed}/{number}") for number in range(len(names))])
        self.credits = np.zeros(len(names))
        self.tokens = 0
        self._row_tokens = row_tokens
        self._retained: dict[str, float] = {}

    def pick(self, rows: np.ndarray, shares: np.ndarray, attempt: int) -> np.ndarray:
        """As :meth:`~energon_ext.mixture.blend.BlendSampler.pick`; :meth:`settle` comes after."""
        credits, shares = self.credits[self._turns], shares[self._turns]
        if self._row_tokens:
            return self._turns[_by_deadline(credits / self._row_tokens, shares, len(rows))]
        credits, picked = np.where(shares > 0, credits, -np.inf), np.empty(len(rows), np.int64)
        for index in range(len(rows)):
            credits += shares
            picked[index] = member = (credits > credits.max() - ROUNDING).argmax()
            credits[member] -= 1
        return self._turns[picked]

    def settle(self, shares: np.ndarray, tokens: np.ndarray) -> None:
        """Count what was drawn under some shares, int64 [members]."""
        total = int(tokens.sum())
        self.credits = self.credits + shares * total - tokens
        self.tokens += total

    def now(self) -> Credits:
        """The state, which later draws do not change."""
        return Credits(self.credits, self.tokens)

    def to_json(self, now: Credits) -> dict[str, Any]:
        """A state as JSON values; members that are away are among them."""
        credits = {**self._retained, **dict(zip(self.names, now.credits.tolist()))}
        return {"credits": dict(sorted(credits.items())), "tokens": now.tokens}

    def restore_state(
        self, state: Mapping[str, Any], renamed: Mapping[str, str], shares: np.ndarray | None
    ) -> None:
        """Continue from a state.

        Args:
            state: of :meth:`to_json`.
            renamed: current names by names in the state, where they differ.
            shares: the current ones, where new members begin as if they had been there from the
                first token and had never been drawn; None where they begin level with the others.
        """
        saved = {renamed.get(name, name): credit for name, credit in state["credits"].items()}
        self.tokens = state["tokens"]
        own = set(self.names)
        self._retained = {name: saved[name] for name in saved if name not in own}
        is_known = np.array([name in saved for name in self.names])
        self.credits = np.array([float(saved.get(name, 0.0)) for name in self.names])
        if shares is not None and not is_known.all() and shares[is_known].sum() > 0:
            before = np.where(is_known, shares, 0.0)
            self.credits += (shares - before / before.sum()) * self.tokens


def _by_deadline(credits: np.ndarray, shares: np.ndarray, rows: int) -> np.ndarray:
    """Members for some rows of one length, by credits in rows and shares, float64 [members]."""
    least = 1 / max(2 * len(shares) - 2, 2)
    active = np.flatnonzero(shares)
    credits, shares = credits[active], shares[active]
    # A row more for every one that the credits lack together, so that there are always enough.
    horizon = rows + 2 + max(0.0, -float(credits.sum()))
    counts = np.floor(credits + shares * horizon - least).clip(-1, rows - 1).astype(np.int64) + 1
    member = np.repeat(np.arange(len(active)), counts)
    nth = np.arange(len(member)) - np.repeat(np.cumsum(counts) - counts, counts)
    lacking = nth - credits[member]  # until all but one of the rows are paid for
    release = np.ceil((lacking + least) / shares[member] - ROUNDING)
    deadline = np.floor((lacking + 1 - least) / shares[member] + ROUNDING)
    order = np.lexsort((member, release))
    begins = np.searchsorted(release[order], np.arange(1, rows + 1), side="right").tolist()
    waiting = list(zip(deadline[order].tolist(), member[order].tolist()))
    picked, begin = np.empty(rows, np.int64), begins[0]
    due = waiting[:begin]
    heapq.heapify(due)
    for row, end in enumerate(begins):
        if begin >= end and not due:
            end = begin + 1  # nobody has the credit: who will have it first
        while begin < end:
            heapq.heappush(due, waiting[begin])
            begin += 1
        picked[row] = heapq.heappop(due)[1]
    return active[picked]
