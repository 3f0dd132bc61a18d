# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every example of an epoch exactly once, in a computed order."""

import dataclasses
import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_ext.batch.collate import BatchAssembler
from energon_ext.errors import ConfigError
from energon_ext.splice import (
    GridIndex,
    LossMap,
    MultiSpliceConfig,
    SpliceConfig,
    SpliceIndex,
    document_quotas,
)
from energon_ext.splice.frames import Frames
from energon_ext.splice.reader import FrameReader
from tests.plan.memory_documents import ListDocuments
from tests.splice import slow

IN_ORDER = {"shuffle_per_epoch": False}


def triples(index, numbers):
    contents = index.locate(np.asarray(numbers))
    columns = (contents.documents, contents.starts, contents.offsets)
    return list(zip(*(column.tolist() for column in columns)))


def epoch(index, number=0):
    return triples(index, np.arange(index.size) + number * index.size)


def test_by_document_repeats_the_pairs_of_shorter_documents():
    config = MultiSpliceConfig(
        content_length=4, balance_mode="by_document", adaptive_k=False, **IN_ORDER
    )
    index = SpliceIndex([7, 5, 3], 8, config)
    assert index.quotas.tolist() == [4, 4, 0]
    assert Counter(epoch(index)) == Counter(
        [(0, 0, 4), (0, 1, 4), (0, 2, 4), (0, 3, 4), *[(1, 0, 4), (1, 1, 4)] * 2]
    )


def shares_of(balance_mode, lengths=(10_000, 5_000, 2_000), **fields):
    config = MultiSpliceConfig(content_length=4096, balance_mode=balance_mode, **fields)
    index = SpliceIndex(lengths, 4096, config)
    shown = index.locate(np.arange(index.size)).documents
    assert np.bincount(shown, minlength=len(lengths)).tolist() == index.quotas.tolist()
    return index, (index.quotas / index.size).tolist()


@pytest.mark.parametrize("epoch_length", [None, 1700])
def test_by_coverage_is_proportional_to_document_length(epoch_length):
    """10K, 5K and 2K tokens, K = S = 4096, stride 1: 59, 29 and 12 % of 17K examples.

    Pairs do not matter: the last document has one content, the others 5905 and 905.
    """
    index, shares = shares_of("by_coverage", epoch_length=epoch_length)
    assert index.pairs.tolist() == [5905, 905, 1]
    assert index.size == (epoch_length or 17_000)
    assert shares == [10 / 17, 5 / 17, 2 / 17]
    assert [round(100 * share) for share in shares] == [59, 29, 12]


def test_an_epoch_has_one_example_per_stride_of_usable_documents():
    assert shares_of("by_coverage", content_stride=10)[0].quotas.tolist() == [1000, 500, 200]
    assert shares_of("by_temperature")[0].quotas.tolist() == [10_000, 5_000, 2_000]
    # Square roots 100, 70.71, 44.72: of 17000, 7891.12, 5579.86 and 3529.03.
    assert shares_of("by_temperature", balance_tau=0.5)[0].quotas.tolist() == [7891, 5580, 3529]
    short_has_none = shares_of("by_coverage", adaptive_k=False)[0]
    assert short_has_none.quotas.tolist() == [10_000, 5_000, 0]
    far_apart = MultiSpliceConfig(content_stride=100)
    assert SpliceIndex([9, 9, 9], 16, far_apart).size == 1


def test_by_document_repeats_each_up_to_the_largest_pair_count():
    index, shares = shares_of("by_document")
    assert index.quotas.tolist() == [5905] * 3 and shares == [1 / 3] * 3
    assert shares_of("by_document", epoch_length=17)[0].quotas.tolist() == [6, 6, 5]
    contents = index.locate(np.arange(index.size))
    views = np.bincount(contents.starts[contents.documents == 1])
    assert len(views) == 905 and set(views.tolist()) == {6, 7}  # 5905 = 905 * 6.52


def test_every_pair_shows_each_pair_once():
    config = MultiSpliceConfig(
        content_start_mode="slide_within", content_length=3, balance_mode="every_pair"
    )
    expected = [(doc, t, s) for doc, L in enumerate((5, 3, 7)) for t, s in slow.pairs(L, 5, 3)]
    index = SpliceIndex([5, 3, 7], 5, config)
    assert index.pairs.tolist() == index.quotas.tolist() == [13, 7, 19]
    for number in (0, 1, 5):
        assert sorted(epoch(index, number)) == expected
        assert epoch(index, number) != expected
    assert epoch(index, 0) != epoch(index, 1)


