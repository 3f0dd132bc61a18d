# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs a job over its units, continues where an earlier run ended, and keeps account of the files.

Everything is made in a hidden folder beside the output, with an account of the finished units, and
takes the output's name at the very end.
"""

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tqdm import tqdm

from energon_ext.data_files import read_data
from energon_ext.documents.origins import ORIGINS_SUFFIX
from energon_ext.documents.token_index import META_SUFFIX, PREPARED, SUFFIXES
from energon_ext.documents.token_paths import SPLITS
from energon_ext.errors import ConfigError
from energon_ext.prepare.claim import claimed
from energon_ext.prepare.documents import Unit
from energon_ext.prepare.job import STAGING, Job, Record, sha256
from energon_ext.prepare.pool import write_units
from energon_ext.state.files import write_file

MOST_RECORD_BYTES = 2**30
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

    Raises:
        ConfigError: the output is of other options or other input, or a unit cannot be read.
        ClaimedError: another process prepares the output.
        WorkerError: a worker was killed.
    """
    if force:
        _check_replaceable(output)
    work = output.with_name(f".{output.name}.unfinished")
    if work.is_symlink():  # what it leads to is not ours
        work.unlink()
    width = max(5, len(str(len(units) - 1)))
    named = {f"part-{number:0{width}}": unit for number, unit in enumerate(units)}
    output.parent.mkdir(parents=True, exist_ok=True)
    with claimed(output) as beat:
        if force:
            shutil.rmtree(work, ignore_errors=True)
        _remove_staging(work)
        saved = [] if force else _saved(output, work, job)
        known = {unit["name"]: unit for each in saved for unit in each["units"]}
        reasons = {
            name: _reason_to_make(known.get(name), unit, output, work)
            for name, unit in named.items()
        }
        missing = {name: named[name] for name, reason in reasons.items() if reason is not None}
        done = {name: known[name] for name in named if name not in missing}
        try:
            for name, record in _made(job, missing, work, jobs, beat, what):
                done[name] = {"name": name, "unit": named[name].description, **record}
                _write_json(work / PREPARED, _prepared(job, done))
            prepared = _prepared(job, done)
            _check_documents(prepared, splits, job, work)
            _publish(prepared, output, work, anew=force)
        finally:
            _remove_staging(work)
            if not (work / PREPARED).exists():
                shutil.rmtree(work, ignore_errors=True)
    remarks = [f"{name}: {reason}, made again" for name, reason in reasons.items() if reason]
    return prepared, remarks


def is_prepared(output: Path, units: Sequence[Unit]) -> bool:
    """Whether these units are what a folder holds."""
    prepared = _read_json(output / PREPARED) or {"units": []}
    return [unit["unit"] for unit in prepared["units"]] == [
        _plain(unit.description) for unit in units
    ]


def check_files(output: Path) -> int:
    """Compare all files of a prepared folder with their hashes; the number of files.

    Raises:
        ConfigError: a file is missing or changed, or nothing was prepared there.
    """
    prepared = _read_json(output / PREPARED)
    if prepared is None:
        raise ConfigError(f"{output}: no {PREPARED} in it; nothing to check.")
    expected = {
        file: known["sha256"] for unit in prepared["units"] for file, known in unit["files"].items()
    }
    wrong = [
        file
        for file, digest in expected.items()
        if not (output / file).is_file() or sha256(output / file) != digest
    ]
    if wrong:
        raise ConfigError(
            f"{output}: {len(wrong)} of {len(expected)} files are missing or changed, the first: "
            f"{wrong[0]}. Remove them, and run the command again that made them."
        )
    return len(expected)


def left_out(prepared: Record, kind: str) -> tuple[int, str]:
    """How many documents were ``unreadable`` or ``refused``, and why the first one was."""
    found = [each[kind] for each in prepared["units"] if each[kind]["count"]]
    return sum(each["count"] for each in found), found[0]["first"] if found else ""


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


