# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs a job over its units, continues where an earlier run ended, and keeps account of the files.

Everything is made in a hidden folder beside the output, with a record for each finished unit, and
takes the output's name at the very end.
"""

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from energon_ext.documents.origins import ORIGINS_SUFFIX
from energon_ext.documents.token_index import META_SUFFIX
from energon_ext.documents.token_paths import SPLITS, SUFFIXES
from energon_ext.errors import ConfigError
from energon_ext.prepare.claim import Claim
from energon_ext.prepare.documents import Unit
from energon_ext.prepare.job import STAGING, Job, sha256
from energon_ext.prepare.pool import write_units
from energon_ext.prepare.progress import Progress

PREPARED = "prepared.json"
_RECORDS = "records"
_VERSION = 1

#: JSON values of the file PREPARED, or of one unit in it.
Record = dict[str, Any]


def run_units(
    job: Job,
    units: Sequence[Unit],
    output: Path,
    *,
    claim: Claim,
    jobs: int = 1,
    force: bool = False,
    splits: Sequence[str] = (),
    what: str = "preparing",
) -> tuple[Record, list[str]]:
    """Prepare units that are not prepared yet.

    Args:
        output: the folder that is made or completed.
        claim: of the output; it is touched while the run lasts.
        jobs: processes.
        force: make everything anew, and replace what is there.
        splits: those that need documents.

    Returns:
        What is written to PREPARED, and what was found and done again, for people.

    Raises:
        ConfigError: the output is of other options or other input, or a unit cannot be read.
        WorkerError: a worker was killed.
    """
    work = _work_folder(output)
    if force:
        shutil.rmtree(work, ignore_errors=True)
    _remove_staging(work)
    known: dict[str, Record] = {}
    if not force:
        known = {**_finished(output), **_unfinished(work)}
        _check_same(output, known, job)
    records: dict[str, Record] = {}
    missing: list[tuple[str, Unit]] = []
    remarks = []
    described = {name: _plain(unit.describe()) for name, unit in zip(_names(len(units)), units)}
    for (name, description), unit in zip(described.items(), units):
        reason = _to_be_made(known.get(name), description, output, work)
        if reason is None:
            records[name] = known[name]
            continue
        missing.append((name, unit))
        if reason:
            remarks.append(f"{name}: {reason}, made again")
    try:
        for name, record in _made(job, missing, work, jobs, claim, what):
            own = {"name": name, "unit": described[name], "options": dict(job.options)}
            records[name] = {**own, **record}
            _write_json(work / _RECORDS / f"{name}.json", records[name])
        prepared = _prepared(job, [records[name] for name in described])
        _check_documents(prepared, splits, job, work)
        _publish(prepared, output, work, anew=force)
    finally:
        _remove_staging(work)
        if work.is_dir() and not _unfinished(work):
            shutil.rmtree(work)
    return prepared, remarks


def check_files(output: Path) -> int:
    """Compare all files of a prepared folder with their hashes; the number of files.

    Raises:
        ConfigError: a file is missing or changed, or nothing was prepared there.
    """
    finished = _finished(output)
    if not finished:
        raise ConfigError(f"{output}: no {PREPARED} in it; nothing to check.")
    wrong, count = [], 0
    for record in finished.values():
        for file, expected in record["files"].items():
            path = output / file
            count += 1
            if not path.is_file() or sha256(path) != expected["sha256"]:
                wrong.append(file)
    if wrong:
        raise ConfigError(
            f"{output}: {len(wrong)} of {count} files are missing or changed, the first: "
            f"{wrong[0]}. Remove them, and run the command again that made them."
        )
    return count


def check_replaceable(output: Path) -> None:
    """Refuse to replace a folder in which anything lies that was not prepared."""
    known = (*SUFFIXES, META_SUFFIX, ORIGINS_SUFFIX, PREPARED)  # weights end with .bin as well
    found = [output] if output.is_file() else output.rglob("*")
    for path in found:
        if not (path.is_dir() and path.name in SPLITS) and not path.name.endswith(known):
            raise ConfigError(
                f"{output}: exists and holds other things than token files; not even --force "
                f"replaces it."
            )


def _work_folder(output: Path) -> Path:
    return output.parent / f".{output.name}.unfinished"


def _names(count: int) -> list[str]:
    width = max(5, len(str(count - 1)))
    return [f"part-{number:0{width}}" for number in range(count)]


def _made(
    job: Job,
    missing: Sequence[tuple[str, Unit]],
    work: Path,
    jobs: int,
    claim: Claim,
    what: str,
) -> Iterator[tuple[str, Record]]:
    """The records of the units that are missing, once they are written."""
    if not missing:
        return
    (work / _RECORDS).mkdir(parents=True, exist_ok=True)
    units = dict(missing)
    for name in units:
        _remove_part(work, name)
    totals = [unit.num_bytes for unit in units.values()]
    progress = Progress(what, sum(totals) if all(totals) else 0)

    def advance(num_bytes: int) -> None:
        claim.beat()
        progress.add(num_bytes)

    try:
        with closing(write_units(job, missing, work, jobs, advance)) as written:
            yield from written
    finally:
        progress.close()


# Continuing -------------------------------------------------------------------------------------


def _finished(output: Path) -> dict[str, Record]:
    """The records of a complete output."""
    content = _read_json(output / PREPARED)
    if content is None:
        return {}
    return {each["name"]: {**each, "options": content["options"]} for each in content["units"]}


def _unfinished(work: Path) -> dict[str, Record]:
    """The records of a run that did not end."""
    found = (_read_json(path) for path in sorted((work / _RECORDS).glob("*.json")))
    return {record["name"]: record for record in found if record is not None}


def _check_same(output: Path, known: Mapping[str, Record], job: Job) -> None:
    """Refuse to continue what was begun with other options."""
    if output.exists() and not known and (output.is_file() or any(output.iterdir())):
        raise ConfigError(f"{output}: exists. Replace it with --force.")
    options = _plain(job.options)
    for record in known.values():
        for option in sorted({*options, *record["options"]}):
            saved, now = record["options"].get(option), options.get(option)
            if saved != now:
                raise ConfigError(
                    f"{output}: begun with {option} {json.dumps(saved)}, now {json.dumps(now)}; "
                    f"give the same, another folder, or --force to make all of it anew."
                )


def _to_be_made(record: Record | None, description: Record, output: Path, work: Path) -> str | None:
    """Why a unit is to be made; empty where it never was, None where its files are whole."""
    if record is None:
        return ""
    if record["unit"] != description:
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


def _prepared(job: Job, records: Sequence[Record]) -> Record:
    """What PREPARED holds."""
    totals: dict[str, Counter[str]] = {"documents": Counter(), "characters": Counter()}
    totals["tokens"] = Counter()
    for record in records:
        for name, counter in totals.items():
            counter.update(record[name])
    options = dict(job.options)
    digest = hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()
    return {
        "version": _VERSION,
        "digest": digest,
        "options": options,
        **{name: dict(counter) for name, counter in totals.items()},
        "bytes": sum(file["bytes"] for record in records for file in record["files"].values()),
        "units": [{k: v for k, v in each.items() if k != "options"} for each in records],
    }


def left_out(prepared: Record, kind: str) -> tuple[int, str]:
    """How many documents were ``unreadable`` or ``refused``, and why the first one was."""
    found = [each[kind] for each in prepared["units"] if each[kind]["count"]]
    return sum(each["count"] for each in found), found[0]["first"] if found else ""


def _check_documents(prepared: Record, splits: Sequence[str], job: Job, work: Path) -> None:
    documents = sum(prepared["documents"].values())
    if not splits or all(prepared["documents"].get(split) for split in splits):
        return
    shutil.rmtree(work, ignore_errors=True)  # other options are needed
    if not documents:
        too_short = sum(each["too_short"] for each in prepared["units"])
        count, first = left_out(prepared, "refused")
        refused = f", and {count} refused, the first: {first}" if count else ""
        raise ConfigError(
            f"The input has no document of at least {job.min_chars} characters ({too_short} "
            f"shorter ones{refused})."
        )
    empty = next(split for split in splits if not prepared["documents"].get(split))
    raise ConfigError(
        f"None of the {documents} documents fell into {empty} with --val {job.val_fraction} and "
        f"--seed {job.seed}. Change --val (0: no val split) or --seed."
    )


def _publish(prepared: Record, output: Path, work: Path, anew: bool) -> None:
    """Give what is made the output's name, or put what was made again into the output."""
    work.mkdir(parents=True, exist_ok=True)
    if anew or not output.exists() or not any(output.iterdir()):
        shutil.rmtree(work / _RECORDS, ignore_errors=True)
        _write_json(work / PREPARED, prepared)
        old = output.parent / f"{work.name}-{os.urandom(6).hex()}"
        if output.exists():
            output.rename(old)
        work.rename(output)
        shutil.rmtree(old, ignore_errors=True)
        return
    wanted = {file for record in prepared["units"] for file in record["files"]}
    for path in [*output.glob("*/*")]:
        file = f"{path.parent.name}/{path.name}"
        if file not in wanted or (work / file).is_file():
            path.unlink()
    for file in sorted(wanted):
        if (work / file).is_file():
            (output / file).parent.mkdir(exist_ok=True)
            os.replace(work / file, output / file)
    _write_json(output / PREPARED, prepared)
    shutil.rmtree(work)


def _remove_part(folder: Path, name: str) -> None:
    for path in [*folder.glob(f"*/{name}.*")]:
        path.unlink()


def _remove_staging(work: Path) -> None:
    for path in work.glob(f"{STAGING}*"):
        shutil.rmtree(path, ignore_errors=True)


def _write_json(path: Path, content: Record) -> None:
    aside = path.with_name(f".{path.name}-{os.urandom(6).hex()}")
    aside.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


def _read_json(path: Path) -> Record | None:
    """The content of a file that was written here; None where there is none or it is damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return content if isinstance(content, dict) else None
