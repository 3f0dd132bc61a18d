# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Safe access to files that others may have written: regular files only, read up to a limit."""

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from energon_ext.errors import ConfigError
from energon_ext.keyed import sha256

#: Environment variable with the folder for everything that is computed or fetched only once.
CACHE_VARIABLE = "ENERGON_EXT_CACHE"

#: Folder next to the data for the same, if the variable is not set.
DEFAULT_CACHE = ".energon_ext_cache"


def cache_path(data: Path, name: str, dependencies: str, suffix: str = "") -> Path:
    """Return the path of what is computed once from the data in a folder.

    Args:
        data: the folder; the path is in a folder in it, or in the one in CACHE_VARIABLE.
        name: beginning of the file's name, for people.
        dependencies: text with everything that the content depends on.
    """
    folder = Path(os.environ.get(CACHE_VARIABLE) or data / DEFAULT_CACHE)
    words = re.sub(r"[^\w.-]+", "-", name)[-60:].strip("-.")
    digest = sha256(dependencies.encode("utf-8", "surrogateescape"))
    return folder / f"{words}-{digest[:24]}{suffix}"


def open_descriptor(path: str | Path) -> int:
    """Open a file for reading.

    Raises:
        ConfigError: it is a device or a pipe, which may block forever, or too many files are open.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        raise ConfigError(
            f"{path}: cannot be opened, since too many files are open; raise the limit of the "
            f"process (`ulimit -n`)."
        ) from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise ConfigError(f"{path}: is not a regular file.")


def open_data(path: str | Path) -> BinaryIO:
    """Open a file as :func:`open_descriptor` does, as a file object."""
    return os.fdopen(open_descriptor(path), "rb")


def read_data(path: str | Path, max_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        ConfigError: the file is not a regular file or has more than ``max_bytes``.
        OSError: the file does not exist or cannot be read.
    """
    with open_data(path) as file:
        return read_to_limit(file, max_bytes, path)


@contextlib.contextmanager
def reading(path: str | Path, missing: str = "", advice: str = "") -> Iterator[None]:
    """Raise the system's errors in a block as ConfigErrors that name the file.

    Args:
        missing: why a file that does not exist is needed; by default only that it cannot be read.
        advice: what to do about a file that cannot be read.

    Example:
        >>> with reading("web.idx"):
        ...     raise OSError("no answer")  # without the name of the file
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: web.idx: cannot be read (no answer).
    """
    try:
        yield
    except OSError as error:
        name = error.filename or path
        if missing and isinstance(error, FileNotFoundError):
            raise ConfigError(f"{name}: does not exist; {missing}.") from error
        reason = error.strerror or error
        raise ConfigError(f"{name}: cannot be read ({reason}){advice}.") from error


def read_json(path: str | Path, max_bytes: int) -> Any:
    """Return the content of a JSON file.

    Raises:
        ValueError: as for :func:`parse_json`.
        ConfigError, OSError: as for :func:`read_data`.
    """
    return parse_json(read_data(path, max_bytes))


class RepeatedKeyError(ValueError):
    """An object of a JSON text has a key twice, so that one of the two values would be dropped."""


def parse_record(content: str | bytes) -> Any:
    """Return the value of JSON in a user's data, where any number is allowed.

    Raises:
        RepeatedKeyError: an object has a key twice.
        ValueError: it is not JSON.
        RecursionError: it has too many levels.
    """
    return json.loads(content, object_pairs_hook=_make_object)


def parse_json(content: str | bytes) -> Any:
    """Return the value of JSON that others may have written.

    Raises:
        ValueError: it is not JSON, has too many levels, has a key twice in one object, or an
            integer of more than 64 bits.

    Example:
        >>> parse_json('{"web": 1, "web": 2}')
        Traceback (most recent call last):
        energon_ext.data_files.RepeatedKeyError: the key 'web' is there twice
    """
    try:
        return json.loads(content, parse_int=_parse_integer, object_pairs_hook=_make_object)
    except RecursionError as error:
        raise ValueError("too many lists and objects within each other") from error


def _parse_integer(digits: str) -> int:
    number = int(digits) if len(digits) <= 20 else 2**64
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"the integer {digits:.20}... has more than 64 bits")
    return number


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RepeatedKeyError(f"the key {twice!r:.80} is there twice")
    return found


def count_of(value: Any) -> int:
    """Return a value from a file that is a count; ValueError if it is none that fits into int64."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"{value!r:.40} is not a count")
    return value


def read_to_limit(file: BinaryIO, max_bytes: int, path: object) -> bytes:
    """Return the rest of an open file; ConfigError if that is more than ``max_bytes``."""
    content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ConfigError(f"{path}: has more than {max_bytes:,} bytes.")
    return content
