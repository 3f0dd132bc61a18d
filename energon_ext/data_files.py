# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The one way in for a file that somebody else may have made: a regular one, read to a limit."""

import os
import stat
from pathlib import Path
from typing import BinaryIO

from energon_ext.errors import ConfigError

#: Names the folder of everything that is kept to be made or fetched once.
CACHE_VARIABLE = "ENERGON_EXT_CACHE"


def open_descriptor(path: str | Path) -> int:
    """Open a file to be read; ConfigError for a pipe, which may block for ever, or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise ConfigError(f"{path}: is not a regular file.")


def open_data(path: str | Path) -> BinaryIO:
    """A file object over :func:`open_descriptor`."""
    return os.fdopen(open_descriptor(path), "rb")


def read_data(path: str | Path, most_bytes: int) -> bytes:
    """The content of a file; ConfigError for more than a limit, or as :func:`open_descriptor`.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    with open_data(path) as file:
        return read_to_limit(file, most_bytes, path)


def read_to_limit(file: BinaryIO, most_bytes: int, path: object) -> bytes:
    """The rest of an open file; ConfigError where it is more than a limit."""
    content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ConfigError(f"{path}: has more than {most_bytes:,} bytes.")
    return content
