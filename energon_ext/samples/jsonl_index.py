# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Line indices of JSON Lines files, which Energon needs next to each file."""

import codecs
import re
from array import array
from pathlib import Path

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.ijsonl import IJsonlIndexReader

from energon_ext.data_files import open_data
from energon_ext.errors import ConfigError, log_of
from energon_ext.storage.file_map import map_file
from energon_ext.storage.object_store import file_name
from energon_ext.storage.whole_file import open_whole

logger = log_of(__name__)

MAX_LINE_BYTES = 1 << 28

#: Between two objects; in one object this cannot be.
_OBJECTS = re.compile(rb"\}\s*\r\s*\{")


def refuse_returns(line: bytes, where: str) -> None:
    """Raise ConfigError for a line of several objects, between which are carriage returns only.

    Energon and the JSON Lines format know line feeds, so that such a file would be one sample.
    """
    if b"\r" in line and _OBJECTS.search(line):
        raise ConfigError(
            f"{where}: its lines end with a carriage return (CR); write them with line feeds, for "
            f"example `tr '\\r' '\\n' < OLD > NEW`."
        )


def ensure_index(path: EPath, found_in: str = "") -> None:
    """Write the index of a local file that has none; ConfigError if an index does not match.

    Ranks may write the same index at the same time, each under its own temporary name. Whether a
    sample is one line is checked when it is read.
    """
    index = EPath(f"{path}.idx")
    if not index.is_file():
        if not path.is_local():
            raise ConfigError(f"{found_in}{path}: no index; run `energon prepare {path}`.")
        _write_index(path, found_in)
    size = index.size()
    if size % 8 or size < 16 or not _fits(path, size):
        raise ConfigError(
            f"{found_in}{path}: the file has changed since it was indexed; remove {path}.idx, and "
            f"the next start writes it again."
        )


def _fits(path: EPath, index_bytes: int) -> bool:
    if not path.is_local():
        return IJsonlIndexReader.size(path) == path.size()
    bounds = map_file(f"{file_name(path)}.idx", index_bytes).view("<u8")
    is_rising = bool((bounds[1:] > bounds[:-1]).all())
    return is_rising and bounds[0] == 0 and bounds[-1] == path.size()


def _write_index(path: EPath, found_in: str) -> None:
    file = Path(file_name(path))
    bounds = _line_bounds(file, found_in)
    try:
        with open_whole(Path(f"{file}.idx")) as index:
            index.write(bounds.tobytes())
    except OSError as error:
        raise ConfigError(
            f"{found_in}{path}: cannot write an index next to it ({error.strerror}); run `energon "
            f"prepare {path}` where its folder is writable."
        ) from error
    logger.info("%s.idx: wrote the index of %d lines.", path, len(bounds) - 1)


def _line_bounds(file: Path, found_in: str) -> "array[int]":
    """Return line starts and the end of the last line; a blank line extends the one before."""
    bounds, begin, position = array("Q"), 0, 0
    with open_data(file) as lines:
        while line := lines.readline(MAX_LINE_BYTES):
            position += len(line)
            text = (line if position > len(line) else line.removeprefix(codecs.BOM_UTF8)).strip()
            refuse_returns(text, f"{found_in}{file}: cannot be indexed")
            if text and (text[:1] + text[-1:] != b"{}" or len(line) == MAX_LINE_BYTES):
                raise ConfigError(
                    f"{found_in}{file}: cannot be indexed: line {len(bounds) + 1}, {text[:60]!r}, "
                    f"is not a JSON object of less than {MAX_LINE_BYTES:,} bytes."
                )
            if text:
                bounds.append(begin)
            if bounds:  # leading blank lines belong to the first line
                begin = position
    if not bounds:
        raise ConfigError(f"{found_in}{file}: cannot be indexed: it has no lines.")
    bounds.append(begin)
    return bounds
