# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ``.bin``/``.idx`` pairs that a path names: one pair, a folder of pairs, or a pattern.

Each folder is listed once. Which files there are is decided by their names alone: asking the file
system about each of 10 000 pairs would take longer than everything else at a start.
"""

import glob
import os
from collections.abc import Iterator
from typing import Any

from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME

from energon_ext.errors import ConfigError
from energon_ext.storage.folders import matching_folders, names_beside
from energon_ext.storage.object_store import file_name, is_remote
from energon_ext.tokens.column_files import suffixes_of_columns
from energon_ext.tokens.index import ALL_SUFFIXES, SUFFIXES, WEIGHTS_SUFFIX, without_suffix
from energon_ext.tokens.remote_pairs import names_remote_pairs
from energon_ext.tokens.splits import refuse_splits


def is_token_file(path: Any) -> bool:
    """True if a path names one or more ``.bin`` and ``.idx`` pairs.

    The path may be that of a pair, with or without one of its suffixes, a folder with pairs in it
    or below it, or a pattern. One file of a pair is enough, so a later error can name the other.
    """
    text = file_name(path).rstrip("/")
    if is_remote(text):
        return names_remote_pairs(text)
    if _files_beside(text):
        return True
    if not os.path.isdir(text):
        is_pattern = glob.has_magic(text) and "://" not in text and not os.path.exists(text)
        return is_pattern or _single_prefix(text) is not None
    if os.path.exists(os.path.join(text, MAIN_FOLDER_NAME)):
        return False
    has_pair = any(set(SUFFIXES) <= files for _, files in _found(_below(text)))
    return has_pair or _single_prefix(text) is not None


def list_pairs(path: Any) -> dict[str, set[str]]:
    """Return the pairs that a path names, sorted: the suffixes of the files of each prefix.

    ConfigError if there is none, one lacks a file, or a folder contains several splits.
    """
    pairs = list_files(path)
    for prefix, files in pairs.items():
        if fault := half_of(prefix, files):
            raise ConfigError(fault)
    return pairs


def half_of(prefix: str, files: set[str]) -> str | None:
    """Return a message if a pair has only one of its two files."""
    for suffix, other in (SUFFIXES, SUFFIXES[::-1]):
        if suffix not in files:
            return (
                f"{prefix}{suffix}: does not exist; a pair needs both files. If {prefix}{other} is "
                f"not part of one, move it away or use a pattern that does not match it."
            )
    return None


def list_files(path: Any) -> dict[str, set[str]]:
    """Like :func:`list_pairs`, with pairs that have only one of their two files."""
    text = str(path).rstrip("/")
    if files := _files_beside(text):
        return {text: files}
    prefix = _single_prefix(text)
    if prefix is not None:
        return {prefix: {each for each in ALL_SUFFIXES if os.path.lexists(prefix + each)}}
    is_folder = os.path.isdir(text)
    pairs = dict(sorted(_found(_below(text) if is_folder else text)))
    if not any(set(SUFFIXES) <= files for files in pairs.values()):
        raise ConfigError(f"{text}: names no .bin/.idx pair; check the path.")
    if is_folder:
        refuse_splits(text, pairs)
    return pairs


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


def _files_beside(text: str) -> set[str]:
    """Return the suffixes of the pair that a path without suffix names, if a load lists them."""
    names, name = names_beside(text), os.path.basename(text)
    files = {suffix for suffix in ALL_SUFFIXES if name + suffix in names}
    is_pair = name not in names and any(
        suffix in files and names[name + suffix].is_file() for suffix in SUFFIXES
    )
    return files if is_pair else set()


def _below(folder: str) -> str:
    return os.path.join(glob.escape(folder), "**")


def _found(pattern: str) -> Iterator[tuple[str, set[str]]]:
    """Yield the pairs and halves that match a pattern with or without suffix, and their files."""
    for folder, names, is_match in matching_folders(without_suffix(pattern)):
        columns = suffixes_of_columns(names)
        for file in names:
            stem, suffix = os.path.splitext(file)
            if suffix not in SUFFIXES or not is_match(stem):
                continue
            if suffix == ".idx":
                # If the stem is a name, too, the .idx is Energon's, for a JSONL file or a tar.
                is_pair = stem + ".bin" in names or stem not in names
            else:
                is_pair = stem + ".idx" not in names and not file.endswith(WEIGHTS_SUFFIX)
            if is_pair:
                files = {each for each in ALL_SUFFIXES if stem + each in names}
                yield os.path.join(folder, stem), files | columns.get(stem, set())
