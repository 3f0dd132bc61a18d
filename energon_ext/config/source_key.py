# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a source is called, wherever its state goes.

Everything that belongs to one source for longer than a process lives, its cursor, its buffers, its
counts, its order, hangs on its key. The key says what is read, not where it stands in a list, so
sources may be added, removed, reordered and reweighted between two runs.
"""

import hashlib
import json
import posixpath
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Iterable, Mapping, Sequence

import braceexpand
from megatron.energon.epathlib import EPath
from megatron.energon.eyaml import load_yaml_json
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory
from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME

from energon_ext.config.leaf import Leaf
from energon_ext.documents.token_paths import SPLITS
from energon_ext.errors import ConfigError
from energon_ext.state.match import SourceNames

MAX_KEY = 20_000  # characters; states and messages have it


@dataclass(frozen=True)
class SourceKey:
    """The identity of a source.

    Attributes:
        path: of the dataset, relative to the folder of the metadataset; absolute when there is
            none. Joined datasets are joined with ``+``.
        split: split part, empty where the format has none.
        subset: range of the dataset, empty for all of it.
        subflavors: of the reference, when it has some.

    Example:
        >>> str(SourceKey("data/web", "train"))
        'data/web:train'
        >>> str(SourceKey("data/web", "train", subset="[0, 0.5]"))
        'data/web:train[0, 0.5]'
    """

    path: str
    split: str = ""
    subset: str = ""
    subflavors: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        flavors = json.dumps(self.subflavors, sort_keys=True, default=str)
        split = f":{self.split}" if self.split else ""
        return f"{self.path}{split}{self.subset}{flavors if self.subflavors else ''}"


def numbered(keys: Iterable[str]) -> list[str]:
    """Keys told apart: the second source that reads the same is ``#2``.

    Example:
        >>> numbered(["web", "code", "web"])
        ['web', 'code', 'web#2']
    """
    seen: Counter[str] = Counter()
    told_apart = []
    for key in keys:
        seen[key] += 1
        told_apart.append(f"{key}#{seen[key]}" if seen[key] > 1 else key)
    return told_apart


def source_keys(leaves: Sequence[Leaf]) -> list[str]:
    """One key for each source of a metadataset, in its order."""
    return numbered(str(_key_of(leaf)) for leaf in leaves)


def source_names(leaves: Sequence[Leaf]) -> list[SourceNames]:
    """By which the state of each source is found when the metadataset or the data has moved."""
    absolute = numbered(str(_key_of(leaf, portable=False)) for leaf in leaves)
    return [
        SourceNames(identity, _shuffle_key(key, leaf))
        for key, identity, leaf in zip(source_keys(leaves), absolute, leaves)
    ]


def _shuffle_key(key: str, leaf: Leaf) -> str:
    """The part of a key that names the order in which a source is read: its folders left out.

    So the order stays when the metadataset, or all the data, moves to another folder. A dataset
    that is listed twice is still read in two orders.
    """
    path = _key_of(leaf).path
    absolute = _key_of(leaf, portable=False).path
    return "+".join(map(_last_name, absolute.split("+"))) + key[len(path) :]


def _last_name(path: str) -> str:
    """The name of a file, with its folder where `energon-ext prepare` gave it that of its split."""
    folder, _, name = path.rpartition("/")
    return f"{folder.rpartition('/')[2]}/{name}" if name in SPLITS else name


def _key_of(leaf: Leaf, portable: bool = True) -> SourceKey:
    factory, root = leaf.dataset, leaf.root if portable else None
    path = "+".join(portable_path(path, root) for path in factory.paths)
    key = SourceKey(path, _split_name(factory), _subset_text(factory), leaf.subflavors)
    if (length := len(str(key))) > MAX_KEY:
        raise ConfigError(
            f"{path}: a name of {length:,} characters, subflavors included; at most {MAX_KEY:,} "
            f"are allowed."
        )
    return key


def portable_path(path: Any, root: EPath | None) -> str:
    """A path relative to a folder, as it is for another file system or no folder."""
    text = str(path)
    if root is None or "://" in text or "://" in str(root):
        return text
    return posixpath.relpath(text, str(root))


def _subset_text(factory: BaseCoreDatasetFactory) -> str:
    subset = getattr(factory, "subset", None)
    if subset is None:
        return ""
    ranges = (subset.absolute_range, subset.range)
    return "".join(json.dumps(r) for r in ranges if r is not None and tuple(r) != (0, 1))


def _split_name(factory: BaseCoreDatasetFactory) -> str:
    """The split a factory reads. Energon keeps only its list of shards; JSONL has no splits."""
    reader = getattr(factory, "inner_datasets", [factory])[0]
    files = getattr(reader, "split_part_files", None)
    if files is None:
        return ""
    for file_name in ("split.yaml", "split.json"):
        config = reader.path / MAIN_FOLDER_NAME / file_name
        if config.is_file():
            for name, patterns in load_yaml_json(config).get("split_parts", {}).items():
                if [f for pattern in patterns for f in braceexpand.braceexpand(pattern)] == files:
                    return name
    return hashlib.sha1("\n".join(files).encode("utf-8")).hexdigest()[:8]
