# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Metadatasets with fields on their entries, and the segments of batches."""

import json
from collections import Counter

from tests.support import write_mix


def mix_of(data, name, *entries, split="train", node="blend"):
    """Write a metadataset; entries are ``(path, fields)``."""
    path = write_mix(data / f"{name}.yaml", [(entry, 1) for entry, _ in entries], split=split)
    content = json.loads(path.read_text())
    listed = content["splits"][split].pop("blend")
    for entry, (_, fields) in zip(listed, entries):
        entry.update(fields)
    content["splits"][split] = {node: listed}
    path.write_text(json.dumps(content))
    return path


def segments(batch):
    """Return ``(name, tokens, position ids, weights)`` of each segment that is not padding."""
    ends = batch.validate().cu_seqlens.tolist()
    fields = (batch.tokens, batch.position_ids, batch.token_weights)
    return [
        (batch.sources[source], *(field[a:b].tolist() for field in fields))
        for a, b, source in zip(ends, ends[1:], batch.source_ids.tolist())
        if source >= 0
    ]


def shown(batches):
    """Count how often each (name, tokens, offset) was shown."""
    return Counter(
        (name, tuple(tokens), positions[0])
        for batch in batches
        for name, tokens, positions, _ in segments(batch)
    )
