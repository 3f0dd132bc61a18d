# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tree of a metadataset: nodes as the YAML has them, with sources as leaves.

Energon hands the sources of a metadataset over as one flat list with a float each. So every source
carries its path through the tree in that float (:class:`PathWeight`), and :func:`tree_of` puts the
nodes back together.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any, Iterator, Sequence

from energon_ext.errors import ConfigError
from energon_ext.weights import ConstantWeight, WeightSpec

#: How the members of a node take turns: drawn at random, by credits, or one after the other.
BLEND, INTERLEAVE, IN_ORDER = "blend", "interleave", "in order"

#: Where a member of an interleave starts that a resumed state does not know.
NEW_SOURCES = ("baseline", "zero")


@dataclass(eq=False)
class Node:
    """A blend or an interleave.

    Attributes:
        rule: ``BLEND``, ``INTERLEAVE`` or ``IN_ORDER``.
        weights: of the members.
        wheres: place of each member in the YAML, for messages.
        new_source: for an interleave, where a member starts that a resumed state does not know.
        allow_nested_schedules: a schedule above and one below may multiply.
        location: ``path:split`` of the metadataset that has this node; empty for others.
        name, identity: made of it; name its state, and find it where the name has changed.
    """

    rule: str
    weights: list[WeightSpec]
    wheres: list[str] = field(default_factory=list)
    new_source: str = NEW_SOURCES[0]
    allow_nested_schedules: bool = False
    location: str = ""
    name: str = ""
    identity: str = ""

    @functools.cached_property
    def shares_at_start(self) -> list[float]:
        """Of the members at position 0, 1 together; all 0 where no weight is above."""
        values = [weight.evaluate(0) for weight in self.weights]
        total = sum(values) or 1.0
        return [value / total for value in values]


#: One step of the path from the root to a source: member ``index`` of a node, or a constant factor
#: of a blend that is not ours.
PathStep = tuple[Node, int] | float


class PathWeight(float):
    """Carries the path of a source, from the outermost node in, where a float is expected.

    Stock metadatasets multiply and divide the weights of what they wrap; here that lengthens the
    path. Where the whole path is constant blends, it is the float that stock Energon makes; else
    whoever asks for the number does not know schedules, which is an error and not a run that is
    frozen at its first weights.
    """

    path: tuple[PathStep, ...]

    def __new__(cls, path: Sequence[PathStep]) -> "PathWeight":
        self = super().__new__(cls, _share_at_start(path))
        self.path = tuple(path)
        return self

    def __mul__(self, factor: Any) -> "PathWeight":
        outermost, path = float(factor), self.path
        if path and isinstance(path[0], float):
            outermost, path = outermost * path[0], path[1:]
        return PathWeight((outermost, *path))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "PathWeight":
        return self * (1.0 / float(divisor))

    def __float__(self) -> float:
        moving = [where for where, plain in _plainness(self.path) if not plain]
        if moving:
            raise ConfigError(
                f"{moving[0]}: a schedule, a weight of 0 or an interleave, which this TaskEncoder "
                f"does not know; put energon_ext.DynamicBlendMixin first among its base classes, "
                f"or use energon_ext.PackedTaskEncoder."
            )
        return float.__add__(self, 0.0)

    def __reduce__(self) -> tuple[Any, ...]:
        return PathWeight, (self.path,)


def path_of(weight: Any) -> tuple[PathStep, ...]:
    """The path in whatever stands in ``LoadedDataset.weight``: None, a number, a carried path."""
    if isinstance(weight, PathWeight):
        return weight.path
    return () if weight is None else (float(weight),)


@dataclass(eq=False)
class Tree:
    """A node with its members resolved.

    Attributes:
        node: rule and weights of the members that have sources.
        members: for each, a tree or the key of a source.
    """

    node: Node
    members: list["Tree" | str]

    def keys(self) -> Iterator[str]:
        """Keys of all sources below."""
        for member in self.members:
            yield from member.keys() if isinstance(member, Tree) else [member]

    def nodes(self) -> Iterator[Node]:
        """This node and all below."""
        yield self.node
        for member in self.members:
            if isinstance(member, Tree):
                yield from member.nodes()

    def interleaves(self) -> dict[str, int]:
        """How many interleaves are above a source, of all that are drawn by no blend of several."""
        kept = self.node.rule == INTERLEAVE
        if not kept and len(self.members) > 1:
            return {}
        below = [m.interleaves() if isinstance(m, Tree) else {m: 0} for m in self.members]
        return {key: count + kept for each in below for key, count in each.items()}

    def to_json(self) -> Any:
        """Names, rules, weights and sources as JSON values; another draw has others."""
        members = [m.to_json() if isinstance(m, Tree) else m for m in self.members]
        weights = [weight.to_json() for weight in self.node.weights]
        return [self.node.name, self.node.rule, self.node.new_source, weights, members]

    def breakpoints(self) -> set[int]:
        """Every position at which some weight changes its rule."""
        return {
            point
            for node in self.nodes()
            for weight in node.weights
            for point in weight.breakpoints()
        }


