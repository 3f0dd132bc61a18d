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
from dataclasses import dataclass, field, replace
from typing import Any, Mapping, Sequence

import braceexpand
from megatron.energon.epathlib import EPath
from megatron.energon.eyaml import load_yaml_json
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory
from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME

from energon_ext.config.left_out import LeftOut
from energon_ext.documents.token_paths import SPLITS
from energon_ext.errors import ConfigError
from energon_ext.mixture.tree import Tree
from energon_ext.splice.config import SpliceFields
from energon_ext.state.match import SourceNames

MAX_KEY = 20_000  # characters; states and messages have it

#: Where a metadataset leaves its word on a dataset factory, for the TaskEncoder to read.
_ORIGIN_ATTRIBUTE = "_energon_ext_origin"


@dataclass(frozen=True)
class Origin:
    """What the YAML says of a source, beyond what its factory keeps; nothing without a YAML."""

    root: EPath | None = None  # folder of the outermost metadataset; keys are relative to it
    where: str = ""  # place of the reference in the YAML, for messages
    max_epochs: int | None = None  # most passes over the source in a run, None for no limit
    name: str | None = None  # what people call the source, None for its key
    left_out: LeftOut | None = None  # what the outermost metadataset leaves out
    splice: SpliceFields | None = None  # how its documents are shown, None for in rows
    splice_where: str = ""  # place of that in the YAML


@dataclass(frozen=True)
class SourceKey:
    """The identity of a source.

    Attributes:
        path: of the dataset, relative to the folder of the metadataset; absolute when there is
            none. Joined datasets are joined with ``+``.
        split: split part, empty where the format has none.
        subset: range of the dataset, empty for all of it.
        subflavors: of the reference, when it has some.
        repetition: 1 for the first source that reads the same, 2 for the second.

    Example:
        >>> str(SourceKey("data/web", "train"))
        'data/web:train'
        >>> str(SourceKey("data/web", "train", subset="[0, 0.5]", repetition=2))
        'data/web:train[0, 0.5]#2'
    """

    path: str
    split: str = ""
    subset: str = ""
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    repetition: int = 1

    def __str__(self) -> str:
        flavors = json.dumps(self.subflavors, sort_keys=True, default=str)
        split = f":{self.split}" if self.split else ""
        number = f"#{self.repetition}" if self.repetition > 1 else ""
        return f"{self.path}{split}{self.subset}{flavors if self.subflavors else ''}{number}"


def set_origin(factory: BaseCoreDatasetFactory, origin: Origin) -> None:
    """Leave word of the YAML on a factory.

    The outermost metadataset has the last say on the root; the place stays that of the innermost
    reference, which is closest to the source, and so do its name and its splice; of several limits
    on the epochs the smallest holds.
    """
    inner = get_origin(factory)
    limits = [n for n in (origin.max_epochs, inner.max_epochs) if n is not None]
    spliced = inner if inner.splice is not None else origin
    merged = Origin(
        root=origin.root,
        where=inner.where or origin.where,
        max_epochs=min(limits, default=None),
        name=inner.name or origin.name,
        left_out=origin.left_out or inner.left_out,
        splice=spliced.splice,
        splice_where=spliced.splice_where,
    )
    setattr(factory, _ORIGIN_ATTRIBUTE, merged)


def get_origin(factory: BaseCoreDatasetFactory) -> Origin:
    """What :func:`set_origin` left."""
    return getattr(factory, _ORIGIN_ATTRIBUTE, Origin())


def left_out_of(factories: Sequence[BaseCoreDatasetFactory]) -> LeftOut:
    """What the metadataset of some sources leaves out.

    Raises:
        ConfigError: several metadatasets say so.
    """
    said = (get_origin(factory).left_out for factory in factories)
    found = {id(each): each for each in said if each is not None}
    if len(found) > 1:
        places = " and ".join(sorted(each.where for each in found.values()))
        raise ConfigError(f"{places}: `skip` or `exclude` in both; only one of them may have it.")
    return next(iter(found.values()), LeftOut())


def source_keys(factories: Sequence[BaseCoreDatasetFactory], portable: bool = True) -> list[str]:
    """One key for each factory; sources that read the same are numbered in the given order."""
    seen: Counter[str] = Counter()
    keys = []
    for key in (_key_of(factory, portable) for factory in factories):
        seen[str(key)] += 1
        keys.append(str(replace(key, repetition=seen[str(key)])))
    return keys


def source_names(factories: Sequence[BaseCoreDatasetFactory]) -> list[SourceNames]:
    """By which the state of each source is found when the metadataset or the data has moved."""
    keys = source_keys(factories)
    absolute = source_keys(factories, portable=False)
    return [
        SourceNames(identity, shuffle_key(key, factory))
        for key, identity, factory in zip(keys, absolute, factories)
    ]


def shuffle_key(key: str, factory: BaseCoreDatasetFactory) -> str:
    """The part of a key that names the order in which a source is read: its folders left out.

    So the order stays when the metadataset, or all the data, moves to another folder. A dataset
    that is listed twice is still read in two orders.
    """
    path = _key_of(factory).path
    absolute = _key_of(factory, portable=False).path
    return "+".join(map(_last_name, absolute.split("+"))) + key[len(path) :]


def _last_name(path: str) -> str:
    """The name of a file, with its folder where `energon-ext prepare` gave it that of its split."""
    folder, _, name = path.rpartition("/")
    return f"{folder.rpartition('/')[2]}/{name}" if name in SPLITS else name


def name_nodes(tree: Tree, factories: Sequence[BaseCoreDatasetFactory]) -> None:
    """Name the nodes of a tree by the metadatasets they stand in, as sources are named.

    The outermost node has no name: it is the same one wherever its file lies.
    """
    root = get_origin(factories[0]).root
    seen: Counter[str] = Counter()
    for number, node in enumerate(tree.nodes()):
        if not node.location or number == 0:
            node.identity = node.location
            continue
        seen[node.location] += 1
        path, _, split = node.location.rpartition(":")
        identity = SourceKey(path, split, repetition=seen[node.location])
        node.name = str(replace(identity, path=_portable(path, root)))
        node.identity = str(identity)


def _key_of(factory: BaseCoreDatasetFactory, portable: bool = True) -> SourceKey:
    root = get_origin(factory).root if portable else None
    path = "+".join(_portable(path, root) for path in factory.paths)
    # Joined datasets keep no subflavors of their own.
    subflavors = getattr(factory, "subflavors", None) or {}
    key = SourceKey(path, _split_name(factory), _subset_text(factory), subflavors)
    if (length := len(str(key))) > MAX_KEY:
        raise ConfigError(
            f"{path}: a name of {length:,} characters, subflavors included; at most {MAX_KEY:,} "
            f"are allowed."
        )
    return key


def _portable(path: Any, root: EPath | None) -> str:
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