def test_unshuffled_pairs_of_one_document_are_in_order():
    config = SpliceConfig(content_length=3, shuffle_content=False, shuffle_offsets=0)
    assert epoch(SpliceIndex([5], 5, config), 2) == [(0, *pair) for pair in slow.pairs(5, 5, 3)]


@pytest.mark.parametrize("stride", [1, 2])
def test_axes_are_shuffled_separately(stride):
    expected = slow.pairs(40, 30, 12, stride)
    shape = {"content_length": 12, "content_stride": stride}
    content = SpliceIndex([40], 30, SpliceConfig(shuffle_offsets=False, **shape))
    offsets = SpliceIndex([40], 30, SpliceConfig(shuffle_content=False, **shape))
    for index in (content, offsets):
        assert sorted(triple[1:] for triple in epoch(index, 3)) == expected
        assert epoch(index, 0) != epoch(index, 1)
    runs = [start for _, start, _ in epoch(content)]
    changes = 1 + sum(a != b for a, b in zip(runs, runs[1:]))
    assert changes == len(set(runs)) and runs != sorted(runs)
    assert all(a[2] < b[2] for a, b in zip(epoch(content), epoch(content)[1:]) if a[1] == b[1])
    assert [t for _, t, _ in epoch(offsets)] == [t for t, _ in expected]
    first_row = [s for _, t, s in epoch(offsets) if t == 0]
    assert first_row != sorted(first_row)


def test_an_order_lasts_the_configured_number_of_epochs():
    index = SpliceIndex([9], 9, SpliceConfig(shuffle_content=3, shuffle_offsets=3))
    orders = [epoch(index, number) for number in range(6)]
    assert orders[0] == orders[1] == orders[2] != orders[3] == orders[5]
    other_seed = SpliceConfig(shuffle_content=3, shuffle_offsets=3, offset_seed=1)
    assert epoch(SpliceIndex([9], 9, other_seed)) != orders[0]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5),
    alpha=st.sampled_from([0.0, 1.0]),
    stride=st.integers(1, 3),
    epoch_length=st.integers(1, 80),
    tau=st.sampled_from([0.0, 0.6, 1.0]),
    number=st.integers(0, 10**6),
)
def test_epoch_starts_are_quantiles_of_each_documents_quota(
    lengths, alpha, stride, epoch_length, tau, number
):
    config = MultiSpliceConfig(
        content_length=8,
        content_stride=stride,
        min_copy_len=3,
        alpha=alpha,
        balance_tau=tau,
        epoch_length=epoch_length,
    )
    long_enough = [doc for doc, length in enumerate(lengths) if length >= 3]
    if not long_enough:
        with pytest.raises(ConfigError, match="No document has a pair"):
            SpliceIndex(lengths, 16, config)
        return
    index = SpliceIndex(lengths, 16, config)
    fixed = document_quotas(
        [lengths[doc] for doc in long_enough], epoch_length, "by_temperature", tau
    )
    shown = epoch(index, number)
    counts = Counter(doc for doc, _, _ in shown)
    if (fixed > 0).all():
        assert counts == dict(zip(long_enough, fixed.tolist()))
    for doc, quota in counts.items():
        content = min(8, lengths[doc])
        assert {s for d, _, s in shown if d == doc} == {16 - content}
        starts = sorted(t for d, t, _ in shown if d == doc)
        # One in each of the equal parts: a start may be split by their bounds.
        for place, start in enumerate(starts):
            bounds = [slow.Fraction(place, quota), slow.Fraction(place + 1, quota)]
            first, last = (
                slow.start_at(b, lengths[doc], content, int(alpha), stride)
                for b in (bounds[0], bounds[1] - slow.Fraction(1, 10**9))
            )
            assert first <= start <= last


