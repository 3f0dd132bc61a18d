# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes small files atomically and durably, and reads them up to a size limit."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from energon_ext.data_files import read_data, read_json
from energon_ext.errors import ConfigError, StateFormatError, first_line
from energon_ext.storage.whole_file import open_whole

_ADVICE = "Copy it again, or resume from another checkpoint."


def write_file(path: Path, content: bytes) -> None:
    """Write a temporary file, flush it to disk and rename it to ``path``.

    A link at ``path`` is replaced, not followed.

    Raises:
        OSError: the file cannot be written; it names the path, and an existing file is unchanged.
    """
    with open_whole(path) as file:
        file.write(content)


def read_small_file(path: Path, max_bytes: int) -> bytes:
    """Read a regular file.

    Raises:
        StateFormatError: it cannot be read, is not a regular file, or exceeds ``max_bytes``.
    """
    with _errors_of(path):
        return read_data(path, max_bytes)


def read_small_json(path: Path, max_bytes: int) -> Any:
    """Read a JSON file; StateFormatError if it is damaged, or as in :func:`read_small_file`."""
    with _errors_of(path):
        return read_json(path, max_bytes)


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Raise the errors of reading a file as StateFormatError."""
    try:
        yield
    except OSError as error:
        raise StateFormatError(f"{path}: cannot be read ({error.strerror}). {_ADVICE}") from error
    except ConfigError as error:
        raise StateFormatError(f"{error} {_ADVICE}") from error
    except ValueError as error:
        raise StateFormatError(f"{path}: is damaged ({first_line(error)}). {_ADVICE}") from error
