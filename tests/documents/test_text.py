# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents that come one by one, as rows: nothing lost, and no document held for longer."""

import copy
import itertools
import json
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.wrappers.shuffle_buffer_dataset import ShuffleBufferDataset

from energon_ext.documents.shuffle import ShuffledDocuments
from energon_ext.documents.text import Document, PackedRows
from energon_ext.errors import SampleError
from energon_ext.packing import best_fit
from tests.packing import slow
from tests.plan.memory_documents import PACKERS, content, documents_in, pairs, trained
from tests.support import config, loader_for

SEQ_LEN = 16
LENGTHS = np.random.default_rng(0).integers(1, 40, 60).tolist()
every_packing = pytest.mark.parametrize("packing", ["bin", "sequential"])


class MemoryText(SavableDataset):
    """Documents of some lengths, epoch after epoch; token p of document d is ``1000 * d + p``."""

    _savable_fields = ("_epoch", "_next")

    def __init__(self, lengths, epochs, with_weights):
        super().__init__(config())
        self._lengths, self._epochs, self._with_weights = lengths, epochs, with_weights
        self._tokens = []
        self.read = 0
        self.reset_state_own()

    def reset_state_own(self):
        self._epoch = self._next = 0

    def __iter__(self):
        while self._epochs is None or self._epoch < self._epochs:
            while self._next < len(self._lengths):
                self._next += 1
                yield self.restore_sample(("MemoryText", self._next - 1))
            self._epoch, self._next = self._epoch + 1, 0

    def restore_sample(self, restore_key):
        number = restore_key[1]
        tokens = 1000 * number + np.arange(self._lengths[number])
        document = Document(
            __key__=str(number),
            __restore_key__=restore_key,
            tokens=tokens,
            # As from sources where some samples have weights and others do not.
            label_weights=(tokens % 7).astype(np.float32)
            if self._with_weights and number % 3
            else None,
        )
        self._tokens.append(weakref.ref(tokens))
        self.read += 1
        return document

    @property
    def position(self):
        """Documents that were yielded since the beginning."""
        return self._epoch * len(self._lengths) + self._next

    @property
    def alive(self):
        """How many documents are in memory."""
        return sum(tokens() is not None for tokens in self._tokens)

    def can_restore_sample(self):
        return True

    def len_worker(self, worker_idx=None):
        return len(self._lengths)

    def worker_has_samples(self):
        return True

    def config(self):
        return {}


def packed(lengths=LENGTHS, *, packing="bin", epochs=1, buffer_docs=8, seq_len=SEQ_LEN, **options):
    text = MemoryText(lengths, epochs, options.pop("with_weights", False))
    return PackedRows(
        text,
        source="web",
        packer=PACKERS[packing](seq_len, **options.pop("packer_options", {})),
        buffer_docs=buffer_docs,
        worker_config=config(),
        **options,
    )


def take(rows, count=None):
    """The next rows; all that are left by default."""
    found = []
    for row in rows:
        found.append(content(row))
        if len(found) == count:
            break
    return found


def resumed(state, lengths=LENGTHS, **options):
    rows = packed(lengths, **options)
    rows.restore_state(state)
    return rows