def _made(
    job: Job,
    missing: Mapping[str, Unit],
    work: Path,
    jobs: int,
    beat: Callable[[], None],
    what: str,
) -> Iterator[tuple[str, Record]]:
    """The records of the units that are missing, once they are written."""
    for name in missing:
        for path in [*work.glob(f"*/{name}.*")]:
            path.unlink()
    totals = [unit.num_bytes for unit in missing.values()]
    with _progress_bar(what, sum(totals) if all(totals) else None) as bar:

        def advance(num_bytes: int) -> None:
            beat()
            bar.update(num_bytes)

        with closing(write_units(job, missing, work, jobs, advance)) as written:
            yield from written


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


# Continuing -------------------------------------------------------------------------------------


def _saved(output: Path, work: Path, job: Job) -> list[Record]:
    """What earlier runs made; ConfigError where they had other options."""
    found = [_read_json(folder / PREPARED) for folder in (output, work)]
    saved = [each for each in found if each is not None]
    if output.exists() and not saved and (output.is_file() or any(output.iterdir())):
        raise ConfigError(f"{output}: exists. Replace it with --force.")
    options = _plain(job.options)
    for each in saved:
        for option in sorted({*options, *each["options"]}):
            before, now = each["options"].get(option), options.get(option)
            if before != now:
                raise ConfigError(
                    f"{output}: begun with {option} {json.dumps(before)}, now {json.dumps(now)}; "
                    f"give the same, another folder, or --force to make all of it anew."
                )
    return saved


def _reason_to_make(record: Record | None, unit: Unit, output: Path, work: Path) -> str | None:
    """Why a unit is to be made; empty where it never was, None where its files are whole."""
    if record is None:
        return ""
    if record["unit"] != _plain(unit.description):
        return f"{record['unit']['path']} has changed"
    for file, expected in record["files"].items():
        found = next((p for p in (work / file, output / file) if p.is_file()), None)
        if found is None:
            return f"{file} is missing"
        if (num_bytes := found.stat().st_size) != expected["bytes"]:
            return f"{file} has {num_bytes} bytes in place of {expected['bytes']}"
    return None


def _plain(content: Any) -> Any:
    """JSON values as they come back from a file."""
    return json.loads(json.dumps(content))


# The output -------------------------------------------------------------------------------------


def _prepared(job: Job, done: Mapping[str, Record]) -> Record:
    """What PREPARED holds, of the units that are done."""
    units = [done[name] for name in sorted(done)]
    totals = {
        name: sum((Counter[str](unit[name]) for unit in units), Counter[str]())
        for name in ("documents", "characters", "tokens")
    }
    num_bytes = sum(file["bytes"] for unit in units for file in unit["files"].values())
    return {"options": dict(job.options), **totals, "bytes": num_bytes, "units": units}


def _check_documents(prepared: Record, splits: Sequence[str], job: Job, work: Path) -> None:
    empty = [split for split in splits if not prepared["documents"].get(split)]
    if not empty:
        return
    shutil.rmtree(work, ignore_errors=True)  # other options are needed
    documents = sum(prepared["documents"].values())
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


def _publish(prepared: Record, output: Path, work: Path, anew: bool) -> None:
    """Give what is made the output's name, or put what was made again into the output."""
    _write_json(work / PREPARED, prepared)
    wanted = {file for record in prepared["units"] for file in record["files"]}
    is_new = anew or not output.exists() or not any(output.iterdir())
    for folder in (work,) if is_new else (work, output):
        for path in [*folder.glob("*/part-*")]:
            if f"{path.parent.name}/{path.name}" not in wanted:
                path.unlink()
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


def _remove_staging(work: Path) -> None:
    for path in work.glob(f"{STAGING}*"):
        shutil.rmtree(path, ignore_errors=True)


def _write_json(path: Path, content: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(content, indent=1).encode() + b"\n")


def _read_json(path: Path) -> Record | None:
    """The content of a file that was written here; None where there is none or it is damaged."""
    try:
        content = json.loads(read_data(path, MOST_RECORD_BYTES))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return content if isinstance(content, dict) else None
