# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Where ``energon-ext prepare`` gets documents from: one function per kind of input.

Every input is a :class:`Corpus`, an iterator that reads as it goes, so memory does not grow with
the input. What cannot be read is a ConfigError that names the file and the line.
"""

import functools
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_ext.cli import import_for
from energon_ext.encoders.sft import Dialogue, PromptResponse, cook_dialogue
from energon_ext.errors import ConfigError, SampleError

READ_CHARACTERS = 1 << 20
MOST_LINE_BYTES = 1 << 28  # a small compressed file may be one line of any length
COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True, slots=True)
class Document:
    """One text, or one conversation."""

    text: str  # of a conversation, all of it as JSON
    origin: str  # where it was read, for messages: FILE, FILE:LINE or NAME[INDEX]
    num_bytes: int = 0  # how much of the input it took, for the progress bar
    conversation: Any = None  # what SFTTaskEncoder encodes, None for text
    split: str | None = None  # the one it was in and stays in; None where the text decides


@dataclass(frozen=True, slots=True)
class Corpus:
    """Documents in a fixed order, read once, from front to back."""

    documents: Iterator[Document]
    total_bytes: int | None = None  # None where nobody knows
    total_documents: int | None = None


@dataclass
class LeftOut:
    """How many documents are left out, and why the first one is."""

    count: int = 0
    first: str = ""

    def add(self, error: Exception) -> None:
        self.count += 1
        self.first = self.first or str(error)


@dataclass
class Unreadable(LeftOut):
    """Around the reading of a document: an error ends the preparation, or is counted."""

    skip: bool = False

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if not self.skip or not isinstance(error, ConfigError):
            return False
        self.add(error)
        return True


#: Makes a document of a JSON object: ``(object, origin, num_bytes) -> document``.
RowReader = Callable[[Any, str, int], Document]


def text_under(key: str) -> RowReader:
    """Reads rows that have their text under a key; ConfigError for one that has not."""

    def read(row: Any, origin: str, num_bytes: int) -> Document:
        check_object(row, origin)
        if key not in row:
            raise ConfigError(f"{origin}: no key {key!r}; it has {sorted(row)}. Choose with --key.")
        text = row[key]
        if not isinstance(text, str):
            raise ConfigError(f"{origin}: {key!r} must be a string, found {type(text).__name__}.")
        return Document(text, origin, num_bytes)

    return read


def check_object(row: Any, origin: str) -> None:
    if not isinstance(row, dict):
        raise ConfigError(f"{origin}: expected a JSON object, found {type(row).__name__}.")


def read_conversation(row: Any, origin: str, num_bytes: int) -> Document:
    """A JSON object as a document; ConfigError where it holds no conversation.

    Example:
        >>> record = {"prompt": "2 + 2", "response": "4", "id": 17}
        >>> read_conversation(record, "chat.jsonl:1", 50).text
        '["2 + 2", "4"]'
    """
    check_object(row, origin)
    crude = {"__key__": origin, "__restore_key__": (), "json": row}
    try:
        return conversation_document(cook_dialogue(crude), origin, num_bytes)
    except SampleError as error:
        raise ConfigError(str(error)) from error


def conversation_document(
    sample: Dialogue | PromptResponse, origin: str, num_bytes: int = 0
) -> Document:
    """A conversation as a document; equal conversations have equal texts."""
    is_dialogue = isinstance(sample, Dialogue)
    content = sample.messages if is_dialogue else [sample.prompt, sample.response]
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, default=str)
    return Document(text, origin, num_bytes, conversation=sample)


def text_files(
    paths: Iterable[Path], unreadable: Unreadable, separator: str | None = None
) -> Corpus:
    """UTF-8 text files, each one document, or several with a separator between them.

    With a separator, ``"<|endoftext|>"`` for example, a file is read piece by piece, never whole.
    """
    if separator == "":
        raise ConfigError("--separator must not be empty.")
    paths = _existing_files(paths)

    def read() -> Iterator[Document]:
        for path in paths:
            with unreadable, _readable(path):
                for text in _texts(path, separator):
                    yield Document(text, str(path), len(text.encode()))

    return Corpus(read(), _total_bytes(paths))


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


def jsonl_files(paths: Iterable[Path], read_row: RowReader, unreadable: Unreadable) -> Corpus:
    """JSON Lines files, compressed or not, one object a line; blank lines are skipped."""
    paths = _files_in_folders(paths, ("*.jsonl", "*.jsonl.gz", "*.jsonl.zst"))

    def read() -> Iterator[Document]:
        for path in paths:
            with unreadable, _readable(path), _decompressed(path) as file:
                lines = iter(functools.partial(file.readline, MOST_LINE_BYTES), b"")
                for number, line in enumerate(lines, start=1):
                    origin = f"{path}:{number}"
                    with unreadable:
                        if line.strip():
                            yield read_row(_parse(line, origin), origin, len(line))

    is_plain = all(path.suffix not in COMPRESSED for path in paths)
    return Corpus(read(), _total_bytes(paths) if is_plain else None)


def parquet_files(paths: Iterable[Path], read_row: RowReader, unreadable: Unreadable) -> Corpus:
    """Parquet files, one document a row."""
    pyarrow = import_for("--parquet", "pyarrow", "datasets", "pyarrow.parquet")
    paths = _files_in_folders(paths, ("*.parquet",))

    def read() -> Iterator[Document]:
        for path in paths:
            with unreadable, _readable(path), pyarrow.ParquetFile(path) as file:
                rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
                for number, row in enumerate(rows):
                    with unreadable:
                        yield read_row(row, f"{path}[{number}]", 0)

    return Corpus(read())


def hugging_face_dataset(
    name: str,
    *,
    config: str | None,
    split: str,
    streaming: bool,
    read_row: RowReader,
    unreadable: Unreadable,
) -> Corpus:
    """One split of a Hugging Face dataset, from the hub, a folder, or what it saved to disk."""
    datasets = import_for("--hf-dataset", "datasets", "datasets")
    try:
        if any((Path(name) / saved).is_file() for saved in ("state.json", "dataset_dict.json")):
            rows = datasets.load_from_disk(name)
            rows = rows[split] if isinstance(rows, dict) else rows
        else:
            rows = datasets.load_dataset(name, config, split=split, streaming=streaming)
    except (KeyError, OSError, ValueError) as error:
        raise ConfigError(f"--hf-dataset {name}, split {split}: {error}") from error

    def read() -> Iterator[Document]:
        for index, row in enumerate(rows):
            with unreadable:
                yield read_row(row, f"{name}[{index}]", 0)

    return Corpus(read(), total_documents=None if streaming else len(rows))


def _files_in_folders(paths: Iterable[Path], patterns: Sequence[str]) -> list[Path]:
    """Files as they are, and of folders those below that match; ConfigError where there is none."""
    found: list[Path] = []
    for path in paths:
        inside = sorted({f for pattern in patterns for f in path.rglob(pattern)})
        if path.is_dir() and not inside:
            raise ConfigError(f"{path}: a folder without {' or '.join(patterns)}.")
        found += inside if path.is_dir() else [path]
    return _existing_files(found)


def _decompressed(path: Path) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path)
    if path.suffix == ".zst":
        pyarrow = import_for(f"{path}: a .zst file", "pyarrow", "datasets")
        return io.BufferedReader(pyarrow.input_stream(path, compression="zstd"))
    return path.open("rb")


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


def _total_bytes(paths: list[Path]) -> int | None:
    return sum(path.stat().st_size for path in paths) or None  # A pipe has size 0: unknown.


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
