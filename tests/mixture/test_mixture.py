# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Nested blends and interleaves."""

import numpy as np
import pytest

from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import BLEND, INTERLEAVE, Node, Tree
from energon_ext.weights import weight_from_config
from tests.mixture.slow import saved

GONE_AT_40 = {"step": {0: 1, 40: 0}}
BACK_AT_60 = {"step": {0: 1, 40: 0, 60: 1}}


def tree(rule, members, name="", identity="", **options):
    """Return a tree; ``members`` are ``(source name or tree, weight as in YAML)``."""
    weights = [weight_from_config(weight) for _, weight in members]
    node = Node(rule, weights, name=name, identity=identity or name, **options)
    return Tree(node, [member for member, _ in members])


def mixture(root, **options):
    return Mixture(root, sorted(root.keys()), **{"seed": "3", "row_tokens": 1, **options})


def draw(drawing, steps, rows, tokens=1):
    """Return the sources of the rows of some steps, one string per step."""
    order = []
    for step in steps:
        assert drawing.open(step)
        drawn = drawing.draw(np.arange(step * rows, (step + 1) * rows))
        drawing.settle(tokens * np.bincount(drawn, minlength=len(drawing.keys)))
        order.append("".join(drawing.keys[number] for number in drawn))
    return order


# Rules of nodes -----------------------------------------------------------------------------------


def test_an_interleave_inside_a_blend_stays_exact():
    """blend(1: interleave(a, b of weight 3), 1: blend(c, d))."""
    pair = tree(INTERLEAVE, [("a", 1), ("b", 3)], "pair")
    root = tree(BLEND, [(pair, 1), (tree(BLEND, [("c", 1), ("d", 1)], "other"), 1)])
    order = "".join(draw(mixture(root), range(400), 10))
    a_rows = b_rows = 0
    for source in order:
        a_rows, b_rows = a_rows + (source == "a"), b_rows + (source == "b")
        assert abs(3 * a_rows - b_rows) <= 3  # within a row of a quarter
    assert abs(a_rows + b_rows - 2000) < 5 * 32
    assert abs(order.count("c") - order.count("d")) < 5 * 45


def test_a_blend_inside_an_interleave_stays_random():
    pair = tree(BLEND, [("a", 1), ("b", 3)], "pair")
    root = tree(INTERLEAVE, [(pair, 1), ("c", 2)])
    order = "".join(draw(mixture(root), range(400), 10))
    for row in range(1, 4001):
        assert abs(order[:row].count("c") - 2 * row / 3) <= 1
    in_pair = order.replace("c", "")
    assert abs(in_pair.count("a") - len(in_pair) / 4) < 5 * (len(in_pair) * 3 / 16) ** 0.5


def test_nested_interleaves_are_exact_on_both_levels():
    inner = tree(INTERLEAVE, [("a", 1), ("b", 2)], "inner")
    order = "".join(draw(mixture(tree(INTERLEAVE, [(inner, 3), ("c", 1)])), range(300), 4))
    assert [order.count(source) for source in "abc"] == [300, 600, 300]
    for row in range(1, 1201):
        assert abs(order[:row].count("c") - row / 4) <= 0.5
        in_inner = order[:row].replace("c", "")
        assert abs(in_inner.count("a") - len(in_inner) / 3) <= 0.5


def test_credits_count_tokens_and_not_rows():
    """Rows of c have three times the tokens, so the pair is drawn three times as often."""
    root = tree(INTERLEAVE, [(tree(BLEND, [("a", 1), ("b", 1)], "pair"), 1), ("c", 1)])
    drawing, count = mixture(root), np.zeros(3, np.int64)
    for row in range(400):
        drawing.open(0)
        (number,) = drawing.draw(np.array([row]))
        count[number] += 1
        drawing.settle(np.array([10, 10, 30]) * (np.arange(3) == number))
    assert count[2] == 100


