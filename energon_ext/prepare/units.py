# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs a job on its units, continues where an earlier run stopped, and publishes the files.

Everything is prepared in a hidden folder next to the output, with an account of each finished unit.
Publishing renames this folder to the output. One process prepares all units, or several prepare one
part each; the last of them to finish publishes.
"""

import contextlib
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from energon_ext.errors import ConfigError
from energon_ext.prepare.accounts import (
    ACCOUNTS,
    Preparation,
    name_units,
    skipped_documents,
    units_read,
    write_record,
)
from energon_ext.prepare.documents import Unit
from energon_ext.prepare.job import STAGING, Job, Record
from energon_ext.prepare.pool import write_units
from energon_ext.prepare.shuffle import passes_of
from energon_ext.progress import progress_bar
from energon_ext.storage.claim import (
    STALE_SECONDS,
    ClaimedError,
    Part,
    check_unclaimed,
    claim,
    living_parts,
)
from energon_ext.storage.whole_file import fsync, move_files
from energon_ext.tokens.index import META_SUFFIX, PREPARED, SUFFIXES
from energon_ext.tokens.origins import ORIGINS_SUFFIX
from energon_ext.tokens.splits import SPLITS


def run_units(
    job: Job,
    units: Sequence[Unit],
    output: Path,
    *,
    jobs: int = 1,
    force: bool = False,
    splits: Sequence[str] = (),
    title: str = "preparing",
    again: Collection[str] = (),
) -> tuple[Record, list[str]]:
    """Prepare the units that are not prepared yet.

    Args:
        output: the folder to create or complete.
        jobs: number of processes.
        force: prepare everything again, and replace the output.
        splits: splits that must not be empty.
        title: label of the progress bar.
        again: names of units to prepare again, though they are complete.

    Returns:
        The content of PREPARED, and a message per unit that was prepared again.
    """
    if force:
        _check_replaceable(output)
    preparation = Preparation(
        job=job, units=name_units(units), output=output, force=force, title=title, again=again
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    with claim(output) as beat:
        check_unclaimed(output, None)
        _remove_link(preparation.work)
        if force:
            shutil.rmtree(preparation.work, ignore_errors=True)
        _remove_staging(preparation.work)
        try:
            remarks = []
            for last in passes_of(preparation):
                reasons = last.reasons(last.units)
                _prepare(last, reasons, jobs, beat)
                remarks += _remarks(reasons)
            return _finish(last, job, splits), remarks
        finally:
            _remove_staging(preparation.work)
            if not (preparation.work / PREPARED).exists() and not preparation.accounts():
                shutil.rmtree(preparation.work, ignore_errors=True)


def run_part(
    job: Job,
    units: Sequence[Unit],
    output: Path,
    part: Part,
    *,
    jobs: int = 1,
    splits: Sequence[str] = (),
    title: str = "preparing",
    again: Collection[str] = (),
) -> tuple[Record | None, list[str]]:
    """Prepare one part of the units; publish the output if no other unit is missing.

    Parts may be prepared at the same time, by any processes that share a file system.

    Returns:
        Like :func:`run_units`, but None as the content while units of other parts are missing.
    """
    preparation = Preparation(
        job=job, units=name_units(units), output=output, force=False, title=title, again=again
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    remarks = []
    # A scheduler may restart a part before the claim of its killed process is stale.
    with claim(part.claimed_path(output), wait_seconds=2 * STALE_SECONDS) as beat:
        _remove_link(preparation.work)
        for last in passes_of(preparation):
            names = part.of(last.units)
            reasons = last.reasons(names)
            if any(reason is not None for reason in reasons.values()):
                check_unclaimed(output, part)
                _remove_staging(last.work, names)
                _prepare(last, reasons, jobs, beat)
            remarks += _remarks(reasons)
    # After releasing the claim: if two parts end together, the later one sees no other claim.
    return _finish_last(last, job, splits), remarks


def _finish_last(last: Preparation, job: Job, splits: Sequence[str]) -> Record | None:
    """Publish the output unless units are missing or another process publishes it."""
    if not last.is_last or not last.has_all() or living_parts(last.output):
        return None
    with contextlib.suppress(ClaimedError), claim(last.output):
        if last.is_complete():
            _remove_staging(last.work)
            return _finish(last, job, splits)
    return None


def _remarks(reasons: Mapping[str, str | None]) -> list[str]:
    return [f"{name}: {reason}, prepared again" for name, reason in reasons.items() if reason]


def _prepare(
    preparation: Preparation,
    reasons: Mapping[str, str | None],
    jobs: int,
    beat: Callable[[], None],
) -> None:
    """Prepare the missing units, and write an account of each."""
    units = preparation.units
    missing = {name: units[name] for name, reason in reasons.items() if reason is not None}
    if missing:
        preparation.job.check()
    for path in [*preparation.work.glob("*/part-*")]:
        if path.name.partition(".")[0] in missing:
            path.unlink()
    totals = [unit.num_bytes for unit in missing.values()]
    with progress_bar(preparation.title, sum(totals) if all(totals) else None) as bar:

        def advance(num_bytes: int) -> None:
            beat()
            bar.update(num_bytes)

        written = write_units(preparation.job, missing, preparation.work, jobs, advance)
        with contextlib.closing(written):
            for name, record in written:
                preparation.write_account(name, record)


# The output -------------------------------------------------------------------------------------


def _finish(last: Preparation, job: Job, splits: Sequence[str]) -> Record:
    """Merge all accounts of the last pass, and publish its files."""
    prepared = last.merge(last.finished_units(last.units))
    if empty := [split for split in splits if not prepared["documents"].get(split)]:
        shutil.rmtree(last.work, ignore_errors=True)  # it would conflict with corrected options
        raise _empty_split(prepared, empty, job)
    _publish(prepared, last)
    return prepared


def _empty_split(prepared: Record, empty: Sequence[str], job: Job) -> ConfigError:
    documents = sum(prepared["documents"].values())
    if documents:
        return ConfigError(
            f"None of the {documents} documents is in {empty[0]} with --val {job.val_fraction} "
            f"and --seed {job.seed}. Change --val (0: no val split) or --seed."
        )
    too_short = sum(unit["too_short"] for unit in units_read(prepared))
    count, first = skipped_documents(prepared, "refused")
    if count and not too_short:
        return ConfigError(f"None of the {count} documents can be used, the first: {first}")
    refused = f", {count} refused, the first: {first}" if count else ""
    return ConfigError(
        f"The input has no document of at least {job.min_chars} characters ({too_short} shorter"
        f"{refused})."
    )


def _publish(prepared: Record, preparation: Preparation) -> None:
    """Rename the work folder to the output, or move its files into an existing output."""
    work, output = preparation.work, preparation.output
    write_record(work / PREPARED, prepared)
    wanted = {file for record in prepared["units"] for file in record["files"]}
    is_new = preparation.force or not output.exists() or not any(output.iterdir())
    for folder in (work,) if is_new else (work, output):
        for path in [*folder.glob("*/part-*")]:
            if f"{path.parent.name}/{path.name}" not in wanted:
                path.unlink()  # also accounts, which PREPARED replaces
    shutil.rmtree(work / ACCOUNTS, ignore_errors=True)
    if is_new:
        old = output.with_name(f".{output.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if output.exists():
            output.rename(old)
        work.rename(output)
        fsync(output.parent)
        shutil.rmtree(old, ignore_errors=True)
        return
    move_files((file for file in sorted(wanted) if (work / file).is_file()), work, output)
    move_files([PREPARED], work, output)
    shutil.rmtree(work)


def _check_replaceable(output: Path) -> None:
    """Raise ConfigError if a folder contains anything that was not prepared."""
    # Weights also end with .bin, columns with .npy.
    known = (*SUFFIXES, META_SUFFIX, ORIGINS_SUFFIX, PREPARED, ".npy")
    for path in [output] if output.is_file() else output.rglob("*"):
        if not (path.is_dir() and path.name in SPLITS) and not path.name.endswith(known):
            raise ConfigError(
                f"{output}: contains files other than token files, so --force does not replace it."
            )


def _remove_link(work: Path) -> None:
    if work.is_symlink():  # never write to or remove its target
        work.unlink()


def _remove_staging(work: Path, names: Collection[str] | None = None) -> None:
    """Remove leftovers of killed processes, for some units or for all."""
    for path in work.glob(f"{STAGING}*"):
        if names is None or path.name.removeprefix(STAGING).rpartition(".")[0] in names:
            shutil.rmtree(path, ignore_errors=True)
