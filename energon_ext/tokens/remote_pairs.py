# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ``.bin``/``.idx`` pairs that a path in an object store names, and their metadata.

If `energon-ext prepare` left a ``prepared.json``, one request returns all of it. Otherwise the
folder is listed and the index of every pair is copied.
"""

import functools
import glob
import os
import re
from fnmatch import translate
from typing import Any, Mapping

from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME

from energon_ext.batch.columns import columns_in
from energon_ext.errors import ConfigError
from energon_ext.storage.object_store import (
    StoredObject,
    as_msc,
    find_object,
    has_below,
    local_copy,
    objects_below,
    read_object,
)
from energon_ext.storage.range_reader import range_reader
from energon_ext.tokens.column_files import suffix_of, suffixes_of_columns
from energon_ext.tokens.index import (
    ALL_SUFFIXES,
    META_SUFFIX,
    PREPARED,
    SUFFIXES,
    WEIGHTS_SUFFIX,
    Pair,
    check_columns,
    pair_of,
    read_header,
    without_suffix,
)
from energon_ext.tokens.meta import read_meta
from energon_ext.tokens.prepared import Prepared, parse_prepared
from energon_ext.tokens.splits import refuse_splits

#: What the names of files of pairs end with.
_ENDINGS = "|".join([*map(re.escape, ALL_SUFFIXES), r"\.\w+\.npy"])

#: Files of pairs by URL, and what is known of them.
_Found = tuple[dict[str, StoredObject], Prepared | None]


def names_remote_pairs(url: str) -> bool:
    """True if a path in a store names token files; Energon handles everything else."""
    url = str(as_msc(url)).rstrip("/")
    if glob.has_magic(url) or url.endswith(SUFFIXES):
        return True
    if os.path.splitext(url)[1] in (".yaml", ".yml", ".jsonl"):
        return False
    if find_object(url + ".idx") or find_object(f"{os.path.dirname(url)}/{PREPARED}"):
        return True
    infos = (f"{url}/{MAIN_FOLDER_NAME}/.info.{suffix}" for suffix in ("json", "yaml"))
    return not any(map(find_object, infos)) and has_below(url, ".idx")


def remote_pairs(url: str) -> list[Pair]:
    """Return the pairs that a path in a store names, sorted by name."""
    url = without_suffix(str(as_msc(url)).rstrip("/"))
    objects, prepared = _found(url)
    prefixes = sorted({without_suffix(each) for each in objects if each.endswith(SUFFIXES)})
    prefixes = [each for each in prefixes if not (each + ".bin").endswith(WEIGHTS_SUFFIX)]
    if not prefixes:
        raise ConfigError(f"{url}: names no .bin/.idx pair; check the path.")
    if not glob.has_magic(url):
        refuse_splits(url, prefixes)
    columns = suffixes_of_columns(objects)
    files = {prefix: _files_of(prefix, objects, columns) for prefix in prefixes}
    # Most pairs share the content of their meta file, which is then copied and read once.
    metas = {
        _content(each[META_SUFFIX]): each[META_SUFFIX]
        for each in files.values()
        if META_SUFFIX in each
    }
    indices = [each[".idx"] for each in files.values() if prepared is None]
    copied = [*metas.values(), *indices]
    range_reader().run_all([functools.partial(local_copy, each) for each in copied])
    read = {content: read_meta(meta.url, local_copy(meta)) for content, meta in metas.items()}
    return [_pair(prefix, each, prepared, read) for prefix, each in files.items()]


def _content(stored: StoredObject) -> str:
    """Return a key that objects of equal content share if their hashes are known."""
    return stored.sha256 or stored.url


def _files_of(
    prefix: str, objects: Mapping[str, StoredObject], columns: Mapping[str, set[str]]
) -> dict[str, StoredObject]:
    files = {
        suffix: objects[prefix + suffix] for suffix in ALL_SUFFIXES if prefix + suffix in objects
    }
    files |= {each: objects[prefix + each] for each in columns.get(prefix, ())}
    for suffix in SUFFIXES:
        if suffix not in files:
            raise ConfigError(f"{prefix}{suffix}: does not exist; a pair needs both files.")
    return files


def _pair(
    prefix: str,
    files: dict[str, StoredObject],
    prepared: Prepared | None,
    metas: Mapping[str, Any],
) -> Pair:
    num_bytes = files[".bin"].size
    if prepared is None:
        header = read_header(prefix + ".idx", local_copy(files[".idx"]))
    else:
        header = prepared.header(prefix)
    meta = metas[_content(files[META_SUFFIX])] if META_SUFFIX in files else None
    for suffix in map(suffix_of, columns_in(meta, f"{prefix}{META_SUFFIX}")):
        if suffix not in files and (stored := find_object(prefix + suffix)):
            files[suffix] = stored
    pair = pair_of(prefix, header, num_bytes, meta, files)
    sizes = {prefix + suffix: stored.size for suffix, stored in files.items()}
    check_columns(pair, files, sizes.get)
    return pair


def _found(url: str) -> _Found:
    """Find the files of the pairs that a path names."""
    folder = _folder_of(url) if glob.has_magic(url) else url
    is_wanted = _pattern(url).fullmatch if glob.has_magic(url) else _below(url).fullmatch
    for above in (os.path.dirname(folder), os.path.dirname(os.path.dirname(folder))):
        objects, prepared = _prepared(above)
        wanted = {each: objects[each] for each in objects if is_wanted(each)}
        if wanted:
            return wanted, prepared
    if not glob.has_magic(url):
        pair = {url + suffix: find_object(url + suffix) for suffix in ALL_SUFFIXES}
        if pair[url + ".idx"]:
            return {name: found for name, found in pair.items() if found}, None
    below = {each.url: each for each in objects_below(folder)}
    return {each: below[each] for each in below if is_wanted(each)}, None


def _folder_of(pattern: str) -> str:
    """Return the deepest folder that contains everything a pattern can match."""
    parts = pattern.split("/")
    return "/".join(parts[: next(n for n, part in enumerate(parts) if glob.has_magic(part))])


def _below(url: str) -> "re.Pattern[str]":
    return re.compile(rf"{re.escape(url)}(/(?!\.)[^/]+)*({_ENDINGS})")


def _pattern(url: str) -> "re.Pattern[str]":
    """Compile a pattern of paths without suffix; ``*`` matches a part of one name."""
    parts = ["[^/]+(/[^/]+)*" if part == "**" else _part(part) for part in url.split("/")]
    return re.compile("/".join(parts) + f"({_ENDINGS})")


def _part(part: str) -> str:
    return translate(part).removeprefix("(?s:").removesuffix(r")\Z").replace(".*", "[^/]*")


def _prepared(folder: str) -> _Found:
    """Read the ``prepared.json`` of a folder; empty if there is none."""
    path = f"{folder}/{PREPARED}"
    content = read_object(path) if folder.count("/") > 2 or folder.startswith("msc://") else None
    if content is None:
        return {}, None
    prepared = parse_prepared(content, folder)
    return prepared.files, prepared
