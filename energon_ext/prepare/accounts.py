# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Accounts of finished units: what they hold, and whether they must be made again.

While an output is being prepared, every finished unit has an account, a small file that is renamed
into place after the unit's own files. So a unit is either finished or missing, whichever process
on whichever machine looks. At the end all accounts become one file, PREPARED.
"""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from energon_ext.data_files import read_data
from energon_ext.documents.token_index import PREPARED
from energon_ext.errors import ConfigError
from energon_ext.prepare.documents import Unit
from energon_ext.prepare.job import Job, Record, sha256
from energon_ext.state.files import write_file

MOST_RECORD_BYTES = 2**30
_MOST_ACCOUNT_BYTES = 2**20
ACCOUNTS = "accounts"


@dataclass(frozen=True)
class Preparation:
    """A job, its units, and where they are made."""

    job: Job
    units: Mapping[str, Unit]  # by the name of their files
    output: Path  # the folder that is made or completed
    anew: bool = False  # what is there does not count, and is replaced

    @classmethod
    def of(cls, job: Job, units: Sequence[Unit], output: Path, anew: bool = False) -> "Preparation":
        """Name the units by their numbers."""
        width = max(5, len(str(len(units) - 1)))
        named = {f"part-{number:0{width}}": unit for number, unit in enumerate(units)}
        return cls(job, named, output, anew)

    @property
    def work(self) -> Path:
        """The hidden folder beside the output in which everything is made."""
        return self.output.with_name(f".{self.output.name}.unfinished")

    def write_account(self, name: str, record: Record) -> None:
        """Write down that a unit is finished."""
        unit = self.units[name].description
        account = {"options": dict(self.job.options), "name": name, "unit": unit, **record}
        write_json(self.work / ACCOUNTS / f"{name}.json", account)

    def finished(self, names: Iterable[str]) -> dict[str, Record]:
        """Accounts of finished units that were made by whichever process; refuses other options."""
        found = {}
        for prepared in self._saved():
            self._check_options(prepared["options"])
            found.update({unit["name"]: unit for unit in prepared["units"]})
        written = self.accounts()
        # One more, so that a part with other options is refused before it has made anything.
        for name in {*written[:1], *set(names).intersection(written)}:
            account = read_json(self.work / ACCOUNTS / f"{name}.json", _MOST_ACCOUNT_BYTES)
            if account is not None:
                self._check_options(account.pop("options"))
                found[name] = account
        return {name: found[name] for name in names if name in found}

    def has_all(self) -> bool:
        """True if every unit is finished, by names alone."""
        saved = {unit["name"] for prepared in self._saved() for unit in prepared["units"]}
        return set(self.units) <= saved.union(self.accounts())

    def reason_to_make(self, name: str, record: Record | None) -> str | None:
        """Why a unit is to be made; empty where it never was, None where its files are whole."""
        if record is None:
            return ""
        if record["unit"] != _plain(self.units[name].description):
            return f"{record['unit']['path']} has changed"
        for file, expected in record["files"].items():
            folders = (self.work, self.output)
            path = next((f / file for f in folders if (f / file).is_file()), None)
            if path is None:
                return f"{file} is missing"
            if (num_bytes := path.stat().st_size) != expected["bytes"]:
                return f"{file} has {num_bytes} bytes in place of {expected['bytes']}"
        return None

    def summed(self, records: Mapping[str, Record]) -> Record:
        """Content of PREPARED for the units that are finished."""
        units = [records[name] for name in sorted(records)]
        totals = {
            name: sum((Counter[str](unit[name]) for unit in units), Counter[str]())
            for name in ("documents", "characters", "tokens")
        }
        num_bytes = sum(file["bytes"] for unit in units for file in unit["files"].values())
        return {"options": dict(self.job.options), **totals, "bytes": num_bytes, "units": units}

    def accounts(self) -> list[str]:
        """The names of the units that have an account."""
        try:
            found = os.listdir(self.work / ACCOUNTS)
        except FileNotFoundError:
            return []
        return sorted(file.removesuffix(".json") for file in found if file.endswith(".json"))

    def _saved(self) -> list[Record]:
        """Content that was published, or was about to be."""
        if self.anew:
            return []
        # First: a finished folder appears at once.
        holds_anything = self.output.is_file() or any(self.output.glob("*"))
        saved = [read_json(folder / PREPARED) for folder in (self.output, self.work)]
        if holds_anything and saved[0] is None:
            raise ConfigError(f"{self.output}: exists. Replace it with --force.")
        return [each for each in saved if each is not None]

    def _check_options(self, before: Record) -> None:
        now = _plain(self.job.options)
        for option in sorted({*now, *before}):
            if before.get(option) != now.get(option):
                raise ConfigError(
                    f"{self.output}: begun with {option} {json.dumps(before.get(option))}, now "
                    f"{json.dumps(now.get(option))}; give the same, another folder, or --force to "
                    f"make all of it anew."
                )


def is_prepared(output: Path, units: Sequence[Unit]) -> bool:
    """True if a folder holds these units."""
    prepared = read_json(output / PREPARED) or {"units": []}
    found = [unit["unit"] for unit in prepared["units"]]
    return found == [_plain(unit.description) for unit in units]


def check_files(output: Path) -> int:
    """Compare all files of a prepared folder with their hashes; the number of files."""
    prepared = read_json(output / PREPARED)
    if prepared is None:
        raise ConfigError(f"{output}: no {PREPARED} in it; nothing to check.")
    expected = {file: known for unit in prepared["units"] for file, known in unit["files"].items()}
    wrong = [
        file
        for file, known in expected.items()
        if not (output / file).is_file() or sha256(output / file) != known["sha256"]
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


def write_json(path: Path, content: Record) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(content, indent=1).encode() + b"\n")


def read_json(path: Path, most_bytes: int = MOST_RECORD_BYTES) -> Record | None:
    """The content of a file that was written here; None where there is none or it is damaged."""
    try:
        content = json.loads(read_data(path, most_bytes))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _plain(content: Any) -> Any:
    """JSON values as they come back from a file."""
    return json.loads(json.dumps(content))
