# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parquet files and Hugging Face datasets as units. Errors name the row.

Both are read as Arrow tables. Images, sounds and the like are then stored bytes, which nobody
decodes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from energon_ext.compat import version_of_dataset
from energon_ext.errors import ConfigError
from energon_ext.prepare.documents import Documents, RowReader, Unit
from energon_ext.prepare.input_files import describe, input_files, open_input
from energon_ext.prepare.inputs import (
    UNIT_BYTES,
    Row,
    divide,
    import_extra,
    read_documents,
    read_rows,
    unreadable_error,
)
from energon_ext.storage.object_store import StoredObject

UNIT_ROWS = 65_536  # for Hugging Face datasets
_MAX_GROUP_BYTES = 1 << 32
_ROWS = 16  # read at once: a small file may expand to rows of any length


def parquet_units(
    paths: Iterable[Path | str], read_row: RowReader, fields: Sequence[str] | None = None
) -> list[Unit]:
    """Return units of Parquet files, each of whole row groups up to 256 MiB.

    Args:
        fields: the only ones that are read, where all of them exist; None for all.
    """
    parquet = import_extra("pyarrow.parquet", "--parquet")
    units = []
    for path in input_files(paths, (".parquet",)):
        try:
            with open_input(path) as file:
                metadata = parquet.read_metadata(file)
        except (OSError, ValueError) as error:
            raise unreadable_error(path, error) from error
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        for group in groups:
            packed = sum(group.column(n).total_compressed_size for n in range(group.num_columns))
            if group.total_byte_size > min(_MAX_GROUP_BYTES, max(UNIT_BYTES, 200 * packed)):
                raise ConfigError(
                    f"{path}: a row group of {packed:,} bytes expands to "
                    f"{group.total_byte_size:,}; write the file with smaller row groups."
                )
        first_row = 0
        for begin, stop in divide([group.total_byte_size for group in groups]):
            part = range(begin, stop), first_row, fields
            read = partial(read_rows, read_row, _parquet_rows, path, *part)
            units.append(Unit({**describe([path]), "row_groups": [begin, stop]}, read))
            first_row += sum(group.num_rows for group in groups[begin:stop])
    return units


def _parquet_rows(
    path: StoredObject, groups: range, first_row: int, fields: Sequence[str] | None
) -> Iterator[Row]:
    parquet = import_extra("pyarrow.parquet", "--parquet")
    with open_input(path) as stored, parquet.ParquetFile(stored) as file:
        number = first_row
        is_known = set(fields or ()) <= set(file.schema_arrow.names)
        columns = None if fields is None or not is_known else [*fields]
        for batch in file.iter_batches(_ROWS, row_groups=list(groups), columns=columns):
            yield from _rows_of(batch, str(path), number)
            number += batch.num_rows


def hugging_face_units(
    name: str,
    *,
    config: str | None,
    split: str,
    streaming: bool,
    read_row: RowReader,
    fields: Sequence[str] | None = None,
) -> list[Unit]:
    """Return units of one split of a Hugging Face dataset, from the hub or a folder.

    Args:
        fields: the only ones that are read, where all of them exist; None for all.
    """
    datasets = import_extra("datasets", "--hf-dataset")
    try:
        if any((Path(name) / saved).is_file() for saved in ("state.json", "dataset_dict.json")):
            rows = datasets.load_from_disk(name)
            rows = rows[split] if isinstance(rows, dict) else rows
        else:
            rows = datasets.load_dataset(name, config, split=split, streaming=streaming)
    except (KeyError, OSError, ValueError) as error:
        raise ConfigError(f"--hf-dataset {name}, split {split}: {error}") from error
    version = {"path": name, "version": version_of_dataset(rows)}
    if fields is not None and set(fields) <= set(rows.column_names or ()):
        rows = rows.select_columns([*fields])
    # In Arrow's format images and the like stay bytes: text needs none of them.
    rows = rows.with_format("arrow")
    if not hasattr(rows, "select"):  # streamed
        return [Unit(version, partial(_read_streamed, rows, name, read_row))]
    units = []
    for begin in range(0, len(rows), UNIT_ROWS):
        part = range(begin, min(begin + UNIT_ROWS, len(rows)))
        read = partial(_read_hugging_face, rows.select(part), name, begin, read_row)
        units.append(Unit({**version, "range": [part.start, part.stop]}, read))
    return units


def _read_hugging_face(rows: Any, name: str, first: int, read_row: RowReader) -> Documents:
    parse = json_parser(rows.features)

    def read(begin: int, stop: int) -> Iterator[Row]:
        try:
            found = [*_rows_of(rows[begin:stop], name, first + begin, parse)]
        except Exception as error:  # data of others, read by code of others
            if stop > begin + 1:
                found = [row for number in range(begin, stop) for row in read(number, number + 1)]
            else:
                found = [unreadable_error(f"{name}[{first + begin}]", error)]
        yield from found

    parts = range(0, len(rows), _ROWS)
    each = (row for begin in parts for row in read(begin, min(begin + _ROWS, len(rows))))
    return read_documents(each, read_row)


def _read_streamed(rows: Any, name: str, read_row: RowReader) -> Documents:
    parse, number = json_parser(rows.features), 0
    batches = rows.iter(_ROWS)
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # as above; a stream cannot be read beyond an error
            yield unreadable_error(f"{name}[{number}] and all rows after it", error)
            return
        if batch is None:
            return
        yield from read_documents(_rows_of(batch, name, number, parse), read_row)
        number += batch.num_rows


def _rows_of(
    table: Any, name: str, first: int, parse: Callable[[Any], Any] = lambda row: row
) -> Iterator[Row]:
    """Yield the rows of an Arrow table, with an error in place of each that cannot be read."""
    try:
        rows = [*map(parse, table.to_pylist())]
    except (ValueError, OverflowError) as error:  # such as text that is not UTF-8
        if table.num_rows == 1:
            yield unreadable_error(f"{name}[{first}]", error)
            return
        for number in range(table.num_rows):
            yield from _rows_of(table.slice(number, 1), name, first + number, parse)
        return
    for number, row in enumerate(rows, start=first):
        yield row, f"{name}[{number}]", 0


def json_parser(features: Any) -> Callable[[Any], Any]:
    """Return a function that parses the columns which a dataset stores as JSON text."""
    columns = {name: each for name, each in (features or {}).items() if _has_json(each)}
    if not columns:
        return lambda row: row
    parsed = type(features)(columns)
    return lambda row: row | parsed.decode_example({name: row[name] for name in columns})


def _has_json(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return any(map(_has_json, feature.values()))
    if isinstance(feature, list):
        return any(map(_has_json, feature))
    inner = getattr(feature, "feature", None)
    return type(feature).__name__ == "Json" if inner is None else _has_json(inner)
