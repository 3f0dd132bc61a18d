# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The formats of tokenized documents that a metadataset may name, and who opens them.

A path is looked up by its suffix; a folder, by what is in it. YAML names paths only. An own format
is registered in the launch script, see :func:`register_documents`.
"""

import glob
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from megatron.energon.flavors.webdataset.config import MAIN_FOLDER_NAME

from energon_ext.errors import ConfigError
from energon_ext.storage.folders import files_below, find_once
from energon_ext.storage.object_store import file_name, is_remote
from energon_ext.tokens.documents import Documents, sample_numbers
from energon_ext.tokens.file_set import open_token_files
from energon_ext.tokens.npy import open_npy
from energon_ext.tokens.parquet import open_parquet
from energon_ext.tokens.paths import is_token_file
from energon_ext.tokens.unchanged import Share

#: Suffixes that Energon and this package read in other ways.
_TAKEN = (".yaml", ".yml", ".json", ".jsonl", ".tar", ".bin", ".idx")


@dataclass(frozen=True)
class Format:
    """A format of tokenized documents.

    Attributes:
        suffix: of its files or folders.
        open: opens the documents that a path names, for the share of a process; see
            :func:`~energon_ext.tokens.file_set.open_token_files`.
    """

    suffix: str
    open: Callable[[Any, Share | None], Documents]


def _without_share(suffix: str, open_path: Callable[[str], Documents]) -> Format:
    """Return a format whose files are all asked about by every process."""
    return Format(suffix, lambda path, share: open_path(path))


#: Pairs, which have two suffixes and come before all other formats in a folder.
PAIRS = Format("", open_token_files)

#: The other formats, those with the longest suffix first: `.tokens.npy` before `.npy`.
FORMATS = [_without_share(".parquet", open_parquet), _without_share(".npy", open_npy)]


def register_documents(suffix: str, open_path: Callable[[str], Documents]) -> None:
    """Open paths with a suffix by a function of yours; call it before a dataset is loaded.

    The suffix may be that of a file or of a folder, local or in an object store. A folder with
    such files in it or below it is passed to the function as well. Commands register it with
    ``--encoder``, which imports your module.

    Args:
        suffix: such as ``.tokens``; one that was registered before is replaced.
        open_path: called with the path; returns a
            :class:`~energon_ext.tokens.documents.Documents`, which may be pickled.

    Raises:
        ConfigError: the suffix has no dot, or is one that is always read in another way.

    Example:
        >>> register_documents(".jsonl", print)
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: register_documents: '.jsonl' found, a suffix such as \
'.tokens' is needed, and none of .yaml, .yml, .json, .jsonl, .tar, .bin, .idx.
    """
    is_suffix = isinstance(suffix, str) and suffix.startswith(".") and len(suffix) > 1
    if not is_suffix or suffix in _TAKEN:
        raise ConfigError(
            f"register_documents: {suffix!r} found, a suffix such as '.tokens' is needed, and none "
            f"of {', '.join(_TAKEN)}."
        )

    def open_checked(path: Any) -> Documents:
        documents = open_path(file_name(path))
        _check_documents(documents, f"{path}: the documents registered for {suffix}")
        return documents

    others = [each for each in FORMATS if each.suffix != suffix]
    FORMATS[:] = sorted(
        [*others, _without_share(suffix, open_checked)], key=lambda each: -len(each.suffix)
    )


def find_format(path: Any) -> Format | None:
    """Return the format of the documents that a path names; None if it names no documents.

    ConfigError for a folder with files of two formats, except that pairs come before all others.
    """
    return find_once(_format_at, file_name(path).rstrip("/"))


def _format_at(text: str) -> Format | None:
    for each in FORMATS:
        is_named = text.endswith(each.suffix)
        if is_named and (is_remote(text) or os.path.exists(text) or glob.has_magic(text)):
            return each
    if is_token_file(text):  # Megatron's cache in a folder of pairs has .npy files
        return PAIRS
    if is_remote(text) or not os.path.isdir(text):
        return None
    return None if os.path.exists(os.path.join(text, MAIN_FOLDER_NAME)) else _format_below(text)


def _format_below(folder: str) -> Format | None:
    """Return the format of the files below a folder; ConfigError if there are two."""
    names = files_below(folder, tuple(each.suffix for each in FORMATS))
    of_files = {
        next(n for n, each in enumerate(FORMATS) if file.endswith(each.suffix)) for file in names
    }
    found = [FORMATS[n] for n in sorted(of_files)]
    if len(found) > 1:
        raise ConfigError(
            f"{folder}: contains {' and '.join(each.suffix for each in found)} files, which cannot "
            f"be one source; name one kind by a pattern such as {folder}/*{found[0].suffix}."
        )
    return found[0] if found else None


def open_documents(path: Any, share: Share | None = (0, 1)) -> Documents:
    """Open the documents that a path names; ConfigError if it names none.

    Args:
        share: as for :func:`~energon_ext.tokens.file_set.open_token_files`.
    """
    found = find_format(path)
    if found is None:
        raise ConfigError(f"{path}: names no tokenized documents; check the path.")
    return found.open(file_name(path), share)


def _check_documents(documents: Any, where: str) -> None:
    """Raise ConfigError if what a user's function returned is evidently no source."""
    if not isinstance(documents, Documents):
        raise ConfigError(
            f"{where} are a {type(documents).__name__}; a subclass of "
            f"energon_ext.tokens.documents.Documents is needed."
        )
    numbers = sample_numbers(len(documents))
    lengths = documents.lengths(numbers)
    if not _are_integers(lengths, len(numbers)) or (lengths < 0).any():
        raise ConfigError(
            f"{where}: lengths({len(numbers)} numbers) returned {_shown(lengths)}; as many "
            f"integers >= 0 are needed."
        )
    for number, length in zip(numbers[:1].tolist(), lengths.tolist()):
        tokens = documents.tokens(number, 0, length)
        if not _are_integers(tokens, length):
            raise ConfigError(
                f"{where}: tokens({number}, 0, {length}) returned {_shown(tokens)}; {length} "
                f"integers are needed."
            )


def _are_integers(found: Any, count: int) -> bool:
    is_array = isinstance(found, np.ndarray) and found.dtype.kind in "ui"
    return is_array and found.shape == (count,)


def _shown(found: Any) -> str:
    if isinstance(found, np.ndarray):
        return f"an array of {found.dtype} with the shape {found.shape}"
    return f"a {type(found).__name__}"
