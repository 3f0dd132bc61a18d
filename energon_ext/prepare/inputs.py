# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Text and JSON Lines as units. Errors name the file and the line."""

import glob
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from energon_ext.arguments import optional_module
from energon_ext.data_files import RepeatedKeyError, parse_record
from energon_ext.errors import ConfigError
from energon_ext.prepare.documents import Documents, InputDocument, RowReader, Unit
from energon_ext.prepare.input_files import describe, input_files, open_input
from energon_ext.samples.jsonl_index import refuse_returns
from energon_ext.storage.folders import list_files
from energon_ext.storage.object_store import StoredObject, is_remote

UNIT_BYTES = 256 * 2**20
READ_CHARACTERS = 1 << 20
MAX_LINE_BYTES = 1 << 28  # a small compressed file may expand to a single line of any length
MAX_CHARACTERS = 1 << 28  # per text
COMPRESSED = (".gz", ".zst")
_BLOCK = 1 << 24
#: A row with its origin and size, or the error that replaces it.
Row = tuple[Any, str, int] | ConfigError


# Text -------------------------------------------------------------------------------------------


def text_units(paths: Iterable[Path | str], separator: str | None = None) -> list[Unit]:
    """Return units of UTF-8 text files in the given order, small files grouped up to 256 MiB.

    A file is one document, or several documents divided by the separator.
    """
    if separator == "":
        raise ConfigError("--separator: '' found, a text is needed.")
    files = input_files(paths)
    sizes = [file.size for file in files]
    units = []
    for begin, stop in divide(sizes):
        group = files[begin:stop]
        read = partial(_read_texts, group, separator)
        units.append(Unit(describe(group), read, sum(sizes[begin:stop])))
    return units


