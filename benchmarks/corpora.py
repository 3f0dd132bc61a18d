# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writers of token files, webdatasets and mixes for the benchmarks."""

import contextlib
import io
import json
from pathlib import Path

import numpy as np
import webdataset
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.base_webdataset import BaseWebdatasetFactory

from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.tokenizers.tokenizers import ByteTokenizer

VOCAB_SIZE = 50_000
SOURCES = ("code", "web")
CRUDE = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}


class AnyTokens(ByteTokenizer):
    """A stand-in for the tokenizer that wrote the files."""

    def __init__(self):
        super().__init__()
        self.vocab_size = VOCAB_SIZE


def random_documents(count, seed):
    """Return documents of web-like lengths, as uint16 arrays."""
    random = np.random.default_rng(seed)
    lengths = random.lognormal(6.0, 1.3, count).astype(np.int64).clip(2, 200_000)
    tokens = random.integers(5, VOCAB_SIZE, lengths.sum()).astype(np.uint16)
    return np.split(tokens, np.cumsum(lengths)[:-1])


def write_token_file(prefix, documents):
    """Write a pair like ``energon-ext prepare --tokenizer``."""
    writer = TokenWriter(prefix, VOCAB_SIZE)
    for tokens in documents:
        writer.write(tokens)
    writer.close()


def write_webdataset(folder, samples, dataset_config=CRUDE):
    """Write and prepare a webdataset; ``samples`` are ``{extension: bytes}``."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    with webdataset.ShardWriter(f"{folder}/%03d.tar", maxcount=5000, verbose=0) as shards:
        for number, sample in enumerate(samples):
            shards.write({"__key__": f"{number:08d}", **sample})
    with contextlib.redirect_stdout(io.StringIO()):
        BaseWebdatasetFactory.prepare_dataset(
            EPath(folder),
            sorted(file.name for file in folder.glob("*.tar")),
            split_parts_patterns=[("train", ".*")],
            progress_fn=lambda shards, total: shards,
            tar_index_only=False,
            workers=1,
        )
    (folder / ".nv-meta" / "dataset.yaml").write_text(json.dumps(dataset_config))


def write_mixes(folder):
    """Write an equal blend of SOURCES, for stock Energon and for energon_ext."""
    folder = Path(folder)
    ours = {"blend": [{"path": name} for name in SOURCES]}
    stock = {"blend": [{"path": name, "weight": 1.0} for name in SOURCES]}
    for name, module, class_name, blend in (
        ("ours.yaml", "energon_ext", "ScheduledMetadataset", ours),
        ("stock.yaml", "megatron.energon", "MetadatasetV2", stock),
    ):
        content = {"__module__": module, "__class__": class_name, "splits": {"train": blend}}
        (folder / name).write_text(json.dumps(content))
