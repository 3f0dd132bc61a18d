# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""An epoch is every document once: in every pass, from every save, whatever a resume changes."""

import json
from collections import Counter

import numpy as np
import pytest

from energon_ext import PackedTaskEncoder, get_train_dataset, get_val_datasets
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


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("epochs")
    write_tokens(folder / "a", A, dtype=np.int32)
    write_tokens(folder / "b", B, dtype=np.int32)
    write_tokens(folder / "c", C, dtype=np.int32)
    return folder


def write(path, node, split="train"):
    head = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path.write_text(json.dumps({**head, "splits": {split: node}}))
    return path


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
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_further_passes_without_repeat_are_the_first_pass(data, packing, workers):
    path = write(data / "once.yaml", {"blend": [entry("a"), entry("b")]})
    loader = load(path, packing, repeat=False, workers=workers)
    check_passes([list(loader) for _ in range(3)], A + B, {"a": 100, "b": 40})


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
    entries = [entry(path) for path in ("a", "b")]
    path = write(data / "val.yaml", {"blend": entries}, "val")
    datasets = get_val_datasets(
        path, worker_config=config(workers), batch_size=2, task_encoder=encoder(packing)
    )
    a, b = (loader_for(dataset) for dataset, _ in datasets)
    check_passes([list(a) for _ in range(3)], A, {"a": 100})
    check_passes([list(b) for _ in range(2)], B, {"b": 40})


@every_packing
def test_a_state_of_the_second_pass_continues_there(data, packing):
    path = write(data / "once.yaml", {"blend": [entry("a"), entry("b")]})
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
        path = write(data / "raised.yaml", {"blend": [entry("b", of_b), entry("c", of_c)]})
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
