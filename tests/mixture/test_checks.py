# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks at build time: gaps in the weights, and likely mistakes."""

import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from megatron.energon import DefaultTaskEncoder

from energon_ext import ConfigError, DynamicBlendMixin, PackedTaskEncoder, get_train_dataset
from energon_ext.mixture.checks import BlendWarning, check_mixture
from energon_ext.mixture.tree import BLEND, INTERLEAVE, Node, Tree
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.weights import ScheduleAxis, ScheduledWeight, weight_from_config
from tests.plan.runs import write_split
from tests.support import config, write_dataset, write_mix, write_tokens


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for source, count in (("web", 40), ("code", 40), ("tiny", 1)):
        write_dataset(root / source, [f"{source} {number}" for number in range(count)])
    for source in ("books", "papers"):
        write_tokens(root / source, [[5, 6, 7]] * 40)
    return root


class Streamed(DynamicBlendMixin, DefaultTaskEncoder):
    """Streams: every worker draws from its own samples."""

    plan_samples = False


def load(data, entries, *, rule="blend", axis=None, num_workers=0, encoder=None, **fields):
    """``entries``: ``(path, weight)``, or ``(path, weight, max_epochs)``."""
    names = ("path", "weight", "max_epochs")
    node = {rule: [dict(zip(names, entry)) for entry in entries]}
    path = write_split(data / "mix.yaml", node, **fields)
    encoder = encoder or PackedTaskEncoder(ByteTokenizer(), 16, packing_buffer_docs=4)
    encoder.schedule_axis = axis
    return get_train_dataset(
        path, worker_config=config(num_workers), batch_size=2, task_encoder=encoder
    )


