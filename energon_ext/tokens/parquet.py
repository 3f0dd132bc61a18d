# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents of Parquet files with a column of token ids, one document per row.

Parquet stores where a list ends only inside its pages, so the lengths take one pass over the
column, see :mod:`~energon_ext.tokens.scanned`; it also checks every row. A row group is the
smallest part that can be read: it is decoded as a whole, and the last ones are kept.
"""

import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_ext.errors import ConfigError, log_of
from energon_ext.storage.object_store import StoredObject
from energon_ext.tokens.documents import Documents
from energon_ext.tokens.scanned import ScannedFiles, check_unchanged, local_files

logger = log_of(__name__)

#: Columns of token ids, if the entry names none.
COLUMNS = ("input_ids", "tokens")

#: Columns of label weights: a number per token, or -100 in place of a token that is not trained.
WEIGHTS_COLUMNS = ("loss_mask", "labels")
_UNTRAINED = -100

#: A column of Hugging Face tokenizers that must be 1 everywhere: documents have no padding.
_ATTENTION = "attention_mask"

#: Columns that say where several documents in one row end (Bridge's packed SFT, TRL's packing).
_PACKED = ("seq_start_id", "cu_seqlens", "seq_lengths")

#: Types of a column of weights.
_NUMBERS = ("is_integer", "is_floating", "is_boolean")

#: Bytes of decoded row groups that a process keeps, and of a row group that may be read at all.
KEPT_BYTES, MAX_GROUP_BYTES = 2**29, 2**30

#: Row groups that decode to more bytes cause a warning, unless all of them may be kept.
_SLOW_GROUP_BYTES = 2**22

_SMALLER_GROUPS = "write the files with smaller row groups (pyarrow: row_group_size=32)"

#: Rows checked at once, and files that are open or known at once.
_CHECKED_ROWS, _OPEN_FILES, _KNOWN_FILES = 1024, 64, 1 << 14


@dataclass(frozen=True)
class RowGroup:
    """The decoded columns of a row group: the tokens of all its rows, and where each row ends."""

    tokens: np.ndarray
    ends: np.ndarray  # int64 [rows + 1]
    weights: np.ndarray | None

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + (0 if self.weights is None else self.weights.nbytes)


class ParquetTokens(ScannedFiles):
    """Documents of Parquet files; see the module.

    Args:
        files: in the order of their documents.
        how: name of the column of token ids; None for ``input_ids`` or ``tokens``.

    Raises:
        ConfigError: on first use, if a file is damaged, has no such column, or has a row that
            cannot be trained as it is.
    """

    def of_field(self, name: str) -> Documents:
        return ParquetTokens(self.files, name)

    @property
    def _packed_bytes(self) -> int:
        return sum(stored.size for stored in self.files)

    @functools.cached_property
    def unweighted(self) -> str | None:
        bare = (f.url for f in self.files if not _columns(f, self.how)[1])
        return next(bare, None)

    def scan(self, file: int) -> Iterator[np.ndarray]:
        stored, row = self.files[file], 0
        names = _columns(stored, self.how)
        largest = _check_groups(stored, names[0])
        if file == 0 and largest > _SLOW_GROUP_BYTES and self._packed_bytes > KEPT_BYTES // 4:
            logger.warning(
                "%s: up to %d MiB are decoded to read one document at random; %s.",
                *(stored.url, max(1, largest >> 20), _SMALLER_GROUPS),
            )
        with _errors_of(stored):
            extra = [_ATTENTION] if _ATTENTION in _open(stored).schema_arrow.names else []
            wanted = [name for name in (*names, *extra) if name]
            for batch in _open(stored).iter_batches(_CHECKED_ROWS, columns=wanted):
                lengths, tokens = _lists(stored, row, batch, names[0])
                for name in wanted[1:]:
                    _check_column(stored, row, name, lengths, tokens, batch)
                yield lengths
                row += len(lengths)

    def read_pieces(
        self, numbers: Sequence[int], starts: Sequence[int], stops: Sequence[int]
    ) -> tuple[list[Any], list[Any]]:
        files = self.files_of(numbers)
        rows = np.asarray(numbers, np.int64) - self.first_documents[files]
        tokens: list[Any] = [None] * len(files)
        weights: list[np.ndarray | None] = [None] * len(files)
        # Rows of the same group follow one another, so that it is decoded once.
        for place in np.lexsort([rows, files]).tolist():
            file, row = int(files[place]), int(rows[place])
            group, row = self._group_of(file, row)
            part = slice(int(group.ends[row]) + starts[place], int(group.ends[row]) + stops[place])
            tokens[place] = group.tokens[part]
            weights[place] = None if group.weights is None else group.weights[part]
        return tokens, weights

    def _group_of(self, file: int, row: int) -> tuple[RowGroup, int]:
        """Return the row group that contains a row of a file, and the number of the row in it."""
        stored = self.files[file]
        first_rows = _first_rows(stored)
        number = int(np.searchsorted(first_rows, row, side="right")) - 1
        first = int(first_rows[number])

        def decode() -> RowGroup:
            group = _decode(stored, number, *_columns(stored, self.how))
            begin = int(self.first_documents[file]) + first
            planned = self.ends[begin : begin + len(group.ends)]
            if not np.array_equal(group.ends, planned - planned[0]):
                raise ConfigError(f"{stored.url}: was replaced since its lengths were found.")
            return group

        return _kept.find((stored, number, self.how), decode), row - first


def open_parquet(path: str) -> ParquetTokens:
    """Open the Parquet files that a path names: one, a folder or a pattern."""
    return ParquetTokens(local_files(path, ".parquet"))


class _Kept:
    """The row groups that were decoded last, at most a number of bytes."""

    def __init__(self) -> None:
        self._groups: OrderedDict[Any, RowGroup] = OrderedDict()
        self._num_bytes = 0

    def find(self, key: Any, decode: Callable[[], RowGroup]) -> RowGroup:
        group = self._groups.pop(key, None)
        if group is None:
            group = decode()
            self._num_bytes += group.num_bytes
        self._groups[key] = group
        while self._num_bytes > KEPT_BYTES and len(self._groups) > 1:
            self._num_bytes -= self._groups.popitem(last=False)[1].num_bytes
        return group


_kept = _Kept()


# One file ---------------------------------------------------------------------------------------


class _errors_of:
    """Turns what pyarrow raises for damaged files into a ConfigError that names the file."""

    def __init__(self, stored: StoredObject):
        self._path = stored.url

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # pyarrow's own errors are subclasses of ValueError, OSError and NotImplementedError.
        if isinstance(error, (OSError, ValueError, NotImplementedError, MemoryError)) and (
            not isinstance(error, ConfigError)
        ):
            raise ConfigError(
                f"{self._path}: cannot be read as Parquet ({str(error):.200}); copy it again."
            ) from error


def _open(stored: StoredObject) -> Any:
    """Open a file, which must be as long as at the start; files stay open in one process."""
    return _open_in(os.getpid(), stored)


@functools.lru_cache(_OPEN_FILES)
def _open_in(process: int, stored: StoredObject) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{stored.url}: Parquet needs pyarrow; install `energon_ext[datasets]`."
        ) from error
    check_unchanged(stored)
    with _errors_of(stored):
        return pyarrow.parquet.ParquetFile(stored.url)


@functools.lru_cache(_KNOWN_FILES)
def _first_rows(stored: StoredObject) -> np.ndarray:
    """Return the first row of each row group, and the number of rows."""
    found = _open(stored).metadata
    rows = [found.row_group(number).num_rows for number in range(found.num_row_groups)]
    return np.concatenate([[0], np.cumsum(rows, dtype=np.int64)])


@functools.lru_cache(_KNOWN_FILES)
def _columns(stored: StoredObject, chosen: str | None) -> tuple[str, str | None]:
    """Return the columns of the tokens and of the label weights of a file."""
    with _errors_of(stored):
        types = {field.name: field.type for field in _open(stored).schema_arrow}
    found = [name for name in ((chosen,) if chosen else COLUMNS) if name in types]
    if not found:
        has = ", ".join(f"{name} ({kind})" for name, kind in list(types.items())[:8])
        raise ConfigError(
            f"{stored.url}: no column {' or '.join([chosen] if chosen else COLUMNS)} of token ids; "
            f"it has {has}. Name the column as `key` of the entry. `energon-ext prepare FOLDER "
            f"--parquet {stored.url} --tokenizer NAME` turns text into token files."
        )
    if not _is_list(types[found[0]], "is_integer"):
        raise ConfigError(
            f"{stored.url}: column {found[0]} is {types[found[0]]}; lists of integers are needed, "
            f"one per document."
        )
    if packed := next((name for name in _PACKED if name in types), None):
        raise ConfigError(f"{stored.url}: {packed} marks packed documents; give one per row.")
    weights = [name for name in WEIGHTS_COLUMNS if name in types and name != found[0]]
    if len(weights) > 1:
        raise ConfigError(
            f"{stored.url}: both loss_mask and labels say what is trained; remove one of them."
        )
    for name in (*weights, *({_ATTENTION} & types.keys())):
        allowed = ("is_integer",) if name == "labels" else _NUMBERS
        if not any(_is_list(types[name], kind) for kind in allowed):
            raise ConfigError(
                f"{stored.url}: column {name} is {types[name]}; lists with one number per token "
                f"are needed."
            )
    return found[0], weights[0] if weights else None


def _is_list(kind: Any, of: str) -> bool:
    import pyarrow.types as types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return is_list and getattr(types, of)(kind.value_type)


def _check_groups(stored: StoredObject, column: str) -> int:
    """Return the bytes of the largest row group, decoded; ConfigError if that is too many."""
    found = _open(stored).metadata
    largest = 0
    for number in range(found.num_row_groups):
        group = found.row_group(number)
        chunks = [group.column(place) for place in range(group.num_columns)]
        sizes = [c.num_values for c in chunks if c.path_in_schema.split(".")[0] == column]
        largest = max(largest, 8 * sum(sizes))
    if largest > MAX_GROUP_BYTES:
        raise ConfigError(
            f"{stored.url}: a row group decodes to up to {largest:,} bytes, more than "
            f"{MAX_GROUP_BYTES:,}; {_SMALLER_GROUPS}."
        )
    return largest


def _decode(stored: StoredObject, number: int, column: str, weights: str | None) -> RowGroup:
    """Decode a row group."""
    with _errors_of(stored):
        wanted = [column, weights] if weights else [column]
        table = _open(stored).read_row_group(number, columns=wanted, use_threads=False)
        lengths, tokens = _lists(stored, 0, table, column)
        found = None
        if weights:
            _, values = _lists(stored, 0, table, weights)
            found = values != _UNTRAINED if weights == "labels" else values
            found = found.astype(np.float32)
        return RowGroup(tokens, np.concatenate([[0], np.cumsum(lengths)]), found)


def _lists(stored: StoredObject, row: int, table: Any, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the length of each list of a column, int64, and the values of all; refuse nulls."""
    import pyarrow as pa
    import pyarrow.compute as pc

    column = table.column(name)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    values = column.flatten()
    if column.null_count or values.null_count:
        nulls = (
            column if column.null_count else pc.list_parent_indices(column).filter(values.is_null())
        )
        place = nulls.is_null().index(True).as_py() if column.null_count else nulls[0].as_py()
        raise ConfigError(f"{stored.url}: row {row + place} of {name} is null or contains a null.")
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    return lengths, values.to_numpy(zero_copy_only=False)


def _check_column(
    stored: StoredObject, row: int, name: str, lengths: np.ndarray, tokens: np.ndarray, batch: Any
) -> None:
    """Raise ConfigError for a row whose weights or mask do not fit its tokens."""
    own, values = _lists(stored, row, batch, name)
    differs = own != lengths
    problem = "is not as long as its tokens"
    if not differs.any():
        rows = np.repeat(np.arange(len(lengths)), lengths)
        if name == "labels":
            wrong = (values != _UNTRAINED) & (values != tokens)
            problem = (
                "has a label that is neither its token nor -100; labels must not be shifted by one"
            )
        elif name == _ATTENTION:
            wrong, problem = values != 1, "has padding; write documents without it"
        else:
            wrong = ~(np.isfinite(values) & (values >= 0))
            problem = "has a weight that is not a finite number >= 0"
        differs[rows[wrong]] = True
    if differs.any():
        raise ConfigError(f"{stored.url}: row {row + int(differs.argmax())} of {name} {problem}.")
