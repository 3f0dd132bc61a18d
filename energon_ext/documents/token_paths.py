# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ``.bin``/``.idx`` pairs that a path names: one, or those of a folder or a pattern."""

import glob
import itertools
import os
from collections.abc import Iterator
from typing import Any

from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME

from energon_ext.documents.object_store import is_remote
from energon_ext.documents.remote_pairs import names_remote_pairs
from energon_ext.documents.token_index import SUFFIXES, WEIGHTS_SUFFIX, without_suffix
from energon_ext.errors import ConfigError

MOST_FOLDERS = 50_000  # that a `**` stands for

#: The pairs that `energon-ext prepare` writes; together they are no source.
SPLITS = ("train", "val")


def is_token_file(path: Any) -> bool:
    """True if a path names one or more ``.bin`` and ``.idx`` pairs.

    That is the path without suffix, or with one of the two; a folder with pairs in it or below it;
    or a pattern. One file of a pair is enough, so that the missing one can be named.
    """
    text = str(path).rstrip("/")
    if is_remote(text):
        return names_remote_pairs(text)
    if os.path.exists(os.path.join(text, MAIN_FOLDER_NAME)):
        return False
    is_pattern = glob.has_magic(text) and "://" not in text and not os.path.exists(text)
    if _single_prefix(text) is not None or is_pattern:
        return True
    return os.path.isdir(text) and any(os.path.isfile(f"{p}.bin") for p in _matching(_below(text)))


def pair_prefixes(path: Any) -> list[str]:
    """The pairs that a path names, as paths without suffix, sorted.

    The order depends on names alone: those below the folder, or those that match the pattern.
    ConfigError where there is none, one is not whole, or a folder holds the splits of a prepared
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
    _check_halves(pattern, prefixes)
    if os.path.isdir(text):
        _check_splits(text, prefixes)
    return prefixes


def named_pair(path: Any) -> str:
    """A path that names one pair, without suffix; any other as it is."""
    text = str(path).rstrip("/")
    if is_remote(text):
        return without_suffix(text)
    return _single_prefix(text) or text


def _single_prefix(text: str) -> str | None:
    """The pair that a path names by itself, with or without a suffix."""
    if os.path.isdir(text):
        # Megatron's GPTDataset keeps its cache in a folder of the pair's name.
        return text if all(os.path.isfile(text + suffix) for suffix in SUFFIXES) else None
    for prefix in (text, without_suffix(text)):
        # Energon puts an .idx beside a JSONL file or a tar, which are there without it as well.
        halves = (os.path.isfile(prefix + suffix) for suffix in SUFFIXES)
        if not os.path.exists(prefix) and any(halves):
            return prefix
    return None


def _below(folder: str) -> str:
    return os.path.join(glob.escape(folder), "**")


def _matching(pattern: str) -> Iterator[str]:
    """Pairs that match a pattern, with or without suffix; hidden files and folders never do."""
    for index in _glob(_with_suffix(pattern, ".idx")):
        prefix = without_suffix(index)
        if os.path.isfile(f"{prefix}.bin") or not os.path.exists(prefix):
            yield prefix


def _glob(pattern: str) -> Iterator[str]:
    """Matches of a pattern; links may turn a few folders into any number."""
    *above, name = pattern.split("/")
    folders = ["/" if pattern.startswith("/") else ""]
    for part in filter(None, above):
        found = (each for folder in folders for each in _folders(folder, part))
        folders = list(itertools.islice(found, MOST_FOLDERS + 1))
        if len(folders) > MOST_FOLDERS or pattern.count("**") > 1:
            raise ConfigError(f"{pattern}: more than {MOST_FOLDERS:,} folders, or than one `**`.")
    for folder in folders:
        yield from glob.iglob(os.path.join(glob.escape(folder), name))


def _folders(folder: str, part: str) -> Iterator[str]:
    """The folders in another one that a part of a pattern matches."""
    if part != "**":
        yield from glob.iglob(os.path.join(glob.escape(folder), part, ""))
        return
    for path, below, _ in os.walk(folder or os.curdir, followlinks=True):
        below[:] = [each for each in below if not each.startswith(".")]
        yield path


def _with_suffix(pattern: str, suffix: str) -> str:
    stem = without_suffix(pattern)
    return f"{stem}/*{suffix}" if stem.endswith("**") else stem + suffix


def _check_halves(pattern: str, prefixes: list[str]) -> None:
    known = set(prefixes)
    for path in sorted(_glob(_with_suffix(pattern, ".bin"))):
        prefix = without_suffix(path)
        if prefix not in known and not path.endswith(WEIGHTS_SUFFIX):
            raise ConfigError(
                f"{prefix}.idx: does not exist; a pair is needed. If {path} holds no tokens, move "
                f"it away or name the pairs by a pattern that leaves it out."
            )


def _check_splits(folder: str, prefixes: list[str]) -> None:
    """Refuse a folder with both splits of one prepared text, each one pair or a folder of pairs."""
    parents: dict[str, set[str]] = {split: set() for split in SPLITS}
    for prefix in prefixes:
        below = os.path.relpath(prefix, folder).split(os.sep)
        for depth, name in enumerate(below):
            if name in parents:
                parents[name].add(os.path.join(folder, *below[:depth]))
    for parent in sorted(set.intersection(*parents.values())):
        raise ConfigError(
            f"{folder}: holds the splits {' and '.join(SPLITS)}, which are no source together; "
            f"name one of them: {os.path.join(parent, SPLITS[0])}"
        )
