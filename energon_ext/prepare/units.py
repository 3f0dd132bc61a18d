# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs a job over its units, continues where an earlier run ended, and publishes the files.

Everything is made in a hidden folder beside the output, with an account of each finished unit, and
takes the output's name at the very end. One process makes all units, or several make a part each;
whichever of these ends last publishes.
"""

import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from energon_ext.documents.origins import ORIGINS_SUFFIX
from energon_ext.documents.token_index import META_SUFFIX, PREPARED, SUFFIXES
from energon_ext.documents.token_paths import SPLITS
from energon_ext.errors import ConfigError
from energon_ext.prepare.accounts import ACCOUNTS, Preparation, left_out, write_json
from energon_ext.prepare.claim import (
    STALE_SECONDS,
    ClaimedError,
    Part,
    claimed,
    living_parts,
    refuse_others,
)
from energon_ext.prepare.documents import Unit
from energon_ext.prepare.job import STAGING, Job, Record
from energon_ext.prepare.pool import write_units

_SECONDS_BETWEEN_LINES = 30.0


def run_units(
    job: Job,
    units: Sequence[Unit],
    output: Path,
    *,
    jobs: int = 1,
    force: bool = False,
    splits: Sequence[str] = (),
    what: str = "preparing",
) -> tuple[Record, list[str]]:
    """Prepare units that are not prepared yet.

    Args:
        output: the folder that is made or completed.
        jobs: processes.
        force: make everything anew, and replace what is there.
        splits: those that need documents.

    Returns:
        What is written to PREPARED, and what was found and done again, for people.
    """
    if force:
        _check_replaceable(output)
    made = Preparation.of(job, units, output, anew=force)
    output.parent.mkdir(parents=True, exist_ok=True)
    with claimed(output) as beat:
        refuse_others(output, None)
        _remove_link(made.work)
        if force:
            shutil.rmtree(made.work, ignore_errors=True)
        _remove_staging(made.work)
        try:
            reasons = _reasons(made, made.units)
            _make(made, reasons, jobs, beat, what)
            return _finish(made, splits), _remarks(reasons)
        finally:
            _remove_staging(made.work)
            if not (made.work / PREPARED).exists() and not made.accounts():
                shutil.rmtree(made.work, ignore_errors=True)


def run_part(
    job: Job,
    units: Sequence[Unit],
    output: Path,
    part: Part,
    *,
    jobs: int = 1,
    splits: Sequence[str] = (),
    what: str = "preparing",
) -> tuple[Record | None, list[str]]:
    """Prepare every COUNT-th unit; publish the output where no unit is missing any more.

    Parts may be prepared at the same time, by any processes that share a file system.

    Returns:
        As :func:`run_units`; None in place of the first while units of other parts are missing.
    """
    made = Preparation.of(job, units, output)
    own = list(made.units)[part.number :: part.count]
    output.parent.mkdir(parents=True, exist_ok=True)
    # A scheduler may begin a part again before the claim of the killed process has become stale.
    with claimed(part.beside(output), wait_seconds=2 * STALE_SECONDS) as beat:
        _remove_link(made.work)
        reasons = _reasons(made, own)
        if any(reason is not None for reason in reasons.values()):
            refuse_others(output, part)
            _remove_staging(made.work, own)
            _make(made, reasons, jobs, beat, what)
    # Without its own claim: of two parts that end at once, the later one finds no other at work.
    return _finish_last(made, splits), _remarks(reasons)


def _finish_last(made: Preparation, splits: Sequence[str]) -> Record | None:
    """Publish the output, unless units are missing or another process does it."""
    if not made.has_all() or living_parts(made.output):
        return None
    with contextlib.suppress(ClaimedError), claimed(made.output):
        if all(reason is None for reason in _reasons(made, made.units).values()):
            _remove_staging(made.work)
            return _finish(made, splits)
    return None


def _reasons(made: Preparation, names: Collection[str]) -> dict[str, str | None]:
    """Why each of some units is to be made, None for one that is finished."""
    known = made.finished(names)
    return {name: made.reason_to_make(name, known.get(name)) for name in names}


def _remarks(reasons: Mapping[str, str | None]) -> list[str]:
    return [f"{name}: {reason}, made again" for name, reason in reasons.items() if reason]


def _make(
    made: Preparation,
    reasons: Mapping[str, str | None],
    jobs: int,
    beat: Callable[[], None],
    what: str,
) -> None:
    """Make the units that are missing, and write an account of each."""
    missing = {name: made.units[name] for name, reason in reasons.items() if reason is not None}
    for path in [*made.work.glob("*/part-*")]:
        if path.name.partition(".")[0] in missing:
            path.unlink()
    totals = [unit.num_bytes for unit in missing.values()]
    with _progress_bar(what, sum(totals) if all(totals) else None) as bar:

        def advance(num_bytes: int) -> None:
            beat()
            bar.update(num_bytes)

        written = write_units(made.job, missing, made.work, jobs, advance)
        with contextlib.closing(written):
            for name, record in written:
                made.write_account(name, record)


def _progress_bar(what: str, num_bytes: int | None) -> Any:
    """A bar on a terminal, in a log now and then a line."""
    is_closed = sys.stderr is None or sys.stderr.closed
    seconds = 0.1 if not is_closed and sys.stderr.isatty() else _SECONDS_BETWEEN_LINES
    return tqdm(
        desc=what,
        total=num_bytes,
        unit="B",
        unit_scale=True,
        mininterval=seconds,
        miniters=1,
        delay=seconds,
        disable=is_closed,
    )


# The output -------------------------------------------------------------------------------------


def _finish(made: Preparation, splits: Sequence[str]) -> Record:
    """Make one record of all accounts, and publish the files."""
    prepared = made.summed(made.finished(made.units))
    _check_documents(prepared, splits, made)
    _publish(prepared, made)
    return prepared


def _check_documents(prepared: Record, splits: Sequence[str], made: Preparation) -> None:
    empty = [split for split in splits if not prepared["documents"].get(split)]
    if not empty:
        return
    shutil.rmtree(made.work, ignore_errors=True)  # other options are needed
    documents = sum(prepared["documents"].values())
    job = made.job
    if documents:
        raise ConfigError(
            f"None of the {documents} documents fell into {empty[0]} with --val "
            f"{job.val_fraction} and --seed {job.seed}. Change --val (0: no val split) or --seed."
        )
    too_short = sum(each["too_short"] for each in prepared["units"])
    count, first = left_out(prepared, "refused")
    refused = f", and {count} refused, the first: {first}" if count else ""
    raise ConfigError(
        f"The input has no document of at least {job.min_chars} characters ({too_short} shorter "
        f"ones{refused})."
    )


def _publish(prepared: Record, made: Preparation) -> None:
    """Give what is made the output's name, or put what was made again into the output."""
    work, output = made.work, made.output
    write_json(work / PREPARED, prepared)
    wanted = {file for record in prepared["units"] for file in record["files"]}
    is_new = made.anew or not output.exists() or not any(output.iterdir())
    for folder in (work,) if is_new else (work, output):
        for path in [*folder.glob("*/part-*")]:
            if f"{path.parent.name}/{path.name}" not in wanted:
                path.unlink()  # accounts too, which PREPARED now stands for
    shutil.rmtree(work / ACCOUNTS, ignore_errors=True)
    if is_new:
        old = output.with_name(f".{output.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        if output.exists():
            output.rename(old)
        work.rename(output)
        shutil.rmtree(old, ignore_errors=True)
        return
    for file in [*sorted(wanted), PREPARED]:
        if (work / file).is_file():
            (output / file).parent.mkdir(exist_ok=True)
            os.replace(work / file, output / file)
    shutil.rmtree(work)


def _check_replaceable(output: Path) -> None:
    """Refuse to replace a folder in which anything lies that was not prepared."""
    known = (*SUFFIXES, META_SUFFIX, ORIGINS_SUFFIX, PREPARED)  # weights end with .bin as well
    found = [output] if output.is_file() else output.rglob("*")
    for path in found:
        if not (path.is_dir() and path.name in SPLITS) and not path.name.endswith(known):
            raise ConfigError(
                f"{output}: exists and holds other things than token files; not even --force "
                f"replaces it."
            )


def _remove_link(work: Path) -> None:
    if work.is_symlink():  # what it leads to is not ours
        work.unlink()


def _remove_staging(work: Path, names: Collection[str] | None = None) -> None:
    """Remove what killed processes left of some units, or of all."""
    for path in work.glob(f"{STAGING}*"):
        if names is None or path.name.removeprefix(STAGING).rpartition(".")[0] in names:
            shutil.rmtree(path, ignore_errors=True)
