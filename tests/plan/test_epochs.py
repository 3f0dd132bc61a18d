# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""An epoch is every document once: in every pass, from every save, whatever a resume changes."""

import itertools
import json
import random
from collections import Counter

import numpy as np
import pytest

from energon_ext import PackedTaskEncoder, get_train_dataset, get_val_datasets
from energon_ext.encoders import sources
from tests.support import (
    LargeTokenizer,
    batch_hash,
    close_loaders,
    config,
    loader_for,
    take,
    trained_transitions,
    write_dataset,
    write_tokens,
)

SEQ_LEN = 16
every_packing = pytest.mark.parametrize("packing", ["bin", "sequential"])


def documents(first, lengths):
    """Each token has an id of its own, so that a transition tells where it comes from."""
    starts = np.cumsum([first, *(length + 1 for length in lengths)]).tolist()
    return [list(range(start, start + length)) for start, length in zip(starts, lengths)]


def transitions(tokens, times=1):
    """What `trained_transitions` finds where every document was read so many times."""
    pairs = (pair for document in tokens for pair in zip(document, document[1:]))
    return Counter(dict.fromkeys(pairs, times))


A = documents(1000, np.random.default_rng(0).integers(1, 40, 100).tolist())
B = documents(40_000, np.random.default_rng(1).integers(1, 40, 40).tolist())
C = documents(60_000, np.random.default_rng(2).integers(1, 40, 25).tolist())
TEXT = documents(70_000, np.random.default_rng(3).integers(1, 40, 44).tolist())


class RangeTokenizer(LargeTokenizer):
    """The text ``7 3`` is the tokens 7, 8, 9."""

    def encode_array(self, text):
        first, count = map(int, text.split())
        return np.arange(first, first + count)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("epochs")
    write_tokens(folder / "a", A, dtype=np.int32)
    write_tokens(folder / "b", B, dtype=np.int32)
    write_tokens(folder / "c", C, dtype=np.int32)
    texts = [f"{tokens[0]} {len(tokens)}" for tokens in TEXT]
    parts = [("train", ".*"), ("val", "shard_001.tar")]  # the second half
    write_dataset(folder / "text", texts, split_parts=parts, shard_size=22)
    return folder


@pytest.fixture
def small_buffers(monkeypatch):
    """Token files are packed ``packing_buffer_docs`` at a time."""
    monkeypatch.setattr(sources, "MOST_PLANNED_BUFFER_DOCS", 1)


def write(path, node, split="train"):
    head = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path.write_text(json.dumps({**head, "splits": {split: node}}))
    return path


def entry(path, max_epochs=None, **fields):
    return {"path": path, **fields, **({} if max_epochs is None else {"max_epochs": max_epochs})}


def encoder(packing, buffer_docs=512):
    return PackedTaskEncoder(
        RangeTokenizer(),
        SEQ_LEN,
        packing=packing,
        packing_buffer_docs=buffer_docs,
        mask_boundary_loss=True,
    )


def load(path, packing="bin", *, workers=0, rank=0, ranks=1, batch_size=2, buffer_docs=512, **more):
    return loader_for(
        get_train_dataset(
            path,
            worker_config=config(workers, rank, ranks),
            batch_size=batch_size,
            task_encoder=encoder(packing, buffer_docs),
            **more,
        )
    )


def ended(batches):
    """Documents that ended, by source."""
    return sum((Counter(batch.documents_per_source()) for batch in batches), Counter())


# Passes -------------------------------------------------------------------------------------------


def check_passes(passes, tokens, counts):
    hashes = [[batch_hash(batch) for batch in batches] for batches in passes]
    assert hashes[1:] == hashes[:-1]
    for batches in passes:
        assert trained_transitions(batches) == transitions(tokens)
        assert ended(batches) == counts


@every_packing
@pytest.mark.parametrize("workers", [0, 2])
def test_further_passes_without_repeat_are_the_first_pass(data, packing, workers):
    path = write(data / "once.yaml", {"blend": [entry("a"), entry("b")]})
    loader = load(path, packing, repeat=False, workers=workers)
    check_passes([list(loader) for _ in range(3)], A + B, {"a": 100, "b": 40})


@every_packing
def test_further_passes_over_text_read_what_the_first_pass_read(data, packing):
    path = write(data / "text.yaml", {"blend": [entry("text"), entry("b")]})
    loader = load(path, packing, repeat=False, shuffle_buffer_size=9, buffer_docs=8)
    for _ in range(3):
        batches = list(loader)
        assert trained_transitions(batches) == transitions(TEXT + B)
        assert ended(batches) == {"text:train": 44, "b": 40}


@every_packing
def test_further_passes_of_an_epochized_blend_are_the_first_pass(data, packing):
    entries = [{"path": "a", "repetitions": 1}, {"path": "b", "repetitions": 2}]
    path = write(data / "epochized.yaml", {"blend_epochized": entries})
    once = list(load(path, packing, repeat=False))
    assert ended(once) == {"a": 100, "b": 80}
    assert trained_transitions(once) == transitions(A) + transitions(B, 2)
    loader, found = load(path, packing), []
    for _ in range(3):  # also where a pass ends, a state knows that another follows
        found += take(loader, len(once))
        state = loader.state_dict()
        loader = load(path, packing, workers=2)
        loader.load_state_dict(state)
    assert [batch_hash(batch) for batch in found] == 3 * [batch_hash(batch) for batch in once]