@pytest.mark.parametrize(("alpha", "weight"), [(0.0, 4937), (0.8, 5150)])
def test_over_epochs_every_start_is_seen(alpha, weight):
    """4937 starts of 227 examples per epoch: within 2.1 times as many epochs as parts."""
    config = MultiSpliceConfig(content_length=64, epoch_length=227, alpha=alpha, offset_jitter=2)
    index = SpliceIndex([5000], 128, config, key="book")
    assert index.pairs.tolist() == [4937]
    epochs = int(np.ceil(2.1 * weight / 227))
    for first in (0, 100, 100_000):
        shown = index.locate(np.arange(first * 227, (first + epochs) * 227)).starts
        assert set(shown.tolist()) == set(range(4937))
        # Neighbouring epochs do not show the same starts.
        fewer = index.locate(np.arange(first * 227, (first + 10) * 227)).starts
        assert len(set(fewer.tolist())) > 1800


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(8, 2000), min_size=2, max_size=40),
    epoch_length=st.integers(1, 30),
    tau=st.sampled_from([0.0, 0.5, 1.0]),
    first=st.integers(0, 10**5),
)
def test_every_document_gets_its_share_over_epochs(lengths, epoch_length, tau, first):
    """The longest wait is 1.9 parts; the largest error of N epochs grows like their logarithm."""
    config = MultiSpliceConfig(content_length=8, epoch_length=epoch_length, balance_tau=tau)
    index = SpliceIndex(lengths, 16, config, key="book")
    parts = np.array(lengths, float) ** tau
    parts *= epoch_length / parts.sum()
    quotas = np.array([index._epoch(first + number)[1] for number in range(400)])
    assert (quotas.sum(axis=1) == epoch_length).all()
    if (document_quotas(lengths, epoch_length, "by_temperature", tau) > 0).all():
        assert (quotas == index.quotas).all()
        return
    assert index.quotas == pytest.approx(parts)
    assert (abs(quotas.sum(axis=0) - 400 * parts) < 6).all()
    for document, part in enumerate(parts):
        wait = int(np.ceil(1.9 / part))
        shown = np.flatnonzero(quotas[:, document])
        if wait < 400:
            assert np.diff(shown, prepend=-1, append=400).max() <= wait


def test_documents_take_turns_when_an_epoch_is_too_short():
    config = MultiSpliceConfig(content_length=4, epoch_length=3, balance_mode="by_document")
    index = SpliceIndex([9] * 12, 8, config, key="book")
    assert index.size == 3 and index.quotas == pytest.approx([0.25] * 12)
    assert index.token_shares() == pytest.approx([1 / 12] * 12)
    shown = Counter(triple for number in range(2400) for triple in epoch(index, number))
    # Every start of every document about 100 times.
    assert len(shown) == 12 * 6
    assert all(80 <= count <= 120 for count in shown.values())
    orders = {tuple(epoch(SpliceIndex([9] * 12, 8, config, key=key))) for key in "abcdef"}
    assert len(orders) > 1


def test_phases_depend_on_source_and_seed():
    def starts(key="book", **fields):
        config = MultiSpliceConfig(content_length=8, epoch_length=9, **IN_ORDER, **fields)
        return [t for n in range(3) for _, t, _ in epoch(SpliceIndex([400], 16, config, key), n)]

    assert starts() == starts()
    assert len({tuple(found) for found in (starts(), starts("web"), starts(seed=1))}) == 3


def test_examples_looked_up_singly_or_together_are_equal():
    index = SpliceIndex([40, 90], 64, MultiSpliceConfig(content_length=16, offset_jitter=5))
    numbers = np.random.default_rng(0).integers(0, 3 * index.size, 100)
    assert triples(index, numbers) == [triples(index, [number])[0] for number in numbers]


@pytest.mark.parametrize("jitter_mode", ["uniform", "low_discrepancy"])
def test_jitter_covers_the_last_places(jitter_mode):
    config = MultiSpliceConfig(
        content_length=10,
        balance_mode="every_pair",
        offset_jitter=3,
        jitter_mode=jitter_mode,
        **IN_ORDER,
    )
    index = SpliceIndex([1009, 4, 40], 12, config)
    offsets = {doc: Counter() for doc in range(3)}
    for doc, _, s in epoch(index):
        offsets[doc][s] += 1
    # Contents of 10 in 12 are shortened to 9, so that they have four places too.
    assert index.pairs.tolist() == [1001, 1, 32]
    assert set(offsets[0]) == {3, 2, 1, 0} and set(offsets[1]) <= {8, 7, 6, 5}
    most = 2 if jitter_mode == "low_discrepancy" else 60
    assert all(abs(count - 1001 / 4) <= most for count in offsets[0].values())
    again = [triple for number in range(12) for triple in epoch(index, number) if triple[0] == 0]
    places = Counter(triple[1:] for triple in again)
    if jitter_mode == "low_discrepancy":  # each start is seen at every place in four epochs
        assert all(places[t, s] == 3 for t in range(1001) for s in (0, 1, 2, 3))
    else:  # and with drawn places at all but 3/4^12 of them
        assert len(places) == pytest.approx(4004 * (1 - 0.75**12), rel=0.02)


