# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The losses of documents in a run: one folder per start of it, and in that one file per rank.

A file has one line of JSON with its sources, and then one record of 32 bytes for each segment: a
document, or the piece of one that a row has. A run that resumes begins a new folder, whose name
contains the step that it resumed after: what earlier folders have of later steps was done again and
does not count.
"""

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from energon_ext.data_files import open_data, parse_json
from energon_ext.errors import ConfigError, SampleError, log_of
from energon_ext.state.schema import check_shape
from energon_ext.storage.whole_file import fsync

logger = log_of(__name__)

FOLDER = "document_losses"
_START = re.compile(r"start-(\d{6})-after-(\d{10})")
_MAX_HEADER, _RECORDS_AT_ONCE = 2**24, 2**20

#: What a file has of a segment. Steps count from 1, as in ``metrics.jsonl``.
RECORD = np.dtype(
    [
        ("document", "<i8"),
        ("loss", "<f8"),  # sum over the trained labels
        ("step", "<u4"),
        ("source", "<u4"),
        ("visit", "<i4"),
        ("tokens", "<u4"),  # trained labels
    ]
)

#: Sums over segments, by source, document and visit.
_SUMS = np.dtype(
    [
        *(("source", "i4"), ("document", "i8"), ("visit", "i4")),
        *(("loss", "f8"), ("tokens", "i8"), ("visits", "i8"), ("first", "i8"), ("last", "i8")),
    ]
)


def begin_folder(run_dir: Path, first_step: int) -> Path:
    """Create the folder of a start that continues after some steps; one rank calls this."""
    parent = run_dir / FOLDER
    parent.mkdir(parents=True, exist_ok=True)
    number = max((start.number for start in _starts(parent)), default=0) + 1
    folder = parent / f"start-{number:06}-after-{first_step:010}"
    folder.mkdir()
    return folder


class DocumentLossFile:
    """Writes the losses of documents on one rank.

    A step is copied from its device in the background and written with the next one, or by
    :meth:`flush`. Call that before every checkpoint, and leave the ``with`` block.

    Args:
        folder: see :func:`begin_folder`.
        rank: a number that no other writer of the folder has.
    """

    def __init__(self, folder: Path, rank: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"rank-{rank:05}.bin"
        self._descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._waiting: tuple[int, torch.Tensor, torch.cuda.Event | None] | None = None
        self._has_header = False

    def add(self, step: int, sources: Sequence[str], losses: Sequence[torch.Tensor]) -> None:
        """Take the losses of all micro-batches of a step; write those of the step before.

        Args:
            sources: those that the losses refer to, the same in every step.
            losses: see :func:`energon_ext.losses.document_losses`.

        Raises:
            ConfigError: the file cannot be written, or was removed.
            SampleError: a trained segment has no number.
        """
        self._write_waiting()
        if not self._has_header:
            header = {"version": 1, "sources": list(sources)}
            self._append(json.dumps(header).encode() + b"\n")
            self._has_header = True
        if not losses:
            return
        found = torch.cat([*losses])
        # From a GPU to page-locked memory, which does not wait.
        copied, event = found.to("cpu", non_blocking=True), None
        if found.is_cuda:
            event = torch.cuda.Event()
            event.record()
        self._waiting = step, copied, event

    def flush(self) -> None:
        """Write everything that was added, and flush it to disk."""
        self._write_waiting()
        with self._errors():
            os.fsync(self._descriptor)
            fsync(self.path.parent)

    def _write_waiting(self) -> None:
        if self._waiting is None:
            return
        (step, losses, event), self._waiting = self._waiting, None
        if event is not None:
            event.synchronize()
        source, document, visit, loss, tokens = losses[losses[:, 4] > 0].numpy().T
        if (document < 0).any():
            raise SampleError(
                f"Step {step}: a segment has no number of a document; its rows were not made by a "
                f"task encoder with document_numbers=True."
            )
        records = np.zeros(len(document), RECORD)
        records["step"] = step
        for name, values in (("source", source), ("document", document), ("visit", visit)):
            records[name] = values
        records["loss"], records["tokens"] = loss, tokens
        self._append(records.tobytes())

    def _append(self, content: bytes) -> None:
        rest = memoryview(content)
        with self._errors():
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
            if os.fstat(self._descriptor).st_nlink == 0:
                raise FileNotFoundError(errno.ENOENT, "the file was removed")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise what prevents writing as ConfigError."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be written ({error.strerror}); free or restore its folder, "
                f"and resume from the last checkpoint, or go on without losses of documents."
            ) from error

    def __enter__(self) -> "DocumentLossFile":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._write_waiting()
        finally:
            os.close(self._descriptor)


# Reading ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DocumentLoss:
    """The loss of a document over all its visits.

    Attributes:
        tokens: trained labels, over all visits.
        mean: loss of each.
        first, last: steps, from 1 on.
    """

    source: str
    document: int
    mean: float
    tokens: int
    visits: int
    first: int
    last: int


class DocumentLosses:
    """The losses of all documents of a run.

    Args:
        run_dir: folder of the run.
        after: leave out steps up to this one.

    Raises:
        ConfigError: the run has none, or a file is damaged.
    """

    def __init__(self, run_dir: Path, after: int = 0):
        parent, numbers, sums = run_dir / FOLDER, {}, []  # type: ignore[var-annotated]
        if not parent.is_dir():
            raise ConfigError(
                f"{parent}: does not exist; the run has not written the losses of its documents, "
                f"see `document_numbers`."
            )
        for start, last in _history(sorted(_starts(parent))):
            for path in sorted(start.folder.glob("rank-*.bin")):
                for sources, records in _read(path):
                    steps = records["step"]
                    kept = records[(steps > max(after, start.after)) & (steps <= last)]
                    own = [numbers.setdefault(each, len(numbers)) for each in sources]
                    sums.append(_add_up(_sums_of(kept, np.array(own)), by_visit=True))
        joined = np.concatenate([np.zeros(0, _SUMS), *sums])
        self._sums = _add_up(_add_up(joined, by_visit=True), by_visit=False)
        self._sources = list(numbers)

    def __len__(self) -> int:
        return len(self._sums)

    def highest(self, count: int, min_tokens: int = 1) -> list[DocumentLoss]:
        """Return the documents with the highest mean loss, those without a finite one first."""
        sums = self._sums[self._sums["tokens"] >= min_tokens]
        means = np.where(np.isfinite(sums["loss"]), sums["loss"] / sums["tokens"], np.inf)
        return [
            DocumentLoss(
                self._sources[each["source"]],
                int(each["document"]),
                float(each["loss"] / each["tokens"]),
                *(int(each[name]) for name in ("tokens", "visits", "first", "last")),
            )
            for each in sums[np.argsort(-means, kind="stable")[:count]]
        ]


@dataclass(frozen=True, order=True)
class _Start:
    number: int
    after: int
    folder: Path


def _starts(parent: Path) -> Iterator[_Start]:
    for folder in parent.iterdir():
        if match := _START.fullmatch(folder.name):
            yield _Start(int(match[1]), int(match[2]), folder)


def _history(starts: Sequence[_Start]) -> Iterator[tuple[_Start, int]]:
    """Yield the starts that led to the newest one, and the last step of each that counts.

    A start that ended before the step that a later one resumed after did not lead to it, such as
    one that was stopped before its first step.
    """
    last, left = 2**32, [(start, _reached(start)) for start in starts]
    while left:
        start, _ = left.pop()
        yield start, last
        last = min(last, start.after)
        while left and left[-1][1] < last and any(reached >= last for _, reached in left):
            left.pop()


def _reached(start: _Start) -> int:
    """Return the last step that a start has written, or the one that it began after."""
    found = [start.after]
    for path in start.folder.glob("rank-*.bin"):
        with open_data(path) as file:
            begin = len(file.readline(_MAX_HEADER))
            count = (file.seek(0, os.SEEK_END) - begin) // RECORD.itemsize
            if count > 0:
                file.seek(begin + (count - 1) * RECORD.itemsize)
                found.append(int(np.frombuffer(file.read(RECORD.itemsize), RECORD)["step"][0]))
    return max(found)


def _read(path: Path) -> Iterator[tuple[list[str], np.ndarray]]:
    """Yield the sources of a file and some of its records at a time."""
    with open_data(path) as file:
        sources = _read_header(file, path)
        while content := file.read(_RECORDS_AT_ONCE * RECORD.itemsize):
            if cut := len(content) % RECORD.itemsize:
                logger.warning("%s: its last record is cut, so it is left out.", path)
                content = content[:-cut]
            records = np.frombuffer(content, RECORD)
            is_whole = (records["tokens"] > 0) & (records["source"] < len(sources))
            if damaged := int((~is_whole).sum()):
                logger.warning("%s: %d damaged records are left out.", path, damaged)
            yield sources, records[is_whole]


def _read_header(file: BinaryIO, path: Path) -> list[str]:
    line = file.readline(_MAX_HEADER)
    if len(line) < _MAX_HEADER and not line.endswith(b"\n"):  # it ended before its first step
        return []
    try:
        header = parse_json(line)
    except ValueError as error:
        raise ConfigError(f"{path}: damaged; remove it to report the others.") from error
    check_shape(header, {"version": int, "sources": [str]}, str(path))
    if header["version"] != 1:
        raise ConfigError(f"{path}: version {header['version']} found, 1 is known; upgrade.")
    sources: list[str] = header["sources"]
    return sources


def _sums_of(records: np.ndarray, sources: np.ndarray) -> np.ndarray:
    sums = np.ones(len(records), _SUMS)
    for name in ("document", "visit", "loss", "tokens"):
        sums[name] = records[name]
    sums["first"] = sums["last"] = records["step"]
    if len(records):
        sums["source"] = sources[records["source"]]
    return sums


def _add_up(sums: np.ndarray, *, by_visit: bool) -> np.ndarray:
    """Add up entries of one source, document and, if asked for, visit; sort by these."""
    if not len(sums):
        return sums
    names = ("source", "document", "visit")[: 3 if by_visit else 2]
    sums = sums[np.lexsort([sums[name] for name in names[::-1]])]
    is_new = np.any([np.diff(sums[name]) != 0 for name in names], axis=0)
    begins = np.flatnonzero(np.concatenate([[True], is_new]))
    added = sums[begins]
    for name in ("loss", "tokens") if by_visit else ("loss", "tokens", "visits"):
        added[name] = np.add.reduceat(sums[name], begins)
    added["first"] = np.minimum.reduceat(sums["first"], begins)
    added["last"] = np.maximum.reduceat(sums["last"], begins)
    return added
