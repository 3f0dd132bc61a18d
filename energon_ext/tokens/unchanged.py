# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tests at a start whether the files of a source are those of its catalog.

Each process asks the file system about its share of the files, so that together they ask about each
once: a file that was cut off or replaced ends the run at its start, and not at the step that reads
it. Only names, sizes and times are asked for. Of a pair with other times the index is read again,
and the pair is accepted if that is the same: copying and touching files changes nothing. The tokens
themselves are not compared.
"""

import os
from collections.abc import Sequence
from threading import Thread

from energon_ext.errors import ConfigError, log_of
from energon_ext.tokens.catalog import Catalog, digest_of
from energon_ext.tokens.index import SUFFIXES, index_bytes

logger = log_of(__name__)

#: How long the file system may take for one answer.
DEADLINE_SECONDS = 120.0

#: Pairs in a share up to which both files are asked about; beyond that, only the ``.bin``, which is
#: by far the larger one. The ``.idx`` is tested anyway when it is opened.
_BOTH_FILES = 16

#: This process's number, and the number of processes that share the files of a source.
Share = tuple[int, int]


def check_unchanged(catalog: Catalog, share: Share) -> None:
    """Test the files of one process's share; ConfigError names a file that has changed."""
    numbers = range(share[0], len(catalog.pairs), share[1])
    suffixes = SUFFIXES if len(numbers) <= _BOTH_FILES else (".bin",)
    paths = [catalog.pairs[number].prefix + suffix for number in numbers for suffix in suffixes]
    answers = iter(_stat_all(paths))
    touched = []
    for number in numbers:
        pair, stamp = catalog.pairs[number], catalog.stamps[number]
        times = []
        for suffix, each in zip(suffixes, answers):
            size = pair.tokens * pair.dtype.itemsize if suffix == ".bin" else index_bytes(pair)
            # Megatron's multimodal indices end with one byte per sequence.
            sizes = (size, size + pair.sequences * (suffix == ".idx"))
            if each.st_size not in sizes:
                raise ConfigError(
                    f"{pair.prefix}{suffix}: has {each.st_size} bytes, but {size} in "
                    f"{catalog.path}; copy it again, or {catalog.advice} if that is intended."
                )
            times.append(each.st_mtime_ns)
        if stamp.times and tuple(times) != stamp.times[: len(times)]:
            touched.append(number)
    _check_content(catalog, touched)


def _check_content(catalog: Catalog, touched: Sequence[int]) -> None:
    """Raise ConfigError if the index of a pair with other times has another content."""
    for number in touched:
        prefix = catalog.pairs[number].prefix
        if digest_of(prefix + ".idx") != catalog.stamps[number].digest:
            raise ConfigError(
                f"{prefix}.idx: has changed since {catalog.path} was written; "
                f"{catalog.advice} if that is intended."
            )
    if touched:
        logger.info(
            "%d pairs have other times than in %s, but the same index, the first: %s",
            *(len(touched), catalog.path, catalog.pairs[touched[0]].prefix),
        )


def _stat_all(paths: Sequence[str]) -> list[os.stat_result]:
    """Return the status of files; ConfigError names the one for which no answer comes.

    A thread asks, because a file system that has lost its server never answers.
    """
    found: list[os.stat_result] = []
    errors: list[OSError] = []

    def ask() -> None:
        try:
            for path in paths:
                found.append(os.stat(path))
        except OSError as error:
            errors.append(error)

    thread = Thread(target=ask, daemon=True)
    thread.start()
    while thread.is_alive():
        done = len(found)
        thread.join(DEADLINE_SECONDS)
        if thread.is_alive() and len(found) == done:
            raise ConfigError(
                f"{paths[done]}: the file system has not answered for {DEADLINE_SECONDS:.0f} s; "
                f"see whether `stat` on it returns, and start again."
            )
    for error in errors:
        raise ConfigError(
            f"{paths[len(found)]}: cannot be read ({error.strerror}); copy it again."
        ) from error
    return found