@pytest.mark.parametrize("content_length", [None, 12, 4096])
def test_full_frame_contents_leave_room_for_jitter(content_length):
    """S = 12 and a jitter of 2: K = 10, at s = 2, 1 and 0, by S - K - j."""
    config = MultiSpliceConfig(
        content_length=content_length, balance_mode="every_pair", offset_jitter=2
    )
    index = SpliceIndex([100, 11, 5], 12, config)
    assert index.pairs.tolist() == [91, 2, 1]
    contents = index.locate(np.arange(index.size * 20))
    of_long = contents.documents == 0
    assert set(contents.copy_lens[of_long].tolist()) == {10}
    assert Counter(contents.offsets[of_long].tolist()).keys() == {0, 1, 2}
    assert set(contents.offsets[contents.documents == 2].tolist()) == {7, 6, 5}
    assert (contents.offsets + contents.copy_lens <= 12).all()
    with pytest.raises(
        ConfigError, match="seq_len: 12 found with offset_jitter: 11; a content needs 2"
    ):
        SpliceIndex([100], 12, dataclasses.replace(config, content_length=None, offset_jitter=11))


def jittered(mode, seed=0, key="", **fields):
    config = MultiSpliceConfig(
        content_length=10, balance_mode="every_pair", offset_jitter=2, jitter_mode=mode, seed=seed
    )
    return SpliceIndex([509], 12, dataclasses.replace(config, **IN_ORDER, **fields), key=key)


def test_even_jitter_is_a_golden_sequence_shifted_each_epoch():
    index = jittered("low_discrepancy")
    assert index.size == 500
    golden = (5**0.5 - 1) / 2
    for number in (0, 1, 7):
        steps = [(int(t * golden % 1 * 3) + number) % 3 for t in range(500)]
        assert epoch(index, number) == [(0, t, 2 - step) for t, step in enumerate(steps)]


def test_drawn_jitter_depends_on_seed_source_and_epoch():
    one, again = jittered("uniform", 1, "web"), jittered("uniform", 1, "web")
    others = [jittered("uniform", 2, "web"), jittered("uniform", 1, "code")]
    assert epoch(one) == epoch(again)
    drawn = [epoch(one), *map(epoch, others), epoch(one, 1)]
    assert all(a != b for a, b in itertools.combinations(drawn, 2))


MANY = {"content_length": 16}
ONE = {"content_length": 9}
#: Documents, starts, offsets and tokens of the examples 0, 1, 2, 77, 1000 and 123456.
LASTING = [
    (
        MultiSpliceConfig(**MANY, alpha=0.8, offset_jitter=5, seed=3),
        "0 113 48 16, 0 47 48 16, 0 581 45 16, 0 49 47 16, 0 5 47 16, 2 25 47 16",
    ),
    (
        MultiSpliceConfig(
            **MANY,
            epoch_length=7,
            content_stride=3,
            offset_jitter=2,
            jitter_mode="low_discrepancy",
        ),
        "0 24 48 16, 0 369 46 16, 0 483 47 16, 0 660 46 16, 0 348 48 16, 1 63 47 16",
    ),
    (
        MultiSpliceConfig(
            content_start_mode="slide_within",
            epoch_length=50,
            balance_tau=0.5,
            doc_weights=[1, 2, 0.5, 4],
        ),
        "1 58 19 32, 0 678 33 22, 1 62 1 28, 1 22 0 64, 1 87 12 3, 1 72 30 18",
    ),
    (
        SpliceConfig(**ONE, cut_at_frame_end=True, offset_seed=2),
        "0 454 37 9, 0 526 35 9, 0 64 58 6, 0 252 51 9, 0 613 55 9, 0 674 53 9",
    ),
    (
        SpliceConfig(**ONE, shuffle_content=3, shuffle_offsets=False, content_seed=1),
        "0 52 0 9, 0 52 1 9, 0 52 2 9, 0 665 21 9, 0 670 48 9, 0 428 50 9",
    ),
    (
        SpliceConfig(content_start_mode="cyclic_roll", shuffle_content=0, shuffle_offsets=2),
        "0 0 0 64, 0 1 0 64, 0 2 0 64, 0 77 0 64, 0 300 0 64, 0 256 0 64",
    ),
]


