# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""An epoch is every document once: in every pass and from every save."""

from collections import Counter

import numpy as np
import pytest

from energon_ext import PackedTaskEncoder, get_train_dataset, get_val_datasets
from tests.plan.runs import write_split
from tests.support import (
    LargeTokenizer,
    batch_hash,
    config,
    loader_for,
    take,
    trained_transitions,
    write_tokens,
)

SEQ_LEN = 16
every_packing = pytest.mark.parametrize("packing", ["bin", "sequential"])
#: Both packings, and both numbers of workers; the other pairs run at night.
some_workers = pytest.mark.parametrize(
    ("packing", "workers"),
    [
        ("bin", 2),
        ("sequential", 0),
        pytest.param("bin", 0, marks=pytest.mark.nightly),
        pytest.param("sequential", 2, marks=pytest.mark.nightly),
    ],
)


def documents(first, lengths):
    """Return documents of unique token ids, so that a transition identifies its document."""
    starts = np.cumsum([first, *(length + 1 for length in lengths)]).tolist()
    return [list(range(start, start + length)) for start, length in zip(starts, lengths)]


def transitions(tokens, times=1):
    """Return what `trained_transitions` counts if every document was read ``times`` times."""
    pairs = (pair for document in tokens for pair in zip(document, document[1:]))
    return Counter(dict.fromkeys(pairs, times))


A = documents(1000, np.random.default_rng(0).integers(1, 40, 50).tolist())
B = documents(40_000, np.random.default_rng(1).integers(1, 40, 40).tolist())
C = documents(60_000, np.random.default_rng(2).integers(1, 40, 25).tolist())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("epochs")
    for name, tokens in {"a": A, "b": B, "c": C}.items():
        write_tokens(folder / name, tokens, dtype=np.int32)
    return folder


def entry(path, max_epochs=None, **fields):
    return {"path": path, **fields, **({} if max_epochs is None else {"max_epochs": max_epochs})}


def encoder(packing, buffer_docs=512):
    return PackedTaskEncoder(
        LargeTokenizer(),
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
    """Count the documents that ended, by source."""
    return sum((Counter(batch.documents_per_source()) for batch in batches), Counter())


# Passes -------------------------------------------------------------------------------------------


def check_passes(passes, tokens, counts):
    hashes = [[batch_hash(batch) for batch in batches] for batches in passes]
    assert hashes[1:] == hashes[:-1]
    for batches in passes:
        assert trained_transitions(batches) == transitions(tokens)
        assert ended(batches) == counts


@some_workers
def test_later_passes_without_repeat_equal_the_first(data, packing, workers):
    path = write_split(data / "once.yaml", {"blend": [entry("a"), entry("b")]})
    loader = load(path, packing, repeat=False, workers=workers)
    check_passes([list(loader) for _ in range(3)], A + B, {"a": 50, "b": 40})


@every_packing
def test_an_epochized_blend_reads_each_pass_in_another_order(data, packing):
    """In each pass 50 documents of one source once, and 40 of the other twice."""
    entries = [{"path": "a", "repetitions": 1}, {"path": "b", "repetitions": 2}]
    path = write_split(data / "epochized.yaml", {"blend_epochized": entries})
    once = list(load(path, packing, repeat=False, batch_size=1))
    assert ended(once) == {"a": 50, "b": 80}
    state, found, counts = None, [], Counter()
    borders = [0]
    for workers in (0, 2, 0):
        loader = load(path, packing, workers=workers, batch_size=1)
        if state is not None:
            loader.load_state_dict(state)
        read = transitions(A, len(borders)) + transitions(B, 2 * len(borders))
        ends = Counter({"a": 50 * len(borders), "b": 80 * len(borders)})
        for batch in loader:
            found.append(batch)
            counts.update(batch.documents_per_source())
            # The last piece of a long document is not always in the last of its rows.
            if counts == ends and trained_transitions(found) == read:
                break
            assert len(found) < 1000, "no row ends the pass"
        borders.append(len(found))
        state = loader.state_dict()
    assert state["plan"]["step"] == len(found)
    documents = {key: each["documents"] for key, each in state["plan"]["sources"].items()}
    assert documents == {"a": 150, "b": 240}
    rows = [batch_hash(batch) for batch in found]
    passes = [rows[begin:end] for begin, end in zip(borders, borders[1:])]
    assert passes[0] == [batch_hash(batch) for batch in once]
    assert len({tuple(each) for each in passes}) == 3


def test_the_steps_of_an_epochized_blend_are_full_at_the_end_of_a_pass(data):
    """Three rows per step; the passes have other numbers of rows."""
    entries = [{"path": "a", "repetitions": 1}, {"path": "c", "repetitions": 1}]
    path = write_split(data / "full.yaml", {"blend_epochized": entries})
    rows = len(list(load(path, repeat=False, batch_size=1)))
    assert rows % 7, "choose another number of rows per step"
    loader = load(path, batch_size=7)
    for batch in take(loader, 3 * rows // 7):
        begins_row = batch.cu_seqlens[:-1] % SEQ_LEN == 0
        assert begins_row.sum() == 7 and (batch.source_ids[begins_row] >= 0).all()
    assert loader.state_dict()["plan"]["row"] == 3 * rows // 7 * 7


@some_workers
def test_every_validation_pass_is_the_same(data, packing, workers):
    entries = [entry(path) for path in ("a", "b")]
    path = write_split(data / "val.yaml", {"blend": entries}, split="val")
    datasets = get_val_datasets(
        path, worker_config=config(workers), batch_size=2, task_encoder=encoder(packing)
    )
    a, b = (loader_for(dataset) for dataset, _ in datasets)
    check_passes([list(a) for _ in range(3)], A, {"a": 50})
    check_passes([list(b) for _ in range(2)], B, {"b": 40})


@every_packing
def test_a_state_saved_in_the_second_pass_continues_there(data, packing):
    path = write_split(data / "once.yaml", {"blend": [entry("a"), entry("b")]})
    loader = load(path, packing, repeat=False)
    first = [batch_hash(batch) for batch in loader]
    take(loader, 30)
    resumed = load(path, packing, repeat=False)
    resumed.load_state_dict(loader.state_dict())
    assert [batch_hash(batch) for batch in resumed] == first[30:]
    assert [batch_hash(batch) for batch in resumed] == first


# Other limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
@every_packing
def test_a_raised_limit_adds_its_epochs_at_every_save_point(data, packing, workers):
    """Limits of 1 on both become 2 and 3; also from a state that was saved after the end."""

    def run(of_b, of_c):
        path = write_split(data / "raised.yaml", {"blend": [entry("b", of_b), entry("c", of_c)]})
        return load(path, packing, workers=workers, buffer_docs=8)

    loader = run(1, 1)
    batches, states = [], []
    for batch in loader:
        batches.append(batch)
        states.append(loader.state_dict())
    states.append(loader.state_dict())
    assert len(batches) > 30
    for done in [*range(1, len(states), 4), len(states)]:
        resumed = run(2, 3)
        resumed.load_state_dict(states[done - 1])
        found = batches[:done] + list(resumed)
        assert trained_transitions(found) == transitions(B, 2) + transitions(C, 3), done
        assert ended(found) == {"b": 80, "c": 75}
        resumed.close()
