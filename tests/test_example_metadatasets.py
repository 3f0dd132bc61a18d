# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Every file in metadatasets/ loads and has the shares its first comment describes."""

import importlib
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest

from energon_ext import PackedTaskEncoder, SFTTaskEncoder, get_train_dataset
from energon_ext.plan.lookup import find_blend
from energon_ext.splice.frames import splices_of
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import config, loader_for, take, write_texts

FOLDER = Path(__file__).parents[1] / "metadatasets"

#: Planned shares at a position of the axis (a step or token), computed by hand from the files.
EXPECTED = {
    "constant": {0: {"prose": 3 / 6, "code": 2 / 6, "docs": 1 / 6}},
    "step": {99: {"prose": 1}, 100: {"code": 1}, 200: {"code": 0.5, "docs": 0.5}},
    "linear": {0: {"prose": 1}, 75: {"prose": 0.75, "code": 0.25}, 300: {"code": 1}},
    "cosine": {0: {"prose": 10 / 11, "code": 1 / 11}, 150: {"prose": 0.5, "code": 0.5}},
    "exponential": {0: {"prose": 0.8, "code": 0.2}, 100: {"prose": 0.5, "code": 0.5}},
    "tokens": {0: {"prose": 1}, 500_000: {"prose": 0.5, "code": 0.5}, 10**6: {"code": 1}},
    "pairs": {100: {"prose": 5 / 7, "code": 2 / 7}, 300: {"code": 1}},
    "nested": {100: {"prose": 1 / 4, "code": 1 / 6, "docs": 1 / 12 + 1 / 2}},
    "schedule_in_schedule": {
        0: {"prose": 0.5, "docs": 0.5},
        150: {"prose": 1 / 6, "code": 1 / 6, "docs": 2 / 3},
    },
    "halves": {0: {"code": 1}},
    "interleave": {0: {"prose": 2 / 4, "code": 1 / 4, "docs": 1 / 4}},
    "max_epochs": {0: {"prose": 1 / 4, "docs": 1 / 4, "code": 2 / 4}},
    "transforms": {0: {"code": 0.5, "prose": 0.5}, 100: {"code": 0.5, "docs": 0.5}},
    "chats": {0: {"chats.jsonl": 1}},
    "vision_language": {
        0: {"shapes": 0.6, "pairs": 0.3, "prose": 0.1},
        60: {"shapes": 2 / 6, "pairs": 1 / 6, "prose": 3 / 6},
    },
    "splice_curriculum": {0: {"prose": 1}, 100: {"prose": 1}, 200: {"prose": 1}},
    "splice": {0: {"prose": 0.5, "docs": 0.5}, 200: {"docs": 1}},
    "curriculum": {0: {"prose": 0.9, "docs": 0.1}, 50: {"prose": 0.5, "code": 0.4, "docs": 0.1}},
}


def example(module):
    folder = str(FOLDER.with_name("examples"))
    sys.path.insert(0, folder)
    try:
        return importlib.import_module(module)
    finally:
        sys.path.remove(folder)


#: Task encoders for files that are not plain text.
ENCODERS = {
    "chats": lambda: SFTTaskEncoder(ByteTokenizer(), 128),
    "vision_language": lambda: example("vision_language").encoder(),
}


@pytest.fixture(scope="module")
def metadatasets(tmp_path_factory):
    """The files next to data like that of the demo."""
    root = tmp_path_factory.mktemp("repo")
    for source in ("prose", "code", "docs"):
        write_texts(root / "demo" / "data" / source, [f"{source} {number}" for number in range(60)])
    chat = {"prompt": "What does glob.glob do?", "response": "It lists paths."}
    (root / "demo" / "data" / "chats.jsonl").write_text((json.dumps(chat) + "\n") * 30)
    example("drawn_images").write_webdatasets(root / "demo" / "data" / "images", images=200)
    shutil.copytree(FOLDER, root / "metadatasets")
    return root / "metadatasets"


def test_every_file_has_expected_shares():
    assert {path.stem for path in FOLDER.glob("*.yaml")} == set(EXPECTED)


def _folder(key):
    """``prose`` of ``../demo/data/prose/train``, ``pairs`` of ``../demo/data/images/pairs``."""
    return key.partition(":")[0].replace("images/", "").split("/")[3]


@pytest.mark.parametrize("name", EXPECTED)
# Some files list one dataset several times on purpose.
@pytest.mark.filterwarnings("ignore:.*listed more than once")
def test_a_file_plans_the_shares_it_describes_and_runs(metadatasets, name):
    text = PackedTaskEncoder(ByteTokenizer(), 32, packing_buffer_docs=8)
    dataset = get_train_dataset(
        metadatasets / f"{name}.yaml",
        worker_config=config(),
        batch_size=2,
        task_encoder=ENCODERS[name]() if name in ENCODERS else text,
    )
    for step, expected in EXPECTED[name].items():
        shares = Counter()
        for key, share in find_blend(dataset).shares_at(step).items():
            shares[_folder(key)] += share
        assert {name: share for name, share in shares.items() if share} == pytest.approx(expected)
    for batch in take(loader_for(dataset), 3):
        batch.validate()


def test_the_entry_of_splice_yaml_is_spliced(metadatasets):
    dataset = get_train_dataset(
        metadatasets / "splice.yaml",
        worker_config=config(),
        batch_size=2,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), 32, packing_buffer_docs=8),
    )
    (splice,) = splices_of(dataset)
    assert len(splice.names) == 3 and all("prose/train/doc" in name for name in splice.names)
