# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The script that counts mechanisms finds each of them in a small package."""

import shutil
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / ".ci" / "count_mechanisms.py"

MODULES = {
    "plan/state.py": """
def save(dataset: "Dataset", encoder: Any, found: Any) -> None:
    if hasattr(encoder, "cost") and not hasattr(found, "cost"):
        print(isinstance(found, TokenFileFactory), isinstance(found, list))
    if find(encoder, "cost") or entry.documents is None or other.documents is None:
        return cast(TaskEncoder, encoder)
""",
    "encoders/mixin.py": """
class Mixin:
    task_encoder: Any = None

    def read(self, encoder: "Mixin") -> int:  # type: ignore[override]
        return getattr(self, "size", 0) + getattr(self.task_encoder, "size", 0)
""",
}
GLOSSARY = """
| word | meaning |
| --- | --- |
| row | one of a batch |
| kept, moved | two of them |
"""


def test_each_mechanism_is_counted_with_its_places(tmp_path):
    for path in (".ci", "docs/reference", "energon_ext/plan", "energon_ext/encoders"):
        (tmp_path / path).mkdir(parents=True)
    shutil.copy(SCRIPT, tmp_path / ".ci")
    (tmp_path / "docs/reference/glossary.md").write_text(GLOSSARY)
    for name, text in MODULES.items():
        (tmp_path / "energon_ext" / name).write_text(text)
    command = [sys.executable, tmp_path / ".ci" / SCRIPT.name, "--list"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert [line.strip() for line in printed.splitlines()] == [
        "12 lines in 2 modules",
        "2 arguments and fields `encoder: Any`",
        "energon_ext/encoders/mixin.py:3",
        "energon_ext/plan/state.py:2",
        "4 probes of encoders by hasattr, getattr or find",
        "energon_ext/encoders/mixin.py:6",
        "energon_ext/encoders/mixin.py:6",
        "energon_ext/plan/state.py:3",
        "energon_ext/plan/state.py:5",
        "1 cast(TaskEncoder, ...)",
        "energon_ext/plan/state.py:6",
        "1 isinstance(..., TokenFileFactory)",
        "energon_ext/plan/state.py:4",
        "1 tests of entry.documents against None",
        "energon_ext/plan/state.py:5",
        "1 type: ignore[override]",
        "energon_ext/encoders/mixin.py:5",
        "3 nouns in the glossary",
        "row",
        "kept",
        "moved",
    ]
