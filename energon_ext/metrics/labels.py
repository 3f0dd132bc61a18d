# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Short names of sources for people."""

import re
from typing import Mapping, Sequence

MAX_PARTS = 16  # parts of a path in a short label
SOURCE_KEY = re.compile(
    r"(?P<path>.*?)(?:_text_document)?(?P<split>:\w+)?(?P<rest>[\[{#].*)?", re.DOTALL
)


def short_labels(keys: Sequence[str], names: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return names of sources, or the ends of their paths, as long as needed to be distinct.

    Example:
        >>> short_labels(["../data/prose:train", "../data/code:train"])
        ('prose', 'code')
        >>> short_labels(["a/web:train", "b/web:train", "b/web:train#2"])
        ('a/web', 'b/web', 'b/web#2')
    """
    if names:
        return tuple(names.get(key, label) for key, label in zip(keys, short_labels(keys)))
    parts = [match.groupdict("") for match in map(SOURCE_KEY.fullmatch, keys) if match]
    splits = {part["split"] for part in parts}
    deepest = max((key.count("/") for key in keys), default=0)
    for depth in range(1, 2 + min(deepest, MAX_PARTS)):
        labels = tuple(
            "/".join(part["path"].split("/")[-depth:])
            + (part["split"] if len(splits) > 1 else "")
            + part["rest"]
            for part in parts
        )
        if len(set(labels)) == len(keys):
            return labels
    return tuple(keys)
