# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Cache of what is made once of a source's samples: tokens of text, or a table of lengths.

It is found by its name, a digest of all that it depends on. A folder of that name is complete: it
is made beside, under another name, and renamed. Several processes may ask for it at once, on
several machines; one of them makes it and the others wait. No collective is used.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_ext.data_files import CACHE_VARIABLE
from energon_ext.errors import ConfigError, log_of
from energon_ext.prepare.accounts import is_prepared, left_out
from energon_ext.prepare.claim import ClaimedError, Part
from energon_ext.prepare.documents import Unit
from energon_ext.prepare.job import Job, Record
from energon_ext.prepare.units import run_part, run_units

logger = log_of(__name__)

DEFAULT_NAME = ".energon_ext_cache"

#: The one split of a cache folder: one document for each sample, in their order.
SPLIT = "tokens"

#: What one core tokenizes in a second, about, and how much is tokenized without being asked for.
BYTES_PER_SECOND = 2_500_000
MOST_SECONDS = 60.0

#: How long a process waits for one that is at work; collectives of NCCL end after 600 s.
WAIT_SECONDS = 480.0
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Cached:
    """One entry of the cache, for the samples of one source."""

    name: str  # of the source, for messages
    folder: Path  # where it is, or will be
    job: Job
    units: Sequence[Unit]
    count: int  # of the samples
    seconds: float | None  # that one core takes for it, about; None where that is not known
    open_folder: Callable[[Path], Any]
    verb: str  # such as "tokenized"
    command: Callable[[], str]  # for people, where it takes long
    grows: bool = False  # units that the source got since are added

    @property
    def is_there(self) -> bool:
        """True if it is made."""
        try:  # a listing is newer than what a network file system remembers of a missing file
            is_made = self.folder.name in os.listdir(self.folder.parent)
        except OSError:
            return False
        return is_made and (not self.grows or is_prepared(self.folder, self.units))

    def open(self) -> Any:
        """The content, with an entry for each sample."""
        try:
            found = self.open_folder(self.folder)
        except ConfigError as error:
            raise ConfigError(f"{error} Remove {self.folder}, and it is made again.") from error
        if len(found) != self.count:
            raise ConfigError(
                f"{self.folder}: holds {len(found)} documents of the {self.count} samples of "
                f"{self.name}. Remove it, and it is made again."
            )
        return found


def cache_folder(beside: Path, name: str, digest: str) -> Path:
    """Folder of a source, whose name is in it for people: where the environment says, or beside."""
    root = Path(os.environ.get(CACHE_VARIABLE) or beside / DEFAULT_NAME)
    words = re.sub(r"[^\w.-]+", "-", name)[-60:].strip("-.")
    return root / f"{words}-{digest[:24]}"


def ensure_made(wanted: Sequence[Cached]) -> None:
    """Make what is missing; ConfigError with the command that does where it takes long."""
    by_folder = {each.folder: each for each in wanted if not each.is_there}
    missing = list(by_folder.values())
    if not missing:
        return
    known = [each.seconds for each in missing if each.seconds is not None]
    if sum(known) > MOST_SECONDS or len(known) < len(missing):
        names = missing[0].name + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        work = f"some {sum(known):,.0f} s of work" if known else "not local"
        raise ConfigError(
            f"{names}: samples that are not {missing[0].verb} yet ({work}). Run "
            f"`{missing[0].command()}` first; {CACHE_VARIABLE} names the folder where the result "
            f"is kept."
        )
    for each in missing:
        make(each)


def make(cached: Cached, jobs: int = 1, wait_seconds: float = WAIT_SECONDS) -> None:
    """Make what is missing of a source, or wait until another process has made it."""
    deadline = time.monotonic() + wait_seconds
    while not cached.is_there:
        try:
            with _room_for(cached):
                _tell(cached, run_units(*_what(cached), jobs=jobs, what=_title(cached))[0])
        except ClaimedError as error:
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"{cached.name}: {error} It has not ended in {wait_seconds:.0f} s; wait for "
                    f"it, or end it, and start again."
                ) from error
            time.sleep(_LOOK_SECONDS)


def make_part(cached: Cached, part: Part, jobs: int) -> None:
    """Make a part of what is missing of a source; other processes make the other parts."""
    if not cached.is_there:
        with _room_for(cached):
            made, _ = run_part(*_what(cached), part, jobs=jobs, what=_title(cached))
        if made is not None:
            _tell(cached, made)


def _what(cached: Cached) -> tuple[Job, Sequence[Unit], Path]:
    return cached.job, cached.units, cached.folder


def _title(cached: Cached) -> str:
    return f"{cached.name} is {cached.verb}"


@contextlib.contextmanager
def _room_for(cached: Cached) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{cached.name}: {cached.folder.parent} cannot be written to "
            f"({error.strerror or error}); set {CACHE_VARIABLE} to a folder that can be "
            f"written and has room."
        ) from error


def _tell(cached: Cached, prepared: Record) -> None:
    """Warn of samples that were refused."""
    count, first = left_out(prepared, "refused")
    if count:
        logger.warning(
            "%s: %d of %d samples cannot be %s, the first: %s",
            *(cached.name, count, cached.count, cached.verb, first),
        )
