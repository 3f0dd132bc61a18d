# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Steps of a source in random order on disk, read by blocks, mix like those of a random order."""

import json

import numpy as np
import pytest

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.encoders import plan_mix
from energon_ext.prepare import shuffle
from energon_ext.prepare.job import Encoded, Job
from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.prepare.units import run_units
from tests.plan.runs import write_split
from tests.prepare.runs import memory_unit
from tests.support import LargeTokenizer, config, loader_for

DOCUMENTS, UNITS, SITE = 40_000, 8, 4096
ROWS, SEQ_LEN = 14, 64
STEP = ROWS * SEQ_LEN // 2  # a document has two tokens
STEPS = DOCUMENTS // STEP


def prepare(folder, seed):
    """Write documents of two equal tokens, their number in the input plus one."""

    def encode(documents):
        return [Encoded([(np.full(2, int(each.text) + 1), None)]) for each in documents]

    tokenizer = LargeTokenizer()
    meta = {"tokenizer": tokenizer.fingerprint(), "vocab_size": tokenizer.vocab_size}
    job = Job(encode, lambda p: TokenWriter(p, tokenizer.vocab_size), meta, {}, shuffle=seed)
    size = DOCUMENTS // UNITS
    texts = [[str(unit * size + n) for n in range(size)] for unit in range(UNITS)]
    run_units(job, [memory_unit(each, str(n)) for n, each in enumerate(texts)], folder / "web")


def steps_of(folder, epochs=2, **fields):
    """Return the step in which each document is read, int64 [epochs, documents]; -1 for none."""
    path = write_split(folder / "mix.yaml", {"blend": [{"path": "web/train", **fields}]})
    encoder = PackedTaskEncoder(LargeTokenizer(), SEQ_LEN, packing="sequential")
    loader = loader_for(
        get_train_dataset(
            path, worker_config=config(), batch_size=epochs * DOCUMENTS * 2 // SEQ_LEN,
            task_encoder=encoder,
        )
    )  # fmt: skip
    numbers = next(iter(loader)).tokens.numpy()[::2].reshape(epochs, DOCUMENTS) - 1
    steps = np.full((epochs, DOCUMENTS), -1)
    for epoch in range(epochs):
        assert sorted(numbers[epoch].tolist()) == list(range(DOCUMENTS))
        steps[epoch, numbers[epoch, : STEPS * STEP]] = np.arange(STEPS * STEP) // STEP
    return steps


def deviations(steps):
    """Return how far two statistics of an epoch are from those of a random order, in sigmas.

    These are the neighbours in the input that are in one step, and the variance over steps of a
    quantity that is the same for each document of a site.
    """
    chance = STEPS * STEP * (STEP - 1) / DOCUMENTS / (DOCUMENTS - 1)
    mean = (DOCUMENTS - 1) * chance
    together = (steps[1:] == steps[:-1]) & (steps[1:] >= 0)
    values = np.random.default_rng(0).normal(size=-(-DOCUMENTS // SITE)).repeat(SITE)[:DOCUMENTS]
    is_read = steps >= 0
    means = np.bincount(steps[is_read], values[is_read]) / STEP
    ratio = means.var() / (values.var() / STEP * (1 - STEP / DOCUMENTS))
    return (together.sum() - mean) / mean**0.5, (ratio - 1) / (2 / (STEPS - 1)) ** 0.5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixing")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shuffle, "BUCKET_BYTES", 400_000)
        prepare(folder, seed=1)
    return folder


def test_steps_of_a_shuffled_source_mix_like_those_of_a_random_order(folder):
    assert len([*(folder / "web/train").glob("*.idx")]) == 4
    for epoch in steps_of(folder):
        assert np.abs(deviations(epoch)).max() < 3


def test_blocks_of_the_order_of_the_input_would_not_mix(tmp_path):
    """Why blocks are refused there: the statistics tell the two apart."""
    prepare(tmp_path, seed=None)
    for epoch in steps_of(tmp_path):
        assert np.abs(deviations(epoch)).max() < 3  # one permutation
    for path in (tmp_path / "web/train").glob("*.meta.json"):
        meta = json.loads(path.read_text())
        path.write_text(json.dumps({**meta, "shuffled": {"seed": 1}}))
    assert plan_mix.SHUFFLED_BLOCK_DOCS == 256 and plan_mix.MIXED_DOCS == 64 * 256
    for epoch in steps_of(tmp_path):
        neighbours, variance = deviations(epoch)
        assert neighbours > 20 and variance > 20
