# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Cache of data computed once from a source's samples: tokens of text, or a table of lengths.

The name of an entry is a digest of everything it depends on. A folder with that name is complete:
it is prepared under another name and then renamed. If several processes, on any machines, need it
at once, one prepares it and the others wait. No collective is used.

A failure is not a result: an entry keeps what was made, and lists the samples that failed. They are
reported whenever it is opened, and tried again by the command that prepares it.
"""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.energon import SkipSample

from energon_ext.data_files import CACHE_VARIABLE
from energon_ext.errors import ConfigError, log_of
from energon_ext.prepare.accounts import (
    changed_files,
    files_of,
    has_units,
    list_refused,
    name_units,
    read_record,
    skipped_documents,
)
from energon_ext.prepare.documents import InputDocument, Unit
from energon_ext.prepare.job import FAILURES, Job, Record, has_tokens
from energon_ext.prepare.units import run_part, run_units
from energon_ext.samples.bad_samples import BadSamples
from energon_ext.storage.claim import WAIT_SECONDS, Part, retry_claimed
from energon_ext.tokens.index import PREPARED

logger = log_of(__name__)

#: The only split of a cache folder: one document per sample, in order.
SPLIT = "tokens"

#: Approximate tokenizer speed of one core, and the longest work that starts automatically.
BYTES_PER_SECOND = 2_500_000
MAX_SECONDS = 60.0

#: Most kinds of failures that one line names.
_MAX_KINDS = 5

#: Failed samples that are tried again together, and the most of a unit that raised SkipSample.
_TRIED_TOGETHER, _TRIED_SKIPPED = 32, 256


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
    advice: str = ""  # if no sample can be used
    judges: Sequence[BadSamples] = ()  # that decide about the errors of samples

    @property
    def is_complete(self) -> bool:
        """True if the entry is complete."""
        # A network file system may cache that a file is missing, but not a listing.
        if self.folder.name not in _names_in(self.folder.parent):
            return False
        prepared = read_record(self.folder / PREPARED)
        if prepared is None:
            return True  # damaged, which open() reports
        if self.grows and not has_units(prepared, self.units):
            return False
        found = _names_in(self.folder / SPLIT)
        return all(file.removeprefix(f"{SPLIT}/") in found for file in files_of(prepared))

    def open(self) -> Any:
        """Open the entry, which has at least one document per sample; log what it lacks.

        Raises:
            ConfigError: it is damaged, and was removed if possible; or every sample had failed.
        """
        prepared = read_record(self.folder / PREPARED)
        try:
            if prepared is None:
                raise ConfigError(f"{self.folder / PREPARED}: damaged.")
            content = self.open_folder(self.folder)
        except ConfigError as error:
            raise ConfigError(f"{error} {self.discard_damaged()}") from error
        if len(content) != self.count and len(content) != _num_documents(prepared):
            raise ConfigError(
                f"{self.folder}: contains {len(content)} documents, but {self.name} has "
                f"{self.count} samples. Remove it to prepare it again."
            )
        self._report_failures(prepared)
        return content

    def discard_damaged(self) -> str:
        """Remove what is damaged, so that it is made again; return a sentence about it."""
        prepared = read_record(self.folder / PREPARED)
        if prepared is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            return f"{self.folder} was removed, and the next start makes it again."
        changed = changed_files(self.folder, prepared)
        try:
            for file in changed:
                (self.folder / file).unlink(missing_ok=True)
        except OSError:
            changed = []
        if not changed:
            return f"Remove {self.folder} to prepare it again."
        return (
            f"{len(changed)} of the files in {self.folder} were damaged and have been removed, the "
            f"first: {changed[0]}; the next start makes them again."
        )

    def _report_failures(self, prepared: Record) -> None:
        """Log how many samples an entry lacks, and why; ConfigError if it lacks all.

        That entry is removed: it is of no use, and corrected code of the same name would find it.
        """
        count, _ = skipped_documents(prepared, "refused")
        listed = [each.rstrip(".") for each in list_refused(prepared)]
        more = f"; and {len(listed) - _MAX_KINDS} more kinds" * (len(listed) > _MAX_KINDS)
        kinds = (": " if len(listed) > 1 else ", ") + "; ".join(listed[:_MAX_KINDS]) + more
        if count and not any(prepared["tokens"].values()):
            shutil.rmtree(self.folder, ignore_errors=True)
            raise ConfigError(
                f"{self.name}: none of its {self.count:,} samples could be {self.verb}{kinds}. "
                f"{self.advice}".rstrip()
            )
        if count:
            logger.warning(
                "%s: %d of %d samples cannot be %s%s. They are left out; `%s` tries them again.",
                *(self.name, count, self.count, self.verb, kinds, self.command()),
            )


def _num_documents(prepared: Record) -> int | None:
    """Return the number of documents written, as conversations may become several."""
    documents = prepared.get("documents")
    return documents.get(SPLIT) if isinstance(documents, dict) else None


def _names_in(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except OSError:
        return set()


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


def _run(run: Callable[..., Any], cached: Cached, *part: Part, **options: Any) -> None:
    """Call ``run_units`` or ``run_part``; report write errors by source."""
    title = f"{cached.name} {cached.verb}"
    try:
        prepared, _ = run(cached.job, cached.units, cached.folder, *part, title=title, **options)
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


# Failures ---------------------------------------------------------------------------------------


def try_failures_again(cached: Cached, jobs: int = 1, part: Part | None = None) -> None:
    """Prepare the parts of a complete entry again in which a sample that had failed no longer does.

    A failure may have a passing reason: a package was missing, or a store did not respond.
    """
    for bad in cached.judges:
        bad.has_worked = True  # what failed may be the first ten samples that are tried
    prepared = read_record(cached.folder / PREPARED) or {"units": []}
    units = name_units(cached.units)
    names = list(units) if part is None else part.of(units)
    failed = {unit["name"] for unit in prepared["units"] if unit["refused"]["count"]}
    again = [name for name in names if name in failed and _works_now(cached, name, units[name])]
    if again and part is None:
        _run(run_units, cached, jobs=jobs, again=again)
    elif again and part is not None:
        _run(run_part, cached, part, jobs=jobs, again=again)


def _works_now(cached: Cached, name: str, unit: Unit) -> bool:
    """Return True if any sample of a unit that failed can now be used."""
    assert unit.pick is not None, "the units of a cache are samples"
    try:
        places = _failed_places(cached.folder / SPLIT / f"{name}{FAILURES}")
    except FileNotFoundError:  # removed, so nothing says which they were
        return True
    for begin in range(0, len(places), _TRIED_TOGETHER):
        picked = unit.pick(places[begin : begin + _TRIED_TOGETHER])
        documents = [item for item in picked if isinstance(item, InputDocument)]
        if any(map(has_tokens, cached.job.encode(documents))):
            return True
    return False


def _failed_places(file: Path) -> list[int]:
    """Return the places of the samples to try again: those skipped on request only here and there.

    SkipSample is rarely raised for a passing reason, and may be raised for a large share.
    """
    failures = [json.loads(line) for line in file.read_text().splitlines()]
    asked = [each["place"] for each in failures if f": {SkipSample.__name__}" in each["reason"]]
    others = {each["place"] for each in failures}.difference(asked)
    return sorted(others.union(asked[:: -(-len(asked) // _TRIED_SKIPPED) or 1]))
