# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The `dataset.yaml` of a folder defines how samples are read, and cannot change the run."""

import json

import pytest

from energon_ext import ConfigError, PackedTaskEncoder, get_train_dataset
from energon_ext.tokenizers.tokenizers import ByteTokenizer
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
def test_a_folder_cannot_set_fields_of_the_run(name, folder, tmp_path):
    settings = folder / ".nv-meta" / "dataset.yaml"
    before = settings.read_text()
    settings.write_text(json.dumps({**json.loads(before), name: FIELDS[name]}))
    try:
        with pytest.raises(ConfigError, match=f"dataset.yaml: .{name}. may not be set in this"):
            get_train_dataset(
                folder,
                worker_config=config(),
                batch_size=2,
                task_encoder=PackedTaskEncoder(ByteTokenizer(), 16),
            )
    finally:
        settings.write_text(before)
