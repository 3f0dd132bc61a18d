# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Cache of data computed once from a source's samples: tokens of text, or a table of lengths.

The name of an entry is a digest of everything it depends on. A folder with that name is complete:
it is prepared under another name and then renamed. If several processes, on any machines, need it
at once, one prepares it and the others wait. No collective is used.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_ext.data_files import CACHE_VARIABLE
from energon_ext.errors import ConfigError, log_of
from energon_ext.prepare.accounts import is_prepared, read_record, skipped_documents
from energon_ext.prepare.documents import Unit
from energon_ext.prepare.job import Job
from energon_ext.prepare.units import run_part, run_units
from energon_ext.storage.claim import WAIT_SECONDS, Part, retry_claimed
from energon_ext.tokens.index import PREPARED

logger = log_of(__name__)

#: The only split of a cache folder: one document per sample, in order.
SPLIT = "tokens"

#: Approximate tokenizer speed of one core, and the longest work that starts automatically.
BYTES_PER_SECOND = 2_500_000
MAX_SECONDS = 60.0


@dataclass(frozen=True)
class Cached:
    """An entry of the cache, for the samples of one source."""

    name: str  # name of the source, for messages
    folder: Path
    job: Job
    units: Sequence[Unit]
    count: int  # number of samples
    seconds: float | None  # approximate time on one core, None if unknown
    open_folder: Callable[[Path], Any]
    verb: str  # past participle, such as "tokenized"
    command: Callable[[], str]  # command line that prepares the entry
    grows: bool = False  # True: units added to the source later are added to the entry

    @property
    def is_complete(self) -> bool:
        """True if the entry is complete."""
        try:  # a network file system may cache that a file is missing, but not a listing
            exists = self.folder.name in os.listdir(self.folder.parent)
        except OSError:
            return False
        return exists and (not self.grows or is_prepared(self.folder, self.units))

    def open(self) -> Any:
        """Open the entry, which has at least one document per sample."""
        try:
            content = self.open_folder(self.folder)
        except ConfigError as error:
            raise ConfigError(f"{error} Remove {self.folder} to prepare it again.") from error
        if len(content) != self.count and len(content) != self._num_documents():
            raise ConfigError(
                f"{self.folder}: contains {len(content)} documents, but {self.name} has "
                f"{self.count} samples. Remove it to prepare it again."
            )
        return content

    def _num_documents(self) -> int | None:
        """Return the number of documents written, as conversations may become several."""
        prepared = read_record(self.folder / PREPARED) or {}
        documents = prepared.get("documents")
        return documents.get(SPLIT) if isinstance(documents, dict) else None


def ensure_prepared(wanted: Sequence[Cached]) -> None:
    """Prepare missing entries; if that takes long, raise ConfigError with the command to run."""
    missing = list({item.folder: item for item in wanted if not item.is_complete}.values())
    if not missing:
        return
    known = [cached.seconds for cached in missing if cached.seconds is not None]
    if sum(known) > MAX_SECONDS or len(known) < len(missing):
        names = missing[0].name + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
        work = f"about {sum(known):,.0f} s of work" if known else "not local"
        raise ConfigError(
            f"{names}: samples have not been {missing[0].verb} yet ({work}). Run "
            f"`{missing[0].command()}` first; {CACHE_VARIABLE} sets the folder for the result."
        )
    for cached in missing:
        prepare_entry(cached)


def prepare_entry(cached: Cached, jobs: int = 1, wait_seconds: float = WAIT_SECONDS) -> None:
    """Prepare an entry, or wait until another process has prepared it."""

    def prepare() -> None:
        while not cached.is_complete:
            _run(run_units, cached, jobs=jobs)

    retry_claimed(prepare, wait_seconds)


def prepare_part_of_entry(cached: Cached, part: Part, jobs: int) -> None:
    """Prepare one part of an entry; other processes prepare the other parts."""
    if not cached.is_complete:
        _run(run_part, cached, part, jobs=jobs)


def _run(run: Callable[..., Any], cached: Cached, *part: Part, jobs: int) -> None:
    """Call ``run_units`` or ``run_part``; report write errors and refused samples by source."""
    title = f"{cached.name} {cached.verb}"
    try:
        prepared, _ = run(cached.job, cached.units, cached.folder, *part, jobs=jobs, title=title)
    except OSError as error:
        raise ConfigError(
            f"{cached.name}: {cached.folder.parent} cannot be written to "
            f"({error.strerror or error}); set {CACHE_VARIABLE} to a writable folder with enough "
            f"free space."
        ) from error
    if prepared is None:
        return
    for note, number in sorted(prepared["notes"].items()):
        logger.info("%s: %s: %d.", cached.name, note, number)
    count, first = skipped_documents(prepared, "refused")
    if count:
        logger.warning(
            "%s: %d of %d samples cannot be %s, the first: %s",
            *(cached.name, count, cached.count, cached.verb, first),
        )
