# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Reading a webdataset leaves nothing behind in the shards that stay open."""

import megatron.energon
import pytest
from megatron.energon import DefaultTaskEncoder
from megatron.energon.flavors.webdataset.sample_loader import WebdatasetSampleLoaderDataset

from energon_ext import DynamicBlendMixin, PackedTaskEncoder, get_train_dataset
from energon_ext.encoders.tokenizers import ByteTokenizer
from tests.support import config, loader_for, take, write_dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    texts = [f"document {number}" for number in range(60)]
    return write_dataset(tmp_path_factory.mktemp("data") / "texts", texts)


class Mixed(DynamicBlendMixin, DefaultTaskEncoder):
    """A user's own encoder."""


def members_kept(dataset):
    """How many headers each open shard remembers."""
    kept, pending = [], [dataset]
    while pending:
        candidate = pending.pop()
        if isinstance(candidate, WebdatasetSampleLoaderDataset):
            for reader in candidate.join_readers:
                kept += [len(shard.members) for shard in reader.itar_files_cache.values()]
        pending += getattr(candidate, "datasets", ())
    return kept


@pytest.mark.parametrize("encoder", [PackedTaskEncoder(ByteTokenizer(), 32), Mixed()])
def test_open_shards_do_not_remember_what_was_read(folder, encoder):
    loader = loader_for(
        get_train_dataset(folder, worker_config=config(), batch_size=2, task_encoder=encoder)
    )
    take(loader, 40)
    assert set(members_kept(loader.dataset)) == {0}


def test_stock_energon_remembers_every_sample(folder):
    """If this fails, the module may go."""
    dataset = megatron.energon.get_train_dataset(
        folder,
        worker_config=config(),
        batch_size=2,
        task_encoder=DefaultTaskEncoder(),
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
    )
    loader = loader_for(dataset)
    take(loader, 40)
    assert sum(members_kept(loader.dataset)) >= 80
