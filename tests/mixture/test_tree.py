# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import itertools
import pickle

import numpy as np
import pytest

from energon_ext.errors import ConfigError
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import (
    BLEND,
    INTERLEAVE,
    Node,
    PathWeight,
    Tree,
    blend_of,
    path_of,
    tree_of,
)
from energon_ext.weights import weight_from_config


def node(*configs, rule=BLEND, name="mix.yaml", **options):
    wheres = [f"{name}: {rule}[{index}].weight" for index in range(len(configs))]
    return Node(rule, [weight_from_config(config) for config in configs], wheres, **options)


def test_an_interleave_keeps_the_shares_of_sources_that_no_blend_draws():
    blend, first, second = (node(1, 1, rule=rule) for rule in (BLEND, INTERLEAVE, INTERLEAVE))
    deep = [("a", [(first, 0), (second, 0)]), ("b", [(first, 0), (second, 1)]), ("c", [(first, 1)])]
    assert tree_of(deep).interleaves() == {"a": 2, "b": 2, "c": 1}
    drawn = [("a", [(first, 0), (blend, 0)]), ("b", [(first, 0), (blend, 1)]), ("c", [(first, 1)])]
    assert tree_of(drawn).interleaves() == {"c": 1}
    assert tree_of([("a", [(blend, 0), (first, 0)]), ("b", [(blend, 1)])]).interleaves() == {}
    assert tree_of([("a", [(blend, 0)])]).interleaves() == {"a": 0}


def shares(tree, position):
    keys = sorted(tree.keys())
    return dict(zip(keys, Mixture(tree, keys, seed="").shares(position)))


# From paths to nodes ------------------------------------------------------------------------------


def test_a_tree_has_the_nodes_that_the_paths_name():
    inner, outer = node(1, 3, rule=INTERLEAVE), node(2, {"step": {0: 2, 9: 0}})
    tree = tree_of(
        [
            ("a", [(outer, 0), (inner, 0)]),
            ("b", [(outer, 0), (inner, 1)]),
            ("c", [(outer, 1)]),
        ]
    )
    assert [each.rule for each in tree.nodes()] == [BLEND, INTERLEAVE]
    assert list(tree.keys()) == ["a", "b", "c"]
    assert tree.breakpoints() == {0, 9}
    assert shares(tree, 0) == {"a": 0.125, "b": 0.375, "c": 0.5}
    assert shares(tree, 9) == {"a": 0.25, "b": 0.75, "c": 0}


def test_one_source_alone_is_a_blend_of_one():
    for path in ([], [2.0]):
        assert shares(tree_of([("only", path)]), 0) == {"only": 1}


def test_members_without_a_source_are_left_out():
    """A metadataset may be asked for a split that one of its entries does not have."""
    outer = node(5, 1, 3)
    tree = tree_of([("a", [(outer, 1)]), ("b", [(outer, 2)])])
    assert tree.node.wheres == ["mix.yaml: blend[1].weight", "mix.yaml: blend[2].weight"]
    assert shares(tree, 0) == {"a": 0.25, "b": 0.75}


def test_nodes_of_ours_inside_a_blend_of_stock_energon():
    """Stock blends are constant factors; a stock blend inside ours, and ours inside that."""
    inner, outer = node({"linear": {0: 4, 100: 0}}, 4), node(1, 1)
    tree = tree_of(
        [
            ("a", [(outer, 0), 0.25, (inner, 0)]),
            ("b", [(outer, 0), 0.25, (inner, 1)]),
            ("c", [(outer, 0), 0.75]),
            ("d", [(outer, 1)]),
        ]
    )
    assert shares(tree, 0) == pytest.approx({"a": 0.0625, "b": 0.0625, "c": 0.375, "d": 0.5})
    assert shares(tree, 50) == pytest.approx({"a": 0.125 / 3, "b": 0.25 / 3, "c": 0.375, "d": 0.5})
    top = tree_of([("x", [0.5, (inner, 0)]), ("y", [0.5, (inner, 1)]), ("z", [1.5])])
    assert shares(top, 0) == pytest.approx({"x": 0.125, "y": 0.125, "z": 0.75})
    assert [each.rule for each in top.nodes()] == [BLEND, BLEND]


def test_a_node_of_ours_beside_a_source_without_a_factor_counts_as_one():
    inner = node(1, 3)
    tree = tree_of([("a", [(inner, 0)]), ("b", [(inner, 1)]), ("c", [])])
    assert shares(tree, 0) == {"a": 0.125, "b": 0.375, "c": 0.5}


def test_a_stock_metadataset_of_one_entry_hides_no_weight_of_ours():
    """Inside ours stands a stock file with one entry, of ours again, which ends at 50."""
    inner, outer = node({"step": {0: 1, 50: 0}}), node(1, 1)
    tree = tree_of([("a", [(outer, 0), 1.0, (inner, 0)]), ("b", [(outer, 1)])])
    assert shares(tree, 49) == {"a": 0.5, "b": 0.5}
    assert shares(tree, 50) == {"a": 0, "b": 1}


@pytest.mark.parametrize("rule", [BLEND, INTERLEAVE])
def test_the_order_of_a_yaml_file_says_nothing(rule):
    """Neither to a draw nor to who is first of two with the same credit."""
    inner = node(2, 1, rule=rule)
    orders = set()
    for order in itertools.permutations("abcd"):
        outer = node(*[{"a": 2, "b": 2, "c": 3, "d": 3}[key] for key in order], rule=rule)
        leaves = []
        for index, key in enumerate(order):
            leaves += [(f"{key}{m}", [(outer, index), (inner, m)]) for m in (1, 0)]
        tree = tree_of(leaves)
        keys = sorted(tree.keys())
        mixture = Mixture(tree, keys, seed="0", row_tokens=1)
        mixture.open(0)
        orders.add("".join(keys[number] for number in mixture.draw(np.arange(300))))
    assert len(orders) == 1


