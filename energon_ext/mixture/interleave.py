# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draws that keep the tokens of each member within a row of its share, by credits.

For every token that a node draws, each member earns its share of a token; the member that is drawn
pays for all tokens of its row::

    credit_i += share_i * tokens        credit_drawn -= tokens

A credit is therefore the integral of the scheduled share minus the tokens read. Schemes that divide
by the weight lack this property: a member whose weight grows from near zero would first have to
work off the debt of its first tokens.

If all rows have the same length, the member with the earliest deadline is drawn. Let
``e = 1 / (2 n - 2)`` for ``n`` members: among those with a credit of at least ``e`` rows, it is the
one that would reach ``1 - e`` rows first if it were never drawn. With constant shares no credit
ever gets there (Tijdeman, *The chairman assignment problem*, 1980). Drawing the largest credit is
not as good: with weights 12 : 12 : 3 : 1 : 1 a credit exceeds a row.

If rows differ in length, the member with the largest credit is drawn; with equal weights that is
the one with the fewest tokens so far. Ties are broken in an order that depends on the seed.
"""

import heapq
from typing import Any, Mapping, NamedTuple, Sequence

import numpy as np

from energon_ext.keyed import stable_hash

ROUNDING = 1e-9  # tolerance when comparing fractions of rows


class Credits(NamedTuple):
    """State of an interleave: credits in tokens, float64 [members], and the tokens drawn."""

    credits: np.ndarray
    tokens: int


class InterleaveSampler:
    """Draws the member whose next row is due first.

    Args:
        row_tokens: tokens per row, assumed until the actual tokens are known; 0 if rows differ in
            length.
        seed: breaks ties between members.

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
        self.row_tokens = row_tokens
        self._retained: dict[str, float] = {}

    def pick(self, rows: np.ndarray, shares: np.ndarray, attempt: int) -> np.ndarray:
        """Return the member for each row, like ``BlendSampler.pick``; call :meth:`settle` next."""
        credits, shares = self.credits[self._turns], shares[self._turns]
        if self.row_tokens:
            return self._turns[_by_deadline(credits / self.row_tokens, shares, len(rows))]
        credits, picked = np.where(shares > 0, credits, -np.inf), np.empty(len(rows), np.int64)
        for index in range(len(rows)):
            credits += shares
            picked[index] = member = (credits > credits.max() - ROUNDING).argmax()
            credits[member] -= 1
        return self._turns[picked]

    def settle(self, shares: np.ndarray, tokens: np.ndarray) -> None:
        """Update the credits by the tokens drawn from each member, int64 [members]."""
        total = int(tokens.sum())
        self.credits = self.credits + shares * total - tokens
        self.tokens += total

    def now(self) -> Credits:
        """Return the current state; later draws do not change it."""
        return Credits(self.credits, self.tokens)

    def to_json(self, now: Credits) -> dict[str, Any]:
        """Return a state as JSON values, including the credits of retained members."""
        credits = {**self._retained, **dict(zip(self.names, now.credits.tolist()))}
        return {"credits": dict(sorted(credits.items())), "tokens": now.tokens}

    def restore_state(
        self, state: Mapping[str, Any], renamed: Mapping[str, str], shares: np.ndarray | None
    ) -> None:
        """Continue from a state.

        Args:
            state: as returned by :meth:`to_json`.
            renamed: current name by saved name, for members whose name changed.
            shares: current shares if new members start as if they had been members from the first
                token and never been drawn; None if they start level with the others.
        """
        saved = {renamed.get(name, name): credit for name, credit in state["credits"].items()}
        self.tokens = state["tokens"]
        current = set(self.names)
        self._retained = {name: saved[name] for name in saved if name not in current}
        is_known = np.array([name in saved for name in self.names])
        self.credits = np.array([float(saved.get(name, 0.0)) for name in self.names])
        if shares is not None and not is_known.all() and shares[is_known].sum() > 0:
            before = np.where(is_known, shares, 0.0)
            self.credits += (shares - before / before.sum()) * self.tokens


def _by_deadline(credits: np.ndarray, shares: np.ndarray, rows: int) -> np.ndarray:
    """Return the members of the next ``rows`` rows, by earliest deadline, int64 [rows].

    All rows have one length, and credits are in rows. The n-th row of a member may be drawn from
    its release on (a credit of ``e``) and is due at its deadline (``1 - e``).
    """
    least = 1 / max(2 * len(shares) - 2, 2)  # e
    active = np.flatnonzero(shares)
    credits, shares = credits[active], shares[active]
    # Look one row further ahead for each row of total debt, so that there are enough candidates.
    horizon = rows + 2 + max(0.0, -float(credits.sum()))
    counts = np.floor(credits + shares * horizon - least).clip(-1, rows - 1).astype(np.int64) + 1
    member = np.repeat(np.arange(len(active)), counts)
    nth = np.arange(len(member)) - np.repeat(np.cumsum(counts) - counts, counts)
    lacking = nth - credits[member]  # rows of credit that the member must earn first
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
            end = begin + 1  # no member has enough credit: take the first that will
        while begin < end:
            heapq.heappush(due, waiting[begin])
            begin += 1
        picked[row] = heapq.heappop(due)[1]
    return active[picked]