def tree_of(leaves: Sequence[tuple[str, Sequence[PathStep]]]) -> Tree:
    """Put the nodes of a metadataset together.

    Args:
        leaves: key and path of every source.

    Raises:
        ConfigError: a schedule inside a schedule, and the node does not allow it.

    Example:
        >>> node = Node(BLEND, [ConstantWeight(1), ConstantWeight(3)])
        >>> tree_of([("code", [(node, 0)]), ("web", [(node, 1)])]).members
        ['code', 'web']
    """
    for _, path in leaves:
        _check_nested_schedules(path)
    tree = _member(sorted(leaves, key=lambda leaf: leaf[0]))  # their order in the YAML says nothing
    if isinstance(tree, Tree):
        return tree
    return Tree(Node(BLEND, [ConstantWeight(1)]), [tree])


def blend_of(weights: dict[str, WeightSpec], rule: str = BLEND, **options: Any) -> Tree:
    """A tree of one node, whose members are sources."""
    return Tree(Node(rule, list(weights.values()), **options), list(weights))


def _member(leaves: Sequence[tuple[str, Sequence[PathStep]]]) -> Tree | str:
    first = leaves[0][1][0] if leaves[0][1] else None
    if len(leaves) == 1 and not any(isinstance(step, tuple) for step in leaves[0][1]):
        return leaves[0][0]
    if isinstance(first, tuple) and all(
        path and isinstance(path[0], tuple) and path[0][0] is first[0] for _, path in leaves
    ):
        return _node(first[0], leaves)
    return _foreign_blend(leaves)


def _node(node: Node, leaves: Sequence[tuple[str, Sequence[PathStep]]]) -> Tree:
    by_member: dict[int, list[tuple[str, Sequence[PathStep]]]] = {}
    for key, path in leaves:
        by_member.setdefault(path[0][1], []).append((key, path[1:]))  # type: ignore[index]
    kept = list(by_member)
    weights = [node.weights[index] for index in kept]
    wheres = [node.wheres[index] for index in kept] if node.wheres else []
    return Tree(
        dataclasses.replace(node, weights=weights, wheres=wheres),
        [_member(by_member[index]) for index in kept],
    )


def _foreign_blend(leaves: Sequence[tuple[str, Sequence[PathStep]]]) -> Tree:
    """Sources that a stock metadataset blends, and nodes of ours among them."""
    weights: list[WeightSpec] = []
    groups: dict[Any, list[tuple[str, Sequence[PathStep]]]] = {}
    for key, path in leaves:
        factor = path[0] if path and isinstance(path[0], float) else 1.0
        inner = path[1:] if path and isinstance(path[0], float) else path
        head = inner[0] if inner else None
        group = head[0] if isinstance(head, tuple) else key
        if group not in groups:
            weights.append(ConstantWeight(factor))
        groups.setdefault(group, []).append((key, inner))
    return Tree(Node(BLEND, weights), [_member(group) for group in groups.values()])


def _check_nested_schedules(path: Sequence[PathStep]) -> None:
    above = None
    for node, index in (step for step in path if isinstance(step, tuple)):
        if not node.weights[index].is_scheduled:
            continue
        if above is not None and not above[0].allow_nested_schedules:
            raise ConfigError(
                f"A schedule inside a schedule: {above[0].wheres[above[1]]} and "
                f"{node.wheres[index]}. Make one of them a constant, or set "
                f"`allow_nested_schedules: true` if the product is meant."
            )
        above = node, index


def _plainness(path: Sequence[PathStep]) -> Iterator[tuple[str, bool]]:
    """The place of each node on a path, and whether stock Energon could draw by it."""
    for step in path:
        if isinstance(step, tuple):
            node, index = step
            plain = all(isinstance(w, ConstantWeight) and w.value > 0 for w in node.weights)
            yield node.wheres[index] if node.wheres else "", plain and node.rule == BLEND


def _share_at_start(path: Sequence[PathStep]) -> float:
    share = 1.0
    for step in path:
        if isinstance(step, tuple):
            share *= step[0].shares_at_start[step[1]]
        else:
            share *= step
    return share