def test_equal_blends_in_one_tree_draw_independently():
    """Two inner blends of equal members must not always agree."""
    inner = [tree(BLEND, [(f"{n}{m}", 1) for m in "ab"], f"inner{n}") for n in "12"]
    root = mixture(tree(INTERLEAVE, [(inner[0], 1), (inner[1], 1)]))
    root.open(0)
    drawn = [root.keys[number][1] for number in root.draw(np.arange(2000))]
    agree = sum(one == other for one, other in zip(drawn[::2], drawn[1::2]))
    assert abs(agree - 500) <= 5 * 15.8


# Empty nodes --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("outside", "inside"), [(INTERLEAVE, BLEND), (BLEND, INTERLEAVE)])
def test_a_node_whose_members_are_all_zero_counts_as_zero(outside, inside):
    """The others take its share from that step on, until it returns."""
    inner = tree(inside, [("a", BACK_AT_60), ("b", BACK_AT_60)], "inner")
    root = tree(outside, [(inner, 2), ("c", 1), ("d", 1)])
    order = draw(mixture(root), range(100), 8)
    steps = {"before": order[:40], "without": order[40:60], "after": order[60:]}
    counts = {
        part: [sum(step.count(source) for step in parts) for source in "abcd"]
        for part, parts in steps.items()
    }
    assert counts["without"][:2] == [0, 0]
    for part, due in (("before", 160), ("after", 160)):
        if outside == INTERLEAVE:
            assert sum(counts[part][:2]) == due
        else:
            assert abs(sum(counts[part][:2]) - due) <= 5 * (320 * 0.25) ** 0.5
        if inside == INTERLEAVE:
            assert abs(counts[part][0] - counts[part][1]) <= 1
        assert all(counts[part])
    if outside == INTERLEAVE:
        assert counts["without"][2:] == [80, 80]


def test_a_deep_node_without_weight_empties_its_ancestors():
    deep = tree(BLEND, [("a", GONE_AT_40)], "deep")
    middle = tree(INTERLEAVE, [(deep, 1)], "middle")
    drawing = mixture(tree(BLEND, [(middle, 1), ("b", 1)]))
    assert "a" in "".join(draw(drawing, range(40), 8))
    assert set("".join(draw(drawing, range(40, 60), 8))) == {"b"}


@pytest.mark.parametrize("rule", [BLEND, INTERLEAVE])
def test_a_node_whose_sources_have_all_ended_counts_as_zero(rule):
    inner = tree(rule, [("a", 1), ("b", 1)], "inner")
    drawing = mixture(tree(INTERLEAVE, [(inner, 3), ("c", 1)]))
    draw(drawing, range(5), 8)
    drawing.ended[0] = True
    assert set("".join(draw(drawing, range(5, 10), 8))) == {"b", "c"}
    drawing.ended[1] = True
    assert draw(drawing, range(10, 12), 8) == ["c" * 8] * 2
    drawing.ended[:] = False  # a raised limit
    again = "".join(draw(drawing, range(12, 17), 8))
    assert again.count("c") == 10


def test_open_reports_that_nothing_can_be_drawn():
    drawing = mixture(tree(BLEND, [(tree(INTERLEAVE, [("a", GONE_AT_40)], "inner"), 1), ("b", 0)]))
    assert drawing.open(39)
    assert not drawing.open(40)
    assert drawing.open(39)
    drawing.ended[0] = True
    assert not drawing.open(39)


# State --------------------------------------------------------------------------------------------


def nested(new_source="baseline", folder="/x", **names):
    names = {"a": "a", "b": "b", "c": "c", "inner": "inner", **names}
    inner = tree(
        INTERLEAVE,
        [(names["a"], 1), (names["b"], 3)],
        names["inner"],
        f"{folder}/inner.yaml",
        new_source=new_source,
    )
    return tree(INTERLEAVE, [(inner, 2), (names["c"], 1)], "", f"{folder}/outer.yaml")


@pytest.mark.parametrize("rule", [BLEND, INTERLEAVE])
def test_a_tree_continues_at_every_step(rule):
    inner = tree(INTERLEAVE, [("a", {"linear": {0: 1, 50: 9}}), ("b", 3)], "inner")
    root = tree(rule, [(inner, 1), (tree(BLEND, [("c", 1), ("d", 2)], "other"), 1)])
    straight, states, order = mixture(root), [], []
    for step in range(60):
        states.append(saved(straight))
        order += draw(straight, [step], 7, tokens=5)
    for step in range(0, 60, 7):
        resumed = restored(root, states[step], step)
        assert draw(resumed, range(step, 60), 7, tokens=5) == order[step:]
        assert saved(resumed) == saved(straight)


