# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Small files that last: written aside, flushed to disk and renamed; read with a limit."""

import json
import os
from pathlib import Path
from typing import Any

from energon_ext.data_files import read_data
from energon_ext.errors import ConfigError, StateFormatError

_ADVICE = "Copy it again from where it came, or resume from another checkpoint."


def write_file(path: Path, content: bytes) -> None:
    """Write a file that gets its name only when its bytes are on disk.

    A link at ``path`` is replaced, not followed. A path has one writer at a time.

    Raises:
        OSError: it cannot be written; what was there before is unchanged.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)  # a killed process may have left it
    try:
        with open(temporary, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)  # a full disk needs the room
        raise
    fsync(path.parent)


def read_small_file(path: Path, most_bytes: int) -> bytes:
    """Read a regular file.

    Raises:
        StateFormatError: it cannot be read, is a pipe or a device, or has more than ``most_bytes``.
    """
    try:
        return read_data(path, most_bytes)
    except OSError as error:
        raise StateFormatError(f"{path} cannot be read ({error.strerror}). {_ADVICE}") from error
    except ConfigError as error:
        raise StateFormatError(f"{error} {_ADVICE}") from error


def read_json(path: Path, most_bytes: int) -> Any:
    """Read a file of JSON; StateFormatError where it holds none, or as :func:`read_small_file`."""
    content = read_small_file(path, most_bytes)
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise StateFormatError(f"{path} is damaged ({first_line(error)}). {_ADVICE}") from error


def fsync(path: Path) -> None:
    """Flush a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def first_line(error: BaseException) -> str:
    """The message of an exception, cut to one line without a full stop."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
