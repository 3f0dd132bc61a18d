# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Indices of JSON Lines files: Energon reads none without the offsets of its lines beside it."""

import os
import tempfile
from array import array
from pathlib import Path

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.ijsonl import IJsonlIndexReader

from energon_ext.data_files import open_data
from energon_ext.documents.file_map import map_file
from energon_ext.errors import ConfigError, log_of

logger = log_of(__name__)

MOST_LINE_BYTES = 1 << 28


def ensure_index(path: EPath, found_in: str = "") -> None:
    """Make the index of a local file that has none; ConfigError for one of another content.

    Ranks that make it at the same time make the same, each in a folder of its own. That each
    sample is one line shows when it is read: :class:`~energon_ext.samples.numbered.LineReader`.
    """
    index = EPath(f"{path}.idx")
    if not index.is_file():
        if not path.is_local():
            raise ConfigError(f"{found_in}{path}: no index; run `energon prepare {path}`.")
        _make_index(path, found_in)
    size = index.size()
    if size % 8 or size < 16 or not _fits(path, size):
        raise ConfigError(
            f"{found_in}{path}: the file has changed since its index was made; remove {path}.idx, "
            f"and the next start makes it again."
        )


def _fits(path: EPath, index_bytes: int) -> bool:
    if not path.is_local():
        return IJsonlIndexReader.size(path) == path.size()
    bounds = map_file(f"{path}.idx", index_bytes).view("<u8")
    is_rising = bool((bounds[1:] > bounds[:-1]).all())
    return is_rising and bounds[0] == 0 and bounds[-1] == path.size()


def _make_index(path: EPath, found_in: str) -> None:
    file = Path(str(path))
    bounds = _bounds(file, found_in)
    try:
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as folder:
            made = Path(folder, "idx")
            made.write_bytes(bounds.tobytes())
            os.replace(made, f"{file}.idx")
    except OSError as error:
        raise ConfigError(
            f"{found_in}{path}: no index can be made beside it ({error.strerror}); run `energon "
            f"prepare {path}` where its folder can be written."
        ) from error
    logger.info("%s: an index of its %d lines is written beside it.", path, len(bounds) - 1)


def _bounds(file: Path, found_in: str) -> "array[int]":
    """Starts of the lines and the end of the last one; a blank line belongs to the one before."""
    bounds, begin, position = array("Q"), 0, 0
    with open_data(file) as lines:
        while line := lines.readline(MOST_LINE_BYTES):
            position += len(line)
            text = line.strip()
            if text and (text[:1] + text[-1:] != b"{}" or len(line) == MOST_LINE_BYTES):
                raise ConfigError(
                    f"{found_in}{file}: no index can be made: line {len(bounds) + 1}, "
                    f"{text[:60]!r}, is not a JSON object of less than {MOST_LINE_BYTES:,} bytes."
                )
            if text:
                bounds.append(begin)
            if bounds:  # blank lines before the first belong to that
                begin = position
    if not bounds:
        raise ConfigError(f"{found_in}{file}: no index can be made: it has no line.")
    bounds.append(begin)
    return bounds
