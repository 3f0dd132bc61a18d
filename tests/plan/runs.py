# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A run on many ranks in one process: one loader per rank, read in turn."""

import json
from collections import Counter

import numpy as np

from energon_ext import PackedTaskEncoder, get_train_dataset
from tests.support import LargeTokenizer, config, loader_for, write_tokens

SEQ_LEN = 64


def numbered_documents(count, first_id, seed=0, longest=60):
    """Return documents in which every token has a unique id."""
    lengths = np.random.default_rng(seed).integers(3, longest, count)
    ends = first_id + np.cumsum(lengths)
    return [list(range(end - length, end)) for end, length in zip(ends, lengths)]


def write_numbered(prefix, count, first_id, seed=0, longest=60):
    return write_tokens(prefix, numbered_documents(count, first_id, seed, longest), np.int32)


def write_split(path, node, split="train", **fields):
    """Write a ScheduledMetadataset with one split as JSON, which is also YAML."""
    head = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path.write_text(json.dumps({**head, "splits": {split: node}, **fields}))
    return path


def edit_yaml(path, change=None, **fields):
    """Apply ``change`` to the train split of a file, and set top-level fields."""
    content = json.loads(path.read_text())
    if change is not None:
        change(content["splits"]["train"])
    path.write_text(json.dumps({**content, **fields}))


def open_loaders(mix, encoder, ranks, workers, batch, rows, **options):
    """Return the loaders of all ranks of a run."""
    datasets = (
        get_train_dataset(
            mix,
            worker_config=config(workers, rank, ranks),
            batch_size=batch,
            rows_per_step=rows,
            task_encoder=encoder,
            **options,
        )
        for rank in range(ranks)
    )
    return [loader_for(dataset) for dataset in datasets]


class Run:
    """The loaders of all ranks of a run.

    Args:
        ranks, workers, batch: The topology; ``batch`` is the micro-batch size.
        rows: Rows per step.
        encoder: Task encoder; a packed one with 64 tokens per row by default.
    """

    def __init__(self, mix, *, ranks=1, workers=0, batch=1, rows=16, encoder=None, **options):
        encoder = encoder or PackedTaskEncoder(LargeTokenizer(), SEQ_LEN)
        self.rounds = rows // (ranks * batch)
        self.batch = batch
        self.loaders = open_loaders(mix, encoder, ranks, workers, batch, rows, **options)
        self._iterators = None

    def step(self):
        """Return the sorted rows of the next step, or None at the end."""
        if self._iterators is None:
            self._iterators = [iter(loader) for loader in self.loaders]
        batches = [next(i, None) for _ in range(self.rounds) for i in self._iterators]
        if all(batch is None for batch in batches):
            return None
        return sorted(row for batch in batches for row in rows_of(batch))

    def steps(self, count):
        return [self.step() for _ in range(count)]

    def state(self):
        """Return the state of the run as JSON text, which is the same on all ranks."""
        texts = {json.dumps(loader.state_dict(), sort_keys=True) for loader in self.loaders}
        assert len(texts) == 1, "ranks disagree on the state"
        return texts.pop()

    def resume(self, text):
        for loader in self.loaders:
            loader.load_state_dict(json.loads(text))
        return self

    def close(self):
        for loader in self.loaders:
            loader.close()


def rows_of(batch):
    """Return the rows of a batch as tuples: tokens, labels, weights and positions."""
    tokens = batch.tokens.view(-1, SEQ_LEN).tolist()
    labels = batch.labels.view(-1, SEQ_LEN).tolist()
    weights = batch.token_weights.view(-1, SEQ_LEN).tolist()
    positions = batch.position_ids.view(-1, SEQ_LEN).tolist()
    return [tuple(map(tuple, row)) for row in zip(tokens, labels, weights, positions)]


def tokens_of(steps):
    """Count how often each token was the input of a trained position."""
    return Counter(
        token
        for step in steps
        for tokens, _, weights, _ in step
        for token, weight in zip(tokens, weights)
        if weight > 0
    )
