# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Accounts of finished units: what they contain, and whether they must be prepared again.

While an output is being prepared, every finished unit has an account, a small file that is renamed
into place after the unit's own files. So every process on any machine sees a unit as either
finished or missing. At the end all accounts are merged into one file, PREPARED.
"""

import json
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_ext.data_files import read_json
from energon_ext.errors import ConfigError
from energon_ext.keyed import sha256_of_file
from energon_ext.prepare.documents import Unit
from energon_ext.prepare.job import Job, Record
from energon_ext.state.files import write_file
from energon_ext.tokens.index import PREPARED

MAX_RECORD_BYTES = 2**30
_MAX_ACCOUNT_BYTES = 2**20
ACCOUNTS = "accounts"


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A job, its units, and the output folder."""

    job: Job
    units: Mapping[str, Unit]  # by the stem of their files
    output: Path  # the folder to create or complete
    force: bool  # ignore and replace an existing output
    title: str = "preparing"  # label of the progress bar
    again: Collection[str] = ()  # complete units to prepare again, with documents that had failed
    is_last: bool = True  # its files are published

    @property
    def work(self) -> Path:
        """The hidden folder next to the output in which everything is prepared."""
        return self.output.with_name(f".{self.output.name}.unfinished")

    def write_account(self, name: str, record: Record) -> None:
        """Write the account of a finished unit."""
        unit = self.units[name].description
        account = {"options": dict(self.job.options), "name": name, "unit": unit, **record}
        write_record(self.work / ACCOUNTS / f"{name}.json", account)

    def finished_units(self, names: Iterable[str]) -> dict[str, Record]:
        """Return the accounts of finished units; ConfigError if the options have changed."""
        found = {}
        for prepared in self.saved_records():
            self._check_options(prepared["options"])
            found.update({unit["name"]: unit for unit in prepared["units"]})
        written = self.accounts()
        # Also check any one account, so that a part with different options fails before it starts.
        for name in {*written[:1], *set(names).intersection(written)}:
            account = read_record(self.work / ACCOUNTS / f"{name}.json", _MAX_ACCOUNT_BYTES)
            if account is not None:
                self._check_options(account.pop("options"))
                found[name] = account
        return {name: found[name] for name in names if name in found}

    def has_all(self) -> bool:
        """Return True if every unit is finished, judging only by names."""
        saved = {unit["name"] for prepared in self.saved_records() for unit in prepared["units"]}
        return set(self.units) <= saved.union(self.accounts())

    def reasons(self, names: Collection[str]) -> dict[str, str | None]:
        """Return why each unit must be prepared; None for a finished unit."""
        records = self.finished_units(names)
        again = set(self.again).difference(self.accounts()) if self.again else ()
        return {
            name: "some of its documents had failed, and no longer do"
            if name in again
            else self.reason_to_prepare(name, records.get(name))
            for name in names
        }

    def is_complete(self) -> bool:
        """Return True if every unit is finished, judging by its description and its files."""
        return all(reason is None for reason in self.reasons(self.units).values())

    def reason_to_prepare(self, name: str, record: Record | None) -> str | None:
        """Return why a unit must be prepared: empty if it is new, None if it is complete."""
        if record is None:
            return ""
        if record["unit"] != plain_json(self.units[name].description):
            return f"{record['unit']['path']} has changed"
        for file, expected in record["files"].items():
            folders = (self.work, self.output)
            path = next(filter(Path.is_file, (folder / file for folder in folders)), None)
            if path is None:
                return f"{file} is missing"
            if (num_bytes := path.stat().st_size) != expected["bytes"]:
                return f"{file} has {num_bytes} bytes instead of {expected['bytes']}"
        return None

    def merge(self, records: Mapping[str, Record]) -> Record:
        """Return the content of PREPARED for finished units."""
        units = [records[name] for name in sorted(records)]
        totals = {
            name: sum((Counter[str](unit.get(name, {})) for unit in units), Counter[str]())
            for name in ("documents", "characters", "tokens", "notes")
        }
        num_bytes = sum(file["bytes"] for unit in units for file in unit["files"].values())
        return {"options": dict(self.job.options), **totals, "bytes": num_bytes, "units": units}

    def accounts(self) -> list[str]:
        """Return the names of the units that have an account."""
        try:
            files = os.listdir(self.work / ACCOUNTS)
        except FileNotFoundError:
            return []
        return sorted(file.removesuffix(".json") for file in files if file.endswith(".json"))

    def saved_records(self) -> list[Record]:
        """Return the content of each PREPARED: the published one, and one not yet published."""
        if self.force:
            return []
        # Checked before reading, since another process may publish the output in between.
        is_occupied = self.output.is_file() or any(self.output.glob("*"))
        saved = [read_record(folder / PREPARED) for folder in (self.output, self.work)]
        if is_occupied and saved[0] is None:
            raise ConfigError(f"{self.output}: already exists; give --force to replace it.")
        return [prepared for prepared in saved if prepared is not None]

    def _check_options(self, before: Record) -> None:
        now = plain_json(self.job.options)
        for option in sorted({*now, *before}):
            if before.get(option) != now.get(option):
                raise ConfigError(
                    f"{self.output}: started with {option} {json.dumps(before.get(option))}, now "
                    f"{json.dumps(now.get(option))}; use the same value, another folder, or "
                    f"--force to prepare everything again."
                )