def folder_files(folder: Path, pattern: str) -> list[str]:
    """Return the files under a folder that match a glob pattern, sorted; ConfigError if none do."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: does not exist; check the path.")
    if not pattern or pattern.startswith("/"):
        raise ConfigError(f"--glob {pattern!r} is not a relative pattern such as '**/*.txt'.")
    paths = list_files(os.path.join(glob.escape(str(folder)), pattern))
    if not paths:
        raise ConfigError(f"{folder}: no file matches {pattern!r}.")
    return paths


def _read_texts(files: Sequence[StoredObject], separator: str | None) -> Documents:
    for file in files:
        texts = _texts(file, separator)
        documents = (
            InputDocument(text, file.url, len(text.encode("utf-8", "replace"))) for text in texts
        )
        yield from _readable(file, documents)


def _texts(path: StoredObject, separator: str | None) -> Iterator[str]:
    # Line ends are kept; a byte-order mark is dropped.
    with io.TextIOWrapper(open_input(path), encoding="utf-8-sig", newline="") as file:
        unfinished = ""
        while piece := file.read(READ_CHARACTERS if separator else MAX_CHARACTERS + 1):
            text = unfinished + piece
            *finished, unfinished = text.split(separator) if separator else [text]
            if len(unfinished) > MAX_CHARACTERS:
                raise ConfigError(f"{path}: a text has more than {MAX_CHARACTERS:,} characters.")
            yield from finished
        yield unfinished


# JSON Lines -------------------------------------------------------------------------------------


def jsonl_units(paths: Iterable[Path | str], read_row: RowReader) -> list[Unit]:
    """Return units of JSON Lines files: whole lines up to 256 MiB, or a whole compressed file."""
    units = []
    for path in input_files(paths, (".jsonl", ".jsonl.gz", ".jsonl.zst")):
        is_compressed = path.url.endswith(COMPRESSED)
        is_divided = path.size > UNIT_BYTES and not is_compressed
        for begin, stop in _line_ranges(path) if is_divided else [(0, path.size)]:
            end = None if is_compressed else stop
            read = partial(read_rows, partial(_read_line, read_row), _lines, path, begin, end)
            num_bytes = 0 if is_compressed else stop - begin
            units.append(Unit({**describe([path]), "range": [begin, stop]}, read, num_bytes))
    return units


def _line_ranges(path: StoredObject) -> Iterator[tuple[int, int]]:
    """Yield the first byte of each part of a file, and the byte after the last."""
    begin = 0
    with open_input(path) as file:
        while begin < path.size:
            file.seek(min(begin + UNIT_BYTES, path.size))
            file.readline(MAX_LINE_BYTES)
            yield begin, file.tell()
            begin = file.tell()


def _lines(path: StoredObject, begin: int, stop: int | None) -> Iterator[tuple[bytes, str, int]]:
    """Yield the lines between two bytes of a file, with origins and sizes; None for the end."""
    with open_input(path) as stored, _unpack(stored, path) as file:
        position, number = begin, 1 + _lines_before(file, path, begin)
        while line := file.readline(MAX_LINE_BYTES):
            if line.strip():
                place = f"@{position}" if begin and is_remote(path) else f":{number}"
                yield line, f"{path}{place}", len(line)
            position, number = position + len(line), number + 1
            if position == stop:
                break


def _lines_before(file: BinaryIO, path: StoredObject, begin: int) -> int:
    """Move a file to a byte, and return the number of lines before it.

    The reader of a part counts them, since listing the parts must not read the whole input. For
    objects in a store nothing is counted; their lines are named by their first byte.
    """
    if is_remote(path):
        file.seek(begin)
        return 0
    pieces = (file.read(min(_BLOCK, begin - done)) for done in range(0, begin, _BLOCK))
    return sum(piece.count(b"\n") for piece in pieces)


def _unpack(file: BinaryIO, path: StoredObject) -> Any:
    if path.url.endswith(".gz"):
        return gzip.open(file)
    if path.url.endswith(".zst"):
        pyarrow = import_extra("pyarrow", f"{path}: a .zst file")
        return io.BufferedReader(pyarrow.input_stream(file, compression="zstd"))
    return file


def _read_line(read_row: RowReader, line: bytes, origin: str, num_bytes: int) -> InputDocument:
    try:
        row = parse_record(line)
    except RepeatedKeyError as error:
        raise ConfigError(f"{origin}: {error}.") from error
    except (ValueError, RecursionError) as error:
        refuse_returns(line, origin)
        reason = error if len(line) < MAX_LINE_BYTES else f"over {MAX_LINE_BYTES:,} bytes"
        raise ConfigError(f"{origin}: not JSON ({reason}).") from error
    return read_row(row, origin, num_bytes)


# Shared helpers ---------------------------------------------------------------------------------


def divide(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield ranges of consecutive items of at most 256 MiB in total; a larger item is alone."""
    begin = num_bytes = 0
    for number, size in enumerate(sizes):
        if number > begin and num_bytes + size > UNIT_BYTES:
            yield begin, number
            begin, num_bytes = number, 0
        num_bytes += size
    if begin < len(sizes):
        yield begin, len(sizes)


def read_documents(rows: Iterable[Row], read_row: RowReader) -> Documents:
    for row in rows:
        try:
            yield row if isinstance(row, ConfigError) else read_row(*row)
        except ConfigError as error:
            yield error


def read_rows(read_row: RowReader, rows: Callable[..., Any], path: Any, *part: Any) -> Documents:
    """Yield documents from the rows that a function reads from a part of a file."""
    return _readable(path, read_documents(rows(path, *part), read_row))


def _readable(path: object, documents: Documents) -> Documents:
    """Yield the documents of a file, followed by the error that stopped reading, if any."""
    try:
        yield from documents
    except (OSError, EOFError, zlib.error, ValueError) as error:
        yield unreadable_error(path, error)


def unreadable_error(path: object, error: Exception) -> ConfigError:
    if isinstance(error, ConfigError):
        return error
    if isinstance(error, UnicodeDecodeError):
        wrong = error.object[error.start]
        return ConfigError(
            f"{path}: not UTF-8 text (byte 0x{wrong:02x}). Convert the file or remove it."
        )
    reason = getattr(error, "strerror", None) or error
    return ConfigError(f"{path}: cannot be read ({reason}).")


def import_extra(module: str, what: str) -> Any:
    """Import a module of a package in the extra ``datasets``."""
    return optional_module(module, what, module.partition(".")[0], "energon_ext[datasets]")