@every_packing
@pytest.mark.parametrize("workers", [0, 2])
def test_every_validation_is_the_first_one(data, packing, workers):
    entries = [entry(path) for path in ("a", "b", "text")]
    path = write(data / "val.yaml", {"blend": entries}, "val")
    datasets = get_val_datasets(
        path, worker_config=config(workers), batch_size=2, task_encoder=encoder(packing)
    )
    a, b, text = (loader_for(dataset) for dataset, _ in datasets)
    check_passes([list(a) for _ in range(3)], A, {"a": 100})
    check_passes([list(b) for _ in range(2)], B, {"b": 40})
    check_passes([list(text) for _ in range(2)], TEXT[22:], {"text:val": 22})


@every_packing
def test_a_state_of_the_second_pass_continues_there(data, packing):
    path = write(data / "once.yaml", {"blend": [entry("a"), entry("b")]})
    loader = load(path, packing, repeat=False)
    first = [batch_hash(batch) for batch in loader]
    take(loader, 30)
    resumed = load(path, packing, repeat=False)
    resumed.restore_state_rank(loader.save_state_rank())
    assert [batch_hash(batch) for batch in resumed] == first[30:]
    assert [batch_hash(batch) for batch in resumed] == first


# Other buffers ------------------------------------------------------------------------------------


@every_packing
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (40, 3),
        (1, 300),
        pytest.param(3, 40, marks=pytest.mark.nightly),
        pytest.param(8, 1, marks=pytest.mark.nightly),
    ],
)
def test_a_resume_with_another_buffer_reads_every_document_as_often_as_it_should(
    data, packing, before, after, small_buffers
):
    path = write(data / "limited.yaml", {"interleave": [entry("a", 2), entry("b", 3)]})
    expected = transitions(A, 2) + transitions(B, 3)
    whole = len(list(load(path, packing, batch_size=8, buffer_docs=before)))
    for done in range(1, whole, 5):
        loader = load(path, packing, batch_size=8, buffer_docs=before)
        batches = take(loader, done)
        resumed = load(path, packing, batch_size=8, buffer_docs=after)
        resumed.load_state_dict(loader.state_dict())
        batches += list(resumed)
        assert trained_transitions(batches) == expected
        assert ended(batches) == {"a": 200, "b": 120}


def test_a_buffer_makes_other_rows_of_a_token_file(data, small_buffers):
    """Else the test above would say nothing."""
    path = write(data / "limited.yaml", {"interleave": [entry("a", 2), entry("b", 3)]})
    few, many = (len(list(load(path, buffer_docs=count))) for count in (1, 40))
    assert few > 1.2 * many


@every_packing
@pytest.mark.parametrize(
    ("before", "after"), [(20, 3), (3, 20), pytest.param(8, 1, marks=pytest.mark.nightly)]
)
def test_text_with_another_buffer_is_read_as_often_as_it_should(data, packing, before, after):
    path = write(data / "text.yaml", {"blend": [entry("text", 2)]})
    whole = len(list(load(path, packing, buffer_docs=before)))
    for done in range(1, whole, 5):
        loader = load(path, packing, buffer_docs=before)
        batches = take(loader, done)
        resumed = load(path, packing, buffer_docs=after)
        resumed.restore_state_rank(loader.save_state_rank())
        batches += list(resumed)
        assert trained_transitions(batches) == transitions(TEXT, 2)
        assert ended(batches) == {"text:train": 88}


# Other limits -------------------------------------------------------------------------------------


def check_raised_limit(data, packing, workers, every):
    """A limit of 1 on 44 texts and 25 token documents becomes one of 2 and 3."""

    def run(of_text, of_c):
        path = write(data / "raised.yaml", {"blend": [entry("text", of_text), entry("c", of_c)]})
        return load(path, packing, workers=workers, shuffle_buffer_size=5, buffer_docs=8)

    loader = run(1, 1)
    iterator, batches, states = iter(loader), [], []
    for batch in iterator:
        batches.append(batch)
        states.append(loader.save_state_rank())
    states.append(loader.save_state_rank())  # after the end was seen
    assert len(batches) > 40
    for done in [*range(1, len(states), every), len(states)]:
        resumed = run(2, 3)
        resumed.restore_state_rank(states[done - 1])
        found = batches[:done] + list(resumed)
        assert trained_transitions(found) == transitions(TEXT, 2) + transitions(C, 3), done
        assert ended(found) == {"text:train": 88, "c": 75}
        resumed.close()


@pytest.mark.nightly
@every_packing
def test_a_raised_limit_of_text_adds_its_epochs_at_every_save_point(data, packing):
    check_raised_limit(data, packing, workers=0, every=1)


