# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ``.bin``/``.idx`` pairs that a path names: one pair, a folder of pairs, or a pattern."""

import glob
import itertools
import os
from collections.abc import Iterator
from typing import Any

from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME

from energon_ext.errors import ConfigError
from energon_ext.storage.object_store import file_name, is_remote
from energon_ext.tokens.index import SUFFIXES, WEIGHTS_SUFFIX, without_suffix
from energon_ext.tokens.remote_pairs import names_remote_pairs

MAX_FOLDERS = 50_000  # that a pattern may match

#: The pairs that `energon-ext prepare` writes; they must not be combined into one source.
SPLITS = ("train", "val")


def is_token_file(path: Any) -> bool:
    """True if a path names one or more ``.bin`` and ``.idx`` pairs.

    The path may be that of a pair, with or without one of its suffixes, a folder with pairs in it
    or below it, or a pattern. One file of a pair is enough, so a later error can name the other.
    """
    text = file_name(path).rstrip("/")
    if is_remote(text):
        return names_remote_pairs(text)
    if os.path.exists(os.path.join(text, MAIN_FOLDER_NAME)):
        return False
    is_pattern = glob.has_magic(text) and "://" not in text and not os.path.exists(text)
    if _single_prefix(text) is not None or is_pattern:
        return True
    return os.path.isdir(text) and any(os.path.isfile(f"{p}.bin") for p in _matching(_below(text)))


def pair_prefixes(path: Any) -> list[str]:
    """Return the pairs that a path names, as sorted paths without suffix.

    ConfigError if there is none, one lacks a file, or a folder contains both splits of a prepared
    text.
    """
    text = str(path).rstrip("/")
    prefix = _single_prefix(text)
    if prefix is not None:
        return [prefix]
    pattern = _below(text) if os.path.isdir(text) else text
    prefixes = sorted(_matching(pattern))
    if not prefixes:
        raise ConfigError(f"{text}: names no .bin/.idx pair; check the path.")
    _check_indices(pattern, prefixes)
    if os.path.isdir(text):
        _check_splits(text, prefixes)
    return prefixes


def named_pair(path: Any) -> str:
    """Return a path without suffix if it names a single pair, any other path unchanged."""
    text, name = str(path).rstrip("/"), file_name(path).rstrip("/")
    has_suffix = is_remote(name) or _single_prefix(name) not in (None, name)
    return without_suffix(text) if has_suffix else text


def _single_prefix(text: str) -> str | None:
    """Return the pair that a path names with or without suffix, if it names a single one."""
    if os.path.isdir(text):
        # Megatron's GPTDataset keeps its cache in a folder of the pair's name.
        return text if all(os.path.isfile(text + suffix) for suffix in SUFFIXES) else None
    for prefix in (text, without_suffix(text)):
        # If the path without suffix exists, the .idx is Energon's, for a JSONL file or a tar.
        if not os.path.exists(prefix) and any(os.path.isfile(prefix + each) for each in SUFFIXES):
            return prefix
    return None


def _below(folder: str) -> str:
    return os.path.join(glob.escape(folder), "**")


def _matching(pattern: str) -> Iterator[str]:
    """Yield the pairs that match a pattern with or without suffix; hidden names never match."""
    for index in _glob(_with_suffix(pattern, ".idx")):
        prefix = without_suffix(index)
        if os.path.isfile(f"{prefix}.bin") or not os.path.exists(prefix):
            yield prefix


def _glob(pattern: str) -> Iterator[str]:
    """Yield the matches of a pattern, up to a limit: links may turn few folders into very many."""
    *above, name = pattern.split("/")
    folders = ["/" if pattern.startswith("/") else ""]
    for part in filter(None, above):
        found = (each for folder in folders for each in _folders(folder, part))
        folders = list(itertools.islice(found, MAX_FOLDERS + 1))
        if len(folders) > MAX_FOLDERS or pattern.count("**") > 1:
            raise ConfigError(
                f"{pattern}: matches more than {MAX_FOLDERS:,} folders or has more than one `**`."
            )
    for folder in folders:
        yield from glob.iglob(os.path.join(glob.escape(folder), name))


def _folders(folder: str, part: str) -> Iterator[str]:
    """Yield the folders below another one that match one part of a pattern."""
    if part != "**":
        yield from glob.iglob(os.path.join(glob.escape(folder), part, ""))
        return
    for path, below, _ in os.walk(folder or os.curdir, followlinks=True):
        below[:] = [each for each in below if not each.startswith(".")]
        yield path


def _with_suffix(pattern: str, suffix: str) -> str:
    stem = without_suffix(pattern)
    return f"{stem}/*{suffix}" if stem.endswith("**") else stem + suffix


def _check_indices(pattern: str, prefixes: list[str]) -> None:
    """Raise ConfigError if any ``.bin`` has no ``.idx``."""
    known = set(prefixes)
    for path in sorted(_glob(_with_suffix(pattern, ".bin"))):
        prefix = without_suffix(path)
        if prefix not in known and not path.endswith(WEIGHTS_SUFFIX):
            raise ConfigError(
                f"{prefix}.idx: does not exist; a pair needs both files. If {path} does not "
                f"contain tokens, move it away or use a pattern that does not match it."
            )


def _check_splits(folder: str, prefixes: list[str]) -> None:
    """Raise ConfigError if both splits of a prepared text, as pairs or folders, are below."""
    parents: dict[str, set[str]] = {split: set() for split in SPLITS}
    for prefix in prefixes:
        below = os.path.relpath(prefix, folder).split(os.sep)
        for depth, name in enumerate(below):
            if name in parents:
                parents[name].add(os.path.join(folder, *below[:depth]))
    for parent in sorted(set.intersection(*parents.values())):
        raise ConfigError(
            f"{folder}: contains the splits {' and '.join(SPLITS)}, which cannot be one source; "
            f"name one of them, such as {os.path.join(parent, SPLITS[0])}."
        )
