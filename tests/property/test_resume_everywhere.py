# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every pipeline, 0 to 4 workers, 1 to 4 ranks: a resume draws what would have come."""

import pytest
from megatron.energon import DefaultTaskEncoder

from energon_ext import DynamicBlendMixin, PackedTaskEncoder, get_train_dataset
from energon_ext.encoders.tokenizers import ByteTokenizer
from tests.support import close_loaders, config, loader_for, take, write_dataset, write_mix

pytestmark = pytest.mark.nightly

BATCHES, EVERY = 24, 5


class Plain(DynamicBlendMixin, DefaultTaskEncoder):
    """Samples as they are."""


PIPELINES = {
    "plain": ("blend", Plain, {}),
    "shuffle": ("blend", Plain, {"shuffle_buffer_size": 7}),
    "packing": ("blend", None, {"shuffle_buffer_size": 7}),
    "interleave": ("interleave", None, {}),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for source in "abc":
        texts = [f"{source}{n} " * (n % 9 + 1) for n in range(120)]
        write_dataset(folder / source, texts, shard_size=20)
    return folder


def words(batch):
    return batch.tokens.tolist() if hasattr(batch, "tokens") else list(batch.text)


@pytest.mark.parametrize("num_workers", range(5))
@pytest.mark.parametrize("ranks", range(1, 5))
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_a_resume_at_any_batch_draws_what_would_have_come(data, pipeline, ranks, num_workers):
    rule, encoder, options = PIPELINES[pipeline]
    mix = write_mix(data / f"{pipeline}.yaml", [("a", 1), ("b", {"linear": {0: 1, 20: 5}})])
    mix.write_text(mix.read_text().replace('"blend"', f'"{rule}"'))

    def fresh(rank):
        packed = PackedTaskEncoder(ByteTokenizer(), 24, packing_buffer_docs=6)
        return loader_for(
            get_train_dataset(
                mix,
                worker_config=config(num_workers, rank, ranks),
                batch_size=2,
                task_encoder=packed if encoder is None else encoder(),
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
