# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import itertools

import numpy as np
import pytest

from energon_ext.errors import ConfigError
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import (
    BLEND,
    INTERLEAVE,
    Node,
    Tree,
    blend_of,
    check_nested_schedules,
)
from energon_ext.weights import weight_from_config


def node(*configs, rule=BLEND, name="mix.yaml", **options):
    places = [f"{name}: {rule}[{index}].weight" for index in range(len(configs))]
    return Node(rule, [weight_from_config(config) for config in configs], places, **options)


def shares(tree, position):
    keys = sorted(tree.keys())
    return dict(zip(keys, Mixture(tree, keys, seed="").shares(position)))


# The tree ----------------------------------------------------------------------------------------


def test_interleaves_excludes_sources_drawn_by_a_blend():
    blend, kept = node(1, 1), node(1, 1, rule=INTERLEAVE)
    assert Tree(kept, [Tree(kept, ["a", "b"]), "c"]).interleaves() == {"a": 2, "b": 2, "c": 1}
    assert Tree(kept, [Tree(blend, ["a", "b"]), "c"]).interleaves() == {"c": 1}
    assert Tree(blend, [Tree(node(1, rule=INTERLEAVE), ["a"]), "b"]).interleaves() == {}
    assert Tree(node(1), ["a"]).interleaves() == {"a": 0}


def test_a_tree_lists_nodes_leaves_and_breakpoints_of_all_levels():
    inner, outer = node(1, 3, rule=INTERLEAVE), node(2, {"step": {0: 2, 9: 0}})
    tree = Tree(outer, [Tree(inner, ["a", "b"]), "c"])
    assert list(tree.nodes()) == [outer, inner]
    assert list(tree.keys()) == ["a", "b", "c"]
    assert tree.breakpoints() == {0, 9}
    assert shares(tree, 0) == {"a": 0.125, "b": 0.375, "c": 0.5}
    assert shares(tree, 9) == {"a": 0.25, "b": 0.75, "c": 0}


def test_map_removes_leaves_that_become_none_with_their_weights():
    tree = Tree(node(5, 1, 3), [Tree(node(1, 1), ["a", "b"]), "c", "d"])
    without = tree.map(lambda leaf: leaf.upper() if leaf in "cd" else None)
    assert list(without.keys()) == ["C", "D"]
    assert without.node.wheres == ["mix.yaml: blend[1].weight", "mix.yaml: blend[2].weight"]
    assert shares(without, 0) == {"C": 0.25, "D": 0.75}
    assert tree.map(lambda leaf: None) is None
    assert list(tree.keys()) == ["a", "b", "c", "d"]  # a tree never changes


@pytest.mark.parametrize("rule", [BLEND, INTERLEAVE])
def test_yaml_order_does_not_matter(rule):
    """It affects neither draws nor ties between equal credits."""
    orders = set()
    for order in itertools.permutations("abcd"):
        outer = node(*[{"a": 2, "b": 2, "c": 3, "d": 3}[key] for key in order], rule=rule)
        members = [Tree(node(1, 2, rule=rule), [f"{key}1", f"{key}0"]) for key in order]
        tree = Tree(outer, members).sorted()
        keys = sorted(tree.keys())
        mixture = Mixture(tree, keys, seed="0", row_tokens=1)
        mixture.open(0)
        orders.add("".join(keys[number] for number in mixture.draw(np.arange(300))))
    assert len(orders) == 1


# Schedules inside schedules -----------------------------------------------------------------------


def test_nested_schedules_are_refused_unless_allowed():
    inner = Tree(node({"linear": {0: 1, 9: 2}}, 1, name="b.yaml"), ["a", "b"])
    for between in (inner, Tree(node(1), [inner])):
        for allowed in (False, True):
            outer = node({"step": {0: 1, 9: 2}}, 1, name="a.yaml", allow_nested_schedules=allowed)
            tree = Tree(outer, [between, "c"])
            if not allowed:
                with pytest.raises(ConfigError, match=r"a\.yaml: blend\[0\].*b\.yaml: blend\[0\]"):
                    check_nested_schedules(tree)
                continue
            check_nested_schedules(tree)
            assert shares(tree, 0) == {"a": 0.25, "b": 0.25, "c": 0.5}
            assert shares(tree, 9) == pytest.approx({"a": 4 / 9, "b": 2 / 9, "c": 1 / 3})


def test_a_schedule_next_to_a_schedule_is_allowed():
    """The constant member of a scheduled node may contain schedules."""
    inner = Tree(node({"linear": {0: 1, 9: 2}}, 1), ["b", "c"])
    check_nested_schedules(Tree(node({"step": {0: 1, 9: 2}}, 1), ["a", inner]))


# Planned shares -----------------------------------------------------------------------------------


def test_weights_one_and_three_are_shares_of_25_and_75_percent():
    """Conformance."""
    tree = blend_of({"a": weight_from_config(1), "b": weight_from_config(3)})
    assert shares(tree, 0) == {"a": 0.25, "b": 0.75}


def test_shares_sum_to_one_at_each_position():
    specs = {"a": weight_from_config({"linear": {0: 0, 10: 6}}), "b": weight_from_config(2)}
    # At 0: 0 of 2; at 5: 3 of 5; at 10: 6 of 8.
    for position, expected in ((0, 0.0), (5, 0.6), (10, 0.75), (5, 0.6)):
        assert shares(blend_of(specs), position)["a"] == pytest.approx(expected)
        assert shares(blend_of(specs), position)["b"] == pytest.approx(1 - expected)


def test_a_tree_without_weight_has_no_shares():
    zero = weight_from_config(0)
    assert shares(blend_of({"a": zero, "b": zero}), 3) == {"a": 0, "b": 0}


def test_the_share_of_an_empty_node_goes_to_the_others():
    gone = weight_from_config({"step": {0: 1, 5: 0}})
    inner = blend_of({"a": gone, "b": gone}, INTERLEAVE)
    outer = node(3, 1, 1)
    tree = Tree(outer, [inner, "c", "d"])
    assert shares(tree, 4) == pytest.approx({"a": 0.3, "b": 0.3, "c": 0.2, "d": 0.2})
    assert shares(tree, 5) == {"a": 0, "b": 0, "c": 0.5, "d": 0.5}
