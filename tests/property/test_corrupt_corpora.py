# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Damage to any file is a typed error, or every document is still read or counted."""

import itertools
import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.errors import EnergonExtError
from energon_ext.prepare.accounts import skipped_documents
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import (
    close_loaders,
    config,
    loader_for,
    write_dataset,
    write_tokens,
    write_weights,
)

WEB, LINES, PAIR = 24, 17, 31
MIX = """
__module__: energon_ext
__class__: ScheduledMetadataset
splits:
  train:
    blend:
    - {path: web, weight: 1, max_epochs: 1}
    - {path: lines.jsonl, weight: 2, max_epochs: 1}
    - {path: pair, weight: {linear: {0: 1, 20: 3}}, max_epochs: 1}
"""


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    folder = tmp_path_factory.mktemp("intact")
    write_dataset(folder / "web", [f"text {n} of the web" for n in range(WEB)], shard_size=8)
    lines = folder / "lines.jsonl"
    lines.write_text("".join(f'{{"text": "line {n} of the file"}}\n' for n in range(LINES)))
    CrudeJsonlDatasetFactory.prepare_dataset(EPath(lines))
    write_tokens(folder / "pair", [[n + 1] * (3 + n % 20) for n in range(PAIR)])
    write_weights(folder / "pair", [[1] * (3 + n % 20) for n in range(PAIR)])
    (folder / "mix.yaml").write_text(MIX)
    return folder


def flip(content, chance):
    """Flip one to three bits."""
    for _ in range(chance.randint(1, 3)):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def cut(content, chance):
    del content[chance.randrange(len(content)) :]


def lose(content, chance):
    """Remove some bytes in the middle."""
    begin = chance.randrange(len(content))
    del content[begin : begin + chance.choice([1, 8, 100])]


def add(content, chance):
    begin = chance.randrange(len(content) + 1)
    content[begin:begin] = chance.randbytes(chance.choice([1, 8, 100]))


def blank(content, chance):
    begin = chance.randrange(len(content))
    content[begin : begin + chance.choice([8, 512])] = bytes(8)


def replace(content, chance):
    content[:] = chance.randbytes(chance.choice([0, 7, len(content)]))


DAMAGES = [flip, flip, cut, lose, add, blank, replace]


def read_all(folder):
    """Count the documents that were read or rejected, by source."""
    dataset = get_train_dataset(
        folder / "mix.yaml",
        worker_config=config(),
        batch_size=1,
        shuffle_buffer_size=4,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), 32, packing_buffer_docs=4),
    )
    batches = itertools.islice(loader_for(dataset), 200)
    found = sum((Counter(batch.documents_per_source()) for batch in batches), Counter())
    return found + rejected(folder)


def rejected(folder):
    """Count the samples without tokens, by source."""
    found = Counter()
    for path in folder.glob(".energon_ext_cache/*/prepared.json"):
        prepared = json.loads(path.read_text())
        name = Path(prepared["units"][0]["unit"]["path"]).name
        found[{"web": "web:train"}.get(name, name)] += skipped_documents(prepared, "refused")[0]
    return +found


def check(intact, folder, seed, expected):
    """Damage one file and return what became of the corpus."""
    chance = random.Random(seed)
    shutil.copytree(intact, folder)
    # A truncated mix may be a different valid mix; the YAML checks have their own tests.
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "mix.yaml")
    path = chance.choice(files)
    content, damage = bytearray(path.read_bytes()), chance.choice(DAMAGES)
    if content:
        damage(content, chance)
    path.write_bytes(content)
    what = f"seed {seed}: {damage.__name__} in {path.relative_to(folder)}"
    try:
        found = read_all(folder)
        has_rejected = bool(rejected(folder))
    except EnergonExtError as error:
        assert "\n" not in str(error), what
        return "error"
    finally:
        close_loaders()
        shutil.rmtree(folder)
    if path.name == "lines.jsonl.idx" and has_rejected:
        return "rejected"  # two lines that are read as one are rejected as one
    assert found == expected, what
    return "rejected" if has_rejected else "all documents"


def check_many(intact, tmp_path, seeds):
    expected = read_all(intact)
    shutil.rmtree(intact / ".energon_ext_cache")
    assert expected == {"web:train": WEB, "lines.jsonl": LINES, "pair": PAIR}
    found = Counter(check(intact, tmp_path / "case", seed, expected) for seed in seeds)
    assert min(found["error"], found["all documents"]) > len(seeds) // 10, found
    return found


def test_a_damaged_corpus_is_an_error_or_counts_every_document(intact, tmp_path):
    check_many(intact, tmp_path, range(60))


@pytest.mark.nightly
def test_a_thousand_damaged_corpora_are_errors_or_count_every_document(intact, tmp_path):
    assert check_many(intact, tmp_path, range(60, 1060))["rejected"] > 10
