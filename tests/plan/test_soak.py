# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A long run counts correctly, and its memory and states do not grow."""

import gc
import json
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from energon_ext import get_train_dataset
from energon_ext.loader.data_loader import ExactDataLoader
from tests.plan.runs import write_split
from tests.plan.test_epochs import documents, encoder, entry
from tests.support import batch_hash, config, take, write_tokens

A = documents(1000, np.random.default_rng(0).integers(1, 40, 200).tolist())
B = documents(40_000, np.random.default_rng(1).integers(1, 40, 60).tolist())
C = documents(60_000, [5, 30, 1, 16, 17, 39, 2, 8, 11])
SOURCES = {"a": A, "b": B, "c": C}
#: Three sources with at most eight carried-over documents each; counts grow by digits.
MAX_STATE_BYTES = 4096
MAX_GROWTH_BYTES = 8 * 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("soak")
    for name, tokens in SOURCES.items():
        write_tokens(folder / name, tokens, dtype=np.int32)
    return folder


def load(path, packing):
    dataset = get_train_dataset(
        path, worker_config=config(), batch_size=1, task_encoder=encoder(packing, buffer_docs=8)
    )
    return ExactDataLoader(dataset)


def resident_bytes():
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def tokens_trained(batches):
    """Count how often each token was the input of a trained position, int64 [80_000]."""
    inputs = [batch.tokens[batch.token_weights > 0].numpy() for batch in batches]
    return np.bincount(np.concatenate([np.zeros(0, np.int64), *inputs]), minlength=80_000)


def next_of_a_resume(path, packing, state):
    resumed = load(path, packing)
    resumed.load_state_dict(json.loads(state))
    hashes = [batch_hash(batch) for batch in take(resumed, 20)]
    resumed.close()
    return hashes


def check_long_run(folder, packing, scale, every):
    """Read to the end of all epochs; save, measure and resume every ``every`` batches.

    Returns:
        Number of batches, sizes of the states in bytes, and resident bytes.
    """
    epochs = {"a": 2 * scale, "b": 6 * scale, "c": 40 * scale}
    weights = {"a": {"linear": {0: 3, 400 * scale: 1}}, "b": 1, "c": {"step": {0: 0, 500: 2}}}
    entries = [entry(name, epochs[name], weight=weights[name]) for name in SOURCES]
    path = write_split(folder / "mix.yaml", {"blend": entries})

    loader = load(path, packing)
    drawn, trained = Counter(), np.zeros(80_000, np.int64)
    count, recent, ahead, sizes, resident = 0, [], [], [], []
    for count, batch in enumerate(loader, 1):
        if ahead:
            assert batch_hash(batch) == ahead.pop(0), count
        drawn.update(batch.documents_per_source())
        recent.append(batch)
        if count % 1000 == 0:
            trained += tokens_trained(recent)
            recent.clear()
        if count % every == 0:
            state = json.dumps(loader.state_dict())
            ahead = next_of_a_resume(path, packing, state)
            sizes.append(len(state))
            resident.append(resident_bytes())
    trained += tokens_trained(recent)
    loader.close()

    assert drawn == {name: len(SOURCES[name]) * times for name, times in epochs.items()}
    expected = np.zeros_like(trained)
    for name, times in epochs.items():
        for document in SOURCES[name]:
            expected[document[:-1]] = times  # the last token of a document predicts nothing
    assert trained.tolist() == expected.tolist()
    return count, sizes, resident


@pytest.mark.parametrize("packing", ["bin", pytest.param("sequential", marks=pytest.mark.nightly)])
def test_a_long_run_reads_every_document_up_to_its_limit(folder, packing):
    count, sizes, _ = check_long_run(folder, packing, scale=1, every=300)
    assert count > 1000 and max(sizes) <= MAX_STATE_BYTES


@pytest.mark.nightly
@pytest.mark.parametrize("packing", ["bin", "sequential"])
def test_a_million_batches_keep_memory_and_states_bounded(folder, packing):
    count, sizes, resident = check_long_run(folder, packing, scale=900, every=100_000)
    print(f"{packing}: {count} batches, states of {sizes} bytes, {resident} bytes resident")
    assert count > 1_000_000 and max(sizes) <= MAX_STATE_BYTES
    assert max(resident) - resident[0] <= MAX_GROWTH_BYTES
