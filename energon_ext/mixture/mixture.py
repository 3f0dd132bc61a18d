# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Draw the sources of rows by walking the tree of a metadataset."""

import copy
from typing import Any, Mapping, Sequence

import numpy as np

from energon_ext.errors import ZeroWeightsError
from energon_ext.mixture.blend import BlendSampler, InOrderSampler
from energon_ext.mixture.interleave import Credits, InterleaveSampler
from energon_ext.mixture.tree import BLEND, INTERLEAVE, ZERO, Tree
from energon_ext.weights import Weights


def zero_weights_error(unit: str, position: int, whose: str, remedy: str = "") -> ZeroWeightsError:
    """Return the error that nothing can be drawn at a position, counted in a unit."""
    return ZeroWeightsError(
        f"Every weight is 0 at {unit} {position}{whose}. Give one of them a weight > 0 there"
        + (f", or {remedy}." if remedy else ".")
    )


class Mixture:
    """Draws the sources of many rows at once.

    A draw walks from the root of the tree to a source. A node has weight 0 for its parent if each
    of its members has weight 0 or has ended.

    Args:
        tree: its leaves are ``keys``, in any order.
        keys: keys of the sources, sorted; draws are indices into them.
        seed: selects the random numbers, which shares do not need.
        row_tokens: positions per row; 0 if rows differ in length.

    Attributes:
        ended: bool [sources], sources that have no row left; set by the caller.

    State: the credits of all interleaves, including retained ones that are not in the tree.

    Example:
        >>> from energon_ext.mixture.tree import INTERLEAVE, blend_of
        >>> from energon_ext.weights import ConstantWeight
        >>> tree = blend_of({"a": ConstantWeight(1), "b": ConstantWeight(3)}, INTERLEAVE)
        >>> mixture = Mixture(tree, ["a", "b"], seed="0")
        >>> mixture.open(position=0)
        True
        >>> mixture.draw(np.arange(4)).tolist()
        [1, 0, 1, 1]
    """

    def __init__(
        self,
        tree: Tree,
        keys: Sequence[str],
        *,
        seed: str = "",
        row_tokens: int = 0,
        unit: str = "position",
    ):
        self.keys, self._unit = tuple(keys), unit
        self.ended = np.zeros(len(self.keys), bool)

        numbers = {key: number for number, key in enumerate(self.keys)}
        self._root = _Branch(tree, "", numbers, seed, row_tokens)
        self._interleaves = self._root.interleaves()
        self._retained: dict[str, Any] = {}

    def fork(self, credits: Sequence[Credits]) -> "Mixture":
        """Return the same mixture with the given credits, to be drawn on its own."""
        other = copy.copy(self)
        other.ended, other._root = self.ended.copy(), self._root.fork()
        other._interleaves = other._root.interleaves()
        for (_, sampler), now in zip(other._interleaves, credits):
            sampler.credits, sampler.tokens = now
        return other

    def open(self, position: int) -> bool:
        """Set the weights for a position on the schedule axis; False if nothing can be drawn."""
        return self._root.open(position, self.ended)

    def error_of_weights(self, position: int, what: str, remedy: str) -> ZeroWeightsError:
        """Return the error that sources that have not ended have no weight at a position.

        Args:
            what: what they have left, such as "rows".
            remedy: what else to do than give a weight.
        """
        left = [key for key, ended in zip(self.keys, self.ended) if not ended]
        whose = f" for the sources with {what} left: {', '.join(left)}"
        return zero_weights_error(self._unit, position, whose, remedy)

    def shares(self, position: int) -> np.ndarray:
        """Return the share of each source, float64 [sources]; all 0 if nothing can be drawn."""
        shares = np.zeros(len(self.keys))
        if self.open(position):
            self._root.add_shares(shares, 1.0)
        return shares

    def row_shares(self, position: int, row_tokens: np.ndarray) -> np.ndarray:
        """Return the share of each source in the rows; all 0 if nothing can be drawn.

        An interleave keeps shares of tokens, so it draws sources with emptier rows more often.

        Args:
            row_tokens: average tokens in a row of each source, float64 [sources].
        """
        if not self.open(position):
            return np.zeros(len(self.keys))
        return self._root.row_shares(row_tokens)[0]

    def draw(self, rows: np.ndarray, attempt: int = 0) -> np.ndarray:
        """Draw the source of each row, int64 [n]; call :meth:`open` first.

        Args:
            rows: int64 [n], row numbers within the run, increasing.
            attempt: number of earlier draws for these rows, which hit an ended source.
        """
        return self._root.draw(rows, attempt)

    def settle(self, tokens: np.ndarray) -> None:
        """Update the credits by the tokens read since the last call, int64 [sources]."""
        self._root.settle(tokens)

    def set_row_tokens(self, row_tokens: int) -> None:
        """Set the positions per row of the next draws."""
        for _, sampler in self._interleaves:
            sampler.row_tokens = row_tokens

    def restart_counts(self, row_tokens: float = 1.0) -> None:
        """Count tokens from 0 again; convert credits from rows to tokens at ``row_tokens`` each."""
        for _, sampler in self._interleaves:
            sampler.credits = sampler.credits * row_tokens
            sampler.tokens = 0

    def credits(self) -> tuple[Credits, ...]:
        """Return the state of every interleave; later draws do not change it."""
        return tuple(sampler.now() for _, sampler in self._interleaves)

    def credits_to_json(self, credits: Sequence[Credits]) -> dict[str, Any]:
        """Return :meth:`credits` as JSON values, together with those of retained nodes."""
        nodes = {
            branch.name: {"identity": branch.identity, **sampler.to_json(now)}
            for (branch, sampler), now in zip(self._interleaves, credits)
        }
        return {**self._retained, **nodes}

    def restore_state(
        self, state: Mapping[str, Any], renamed: Mapping[str, str], position: int
    ) -> None:
        """Continue from :meth:`credits_to_json`, possibly of another tree.

        Nodes are matched by identity, or else by name.

        Args:
            renamed: current key by saved key, for sources that moved.
            position: current position of the run on the schedule axis.
        """
        self.open(position)
        by_identity = {entry["identity"]: name for name, entry in state.items()}
        claimed = {by_identity.get(branch.identity) for branch, _ in self._interleaves}
        left, names, matched = set(state), dict(renamed), []
        for branch, sampler in self._interleaves:
            saved = by_identity.get(branch.identity)
            if saved is None and branch.name not in claimed:
                saved = branch.name
            if saved in left:
                left.remove(saved)
                names[saved] = branch.name
                matched.append((branch, sampler, state[saved]))
        for branch, sampler, entry in matched:
            sampler.restore_state(entry, names, branch.shares_of_new())
        self._retained = {
            name: {
                **entry,
                "credits": {names.get(key, key): each for key, each in entry["credits"].items()},
            }
            for name, entry in state.items()
            if name in left
        }


