# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Choosers of choosers: blends and interleaves inside each other.

A nested metadataset reaches us flat: each source with the product of its shares along its path.
:func:`chooser_for` reads the tree back from those products. Blends inside blends need no node of
their own, since probabilities multiply; an interleave is a node, whose members are sources or
further nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Sequence

from energon_ext.mixture.choosers.base import Chooser
from energon_ext.mixture.choosers.by_weight import RandomChooser
from energon_ext.mixture.choosers.least_consumed import LeastConsumedChooser
from energon_ext.weights import ScheduleAxis, WeightGroup, WeightSpec
from energon_ext.weights.compose import (
    INTERLEAVE,
    ShareWeight,
    factors,
    product,
    without_common_total,
)

#: A source, and the factors of its weight from the outermost in.
_Entry = tuple[str, tuple[WeightSpec, ...]]


def chooser_for(
    keys: Sequence[str],
    weights: Sequence[WeightSpec],
    *,
    seed: int | str,
    axis: ScheduleAxis | None = None,
    sample_tokens: int = 0,
) -> Chooser:
    """The chooser that a metadataset describes.

    Args:
        keys: of the sources.
        weights: of each source, as the metadataset composed it.
        seed: of the worker.
        axis: what the knots count.
        sample_tokens: tokens of a sample, where all have about as many; 0 where they differ.

    Example:
        >>> from energon_ext.weights import ConstantWeight, WeightGroup
        >>> group = WeightGroup([ConstantWeight(1), ConstantWeight(1)], rule="interleave")
        >>> type(chooser_for(["a", "b"], [group.share(0), group.share(1)], seed=0)).__name__
        'LeastConsumedChooser'
    """
    entries = [(key, factors(weight)) for key, weight in zip(keys, weights)]
    return _Tree(axis or ScheduleAxis(), sample_tokens).node(entries, seed)


class TreeChooser(Chooser):
    """A chooser some of whose members are choosers.

    What is consumed counts for every node above it. A node is known by the sources below it; when
    they change, its balance begins anew.

    Args:
        root: chooses among members.
        children: the chooser behind each member that is none of the sources itself.
    """

    def __init__(self, root: Chooser, children: Mapping[str, Chooser]):
        self._root = root
        self._children = dict(children)
        self._child_of = {key: name for name, node in children.items() for key in node.keys}
        leaves = [key for key in root.keys if key not in children]
        weights = {key: root.weights[key] for key in leaves}
        for node in children.values():
            weights.update(node.weights)
        super().__init__(list(weights), list(weights.values()), seed=root.seed)

    def choose(self, batch_index: int = 0) -> str:
        name = self._root.choose(batch_index)
        child = self._children.get(name)
        return name if child is None else child.choose(batch_index)

    def consume(self, key: str, tokens: int) -> None:
        super().consume(key, tokens)
        name = self._child_of.get(key)
        if name is not None:
            self._children[name].consume(key, tokens)
        self._root.consume(name or key, tokens)

    def drop(self, key: str) -> None:
        super().drop(key)
        name = self._child_of.get(key)
        if name is None:
            self._root.drop(key)
            return
        self._children[name].drop(key)
        if not self._children[name].active_keys:
            self._root.drop(name)

    def revive(self, keys=None) -> None:
        back = set(self._dropped if keys is None else keys)
        super().revive(back)
        for node in self._children.values():
            node.revive(back.intersection(node.keys))
        self._root.revive({self._child_of.get(key, key) for key in back})

    def save_state(self) -> dict[str, Any]:
        return {
            **super().save_state(),
            "root": self._root.save_state(),
            "children": {name: node.save_state() for name, node in self._children.items()},
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        super().restore_state(state)
        self._root.restore_state(state["root"])
        for name, node in self._children.items():
            if name in state["children"]:
                node.restore_state(state["children"][name])


@dataclass(frozen=True)
class _Tree:
    """Builds the nodes of one tree."""

    axis: ScheduleAxis
    sample_tokens: int

    def node(self, entries: list[_Entry], seed: int | str) -> Chooser:
        group = _common_interleave(entries)
        return (
            self._blend(entries, seed) if group is None else self._interleave(group, entries, seed)
        )

    def _interleave(self, group: WeightGroup, entries: list[_Entry], seed: int | str) -> Chooser:
        by_member: dict[int, list[_Entry]] = {}
        for key, path in entries:
            by_member.setdefault(path[0].index, []).append((key, path[1:]))
        names, children = self._members(list(by_member.values()), seed)
        root = LeastConsumedChooser(
            names,
            [self.axis.restate(group.members[index]) for index in by_member],
            seed=seed,
            sample_tokens=self.sample_tokens,
            new_source=group.new_source,
        )
        return TreeChooser(root, children) if children else root

    def _blend(self, entries: list[_Entry], seed: int | str) -> Chooser:
        """Sources by themselves, and interleaves of sources, each with the product above it."""
        grouped: dict[Any, list[_Entry]] = {}
        above: dict[Any, WeightSpec] = {}
        for key, path in entries:
            depth = next((i for i, factor in enumerate(path) if _is_interleave(factor)), len(path))
            member = path[depth].group if depth < len(path) else key
            grouped.setdefault(member, []).append((key, path[depth:]))
            above[member] = product(path[:depth])
        names, children = self._members(list(grouped.values()), seed)
        weights = without_common_total(list(above.values()))
        root = RandomChooser(names, [self.axis.restate(weight) for weight in weights], seed=seed)
        return TreeChooser(root, children) if children else root

    def _members(
        self, members: list[list[_Entry]], seed: int | str
    ) -> tuple[list[str], dict[str, Chooser]]:
        """A name for each member, and the chooser behind those that are several sources."""
        names, children = [], {}
        for entries in members:
            keys = sorted(key for key, _ in entries)
            name = keys[0]
            if len(keys) > 1:
                name = f"({', '.join(keys)})"
                children[name] = self.node(entries, f"{seed}/{name}")
            names.append(name)
        return names, children


def _common_interleave(entries: list[_Entry]) -> WeightGroup | None:
    heads = [path[0] if path else None for _, path in entries]
    if all(_is_interleave(head) and head.group is heads[0].group for head in heads):
        return heads[0].group
    return None


def _is_interleave(factor: WeightSpec | None) -> bool:
    return isinstance(factor, ShareWeight) and factor.group.rule == INTERLEAVE
