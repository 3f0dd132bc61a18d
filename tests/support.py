# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Small real Energon datasets, and helpers for loaders."""

import hashlib
import io
import json
import tarfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.energon import SavableDataLoader, TextSample, WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.base_webdataset import BaseWebdatasetFactory
from webdataset import ShardWriter

from energon_ext.compat import end_workers
from energon_ext.loader.planned_dataset import PlannedDataset
from energon_ext.loader.streamed import open_loader
from energon_ext.plan.cursor import save_cursor
from energon_ext.tokenizers.tokenizers import ByteTokenizer

TEXT_SAMPLE = {"__module__": "megatron.energon", "__class__": "TextSample"}
CRUDE = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}


class OtherText(TextSample):
    """A sample type that is not part of Energon."""


def write_dataset(folder, documents, *, split_parts=None, dataset_config=None, shard_size=50):
    """Write a prepared webdataset of text documents to ``folder``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(f"{folder}/shard_%03d.tar", maxcount=shard_size, verbose=0) as shards:
        for index, text in enumerate(documents):
            shards.write({"__key__": f"{index:06d}", "txt": text.encode()})
    config = dataset_config or {"sample_type": TEXT_SAMPLE, "field_map": {"text": "txt"}}
    return prepare_shards(folder, config, split_parts)


def add_sample(tar, key, files):
    """Add the files of a sample, given as bytes by extension, to an open tar file."""
    for extension, content in files.items():
        info = tarfile.TarInfo(f"{key}.{extension}")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))


def write_records(folder, records):
    """Write a prepared crude webdataset of JSON records to ``folder``."""
    folder.mkdir()
    with ShardWriter(f"{folder}/shard_%03d.tar", maxcount=50, verbose=0) as shards:
        for index, record in enumerate(records):
            shards.write({"__key__": f"{index:06d}", "json": json.dumps(record).encode()})
    return prepare_shards(folder, CRUDE)


def prepare_shards(folder, dataset_config, split_parts=None, media=None):
    """Prepare the shards in ``folder`` as a webdataset; ``media`` selects files for metadata."""
    BaseWebdatasetFactory.prepare_dataset(
        EPath(folder),
        sorted(file.name for file in folder.glob("*.tar")),
        split_parts_patterns=split_parts or [("train", ".*")],
        progress_fn=lambda items, total: items,
        tar_index_only=False,
        workers=1,
        media_filter=media,
    )
    (folder / ".nv-meta" / "dataset.yaml").write_text(json.dumps(dataset_config))
    return folder


def write_tokens(prefix, documents, dtype=np.uint16):
    """Write a ``.bin``/``.idx`` pair with megatron-core; ``documents`` are lists of token ids."""
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for tokens in documents:
        builder.add_document(torch.tensor(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return Path(prefix)


def write_texts(folder, texts):
    """Write texts like ``energon-ext prepare``, every fourth to ``val``; tokens are bytes."""
    ids = [ByteTokenizer().encode(text) for text in texts]
    write_tokens(Path(folder) / "train", [tokens for n, tokens in enumerate(ids) if n % 4])
    write_tokens(Path(folder) / "val", ids[::4])


def write_weights(prefix, weights, dtype="uint8", tokenizer=None):
    """Write the label weights of a pair, one array per document, and their description."""
    content = np.concatenate([np.asarray(values, dtype) for values in weights])
    Path(f"{prefix}.weights.bin").write_bytes(content.tobytes())
    fingerprint = (tokenizer or ByteTokenizer()).fingerprint()
    meta = {"tokenizer": fingerprint, "label_weights": {"dtype": dtype}}
    Path(f"{prefix}.meta.json").write_text(json.dumps(meta))
    return Path(prefix)


def write_mix(path, entries, *, split="train", **blend_fields):
    """Write a ScheduledMetadataset with one blend; ``entries`` are ``(path, weight)``."""
    blend = [{"path": str(entry), "weight": weight} for entry, weight in entries]
    content = {
        "__module__": "energon_ext",
        "__class__": "ScheduledMetadataset",
        "splits": {split: {"blend": blend, **blend_fields}},
    }
    path = Path(path)
    # JSON is valid YAML, correctly quoted.
    path.write_text(json.dumps(content))
    return path


def write_distinct_rows(folder):
    """Write a mix of two sources in which no two documents or rows of an epoch are the same."""
    for name, count, first in (("a", 400, 0), ("b", 300, 100)):
        documents = [[first + n % 100, n // 100] * (1 + n % 21) for n in range(count)]
        write_tokens(folder / name, documents)
    return write_mix(folder / "mix.yaml", [("a", {"linear": {0: 3, 9: 1}}), ("b", 1)])


def config(num_workers=0, rank=0, world_size=1, seed=0):
    return WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers, seed_offset=seed)


class LargeTokenizer(ByteTokenizer):
    """Has enough ids for corpora in which every token is different."""

    def __init__(self):
        super().__init__()
        self.vocab_size = 80_000


def trained_transitions(batches):
    """Count how often each pair (token, next token of the same document) is trained."""
    counts = Counter()
    for batch in batches:
        trained = batch.token_weights > 0
        pairs = zip(batch.tokens[trained].tolist(), batch.labels[trained].tolist())
        counts.update((a, b) for a, b in pairs if b == a + 1)
    return counts


_open_loaders, _stock_loaders = [], []


def loader_for(dataset, **options):
    """Return a loader whose workers end with the test, without Energon's watchdog."""
    if not isinstance(dataset, PlannedDataset):
        options = {"watchdog_timeout_seconds": None, "gc_collect_every_n_steps": 0, **options}
    loader = open_loader(dataset, **options)
    _open_loaders.append(loader)
    return loader


def stock_loader_for(dataset, **options):
    """Return Energon's own loader, which saves a state after every batch; it ends with the test."""
    loader = SavableDataLoader(
        dataset,
        checkpoint_every_sec=0,
        checkpoint_every_min_n_samples=1,
        watchdog_timeout_seconds=None,
        gc_collect_every_n_steps=0,  # otherwise a wrapper adds to the state
        **options,
    )
    _stock_loaders.append(loader)
    return loader


def close_loaders():
    while _open_loaders:
        _open_loaders.pop().close()
    while _stock_loaders:
        end_workers(_stock_loaders.pop())


def take(loader, count):
    """Return the next ``count`` batches."""
    iterator = iter(loader)
    return [next(iterator) for _ in range(count)]


def batch_hash(batch):
    """Return a hash over every tensor of a PackedBatch."""
    digest = hashlib.sha256()
    for name in ("tokens", "labels", "token_weights", "position_ids", "cu_seqlens", "source_ids"):
        digest.update(getattr(batch, name).numpy().tobytes())
    return digest.hexdigest()


def drawn_of(blend):
    """Return documents and tokens drawn from each source, according to the state of a blend."""
    sources = save_cursor(blend)["plan"]["sources"]
    return {key: (source["documents"], source["tokens"]) for key, source in sources.items()}


def documents_of(dataset):
    """Return the tokens of all documents that the only source of a dataset shows, a splice."""
    (source,) = dataset.run.sources.values()
    return source.reader.chosen["tokens"]