@pytest.mark.parametrize("packing", ["bin", pytest.param("sequential", marks=pytest.mark.nightly)])
def test_a_raised_limit_of_text_adds_its_epochs_with_workers(data, packing):
    check_raised_limit(data, packing, workers=2, every=9)


@pytest.mark.nightly
@every_packing
def test_a_raised_limit_of_text_adds_its_epochs_at_every_save_point_with_workers(data, packing):
    check_raised_limit(data, packing, workers=2, every=1)


@pytest.mark.parametrize("packing", ["sequential", pytest.param("bin", marks=pytest.mark.nightly)])
def test_a_limit_that_is_lowered_and_raised_again_loses_and_repeats_nothing(
    data, packing, small_buffers
):
    """4 epochs of c, then 1 for some batches, then 4 again."""

    def run(limit):
        path = write(data / "lowered.yaml", {"interleave": [entry("c", limit), entry("b", 9)]})
        return load(path, packing, batch_size=8, buffer_docs=8)

    reference = run(4)
    iterator, batches, states = iter(reference), [], []
    while not states or "c" in batches[-1].documents_per_source() or len(batches) < 35:
        batches.append(next(iterator))
        states.append(reference.state_dict())
    for done, state in enumerate(states, 1):
        for between in [(0,), (3,), (12,)][done % 3]:
            lowered = run(1)
            lowered.load_state_dict(state)
            found = batches[:done] + take(lowered, between)
            raised = run(4)
            raised.load_state_dict(lowered.state_dict())
            found += list(raised)
            assert trained_transitions(found) == transitions(C, 4) + transitions(B, 9), done
            assert ended(found) == {"c": 100, "b": 360}
        close_loaders()


def test_a_limit_of_text_that_is_lowered_and_raised_again_loses_and_repeats_nothing(data):
    """4 epochs, then 1 for some batches, then 4 again; also where more than 1 were read."""

    def run(limit):
        entries = [entry("text", limit), entry("b", 20)]
        return load(write(data / "text.yaml", {"blend": entries}), buffer_docs=8)

    reference = run(4)
    iterator, batches, states = iter(reference), [], []
    for _ in range(130):
        batches.append(next(iterator))
        states.append(reference.save_state_rank())
    for done in range(5, 130, 30):
        lowered = run(1)
        lowered.restore_state_rank(states[done - 1])
        found = batches[:done] + take(lowered, 20)
        raised = run(4)
        raised.restore_state_rank(lowered.save_state_rank())
        found += list(raised)
        assert trained_transitions(found) == transitions(TEXT, 4) + transitions(B, 20), done
        assert ended(found) == {"text:train": 176, "b": 800}


# Chains -------------------------------------------------------------------------------------------


def check_chain(data, packing, seed, workers, hops=10):
    """Hops over ranks, workers and batch sizes, then to the end."""
    rng = random.Random(seed)
    entries = [entry("a", 2, weight=3), entry("b", 2), entry("c", 5)]
    path = write(data / f"chain{seed}.yaml", {rng.choice(["blend", "interleave"]): entries})
    state, batches, sizes = None, [], []
    for hop in range(hops + 1):
        ranks, batch_size = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3])
        rows_per_step = ranks * batch_size * rng.choice([1, 2, 3])
        steps = rng.randint(1, 6)
        states = []
        for rank in range(ranks):
            loader = load(
                path,
                packing,
                workers=rng.choice(workers),
                rank=rank,
                ranks=ranks,
                batch_size=batch_size,
                rows_per_step=rows_per_step,
                buffer_docs=8,
            )
            if state is not None:
                loader.load_state_dict(json.loads(state))
            if hop == hops:
                batches += list(loader)
            else:
                rounds = steps * rows_per_step // (ranks * batch_size)
                batches += itertools.islice(loader, rounds)  # the run may end on the way
                states.append(json.dumps(loader.state_dict()))
            loader.close()
        if hop < hops:
            assert len(set(states)) == 1, "every rank has the same state"
            state = states[0]
            sizes.append(len(state))
    expected = transitions(A, 2) + transitions(B, 2) + transitions(C, 5)
    assert trained_transitions(batches) == expected
    assert ended(batches) == {"a": 200, "b": 80, "c": 125}
    # Three sources with at most eight documents carried over, whatever went before.
    assert max(sizes) < 2600


@every_packing
@pytest.mark.parametrize("seed", range(4))
def test_ten_hops_over_topologies_read_every_document_as_often_as_it_may(
    data, packing, seed, small_buffers
):
    check_chain(data, packing, seed, workers=[0])


@pytest.mark.parametrize("packing", ["sequential", pytest.param("bin", marks=pytest.mark.nightly)])
def test_hops_over_topologies_with_workers(data, packing, small_buffers):
    check_chain(data, packing, seed=101, workers=[0, 0, 1, 3], hops=3)


@pytest.mark.nightly
@every_packing
@pytest.mark.parametrize("seed", range(200, 230))
def test_many_chains_of_hops_read_every_document_as_often_as_it_may(
    data, packing, seed, small_buffers
):
    check_chain(data, packing, seed, workers=[0, 0, 1, 2, 3])