# Schedules inside schedules -----------------------------------------------------------------------


def test_a_schedule_inside_a_schedule_is_refused_unless_it_is_meant():
    inner = node({"linear": {0: 1, 9: 2}}, 1, name="b.yaml")
    for allowed in (False, True):
        outer = node({"step": {0: 1, 9: 2}}, 1, name="a.yaml", allow_nested_schedules=allowed)
        leaves = [("a", [(outer, 0), (inner, 0)]), ("b", [(outer, 0), (inner, 1)])]
        leaves.append(("c", [(outer, 1)]))
        if not allowed:
            with pytest.raises(ConfigError, match=r"a\.yaml: blend\[0\].*b\.yaml: blend\[0\]"):
                tree_of(leaves)
            continue
        assert shares(tree_of(leaves), 0) == {"a": 0.25, "b": 0.25, "c": 0.5}
        assert shares(tree_of(leaves), 9) == pytest.approx({"a": 4 / 9, "b": 2 / 9, "c": 1 / 3})


def test_a_schedule_beside_a_schedule_is_none_inside_it():
    """The constant member of a scheduled node may hold schedules."""
    inner, outer = node({"linear": {0: 1, 9: 2}}, 1), node({"step": {0: 1, 9: 2}}, 1)
    tree_of([("a", [(outer, 0)]), ("b", [(outer, 1), (inner, 0)]), ("c", [(outer, 1), (inner, 1)])])


# Planned shares -----------------------------------------------------------------------------------


def test_constants_one_and_three_are_a_quarter_and_three():
    """Conformance."""
    tree = blend_of({"a": weight_from_config(1), "b": weight_from_config(3)})
    assert shares(tree, 0) == {"a": 0.25, "b": 0.75}


def test_half_of_a_falling_schedule_falls_with_it():
    """Conformance: {0: 10, 5: 0} x 0.5 is 5 at 0, and 0 at 5; beside a constant of 5."""
    falling, constant = node({"linear": {0: 10, 5: 0}}, 10), node(1, 0)
    path = path_of(0.5 * PathWeight([(falling, 0)]))
    assert path == (0.5, (falling, 0))
    both = [("half", path), ("rest", path_of(0.5 * PathWeight([(falling, 1)])))]
    tree = tree_of([*both, ("other", [1.0, (constant, 0)])])
    # Of a group of weight 0.5 beside one of 1.
    assert shares(tree, 0) == pytest.approx({"half": 1 / 6, "rest": 1 / 6, "other": 2 / 3})
    assert shares(tree, 5) == pytest.approx({"half": 0, "rest": 1 / 3, "other": 2 / 3})


def test_shares_are_normalised_at_each_position():
    specs = {"a": weight_from_config({"linear": {0: 0, 10: 6}}), "b": weight_from_config(2)}
    # At 0: 0 of 2; at 5: 3 of 5; at 10: 6 of 8.
    for position, expected in ((0, 0.0), (5, 0.6), (10, 0.75), (5, 0.6)):
        assert shares(blend_of(specs), position)["a"] == pytest.approx(expected)
        assert shares(blend_of(specs), position)["b"] == pytest.approx(1 - expected)


def test_a_tree_without_weight_has_no_shares():
    zero = weight_from_config(0)
    assert shares(blend_of({"a": zero, "b": zero}), 3) == {"a": 0, "b": 0}


def test_the_share_of_a_node_that_is_all_zero_goes_to_the_others():
    gone = weight_from_config({"step": {0: 1, 5: 0}})
    inner = blend_of({"a": gone, "b": gone}, INTERLEAVE)
    outer = node(3, 1, 1)
    tree = Tree(outer, [inner, "c", "d"])
    assert shares(tree, 4) == pytest.approx({"a": 0.3, "b": 0.3, "c": 0.2, "d": 0.2})
    assert shares(tree, 5) == {"a": 0, "b": 0, "c": 0.5, "d": 0.5}


# The float that carries a path --------------------------------------------------------------------


def test_constant_blends_are_the_floats_that_stock_energon_makes():
    inner, outer = node(1, 3), node(2, 6)
    weight = PathWeight([(outer, 1), (inner, 0)])
    assert isinstance(weight, float)
    assert float(weight) == weight == 0.75 * 0.25
    assert float(3 * weight / 2) == pytest.approx(1.5 * 0.1875)
    assert f"{float(weight * 2):.3f}" == "0.375"


def test_a_path_survives_stock_arithmetic_and_a_pickle():
    weight = PathWeight([(node({"step": {0: 6, 10: 2}}, 2), 0)])
    factor, (carried, index) = path_of(pickle.loads(pickle.dumps(3.0 * weight / 2.0)))
    assert factor == 1.5
    assert [carried.weights[index].evaluate(position) for position in (0, 10)] == [6, 2]
    assert path_of(2 * weight * 3)[0] == 6
    assert path_of(None) == ()
    assert path_of(0.3) == (0.3,)


@pytest.mark.parametrize(
    "moving",
    [node({"step": {0: 6, 10: 2}}, 1), node(0, 1), node(1, 1, rule=INTERLEAVE)],
)
def test_a_path_that_is_more_than_a_float_never_becomes_one_in_silence(moving):
    for path in ([(moving, 1)], [(node(1, 2), 0), (moving, 1)]):
        with pytest.raises(ConfigError, match=r"mix\.yaml: .*\[1\]\.weight.*DynamicBlendMixin"):
            float(PathWeight(path))