def warnings_of(data, entries, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(data, entries, **options)
    return [str(w.message) for w in caught if issubclass(w.category, BlendWarning)]


def test_a_warning_shows_the_line_of_the_user(data):
    """Not a line of this package, of Energon, or of this file's own helpers further up."""
    path = write_split(data / "mix.yaml", {"blend": [{"path": "books"}, {"path": "books"}]})
    encoder = PackedTaskEncoder(ByteTokenizer(), 16, packing_buffer_docs=4)
    with pytest.warns(BlendWarning) as caught:
        options = {"worker_config": config(), "batch_size": 2, "task_encoder": encoder}
        get_train_dataset(path, **options)
    (warning,) = caught
    lines = Path(__file__).read_text().splitlines()
    assert warning.filename == __file__
    assert lines[warning.lineno - 1] == "        get_train_dataset(path, **options)"


# Gaps ---------------------------------------------------------------------------------------------


def check(root):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_mixture(root, ScheduleAxis(), {}, {}, {})


def tree(rule, *members):
    weights = [weight_from_config(weight) for _, weight in members]
    return Tree(Node(rule, weights), [member for member, _ in members])


FALLING, GONE_AT_50 = {"linear": {0: 1, 50: 0}}, {"step": {0: 1, 50: 0}}


@pytest.mark.parametrize(("outside", "inside"), [(BLEND, INTERLEAVE), (INTERLEAVE, BLEND)])
def test_an_empty_node_is_allowed_while_another_has_weight(outside, inside):
    """A node may be empty at times, as long as one of them is not."""
    inner = tree(inside, ("a", FALLING), ("b", GONE_AT_50))
    check(tree(outside, (inner, 1), ("c", {"step": {0: 0, 50: 1}})))
    with pytest.raises(ConfigError, match="0 at step 50: .*linear.*for a, b, c"):
        check(tree(outside, (inner, 1), ("c", {"step": {0: 0, 51: 1}})))


def test_a_gap_of_one_position_is_found_anywhere():
    with pytest.raises(ConfigError, match="0 at step 77:"):
        check(tree(BLEND, ("a", {"step": {0: 1, 77: 0, 78: 2}}), ("b", {"linear": {0: 5, 77: 0}})))
    with pytest.raises(ConfigError, match="0 at step 0:"):
        check(tree(BLEND, ("a", {"linear": {0: 0, 100: 1}}), ("b", 0)))


def test_a_nodes_own_weight_does_not_hide_that_it_is_empty():
    """Regression: a product of shares hid that the inner blend has nothing to draw."""
    empty = tree(INTERLEAVE, ("a", 0), ("b", GONE_AT_50))
    with pytest.raises(ConfigError, match="0 at step 50"):
        check(tree(BLEND, (empty, 100)))


values = st.sampled_from([0, 0, 0.5, 2])
entries = st.builds(
    lambda kind, points: {kind: points},
    st.sampled_from(["step", "linear", "cosine"]),
    st.dictionaries(st.integers(0, 12), values, min_size=1, max_size=4),
)


@given(
    st.lists(st.lists(entries, min_size=1, max_size=2), min_size=1, max_size=3),
    st.lists(entries, min_size=3, max_size=3),
)
def test_exactly_the_real_gaps_are_found(inner, outer):
    """Compared with a check of every position, node by node."""
    nodes = [
        tree(INTERLEAVE, *((f"{n}{m}", weight) for m, weight in enumerate(weights)))
        for n, weights in enumerate(inner)
    ]
    root = tree(BLEND, *zip(nodes, outer))

    def has_weight(branch, position):
        return any(
            weight.evaluate(position) > 0
            and (not isinstance(member, Tree) or has_weight(member, position))
            for member, weight in zip(branch.members, branch.node.weights)
        )

    empty = [position for position in range(20) if not has_weight(root, position)]
    if not empty:
        check(root)
        return
    with pytest.raises(ConfigError, match=f"Every weight is 0 at step {empty[0]}:"):
        check(root)


@pytest.mark.parametrize("sources", [("web", "code"), ("books", "papers")])
@pytest.mark.parametrize("rule", ["blend", "interleave"])
def test_a_gap_in_nested_files_is_found_at_build_time(data, sources, rule):
    falling, coming = sources
    write_mix(data / "inner.yaml", [(falling, FALLING)])
    load(data, [("inner.yaml", 1), (coming, {"step": {0: 0, 50: 1}})], rule=rule)
    with pytest.raises(ConfigError, match=f"Every weight is 0 at step 50: .*{coming}"):
        load(data, [("inner.yaml", 1), (coming, {"step": {0: 0, 51: 1}})], rule=rule)


def test_a_worker_with_nothing_to_draw_is_found(data):
    """One document feeds one worker; the other has nothing once web has no weight."""
    entries = [("tiny", 1), ("web", {"step": {0: 1, 30: 0}})]
    load(data, entries, num_workers=1, encoder=Streamed())
    with pytest.raises(
        ConfigError,
        match=r"0 at step 30 for worker \d of rank 0, which only has samples of \['web:train'\]",
    ):
        load(data, entries, num_workers=2, encoder=Streamed())


def test_every_worker_of_a_shared_plan_draws_from_every_source(data):
    """All workers plan all rows, so one document is enough for eight of them."""
    write_tokens(data / "one_document", [[5, 6, 7]])
    load(data, [("one_document", 1), ("books", {"step": {0: 1, 30: 0}})], num_workers=8)


class Counting(ScheduledWeight):
    """Counts how often its rule is looked up."""

    looked_up = 0

    def segment(self, position):
        Counting.looked_up += 1
        return super().segment(position)


@pytest.mark.parametrize("sources", [2, 40])
def test_a_weight_is_evaluated_at_its_own_breakpoints_and_not_at_those_of_all_others(sources):
    """Each of two checks looks at 0, ten breakpoints and the positions after them."""
    Counting.looked_up = 0
    weights = [
        Counting("step", {50 * n + number: 1 for n in range(10)}) for number in range(sources)
    ]
    check(Tree(Node(BLEND, weights), [f"source {number:02d}" for number in range(sources)]))
    assert Counting.looked_up <= 2 * (2 * 10 + 1) * sources


# Likely mistakes ----------------------------------------------------------------------------------


def test_a_typical_blend_raises_no_warning(data):
    entries = [("web", {"linear": {0: 3, 100: 1}}), ("code", 2)]
    assert warnings_of(data, entries, axis=ScheduleAxis(end=101)) == []
    assert warnings_of(data, entries, axis=ScheduleAxis(end=100)) == []  # it ends with the run


def test_a_step_at_the_end_of_a_run_is_never_seen(data):
    entries = [("web", {"step": {0: 3, 100: 1}}), ("code", 2)]
    (message,) = warnings_of(data, entries, axis=ScheduleAxis(end=100))
    assert "continues to step 100, but the run ends at 100." in message


def test_a_breakpoint_after_the_end_is_reported_in_units_of_the_axis(data):
    entries = [("web", {"linear": {0: 3, 100: 1}}), ("code", 2)]
    (message,) = warnings_of(data, entries, axis=ScheduleAxis(end=99))
    assert "mix.yaml: blend[0] (" in message
    assert "web).weight: the schedule linear{0: 3, 100: 1}" in message
    assert "continues to step 100, but the run ends at 99." in message
    # Two steps of two rows of 16 tokens.
    (message,) = warnings_of(data, entries, axis=ScheduleAxis(end=2), schedule_axis="tokens")
    assert "continues to token 100, but the run ends at 64." in message
    assert warnings_of(data, entries, axis=ScheduleAxis(end=4), schedule_axis="tokens") == []


def test_a_constant_dwarfed_by_a_schedule_is_reported(data):
    entries = [("web", {"step": {0: 1, 50: 5000}}), ("code", 1)]
    (message,) = warnings_of(data, entries)
    assert message.startswith("code:train: a constant weight that drops to 2.0e-04")
    assert "position 50" in message
    # Small constants among constants are deliberate.
    assert warnings_of(data, [("web", 5000), ("code", 1)]) == []


def warnings_of_many(count, constant, schedule):
    """Return the warnings for a blend of a schedule and many equal constants."""
    weights = [weight_from_config(schedule), *[weight_from_config(constant)] * count]
    keys = ["moving", *(f"source {number:04d}" for number in range(count))]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_mixture(Tree(Node(BLEND, weights), keys), ScheduleAxis(), {}, {}, {})
    return [str(warning.message) for warning in caught]


def test_small_shares_of_many_sources_raise_no_warning():
    assert warnings_of_many(2000, 1, {"linear": {0: 1, 100: 3}}) == []


def test_many_dwarfed_constants_are_one_warning():
    (message,) = warnings_of_many(40, 1, {"step": {0: 1, 50: 50_000}})
    assert message.startswith(
        "source 0000, source 0001, source 0002 and 37 others: a constant weight that drops to 2"
    )


def test_a_source_listed_twice_is_reported(data):
    (message,) = warnings_of(data, [("web", 1), ("web", 2)])
    assert message.startswith("web:train#2: the same source is listed more than once")


def test_a_run_that_may_have_only_ended_sources_left_is_reported(data):
    """After step 30 only limited sources have a weight, and they may have ended by then."""
    (message,) = warnings_of(data, [("web", 1, 2), ("code", {"step": {0: 1, 30: 0}})])
    assert message.startswith("At step 30 only sources with a max_epochs have a weight > 0")
    assert "'web:train': 2" in message
    # If all sources have a limit, the run ends with the last one.
    assert warnings_of(data, [("web", 1, 2), ("code", {"step": {0: 1, 30: 0}}, 2)]) == []
