# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files and Hugging Face datasets as units. What cannot be read is an error with file and line."""

import functools
import gzip
import hashlib
import importlib
import io
import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_ext.errors import ConfigError
from energon_ext.prepare.documents import InputDocument, RowReader, Unit, Unreadable

UNIT_BYTES = 256 * 2**20
UNIT_ROWS = 65_536  # of a Hugging Face dataset
READ_CHARACTERS = 1 << 20
MOST_LINE_BYTES = 1 << 28  # a small compressed file may be one line of any length
COMPRESSED = (".gz", ".zst")
_BLOCK = 1 << 24


@dataclass(frozen=True)
class TextUnit:
    """UTF-8 text files, each one document, or several with a separator between them."""

    paths: tuple[Path, ...]
    num_bytes: int
    separator: str | None = None

    def describe(self) -> dict[str, Any]:
        return describe_files(self.paths)

    def read(self, unreadable: Unreadable) -> Iterator[InputDocument]:
        for path in self.paths:
            with unreadable, _readable(path):
                for text in _texts(path, self.separator):
                    num_bytes = len(text.encode("utf-8", "replace"))
                    yield InputDocument(text, str(path), num_bytes)


@dataclass(frozen=True)
class JsonLinesUnit:
    """Lines of a JSON Lines file from one byte to another, one object a line."""

    path: Path
    read_row: RowReader
    begin: int = 0
    stop: int | None = None
    first_line: int = 1
    num_bytes: int = 0

    def describe(self) -> dict[str, Any]:
        return {**describe_files([self.path]), "range": [self.begin, self.stop]}

    def read(self, unreadable: Unreadable) -> Iterator[InputDocument]:
        with unreadable, _readable(self.path), _decompressed(self.path) as file:
            if self.begin:
                file.seek(self.begin)
            position = self.begin
            lines = iter(functools.partial(file.readline, MOST_LINE_BYTES), b"")
            for number, line in enumerate(lines, start=self.first_line):
                origin = f"{self.path}:{number}"
                with unreadable:
                    if line.strip():
                        yield self.read_row(_parse(line, origin), origin, len(line))
                position += len(line)
                if self.stop is not None and position >= self.stop:
                    break


@dataclass(frozen=True)
class ParquetUnit:
    """Row groups of a Parquet file, one document a row."""

    path: Path
    read_row: RowReader
    groups: tuple[int, ...]
    first_row: int
    num_bytes: int = 0

    def describe(self) -> dict[str, Any]:
        return {**describe_files([self.path]), "row_groups": list(self.groups)}

    def read(self, unreadable: Unreadable) -> Iterator[InputDocument]:
        pyarrow = _pyarrow("--parquet", "pyarrow.parquet")
        with unreadable, _readable(self.path), pyarrow.ParquetFile(self.path) as file:
            batches = file.iter_batches(row_groups=list(self.groups))
            rows = (row for batch in batches for row in batch.to_pylist())
            for number, row in enumerate(rows, start=self.first_row):
                with unreadable:
                    yield self.read_row(row, f"{self.path}[{number}]", 0)


@dataclass(frozen=True)
class HuggingFaceUnit:
    """Rows of a Hugging Face dataset; all of them where it is streamed."""

    rows: Any
    name: str
    read_row: RowReader
    begin: int = 0
    stop: int | None = None
    num_bytes: int = 0

    def describe(self) -> dict[str, Any]:
        version = getattr(self.rows, "_fingerprint", None)
        return {"path": self.name, "version": version, "range": [self.begin, self.stop]}

    def read(self, unreadable: Unreadable) -> Iterator[InputDocument]:
        rows = self.rows
        if self.stop is not None:
            rows = rows.select(range(self.begin, self.stop))
        for number, row in enumerate(rows, start=self.begin):
            with unreadable:
                yield self.read_row(row, f"{self.name}[{number}]", 0)


def text_units(paths: Iterable[Path], separator: str | None = None) -> list[Unit]:
    """Text files in the given order, small ones grouped up to 256 MiB."""
    if separator == "":
        raise ConfigError("--separator must not be empty.")
    units: list[Unit] = []
    group: list[Path] = []
    num_bytes = 0
    for path in _existing_files(paths):
        size = path.stat().st_size
        if group and num_bytes + size > UNIT_BYTES:
            units.append(TextUnit(tuple(group), num_bytes, separator))
            group, num_bytes = [], 0
        group.append(path)
        num_bytes += size
    if group:
        units.append(TextUnit(tuple(group), num_bytes, separator))
    return units


