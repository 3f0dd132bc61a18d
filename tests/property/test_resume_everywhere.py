# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every pipeline, 0 to 4 workers, 1 to 4 ranks: a resume draws what would have come."""

import json

import numpy as np
import pytest
from megatron.energon import DefaultTaskEncoder

from energon_ext import (
    DynamicBlendMixin,
    MultiSpliceTaskEncoder,
    PackedTaskEncoder,
    get_train_dataset,
)
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.splice import MultiSpliceConfig
from tests.support import (
    close_loaders,
    config,
    loader_for,
    take,
    write_dataset,
    write_mix,
    write_tokens,
)

BATCHES, EVERY = 24, 5


class Plain(DynamicBlendMixin, DefaultTaskEncoder):
    """Samples as they are."""


def packed(packing="bin"):
    return PackedTaskEncoder(ByteTokenizer(), 24, packing=packing, packing_buffer_docs=6)


def spliced():
    splice = MultiSpliceConfig(num_docs=5, content_length=7, pack_contents=True)
    subflavors = {"splice": True}
    return MultiSpliceTaskEncoder(ByteTokenizer(), 24, splice, spliced_subflavors=subflavors)


#: Rule, sources, encoder, options. The first source has a limit.
PIPELINES = {
    "plain": ("blend", "ab", Plain, {}),
    "shuffle": ("blend", "ab", Plain, {"shuffle_buffer_size": 7}),
    "packing": ("blend", "ab", packed, {"shuffle_buffer_size": 7}),
    "interleave": ("interleave", "ab", packed, {}),
    "text and tokens": ("blend", "ay", packed, {"shuffle_buffer_size": 7}),
    "tokens": ("blend", "xy", packed, {}),
    "tokens, interleave": ("interleave", "xy", packed, {}),
    "tokens, sequential": ("interleave", "xy", lambda: packed("sequential"), {}),
    "tokens, spliced": ("interleave", "xy", spliced, {}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for source in "ab":
        texts = [f"{source}{n} " * (n % 9 + 1) for n in range(120)]
        write_dataset(folder / source, texts, shard_size=20)
    for source in "xy":
        lengths = np.random.default_rng(ord(source)).integers(1, 60, 200)
        write_tokens(folder / source, [[ord(source) + n % 50] * n for n in lengths.tolist()])
    return folder


def write(data, rule, sources):
    mix = write_mix(data / "mix.yaml", [(sources[0], 1), (sources[1], {"linear": {0: 1, 20: 5}})])
    content = json.loads(mix.read_text())
    entries = content["splits"]["train"].pop("blend")
    entries[0]["max_epochs"] = 1
    entries[1]["subflavors"] = {"splice": True}
    content["splits"]["train"][rule] = entries
    mix.write_text(json.dumps(content))
    return mix


def words(batch):
    return batch.tokens.tolist() if hasattr(batch, "tokens") else list(batch.text)


@pytest.mark.nightly
@pytest.mark.parametrize("num_workers", range(5))
@pytest.mark.parametrize("ranks", range(1, 5))
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_resume_at_any_batch_draws_what_would_have_come(data, pipeline, ranks, num_workers):
    check_resume(data, pipeline, ranks, num_workers)


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_resume_without_workers_draws_what_would_have_come(data, pipeline):
    check_resume(data, pipeline, ranks=2, num_workers=0)


def check_resume(data, pipeline, ranks, num_workers):
    rule, sources, encoder, options = PIPELINES[pipeline]
    mix = write(data, rule, sources)

    def fresh(rank):
        return loader_for(
            get_train_dataset(
                mix,
                worker_config=config(num_workers, rank, ranks),
                batch_size=2,
                task_encoder=encoder(),
                **options,
            )
        )

    rank = ranks - 1
    expected = [words(batch) for batch in take(fresh(rank), BATCHES)]
    found, state = [], None
    while len(found) < BATCHES:
        loader = fresh(rank)
        if state is not None:
            loader.restore_state_rank(state)
            loader.restore_state_rank(state)
        found += [words(batch) for batch in take(loader, min(EVERY, BATCHES - len(found)))]
        state = loader.save_state_rank()
        close_loaders()
    assert found == expected
