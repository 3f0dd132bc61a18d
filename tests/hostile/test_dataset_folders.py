# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A folder's own `dataset.yaml` says how its samples are read, and nothing about the run."""

import json

import pytest

from energon_ext import ConfigError, PackedTaskEncoder, get_train_dataset
from energon_ext.encoders.tokenizers import ByteTokenizer
from tests.support import config, write_dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("folder") / "d", ["some text"] * 9)


FIELDS = {
    "shuffle_over_epochs": -1,  # sampling with replacement, which no max_epochs ends
    "parallel_shard_iters": 10**9,
    "max_samples_per_sequence": 1,
    "subset": {"range": [0, 3]},
    "split_part": "val",
    "path": "/",
    "training": False,
    "worker_config": {},
    "decoder": {},
    "split_config": "other.yaml",
}


@pytest.mark.parametrize("name", FIELDS)
def test_what_the_run_decides_is_not_for_the_folder_to_say(name, folder, tmp_path):
    own = folder / ".nv-meta" / "dataset.yaml"
    before = own.read_text()
    own.write_text(json.dumps({**json.loads(before), name: FIELDS[name]}))
    try:
        with pytest.raises(ConfigError, match=f"dataset.yaml: .{name}. may not be set in this"):
            get_train_dataset(
                folder,
                worker_config=config(),
                batch_size=2,
                task_encoder=PackedTaskEncoder(ByteTokenizer(), 16),
            )
    finally:
        own.write_text(before)