def restored(root, state, position, renamed=None):
    drawing = mixture(root)
    drawing.restore_state(state, renamed or {}, position)
    return drawing


def credits_of(drawing, name):
    return saved(drawing)[name]["credits"]


def begun():
    """Return a state with uneven credits in both interleaves, after 13 rows."""
    drawing = mixture(nested())
    draw(drawing, [0], 13, tokens=100)
    state = saved(drawing)
    assert any(state["inner"]["credits"].values()) and any(state[""]["credits"].values())
    return state


def test_credits_follow_renamed_sources_and_nodes():
    """The YAML moved alone: relative names change, absolute ones do not."""
    state = begun()
    renamed = {source: f"../{source}" for source in "abc"}
    root = nested(inner="../inner", **renamed)
    drawing = restored(root, state, 1, renamed)
    assert credits_of(drawing, "../inner") == {
        f"../{source}": credit for source, credit in state["inner"]["credits"].items()
    }
    outer = state[""]["credits"]
    assert credits_of(drawing, "") == {"../c": outer["c"], "../inner": outer["inner"]}
    assert set(saved(drawing)) == {"", "../inner"}


def test_credits_stay_if_all_data_moves_together():
    """Relative names stay, absolute ones change."""
    root = nested(folder="/y")
    state = begun()
    drawing = restored(root, state, 1)
    for name in ("", "inner"):
        assert credits_of(drawing, name) == state[name]["credits"]


def test_absent_sources_and_nodes_keep_their_credits():
    state = begun()
    without_b = tree(INTERLEAVE, [("a", 1)], "inner", "/x/inner.yaml")
    root = tree(INTERLEAVE, [(without_b, 2), ("c", 1)], "", "/x/outer.yaml")
    between = restored(root, state, 1)
    assert saved(between) == state
    draw(between, range(1, 4), 9, tokens=100)
    without_inner = restored(tree(BLEND, [("c", 1)], "", "/x/outer.yaml"), saved(between), 4)
    draw(without_inner, range(4, 8), 9, tokens=100)
    kept = saved(without_inner)
    assert kept == saved(between)
    back = restored(nested(), kept, 8)
    assert credits_of(back, "inner")["b"] == state["inner"]["credits"]["b"]
    assert saved(back) == kept


def test_a_node_that_becomes_a_member_keeps_its_credits():
    """mix.yaml was the whole run; now it is one entry of outer.yaml."""
    alone = mixture(tree(INTERLEAVE, [("a", 1), ("b", 3)], "", "/x/mix.yaml"))
    draw(alone, [0], 13, tokens=100)
    state = saved(alone)
    inner = tree(INTERLEAVE, [("a", 1), ("b", 3)], "mix.yaml", "/x/mix.yaml")
    drawing = restored(tree(INTERLEAVE, [(inner, 1), ("c", 1)], "", "/x/outer.yaml"), state, 1)
    assert credits_of(drawing, "mix.yaml") == state[""]["credits"]
    assert credits_of(drawing, "") == {"c": 0, "mix.yaml": 0}


def test_a_new_nested_source_is_owed_a_share_of_its_node():
    """It is owed a quarter of the 900 tokens of its node, not of the whole run."""
    before = tree(INTERLEAVE, [("b", 3)], "inner", "/x/inner.yaml")
    drawing = mixture(tree(INTERLEAVE, [(before, 3), ("c", 1)], "", "/x/outer.yaml"))
    draw(drawing, [0], 12, tokens=100)
    assert saved(drawing)["inner"]["tokens"] == 900
    for new_source, owed in (("baseline", 0), ("zero", 225)):
        resumed = restored(nested(new_source), saved(drawing), 1)
        assert credits_of(resumed, "inner")["a"] == owed
        assert credits_of(resumed, "inner")["b"] == -owed