@pytest.mark.parametrize(("config", "expected"), LASTING)
def test_examples_are_stable_across_versions(config, expected):
    """A state is one number. If these values must change, rename ORDER."""
    lengths = [700] if isinstance(config, SpliceConfig) else [700, 90, 41, 3]
    index = SpliceIndex(lengths, 64, config, key="books")
    found = zip(*index.locate(np.array([0, 1, 2, 77, 1000, 123_456])))
    assert ", ".join(" ".join(map(str, each)) for each in found) == expected


def test_zero_document_weights_exclude_and_a_wrong_count_is_refused():
    weights = {"content_length": 4, "doc_weights": [1, 0], "balance_mode": "by_document"}
    quotas = SpliceIndex([9, 9], 8, MultiSpliceConfig(**weights)).quotas
    assert quotas.tolist() == [12, 0] and quotas.dtype == np.int64  # no rotation
    with pytest.raises(ConfigError, match="doc_weights: 2 found for 3 documents"):
        SpliceIndex([9, 9, 9], 8, MultiSpliceConfig(**weights))


def test_shares_and_coverage_count_copied_tokens():
    config = MultiSpliceConfig(
        content_start_mode="slide_within", content_length=3, balance_mode="every_pair"
    )
    index = SpliceIndex([5, 3], 5, config)
    # 9 contents of 3 and 4 of 2 tokens; 3 of 3 and 4 of 2.
    assert index.coverage() * index.doc_lengths == pytest.approx([35, 17])
    assert index.token_shares() == pytest.approx([35 / 52, 17 / 52])
    assert index.coverage() == pytest.approx([7, 17 / 3])


def test_alpha_changes_the_views_of_tokens_but_not_their_mean():
    """Counted over many epochs; 10 tokens, contents of 4, weights 4 2 4/3 1 4/3 2 4."""
    config = MultiSpliceConfig(content_length=4, alpha=1.0, epoch_length=5, **IN_ORDER)
    index = SpliceIndex([10], 8, config)
    weights = np.array([4, 2, 4 / 3, 1, 4 / 3, 2, 4]) * 5 / (47 / 3)
    expected = [weights[max(0, p - 3) : p + 1].sum() for p in range(10)]
    assert index.views(0) == pytest.approx(expected)
    assert index.coverage() == pytest.approx([2.0]) == [index.views(0).mean()]
    shown = index.locate(np.arange(5 * 3000)).starts
    counts = [((shown <= p) & (p < shown + 4)).sum() / 3000 for p in range(10)]
    assert counts == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("content_length", [100, 1000])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_the_first_token_is_seen_as_the_alpha_formula_says(content_length, alpha):
    config = MultiSpliceConfig(content_length=content_length, alpha=alpha)
    views = SpliceIndex([20 * content_length], 1000, config).views(0)
    middle = views[10 * content_length]
    assert views[0] / middle == pytest.approx(content_length ** (alpha - 1))
    # The most, of the tokens about K from an edge: the sum of all weights on one side.
    most = (content_length / np.arange(1, content_length + 1)) ** alpha
    assert views.max() / middle == pytest.approx(most.mean())


def test_views_count_balanced_contents():
    with pytest.raises(ConfigError, match="views: only for coverage_balanced"):
        SpliceIndex([9], 9, SpliceConfig()).views(0)


def test_a_document_with_one_pair_gets_its_share_of_tokens():
    """Each fills a frame of two tokens: three starts in four tokens, and one in two."""
    index = SpliceIndex([4, 2], 2, SpliceConfig(content_length=2))
    assert index.pairs.tolist() == [3, 1]
    assert index.token_shares().tolist() == [6 / 8, 2 / 8]
    assert index.coverage().tolist() == [6 / 4, 2 / 2]


