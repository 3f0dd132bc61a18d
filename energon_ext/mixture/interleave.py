# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draws that keep the token shares of members exact, by credits.

With every token that a node draws, each member earns its share of it; who is drawn pays what the
row holds; the member with the largest credit is next::

    credit_i += share_i * tokens        next = argmax credit        credit_next -= tokens

With equal weights that is the source with the fewest tokens so far. Whatever the schedules do, a
credit is the integral of the scheduled share minus what was read, and stays below one row. Rates
that divide by the weight do not have this property: a member whose weight grows from near zero
would have to wait for the debts of its first tokens.
"""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import numpy as np

from energon_ext.documents.permutation import keyed_draws


class InterleaveSampler:
    """Draws the member with the largest credit.

    Args:
        names: of the members.
        row_tokens: tokens that a row is taken to have until it is known; 0 where rows differ.
        phase: ``(key, worker, workers)`` where many workers draw for themselves: each begins with
            other fractions of a row, so that they do not all draw the same member at once.

    State: one number a member, and the tokens drawn.

    Example:
        >>> sampler = InterleaveSampler(["a", "b"], row_tokens=10)
        >>> shares = np.array([0.75, 0.25])
        >>> sampler.pick(np.arange(8), shares, 0).tolist()
        [0, 0, 1, 0, 0, 0, 1, 0]
        >>> sampler.settle(shares, np.array([60, 20]))
        >>> sampler.credits.tolist()
        [0.0, 0.0]
    """

    def __init__(
        self,
        names: Sequence[str],
        row_tokens: int = 0,
        phase: tuple[str, int, int] | None = None,
    ):
        self.names = list(names)
        self.credits = np.zeros(len(names))
        self.tokens = 0
        self._row_tokens = float(row_tokens or 1)
        if phase is not None and phase[2] > 1:
            self.credits = self._row_tokens * (_phases(self.names, *phase) - 0.5)
        self._retained: dict[str, float] = {}

    def pick(self, rows: np.ndarray, shares: np.ndarray, attempt: int) -> np.ndarray:
        """Members for some rows; what they really hold is said to :meth:`settle` afterwards.

        Args, Returns: as of :meth:`~energon_ext.mixture.blend.BlendSampler.pick`.
        """
        row_tokens, earned = self._row_tokens, shares * self._row_tokens
        credits = np.where(shares > 0, self.credits, -np.inf)
        picked = np.empty(len(rows), np.int64)
        for index in range(len(rows)):
            credits += earned
            picked[index] = member = credits.argmax()
            credits[member] -= row_tokens
        return picked

    def settle(self, shares: np.ndarray, tokens: np.ndarray) -> None:
        """Count what was drawn under some shares, int64 [members]."""
        total = int(tokens.sum())
        self.credits = self.credits + shares * total - tokens
        self.tokens += total

    def save_state(self) -> dict[str, Any]:
        """JSON values; members that are away are among them."""
        credits = {**self._retained, **dict(zip(self.names, self.credits.tolist()))}
        return {"credits": dict(sorted(credits.items())), "tokens": self.tokens}

    def restore_state(
        self, state: Mapping[str, Any], renamed: Mapping[str, str], shares: np.ndarray | None
    ) -> None:
        """Continue from a state.

        Args:
            state: of :meth:`save_state`.
            renamed: names of now by names in the state, where they differ.
            shares: of now, where new members begin as if they had been there from the first token
                and had never been drawn; None where they begin level with the others.
        """
        saved = {renamed.get(name, name): credit for name, credit in state["credits"].items()}
        self.tokens = state["tokens"]
        self._retained = {name: saved[name] for name in saved if name not in self.names}
        is_known = np.array([name in saved for name in self.names])
        self.credits = np.array([float(saved.get(name, 0.0)) for name in self.names])
        if shares is not None and not is_known.all() and shares[is_known].sum() > 0:
            before = np.where(is_known, shares, 0.0)
            self.credits += (shares - before / before.sum()) * self.tokens


def _phases(names: Sequence[str], key: str, worker: int, workers: int) -> np.ndarray:
    """For each member another order of the workers, evenly over [0, 1)."""
    starts = np.array(
        [
            keyed_draws(np.zeros(1, np.int64), np.array([workers]), f"{key}/{name}")[0]
            for name in names
        ]
    )
    steps = 1 + 2 * np.arange(len(names))  # distinct, so that members do not move in parallel
    return (((starts + worker * steps) % workers) + 0.5) / workers
