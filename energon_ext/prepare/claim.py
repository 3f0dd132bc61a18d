# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The parts of an output, and which of them other processes are preparing."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from energon_ext.storage.claim import ClaimedError, claim_of, is_stale, owner_of


@dataclass(frozen=True)
class Part:
    """Every ``count``-th unit, from unit ``number`` on."""

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def claimed_path(self, output: Path) -> Path:
        """Return the path that is claimed for this part of an output."""
        return output.with_name(f"{output.name}.{self.number}-of-{self.count}")


def check_unclaimed(output: Path, part: Part | None) -> None:
    """Raise ClaimedError if another process prepares the whole output or divides it differently."""
    living = living_parts(output)
    others = [path for other, path in living if not part or other.count != part.count]
    if part and (whole := claim_of(output)).exists() and not is_stale(whole):
        others.append(whole)
    if others:
        raise ClaimedError(f"{output}: is being prepared by {owner_of(others[0])}.")


def living_parts(output: Path) -> list[tuple[Part, Path]]:
    """Return the parts of an output being prepared, with their claims; remove stale claims."""
    parts = []
    pattern = re.compile(rf"\.{re.escape(output.name)}\.(\d+)-of-(\d+)\.claim")
    for name in os.listdir(output.parent):
        if match := pattern.fullmatch(name):
            path = output.parent / name
            if is_stale(path):
                path.unlink(missing_ok=True)
            else:
                parts.append((Part(int(match[1]), int(match[2])), path))
    return parts
