# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tree of a metadataset: nodes as nested in the YAML, with sources as leaves."""

from dataclasses import dataclass, replace
from typing import Any, Callable, Iterator, Sequence

from energon_ext.errors import ConfigError
from energon_ext.weights import LiveWeights, WeightSpec

#: Rules by which a node draws its members: at random, by credits, or one after the other.
BLEND, INTERLEAVE, IN_ORDER = "blend", "interleave", "in order"

#: Start of an interleave member that is missing from the resumed state: level with the others, or
#: as if it had been a member from the first token and never been drawn.
NEW_SOURCES = BASELINE, ZERO = "baseline", "zero"


@dataclass(frozen=True, eq=False)
class Node:
    """A blend or an interleave.

    Attributes:
        rule: ``BLEND``, ``INTERLEAVE`` or ``IN_ORDER``.
        weights: one per member.
        wheres: place of each member in the YAML, for messages; may be empty.
        new_source: for an interleave, the start of new members, see ``NEW_SOURCES``.
        allow_nested_schedules: whether a scheduled member may contain schedules, which multiply.
        live: file through which a controller sets the weights, or None.
        location: ``path:split`` of the metadataset if this node is its root, else empty.
        name, identity: names of the node's state; the identity finds it if the name has changed.
    """

    rule: str
    weights: Sequence[WeightSpec]
    wheres: Sequence[str] = ()
    new_source: str = BASELINE
    allow_nested_schedules: bool = False
    live: LiveWeights | None = None
    location: str = ""
    name: str = ""
    identity: str = ""

    def of_members(self, indices: Sequence[int]) -> "Node":
        """Return the node with only these members, in this order."""
        wheres = [self.wheres[index] for index in indices] if self.wheres else ()
        return replace(self, weights=[self.weights[index] for index in indices], wheres=wheres)


@dataclass(frozen=True, eq=False)
class Tree:
    """A node with its members.

    Attributes:
        node: rule and weights of the members.
        members: each a tree or a leaf, which is the key of a source or any value of the caller.
    """

    node: Node
    members: Sequence[Any]

    def keys(self) -> Iterator[Any]:
        """Yield all leaves below, in order."""
        for member in self.members:
            yield from member.keys() if isinstance(member, Tree) else [member]

    def nodes(self) -> Iterator[Node]:
        """Yield this node and all nodes below."""
        yield self.node
        for member in self.members:
            if isinstance(member, Tree):
                yield from member.nodes()

    def map(self, change: Callable[[Any], Any]) -> "Tree | None":
        """Change every leaf; drop those that become None, and nodes left without members."""
        members = [m.map(change) if isinstance(m, Tree) else change(m) for m in self.members]
        kept = [index for index, member in enumerate(members) if member is not None]
        if not kept:
            return None
        return Tree(self.node.of_members(kept), [members[index] for index in kept])

    def sorted(self) -> "Tree":
        """Sort members by their first key: the order in the YAML must not affect draws."""
        members = [m.sorted() if isinstance(m, Tree) else m for m in self.members]
        first = [next(m.keys()) if isinstance(m, Tree) else m for m in members]
        order = sorted(range(len(members)), key=first.__getitem__)
        return Tree(self.node.of_members(order), [members[index] for index in order])

    def interleaves(self) -> dict[str, int]:
        """Count the interleaves above each source, without sources drawn by a blend of several."""
        is_interleave = self.node.rule == INTERLEAVE
        if not is_interleave and len(self.members) > 1:
            return {}
        below = [m.interleaves() if isinstance(m, Tree) else {m: 0} for m in self.members]
        return {key: count + is_interleave for each in below for key, count in each.items()}

    def to_json(self) -> Any:
        """Return everything that affects draws as JSON values: names, rules, weights, sources."""
        members = [m.to_json() if isinstance(m, Tree) else m for m in self.members]
        weights = [weight.to_json() for weight in self.node.weights]
        return [self.node.name, self.node.rule, self.node.new_source, weights, members]

    def breakpoints(self) -> set[int]:
        """Return every position at which the rule of some weight changes."""
        weights = [weight for node in self.nodes() for weight in node.weights]
        return {point for weight in weights for point in weight.breakpoints()}


def blend_of(weights: dict[str, WeightSpec], rule: str = BLEND, **options: Any) -> Tree:
    """Build a tree of one node whose members are sources.

    Example:
        >>> from energon_ext.weights import ConstantWeight
        >>> blend_of({"code": ConstantWeight(1), "web": ConstantWeight(3)}).members
        ['code', 'web']
    """
    return Tree(Node(rule, list(weights.values()), **options), list(weights))


def check_nested_schedules(tree: Tree, above: tuple[Node, str] | None = None) -> None:
    """Raise ConfigError for a schedule inside a schedule, unless the outer node allows it.

    ``above`` is the node of the nearest schedule above this tree, and its place in the YAML.
    """
    node = tree.node
    for index, (member, weight) in enumerate(zip(tree.members, node.weights)):
        nearest = above
        if weight.is_scheduled:
            where = node.wheres[index] if node.wheres else ""
            if above is not None and not above[0].allow_nested_schedules:
                raise ConfigError(
                    f"A schedule inside a schedule: {above[1]} and {where}. Make one of them a "
                    f"constant, or set `allow_nested_schedules: true` if the product is meant."
                )
            nearest = node, where
        if isinstance(member, Tree):
            check_nested_schedules(member, nearest)
