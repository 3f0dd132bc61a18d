# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tree of a metadataset: nodes as the YAML has them, with sources as leaves."""

from dataclasses import dataclass, replace
from typing import Any, Callable, Iterator, Sequence

from energon_ext.errors import ConfigError
from energon_ext.weights import LiveWeights, WeightSpec

#: How the members of a node take turns: drawn at random, by credits, or one after the other.
BLEND, INTERLEAVE, IN_ORDER = "blend", "interleave", "in order"

#: Where a member of an interleave starts that a resumed state does not have.
NEW_SOURCES = ("baseline", "zero")


@dataclass(frozen=True, eq=False)
class Node:
    """A blend or an interleave.

    Attributes:
        rule: ``BLEND``, ``INTERLEAVE`` or ``IN_ORDER``.
        weights: of the members.
        wheres: place of each member in the YAML, for messages; empty where there is none.
        new_source: for an interleave, where a member starts that a resumed state does not have.
        allow_nested_schedules: a schedule above and one below may multiply.
        live: file from which a controller decides the weights; None without one.
        location: ``path:split`` of the metadataset that has this node; empty for others.
        name, identity: made of it; name its state, and find it where the name has changed.
    """

    rule: str
    weights: Sequence[WeightSpec]
    wheres: Sequence[str] = ()
    new_source: str = NEW_SOURCES[0]
    allow_nested_schedules: bool = False
    live: LiveWeights | None = None
    location: str = ""
    name: str = ""
    identity: str = ""

    def of_members(self, indices: Sequence[int]) -> "Node":
        """The node with some of its members, in this order."""
        wheres = [self.wheres[index] for index in indices] if self.wheres else ()
        return replace(self, weights=[self.weights[index] for index in indices], wheres=wheres)


@dataclass(frozen=True, eq=False)
class Tree:
    """A node with its members.

    Attributes:
        node: rule and weights of the members.
        members: for each, a tree or a leaf: the key of a source, or what the caller has.
    """

    node: Node
    members: Sequence[Any]

    def keys(self) -> Iterator[Any]:
        """All leaves below, in order."""
        for member in self.members:
            yield from member.keys() if isinstance(member, Tree) else [member]

    def nodes(self) -> Iterator[Node]:
        """This node and all below."""
        yield self.node
        for member in self.members:
            if isinstance(member, Tree):
                yield from member.nodes()

    def map(self, change: Callable[[Any], Any]) -> "Tree | None":
        """Change every leaf; leave out those that become None, and nodes without a member."""
        members = [m.map(change) if isinstance(m, Tree) else change(m) for m in self.members]
        kept = [index for index, member in enumerate(members) if member is not None]
        if not kept:
            return None
        return Tree(self.node.of_members(kept), [members[index] for index in kept])

    def sorted(self) -> "Tree":
        """Put members in the order of their first keys: YAML order must not matter to a draw."""
        members = [m.sorted() if isinstance(m, Tree) else m for m in self.members]
        first = [next(m.keys()) if isinstance(m, Tree) else m for m in members]
        order = sorted(range(len(members)), key=first.__getitem__)
        return Tree(self.node.of_members(order), [members[index] for index in order])

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
        weights = [weight for node in self.nodes() for weight in node.weights]
        return {point for weight in weights for point in weight.breakpoints()}


def blend_of(weights: dict[str, WeightSpec], rule: str = BLEND, **options: Any) -> Tree:
    """A tree of one node, whose members are sources.

    Example:
        >>> from energon_ext.weights import ConstantWeight
        >>> blend_of({"code": ConstantWeight(1), "web": ConstantWeight(3)}).members
        ['code', 'web']
    """
    return Tree(Node(rule, list(weights.values()), **options), list(weights))


def check_nested_schedules(tree: Tree, above: tuple[Node, str] | None = None) -> None:
    """Refuse a schedule inside a schedule where the outer node does not allow it.

    ``above`` is the node of the schedule above this tree, with its place in the YAML.
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
