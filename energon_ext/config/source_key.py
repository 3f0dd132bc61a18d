# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The key of a source, under which its state is saved.

Everything about a source that outlives a process (cursor, buffers, counts, order) is tied to its
key. The key describes the data, not its place in a list, so sources may be added, removed,
reordered and reweighted between two runs.
"""

import hashlib
import json
import posixpath
from collections import Counter
from typing import Any, Iterable, Mapping, Sequence

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.base_dataset import BaseCoreDatasetFactory

from energon_ext.config.carried import Leaf
from energon_ext.config.yaml_file import splits_in
from energon_ext.errors import ConfigError
from energon_ext.state.match import SourceNames
from energon_ext.tokens.splits import SPLITS

MAX_KEY = 20_000  # characters; states and messages contain keys


def source_key(
    path: str,
    split: str = "",
    subset: str = "",
    subflavors: Mapping[str, Any] | None = None,
    text_key: str | None = None,
) -> str:
    """Return the identity of a source.

    Args:
        path: path of the dataset, relative to the folder of the metadataset; without one of ours,
            to the innermost folder with all data. Paths of joined datasets are joined with ``+``.
        split: split part, empty if the format has none.
        subset: range of the dataset, empty for all of it.
        subflavors: subflavors of the reference, if any.
        text_key: field with the text, if its entry names one.

    Example:
        >>> source_key("data/web", "train")
        'data/web:train'
        >>> source_key("data/web", "train", subset="[0, 0.5]")
        'data/web:train[0, 0.5]'
        >>> source_key("web.jsonl", text_key="content")
        'web.jsonl@content'
    """
    flavors = json.dumps(subflavors, sort_keys=True, default=str) if subflavors else ""
    field = f"@{text_key}" if text_key else ""
    key = f"{path}{f':{split}' if split else ''}{subset}{flavors}{field}"
    if len(key) > MAX_KEY:
        found = f"a key of {len(key):,} characters, subflavors included"
        raise ConfigError(f"{path}: {found}; at most {MAX_KEY:,} are allowed.")
    return key


def number_duplicates(keys: Iterable[str]) -> list[str]:
    """Make keys unique: the second source with the same key gets ``#2``.

    Example:
        >>> number_duplicates(["web", "code", "web"])
        ['web', 'code', 'web#2']
    """
    seen: Counter[str] = Counter()
    unique = []
    for key in keys:
        seen[key] += 1
        unique.append(f"{key}#{seen[key]}" if seen[key] > 1 else key)
    return unique


def keys_and_names(leaves: Sequence[Leaf]) -> list[tuple[str, SourceNames]]:
    """Return the key and the further names of each source of a metadataset, in its order.

    The names identify the state of a source if the metadataset or the data has moved. The shuffle
    key contains no folders, so a move does not change the order in which the source is read. A
    dataset that is listed twice is still read in two different orders.
    """
    portable, absolute, ends = [], [], []
    shared = _shared_folder([leaf for leaf in leaves if leaf.metadataset is None])
    # Thousands of leaves have few metadatasets.
    some = {id(leaf.metadataset): leaf for leaf in leaves}
    folders = {number: leaf.root for number, leaf in some.items()}
    for leaf in leaves:
        paths = [str(path) for path in leaf.dataset.paths]
        data = leaf.dataset
        read = (_split_name(data), _subset_text(data), leaf.subflavors, leaf.text_key)
        relative = "+".join(
            portable_path(path, folders[id(leaf.metadataset)] or shared) for path in paths
        )
        portable.append(source_key(relative, *read))
        absolute.append(source_key("+".join(paths), *read))
        ends.append(("+".join(map(_last_name, paths)), len(relative)))
    return [
        (key, SourceNames(identity, name + key[length:]))
        for key, identity, (name, length) in zip(
            number_duplicates(portable), number_duplicates(absolute), ends
        )
    ]


def portable_path(path: str, root: EPath | None) -> str:
    """Return a path relative to ``root``, or unchanged without a root or in another store."""
    if root is None or _store_of(path) != _store_of(str(root)):
        return path
    return posixpath.relpath(path, str(root))


def _shared_folder(leaves: Sequence[Leaf]) -> EPath | None:
    """Return the innermost folder with all data of some sources; None if there is none.

    It replaces the folder of a metadataset for sources that are listed in a stock metadataset, or
    are a plain folder, so that their keys survive a move as well.
    """
    paths = [path for leaf in leaves for path in leaf.dataset.paths]
    if not paths or any("://" in str(path) for path in paths):
        return None
    return EPath(posixpath.commonpath([posixpath.dirname(str(path)) for path in paths]))


def _store_of(path: str) -> str:
    """Return the profile of an object store; empty for a local path."""
    return path.split("/")[2] if "://" in path else ""


def _last_name(path: str) -> str:
    """Return a file name, with its folder if `energon-ext prepare` named the file by split."""
    folder, _, name = path.rpartition("/")
    return f"{folder.rpartition('/')[2]}/{name}" if name in SPLITS else name


def _subset_text(factory: BaseCoreDatasetFactory) -> str:
    subset = getattr(factory, "subset", None)
    if subset is None:
        return ""
    ranges = (subset.absolute_range, subset.range)
    return "".join(_range_text(*r) for r in ranges if r is not None and tuple(r) != (0, 1))


def _range_text(*bounds: float | None) -> str:
    """Return a range of documents or fractions, these to twelve digits.

    Example:
        >>> _range_text(0.0, 96.9 / 100)  # which is 0.9690000000000001
        '[0, 0.969]'
        >>> _range_text(123456789012345, None)
        '[123456789012345, end]'
    """
    texts = (f"{x:.12g}" if isinstance(x, float) else str(x) for x in bounds)
    return f"[{', '.join(texts)}]".replace("None", "end")


def _split_name(factory: BaseCoreDatasetFactory) -> str:
    """Return the split with the shards of a factory, or their hash; empty for JSONL."""
    reader = getattr(factory, "inner_datasets", [factory])[0]
    files = getattr(reader, "split_part_files", None)
    if files is None:
        return ""
    for name, shards in splits_in(reader.path).items():
        if shards == files:
            return name
    return hashlib.sha1("\n".join(files).encode("utf-8")).hexdigest()[:8]