def test_a_validation_grid_contains_the_corners():
    grid = GridIndex([10, 3, 1], 12, SpliceConfig(content_length=4), starts=3, offsets=2)
    assert sorted(triples(grid, np.arange(grid.size))) == [
        *[(0, t, s) for t, last in ((0, 8), (4, 8), (8, 10)) for s in (0, last)],
        *[(1, t, s) for t, last in ((0, 9), (1, 10)) for s in (0, last)],
    ]
    cut = GridIndex([10], 12, SpliceConfig(cut_at_frame_end=True), starts=2, offsets=3)
    contents = cut.locate(np.arange(cut.size))
    columns = (contents.starts, contents.offsets, contents.copy_lens)
    assert sorted(zip(*(column.tolist() for column in columns))) == [
        *[(0, 0, 10), (0, 5, 7), (0, 10, 2), (8, 0, 2), (8, 5, 2), (8, 10, 2)]
    ]
    assert GridIndex([100], 100, SpliceConfig(content_length=4)).size == 4 * 8
    with pytest.raises(ConfigError, match="GridIndex.starts: 0 found, an integer >= 1"):
        GridIndex([10], 12, SpliceConfig(), starts=0)


def test_every_prefix_of_a_grid_covers_all_documents_evenly():
    grid = GridIndex([1000, 900, 800], 400, SpliceConfig(content_length=4), starts=5, offsets=7)
    first = grid.locate(np.arange(9))
    assert np.bincount(first.documents).tolist() == [3, 3, 3]
    assert len(set(first.starts.tolist())) >= 3 and np.ptp(first.starts) > 700


@pytest.mark.parametrize("prefix", [False, True])
def test_content_probability_is_the_product_over_its_tokens(prefix):
    """Contents of 4 of 6 tokens; probabilities 1/2, 1/3, 1/5 after the first, 7/8 elsewhere."""
    config = SpliceConfig(content_length=4, attend_prefix=prefix, min_copy_len=4)
    grid = GridIndex([6, 4], 8, config, starts=2, offsets=2)
    names = ["book/doc0", "book/doc1"]
    documents = [np.arange(10, 16), np.arange(20, 24)]
    source = Frames(grid, [0, 1], names, config=config, seq_len=8, epochs=1, fingerprint={})
    reader = FrameReader(ListDocuments(documents), 0, [0, 1], names, config, 0)
    taken = source.take(grid.size)
    assembler = BatchAssembler(8)
    rows = reader.read([taken.description(n) for n in range(len(taken))])
    batch = assembler(rows, sources=names)
    losses = np.full(batch.num_tokens, -np.log(7 / 8))
    for row, offset in enumerate(grid.locate(np.arange(6)).offsets.tolist()):
        losses[8 * row + offset : 8 * row + offset + 3] = np.log([2, 3, 5])
        if row == 0:
            losses[0] = 0.0  # the second token of the first content is certain
    for prompt, first, others in ((1, 1 / 15, 1 / 30), (2, 1 / 15, 1 / 15), (3, 1 / 5, 1 / 5)):
        found = LossMap(grid, names, prompt_tokens=prompt)
        found.add_batch(batch, losses)
        assert np.exp(found.log_probabilities) == pytest.approx([first, *[others] * 5])
        mean = (first + 3 * others) / 4
        assert found.memorized() == pytest.approx({"book/doc0": mean, "book/doc1": others})
    all_prompt = LossMap(grid, names, prompt_tokens=4)
    all_prompt.add_batch(batch, losses)
    assert all_prompt.memorized() == {"book/doc0": 1.0, "book/doc1": 1.0}
    with pytest.raises(ConfigError, match="LossMap.prompt_tokens: 0 found, an integer >= 1"):
        LossMap(grid, names, prompt_tokens=0)


def test_unnamed_documents_share_one_mean():
    losses = LossMap(GridIndex([6, 4], 8, SpliceConfig(content_length=4), offsets=2), ["book"] * 2)
    losses.losses[:] = losses.contents.documents
    share_of_the_second = losses.contents.documents.mean()
    assert 0 < share_of_the_second < 1
    assert losses.per_document() == {"book": pytest.approx(share_of_the_second)}
