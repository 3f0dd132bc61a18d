# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Small real Energon datasets, and what every data test does with a loader."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.energon import SavableDataLoader, TextSample, WorkerConfig
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.base_webdataset import BaseWebdatasetFactory
from torch.utils.data._utils import signal_handling
from webdataset import ShardWriter

from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.loader.streamed import open_loader
from energon_ext.plan.dataset import PlannedDataset

TEXT_SAMPLE = {"__module__": "megatron.energon", "__class__": "TextSample"}


class OtherText(TextSample):
    """A sample type that Energon does not bring."""


def write_dataset(folder, documents, *, split_parts=None, dataset_config=None, shard_size=50):
    """A prepared webdataset of text documents in ``folder``."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(f"{folder}/shard_%03d.tar", maxcount=shard_size, verbose=0) as shards:
        for index, text in enumerate(documents):
            shards.write({"__key__": f"{index:06d}", "txt": text.encode()})
    BaseWebdatasetFactory.prepare_dataset(
        EPath(folder),
        sorted(file.name for file in folder.glob("*.tar")),
        split_parts_patterns=split_parts or [("train", ".*")],
        progress_fn=lambda items, total: items,
        tar_index_only=False,
        workers=1,
    )
    config = dataset_config or {"sample_type": TEXT_SAMPLE, "field_map": {"text": "txt"}}
    (folder / ".nv-meta" / "dataset.yaml").write_text(json.dumps(config))
    return folder


def write_tokens(prefix, documents, dtype=np.uint16):
    """A ``.bin``/``.idx`` pair, written by megatron-core; ``documents`` are lists of token ids."""
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for tokens in documents:
        builder.add_document(torch.tensor(tokens), [len(tokens)])
    builder.finalize(f"{prefix}.idx")
    return Path(prefix)


def write_texts(folder, texts):
    """Texts as ``energon-ext prepare`` writes them, every fourth to ``val``; tokens are bytes."""
    ids = [ByteTokenizer().encode(text) for text in texts]
    write_tokens(Path(folder) / "train", [own for n, own in enumerate(ids) if n % 4])
    write_tokens(Path(folder) / "val", ids[::4])


def write_weights(prefix, weights, dtype="uint8", tokenizer=None):
    """The weights of the labels of a pair of bytes, some for each document; says what they are."""
    content = np.concatenate([np.asarray(each, dtype) for each in weights])
    Path(f"{prefix}.weights.bin").write_bytes(content.tobytes())
    fingerprint = (tokenizer or ByteTokenizer()).fingerprint()
    meta = {"tokenizer": fingerprint, "label_weights": {"dtype": dtype}}
    Path(f"{prefix}.meta.json").write_text(json.dumps(meta))
    return Path(prefix)


def write_mix(path, entries, *, split="train", **blend_fields):
    """A ScheduledMetadataset with one blend; ``entries`` are ``(path, weight)``."""
    blend = [{"path": str(entry), "weight": weight} for entry, weight in entries]
    content = {
        "__module__": "energon_ext",
        "__class__": "ScheduledMetadataset",
        "splits": {split: {"blend": blend, **blend_fields}},
    }
    path = Path(path)
    # JSON is YAML, and quotes what needs quotes.
    path.write_text(json.dumps(content))
    return path


def config(num_workers=0, rank=0, world_size=1, seed=0):
    return WorkerConfig(rank=rank, world_size=world_size, num_workers=num_workers, seed_offset=seed)


class LargeTokenizer(ByteTokenizer):
    """Has an id for every token of a test that gives each token of a corpus its own."""

    def __init__(self):
        super().__init__()
        self.vocab_size = 80_000


def trained_transitions(batches):
    """How often each pair (token, next token of the same document) is trained."""
    counts = Counter()
    for batch in batches:
        trained = batch.token_weights > 0
        pairs = zip(batch.tokens[trained].tolist(), batch.labels[trained].tolist())
        counts.update((a, b) for a, b in pairs if b == a + 1)
    return counts


_open_loaders, _stock_loaders = [], []


def loader_for(dataset, **options):
    """A loader whose workers end with the test; Energon's has no watchdog."""
    if not isinstance(dataset, PlannedDataset):
        options = {"watchdog_timeout_seconds": None, "gc_collect_every_n_steps": 0, **options}
    loader = open_loader(dataset, **options)
    _open_loaders.append(loader)
    return loader


def stock_loader_for(dataset, **options):
    """Energon's own loader, which stores a state after every batch; it ends with the test."""
    loader = SavableDataLoader(
        dataset,
        checkpoint_every_sec=0,
        checkpoint_every_min_n_samples=1,
        watchdog_timeout_seconds=None,
        gc_collect_every_n_steps=0,  # a wrapper, and as such in the state
        **options,
    )
    _stock_loaders.append(loader)
    return loader


def close_loaders():
    while _open_loaders:
        _open_loaders.pop().close()
    while _stock_loaders:
        _end_workers(_stock_loaders.pop()._iterator)


def _end_workers(iterator):
    """torch would wait five seconds for each of them."""
    if hasattr(iterator, "_workers"):
        iterator._shutdown = True
        signal_handling._remove_worker_pids(id(iterator))
        for worker in iterator._workers:
            worker.kill()
            worker.join()


def take(loader, count):
    """The next ``count`` batches."""
    iterator = iter(loader)
    return [next(iterator) for _ in range(count)]


def batch_hash(batch):
    """A hash over every tensor of a PackedBatch."""
    digest = hashlib.sha256()
    for name in ("tokens", "labels", "token_weights", "position_ids", "cu_seqlens", "source_ids"):
        digest.update(getattr(batch, name).numpy().tobytes())
    return digest.hexdigest()


def drawn_of(blend):
    """Documents and tokens drawn from each source of a blend, as its state says."""
    sources = blend.save_state()["plan"]["sources"]
    return {key: (own["documents"], own["tokens"]) for key, own in sources.items()}
