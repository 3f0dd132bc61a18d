# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Tests at a start whether the files of a source are those of its catalog.

Each process asks the file system about its share of the files, so that together they ask about each
once: a file that was cut off or replaced ends the run at its start, and not at the step that reads
it. Only names, sizes and times are asked for. Of a pair with other times, or without known ones,
the index is read again, and the pair is accepted if that is the same: copying and touching files
changes nothing. The tokens themselves are not compared.
"""

import os
from collections.abc import Callable, Sequence
from threading import Thread
from typing import TypeVar

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

_Answer = TypeVar("_Answer")


def check_unchanged(catalog: Catalog, share: Share) -> None:
    """Test the files of one process's share; ConfigError names a file that has changed."""
    numbers = range(share[0], len(catalog.pairs), share[1])
    suffixes = SUFFIXES if len(numbers) <= _BOTH_FILES else (".bin",)
    paths = [catalog.pairs[number].prefix + suffix for number in numbers for suffix in suffixes]
    answers = iter(_ask_all(paths, lambda path, beat: os.stat(path)))
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
        if tuple(times) != stamp.times[: len(times)]:
            touched.append(number)
    _check_content(catalog, touched)


def _check_content(catalog: Catalog, touched: Sequence[int]) -> None:
    """Raise ConfigError if the index of a pair with other times has another content."""
    paths = [catalog.pairs[number].prefix + ".idx" for number in touched]
    for number, digest in zip(touched, _ask_all(paths, digest_of)):
        check_digest(catalog, number, digest)
    if known := [number for number in touched if catalog.stamps[number].times]:
        logger.info(
            "%d pairs have other times than in %s, but the same index, the first: %s",
            *(len(known), catalog.path, catalog.pairs[known[0]].prefix),
        )


def check_digest(catalog: Catalog, number: int, digest: str) -> None:
    """Raise ConfigError unless a digest is that of the index of a pair in a catalog."""
    if digest != catalog.stamps[number].digest:
        raise ConfigError(
            f"{catalog.pairs[number].prefix}.idx: has changed since {catalog.path} was written; "
            f"copy it again, or {catalog.advice} if that is intended."
        )


def _ask_all(
    paths: Sequence[str], ask: Callable[[str, Callable[[], None]], _Answer]
) -> list[_Answer]:
    """Return the answers about files; ConfigError names the one for which no answer comes.

    A thread asks, because a file system that has lost its server never answers.

    Args:
        ask: gets a path, and a function to call while the answer takes long.
    """
    found: list[_Answer] = []
    errors: list[Exception] = []
    beats = 0

    def beat() -> None:
        nonlocal beats
        beats += 1

    def ask_each() -> None:
        try:
            for path in paths:
                found.append(ask(path, beat))
                beat()
        except (OSError, ConfigError) as error:
            errors.append(error)

    thread = Thread(target=ask_each, daemon=True)
    thread.start()
    while thread.is_alive():
        before = beats
        thread.join(DEADLINE_SECONDS)
        if thread.is_alive() and beats == before:
            raise ConfigError(
                f"{paths[len(found)]}: the file system has not answered for "
                f"{DEADLINE_SECONDS:.0f} s; see whether `stat` on it returns, and start again."
            )
    for error in errors:
        if not isinstance(error, OSError):
            raise error
        raise ConfigError(
            f"{paths[len(found)]}: cannot be read ({error.strerror}); copy it again."
        ) from error
    return found