def spans_of(contents):
    """``(document, start, stop)`` of each slice, and how many documents end in each row."""
    return [
        ([(s[0] // 1000, s[0] % 1000, s[-1] % 1000 + 1) for s in slices], documents)
        for slices, _, documents, _ in contents
    ]


# Rows ---------------------------------------------------------------------------------------------


@every_packing
@pytest.mark.parametrize("epochs", [1, 3])
def test_every_transition_is_read_once_an_epoch(packing, epochs):
    found = take(packed(packing=packing, epochs=epochs))
    assert trained(found) == pairs(LENGTHS, epochs)
    assert documents_in(found) == epochs * len(LENGTHS)
    for slices, _, _, num_tokens in found:
        assert num_tokens == min(SEQ_LEN, sum(map(len, slices)))


def test_windows_are_those_of_documents_that_come_one_by_one():
    found = take(packed(packing="sequential"))
    assert spans_of(found) == slow.sequential(LENGTHS, SEQ_LEN)


def test_bins_are_those_of_pieces_in_lists():
    lengths = [min(length, SEQ_LEN + 1) for length in LENGTHS]
    found = spans_of(take(packed(lengths)))
    for rows in slow.best_fit(lengths, SEQ_LEN, buffer_docs=8):
        assert sorted(found[: len(rows)]) == rows
        found = found[len(rows) :]
    assert found == []


@every_packing
def test_weights_of_labels_go_with_their_tokens(packing):
    for slices, weights, _, _ in take(packed(packing=packing, with_weights=True)):
        expected = [
            [token % 7 for token in tokens] if tokens[0] // 1000 % 3 else None for tokens in slices
        ]
        assert weights == (expected if any(expected) else None)
    assert all(weights is None for _, weights, _, _ in take(packed(packing=packing)))


@every_packing
def test_another_pass_is_the_same_pass(packing):
    rows = packed(packing=packing)
    first = take(rows)
    for _ in range(2):
        rows.dataset.reset_state_own()
        assert take(rows) == first


@pytest.mark.parametrize("empty", [1, 5, 40])
@every_packing
def test_empty_documents_are_no_end(packing, empty):
    """With buffers of one document and of four, that hold nothing else at times."""
    lengths = [9, *[0] * empty, 12, 0, 3]
    for buffer_docs in (1, 4):
        found = take(packed(lengths, packing=packing, buffer_docs=buffer_docs))
        assert trained(found) == pairs(lengths)


def test_empty_documents_are_counted_and_named(caplog):
    assert len(take(packed([*[0] * 12, 9, *[0] * 9]))) == 1
    assert [record.getMessage() for record in caplog.records] == [
        "web: 1 documents without a token left out, the last: 0.",
        "web: 10 documents without a token left out, the last: 9.",
    ]


@every_packing
def test_a_source_of_empty_documents_is_refused_and_not_read_for_ever(packing):
    message = "^web: 1000 documents without a token left out, the last 1000 in a row, up to 9;"
    with pytest.raises(SampleError, match=message):
        take(packed([0] * 10, packing=packing, epochs=None))


# Bounds -------------------------------------------------------------------------------------------


def test_rows_of_web_documents_are_full():
    lengths = np.random.default_rng(3).lognormal(6, 1.2, 6000)
    lengths = np.clip(lengths, 2, 20_000).astype(int).tolist()
    rows = packed(lengths, seq_len=4096, buffer_docs=512, epochs=None)
    found = take(rows, 1000)
    assert sum(tokens for *_, tokens in found) / (1000 * 4096) >= 0.999


def test_a_buffer_of_long_documents_ends_with_so_many_tokens(monkeypatch):
    monkeypatch.setattr(best_fit, "MOST_ROWS", 20)
    monkeypatch.setattr(best_fit, "MOST_TOKENS", 1)
    rows = packed([10 * SEQ_LEN + 1] * 40, buffer_docs=512)
    assert rows.dataset.read == 0
    take(rows, 1)
    assert rows.dataset.read == 2  # 20 rows
    assert trained(take(packed([161] * 40, buffer_docs=512))) == pairs([161] * 40)


def shuffled(lengths, size, epochs=1):
    return ShuffledDocuments(MemoryText(lengths, epochs, False), size, 1, worker_config=config())


def read_all(documents):
    return [int(document.__key__) for document in loader_for(documents)]


def test_a_shuffle_buffer_of_long_documents_ends_with_so_many_tokens(monkeypatch):
    monkeypatch.setattr(best_fit, "MOST_ROWS", 1)
    monkeypatch.setattr(best_fit, "MOST_TOKENS", 100)
    lengths = [30] * 50 + [1] * 200 + [1000] * 10
    documents = shuffled(lengths, size=64)
    held, found, source = [], [], documents.dataset
    for document in loader_for(documents):
        found.append(int(document.__key__))
        ahead = set(range(source.read)) - set(found)
        held.append(sum(lengths[number] for number in ahead))
        assert len(ahead) < 64
    assert sorted(found) == list(range(260))
    assert found != sorted(found)
    # A document is drawn once 100 tokens are reached: 4 of 30 are held, or some and one of 1000.
    assert max(held[:40]) == 90
    assert max(held) < 100 + 1000


def test_a_shuffle_buffer_of_short_documents_is_the_one_of_energon():
    lengths = [3] * 90
    stock = ShuffleBufferDataset(MemoryText(lengths, 2, False), 16, worker_config=config())
    assert read_all(shuffled(lengths, 16, epochs=2)) == read_all(stock)


@pytest.mark.parametrize("taken", [1, 7, 40, 99, 119])
def test_a_shuffle_buffer_with_a_bound_of_tokens_continues_exactly(monkeypatch, taken):
    monkeypatch.setattr(best_fit, "MOST_ROWS", 1)
    monkeypatch.setattr(best_fit, "MOST_TOKENS", 100)
    expected = read_all(shuffled(LENGTHS, 8, epochs=2))
    loader = loader_for(shuffled(LENGTHS, 8, epochs=2))
    assert [int(d.__key__) for d in itertools.islice(loader, taken)] == expected[:taken]
    state = loader.save_state_rank()
    resumed = loader_for(shuffled(LENGTHS, 8, epochs=2))
    resumed.restore_state_rank(state)
    assert [int(document.__key__) for document in resumed] == expected[taken:]


def test_a_stream_reads_no_more_than_a_row_ahead():
    rows = packed([5] * 100, packing="sequential")
    take(rows, 1)
    assert rows.dataset.read == 4  # 17 tokens are needed


@every_packing
def test_no_document_is_held_for_longer_than_its_plan(packing):
    rows = packed([4] * 400, packing=packing, buffer_docs=20)
    iterator, found = iter(rows), 0
    while next(iterator, None) is not None:
        found += 1
        plan = np.concatenate([pieces.documents for pieces in rows._plan.parts()])
        assert rows.dataset.alive <= len(np.unique(plan)) + 1  # and the one read last
    assert found > 90
    assert rows.dataset.read == 400
    assert rows.dataset.alive == 0


# States -------------------------------------------------------------------------------------------


@every_packing
@pytest.mark.parametrize(
    ("with_weights", "epochs"),
    [
        (False, 2),
        (True, 1),
        pytest.param(False, 1, marks=pytest.mark.nightly),
        pytest.param(True, 2, marks=pytest.mark.nightly),
    ],
)
def test_a_state_continues_at_every_row_and_may_be_restored_twice(packing, with_weights, epochs):
    options = {"packing": packing, "with_weights": with_weights, "epochs": epochs}
    expected = take(packed(**options))
    rows, done = packed(**options), 0
    iterator = iter(rows)
    while True:
        state = rows.save_state()
        before = copy.deepcopy(state)
        for _ in range(2):
            other = resumed(state, **options)
            # Before it has read its documents again, and afterwards.
            assert other.save_state() == before
            assert take(other) == expected[done:]
        assert state == before
        if next(iterator, None) is None:
            break
        done += 1
    assert done == len(expected)


@every_packing
def test_a_chain_of_hops_is_one_run(packing):
    expected = take(packed(packing=packing, epochs=None), 200)
    found, state = [], packed(packing=packing, epochs=None).save_state()
    for hop in range(60):
        rows = resumed(state, packing=packing, epochs=None)
        found += take(rows, 1 + hop % 5)
        state = rows.save_state()
        assert len(json.dumps(state["packing"])) < 2000
    assert found == expected[: len(found)]


@every_packing
def test_a_state_names_the_documents_of_which_tokens_are_to_come_and_a_resume_reads_no_other(
    packing,
):
    rows = packed(packing=packing)
    whole = take(packed(packing=packing))
    for done, _ in enumerate(rows, 1):
        state = rows.save_state()["packing"]
        read = rows.dataset.read
        pieces = [span for part in state["pieces"] for span in part]
        held = [key[1] for key in state["held"]]
        assert set(held) == {held[index] for index, _, _ in pieces}
        assert len(set(held)) == len(held)
        to_come = {span[0] for spans, _ in spans_of(whole[done:]) for span in spans}
        carried = {held[index] for index, _, _ in state["pieces"][1]}
        assert set(held) - carried == {number for number in to_come if number < read} - carried
        other = resumed(rows.save_state(), packing=packing)
        take(other, 1)
        assert other.dataset.read == len(held) + other.dataset.position - read


@every_packing
@settings(max_examples=30)
@given(done=st.integers(0, 120), buffers=st.lists(st.integers(1, 40), min_size=2, max_size=2))
def test_with_another_buffer_the_plan_that_was_begun_is_finished_as_it_was(packing, done, buffers):
    before, after = buffers
    expected = take(packed(packing=packing, buffer_docs=before, epochs=3))
    rows = packed(packing=packing, buffer_docs=before, epochs=3)
    found = take(rows, done) if done else []
    begun = len(rows._plan) - rows._next_row
    rows = resumed(rows.save_state(), packing=packing, buffer_docs=after, epochs=3)
    found += take(rows)
    assert found[: done + begun] == expected[: done + begun]
    assert trained(found) == pairs(LENGTHS, 3)
    assert documents_in(found) == 3 * len(LENGTHS)


@every_packing
def test_a_raised_limit_adds_its_epochs_at_every_row_the_final_ones_included(packing):
    whole = len(take(packed(packing=packing, may_go_on=True)))
    for done in range(1, whole + 1):
        rows = packed(packing=packing, may_go_on=True)
        found = take(rows, done)
        rows = resumed(rows.save_state(), packing=packing, epochs=2, may_go_on=True)
        found += take(rows)
        assert trained(found) == pairs(LENGTHS, 2)
        assert documents_in(found) == 2 * len(LENGTHS)