def folder_files(folder: Path, pattern: str) -> list[Path]:
    """Files under a folder that match a glob pattern, sorted; ConfigError where there is none."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder.")
    try:
        paths = sorted(path for path in folder.glob(pattern) if path.is_file())
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"--glob {pattern!r} is not a relative pattern: {error}.") from error
    if not paths:
        raise ConfigError(f"{folder}: no file matches {pattern!r}.")
    return paths


def jsonl_units(paths: Iterable[Path], read_row: RowReader) -> list[Unit]:
    """JSON Lines files, in parts of 256 MiB at line borders; a compressed file is one part."""
    units: list[Unit] = []
    for path in _files_in_folders(paths, ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst")):
        size = path.stat().st_size
        if path.suffix in COMPRESSED or size <= UNIT_BYTES:
            plain = size if path.suffix not in COMPRESSED else 0
            units.append(JsonLinesUnit(path, read_row, num_bytes=plain))
            continue
        for begin, stop, line in _line_ranges(path, size):
            units.append(JsonLinesUnit(path, read_row, begin, stop, line, stop - begin))
    return units


def parquet_units(paths: Iterable[Path], read_row: RowReader) -> list[Unit]:
    """Parquet files, in parts of whole row groups of some 256 MiB."""
    pyarrow = _pyarrow("--parquet", "pyarrow.parquet")
    units: list[Unit] = []
    for path in _files_in_folders(paths, ("*.parquet",)):
        with _readable(path):
            metadata = pyarrow.read_metadata(path)
        groups: list[int] = []
        first = first_after = num_bytes = 0
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            groups.append(number)
            first_after += group.num_rows
            num_bytes += group.total_byte_size
            if num_bytes >= UNIT_BYTES or number == metadata.num_row_groups - 1:
                units.append(ParquetUnit(path, read_row, tuple(groups), first))
                groups, first, num_bytes = [], first_after, 0
    return units


def hugging_face_units(
    name: str, *, config: str | None, split: str, streaming: bool, read_row: RowReader
) -> list[Unit]:
    """One split of a Hugging Face dataset, from the hub, a folder, or what it saved to disk."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise _missing("--hf-dataset", "datasets") from error
    try:
        if any((Path(name) / saved).is_file() for saved in ("state.json", "dataset_dict.json")):
            rows = datasets.load_from_disk(name)
            rows = rows[split] if isinstance(rows, dict) else rows
        else:
            rows = datasets.load_dataset(name, config, split=split, streaming=streaming)
    except (KeyError, OSError, ValueError) as error:
        raise ConfigError(f"--hf-dataset {name}, split {split}: {error}") from error
    if not hasattr(rows, "select"):
        return [HuggingFaceUnit(rows, name, read_row)]
    return [
        HuggingFaceUnit(rows, name, read_row, begin, min(begin + UNIT_ROWS, len(rows)))
        for begin in range(0, len(rows), UNIT_ROWS)
    ]


def describe_files(paths: Sequence[Path]) -> dict[str, Any]:
    """JSON values by which a change of some files is noticed: names, sizes and times."""
    digest, num_bytes = hashlib.sha256(), 0
    for path in paths:
        found = path.stat()
        num_bytes += found.st_size
        digest.update(f"{path}\0{found.st_size}\0{found.st_mtime_ns}\n".encode("utf-8", "replace"))
    version = digest.hexdigest()[:32]
    return {"path": str(paths[0]), "files": len(paths), "bytes": num_bytes, "version": version}


def _line_ranges(path: Path, size: int) -> Iterator[tuple[int, int, int]]:
    """First byte, the one behind the last, and first line of each part of a file."""
    begin, line = 0, 1
    with path.open("rb") as file:
        while begin < size:
            lines = 0
            for _ in range(0, UNIT_BYTES, _BLOCK):
                lines += file.read(min(_BLOCK, UNIT_BYTES)).count(b"\n")
            lines += file.readline(MOST_LINE_BYTES).count(b"\n")
            yield begin, file.tell(), line
            begin, line = file.tell(), line + lines


def _files_in_folders(paths: Iterable[Path], patterns: Sequence[str]) -> list[Path]:
    """Files as they are, and of folders those below that match; ConfigError where there is none."""
    found: list[Path] = []
    for path in paths:
        inside = sorted({f for pattern in patterns for f in path.rglob(pattern)})
        if path.is_dir() and not inside:
            raise ConfigError(f"{path}: a folder without {' or '.join(patterns)}.")
        found += inside if path.is_dir() else [path]
    return _existing_files(found)


def _existing_files(paths: Iterable[Path]) -> list[Path]:
    paths = list(paths)
    for path in paths:
        if not path.exists():
            raise ConfigError(f"{path}: no such file.")
        if path.is_dir():
            raise ConfigError(f"{path}: a folder, not a file. Use --folder for folders.")
    return paths


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte 0x{error.object[error.start]:02x}). "
            "Convert the file or leave it out."
        ) from error
    except (OSError, EOFError, zlib.error, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read ({reason}).") from error


def _decompressed(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        pyarrow = _pyarrow(f"{path}: a .zst file", "pyarrow")
        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))
    return path.open("rb")


def _pyarrow(what: str, module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _missing(what, "pyarrow") from error


def _missing(what: str, package: str) -> ConfigError:
    return ConfigError(
        f"{what} needs the package `{package}`: pip install 'energon_ext[datasets]'."
    )


def _texts(path: Path, separator: str | None) -> Iterator[str]:
    # Line ends stay as they are; a byte-order mark is no text.
    with path.open(encoding="utf-8-sig", newline="") as file:
        if separator is None:
            yield file.read()
            return
        unfinished = ""
        while piece := file.read(READ_CHARACTERS):
            *finished, unfinished = (unfinished + piece).split(separator)
            yield from finished
        yield unfinished


def _parse(line: bytes, origin: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = error if len(line) < MOST_LINE_BYTES else f"over {MOST_LINE_BYTES:,} bytes"
        raise ConfigError(f"{origin}: not JSON ({reason}).") from error