def name_units(units: Sequence[Unit]) -> dict[str, Unit]:
    """Name units by their numbers."""
    width = max(5, len(str(len(units) - 1)))
    return {f"part-{number:0{width}}": unit for number, unit in enumerate(units)}


def has_units(prepared: Record, units: Sequence[Unit]) -> bool:
    """Return True if a folder was prepared from these units."""
    expected = [plain_json(unit.description) for unit in units]
    return [unit["unit"] for unit in prepared["units"]] == expected


def files_of(prepared: Record) -> dict[str, Record]:
    """Return the files of a prepared folder, each with its ``bytes`` and its ``sha256``."""
    return {file: known for unit in prepared["units"] for file, known in unit["files"].items()}


def changed_files(output: Path, prepared: Record) -> list[str]:
    """Return the files of a prepared folder that are missing or differ from their hashes."""
    return [
        file
        for file, known in files_of(prepared).items()
        if not (output / file).is_file() or sha256_of_file(output / file) != known["sha256"]
    ]


def check_files(output: Path) -> int:
    """Compare all files of a prepared folder with their hashes; return the number of files."""
    prepared = read_record(output / PREPARED)
    if prepared is None:
        raise ConfigError(f"{output}: has no {PREPARED}; nothing to check.")
    expected = files_of(prepared)
    if wrong := changed_files(output, prepared):
        raise ConfigError(
            f"{output}: {len(wrong)} of {len(expected)} files are missing or changed, the first: "
            f"{wrong[0]}. Remove them and run the command that wrote them again."
        )
    return len(expected)


def units_read(prepared: Record) -> list[Record]:
    """Return the records of the units of the input; shuffling makes other units of them."""
    return prepared["inputs"] if "inputs" in prepared else prepared["units"]


def skipped_documents(prepared: Record, kind: str) -> tuple[int, str]:
    """Return the number of ``unreadable`` or ``refused`` documents, and the first one's error."""
    skipped = [unit[kind] for unit in units_read(prepared) if unit[kind]["count"]]
    return sum(kinds["count"] for kinds in skipped), skipped[0]["first"] if skipped else ""


def list_refused(prepared: Record) -> list[str]:
    """Return the first error of the refused documents; if several kinds, that and their number."""
    kinds = _kinds_of_refused(prepared)
    if len(kinds) > 1:
        return [f"{count:,}, the first: {first}" for count, first in kinds]
    count, first = skipped_documents(prepared, "refused")
    return [f"the first: {first}"] if count else []


def are_most_refused(prepared: Record) -> bool:
    """Return True if more documents were refused than written, which is rarely what was meant."""
    return skipped_documents(prepared, "refused")[0] > sum(prepared["documents"].values())


def _kinds_of_refused(prepared: Record) -> list[tuple[int, str]]:
    """Return the number of refused documents of each kind with the first one's error."""
    counts: Counter[str] = Counter()
    firsts: dict[str, str] = {}
    for unit in units_read(prepared):
        for kind, (count, first) in unit["refused"].get("kinds", {}).items():
            counts[kind] += count
            firsts.setdefault(kind, first)
    return [(count, firsts[kind]) for kind, count in counts.most_common()]


def write_record(path: Path, content: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(content, indent=1).encode() + b"\n")


def read_record(path: Path, max_bytes: int = MAX_RECORD_BYTES) -> Record | None:
    """Read a file written by :func:`write_record`; None if it is missing or damaged."""
    try:
        content = read_json(path, max_bytes)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def plain_json(content: Any) -> Any:
    """Convert JSON values to the types they have when read from a file."""
    return json.loads(json.dumps(content))