class _Branch:
    """A node of the tree with its sampler and children."""

    def __init__(
        self, tree: Tree, name: str, numbers: Mapping[str, int], seed: str, row_tokens: int
    ):
        node = tree.node
        self.name, self.identity = name, node.identity
        self._new_at_zero = node.new_source == ZERO
        self._weights = Weights(node.weights)
        #: Number of the source of each member, -1 for a node.
        members = [-1 if isinstance(member, Tree) else numbers[member] for member in tree.members]
        self._sources = np.array(members, np.int64)
        self._is_source = self._sources >= 0
        names = [
            member if isinstance(member, str) else member.node.name or f"{name}[{index}]"
            for index, member in enumerate(tree.members)
        ]
        self._children = {
            index: _Branch(member, names[index], numbers, seed, row_tokens)
            for index, member in enumerate(tree.members)
            if isinstance(member, Tree)
        }
        self.sampler: BlendSampler | InterleaveSampler | InOrderSampler = InOrderSampler()
        if node.rule == BLEND:
            self.sampler = BlendSampler(f"{seed}/{name}")
        elif node.rule == INTERLEAVE:
            self.sampler = InterleaveSampler(names, row_tokens, seed)

    def fork(self) -> "_Branch":
        """Return a copy of this node and of all nodes below, with samplers of their own."""
        other = copy.copy(self)
        other._weights, other.sampler = copy.copy(self._weights), copy.copy(self.sampler)
        other._children = {index: child.fork() for index, child in self._children.items()}
        return other

    def interleaves(self) -> list[tuple["_Branch", InterleaveSampler]]:
        """Return the interleaves among this node and all nodes below, with their samplers."""
        below = [pair for child in self._children.values() for pair in child.interleaves()]
        own = self.sampler
        return [(self, own), *below] if isinstance(own, InterleaveSampler) else below

    def open(self, position: int, ended: np.ndarray) -> bool:
        present = np.zeros(len(self._sources), bool)
        present[self._is_source] = ~ended[self._sources[self._is_source]]
        for index, child in self._children.items():
            present[index] = child.open(position, ended)
        values = self._weights.at(position) * present
        total = values.sum()
        self._shares = values / total if total > 0 else values
        return bool(total > 0)

    def draw(self, rows: np.ndarray, attempt: int) -> np.ndarray:
        members = self.sampler.pick(rows, self._shares, attempt)
        drawn = self._sources[members]
        for index, child in self._children.items():
            own = members == index
            if own.any():
                drawn[own] = child.draw(rows[own], attempt)
        return drawn

    def settle(self, tokens: np.ndarray) -> int:
        by_member = np.zeros(len(self._sources), np.int64)
        by_member[self._is_source] = tokens[self._sources[self._is_source]]
        for index, child in self._children.items():
            by_member[index] = child.settle(tokens)
        if isinstance(self.sampler, InterleaveSampler):
            self.sampler.settle(self._shares, by_member)
        return int(by_member.sum())

    def add_shares(self, shares: np.ndarray, above: float) -> None:
        """Add the shares of the sources below, given the share of this node in the whole run."""
        shares[self._sources[self._is_source]] += above * self._shares[self._is_source]
        for index, child in self._children.items():
            child.add_shares(shares, above * float(self._shares[index]))

    def row_shares(self, row_tokens: np.ndarray) -> tuple[np.ndarray, float]:
        """Return the share of each source in the rows of this node, and their average tokens."""
        tokens = np.ones(len(self._sources))
        tokens[self._is_source] = row_tokens[self._sources[self._is_source]]
        below = {
            index: child.row_shares(row_tokens)
            for index, child in self._children.items()
            if self._shares[index] > 0
        }
        for index, (_, average) in below.items():
            tokens[index] = average
        rows = (
            self._shares / tokens if isinstance(self.sampler, InterleaveSampler) else self._shares
        )
        rows = rows / rows.sum()
        shares = np.zeros(len(row_tokens))
        shares[self._sources[self._is_source]] = rows[self._is_source]
        for index, (of_child, _) in below.items():
            shares += rows[index] * of_child
        return shares, float((rows * tokens).sum())

    def shares_of_new(self) -> np.ndarray | None:
        """Return the current shares if new members begin at zero, else None."""
        return self._shares if self._new_at_zero else None
