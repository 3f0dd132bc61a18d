# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rows of a planned source: taken by number in the plan, read anywhere.

A source takes rows from a *window*, an immutable description of its next rows (for packed
documents: which documents were packed together). The window and the number of rows taken from it
are all the state there is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Mapping

import numpy as np

from energon_ext.batch.rows import Row
from energon_ext.packing import Packer
from energon_ext.state.match import check_fingerprint


class Taken(ABC):
    """Rows that were taken from a source and are not yet read.

    Attributes:
        num_tokens: positions of them that hold a document.
        num_documents: documents that end in them.
    """

    num_tokens: int
    num_documents: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def description(self, number: int) -> Any:
        """One of them as :meth:`RowSource.read` takes it; small, and picklable."""

    @abstractmethod
    def contents(self, number: int) -> list[tuple[int, int, int]]:
        """Document, first token and the one behind the last, of everything in one of them."""

    @abstractmethod
    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """Lengths that attend to themselves in all rows, row after row, and where each row ends."""

    def further_costs(self) -> np.ndarray:
        """Cost of each row beside that of its lengths, float64 [rows]; images have one."""
        return np.zeros(len(self))


@dataclass(frozen=True)
class Window:
    """The next rows of a source. Subclasses say what they are made of."""

    def to_json(self) -> dict[str, Any]:
        return {}


class RowSource(ABC):
    """The rows of a source.

    Args:
        key: of the source.
        fingerprint: JSON values by which a change of the data is noticed.

    Attributes:
        window: its next rows.
        next_row: rows of the window that were taken.
    """

    kind: ClassVar[str]  # the name of these rows in a state
    window: Window
    next_row: int
    read_bytes = 0  # of a row, about, where it helps to announce those of later batches

    def __init__(self, key: str, fingerprint: Mapping[str, Any]):
        self.key = key
        self.fingerprint = dict(fingerprint)

    @property
    @abstractmethod
    def is_finite(self) -> bool:
        """True if there may be a last row."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """True if no row is left."""

    @abstractmethod
    def take(self, count: int) -> Taken:
        """Up to ``count`` further rows; fewer at the end."""

    @abstractmethod
    def read(self, description: Any) -> Row:
        """A row that :meth:`Taken.description` describes, with its tokens."""

    def announce(self, description: Any) -> None:  # noqa: B027 - few have something to do
        """Tell the storage that a row is read soon, where that helps."""

    @abstractmethod
    def restart(self) -> None:
        """Begin with the first row again."""

    def options(self) -> dict[str, Any]:
        """Settings that decide the next rows, as JSON values; may change between two steps."""
        return {}

    def state_at(self, window: Window, next_row: int) -> dict[str, Any]:
        """The state after some rows of a window, as JSON values."""
        own = {"kind": self.kind, "documents": self.fingerprint, "next_row": next_row}
        return {**own, **window.to_json()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise StateMismatchError for a state of rows of another kind or of other documents."""
        check_fingerprint(
            {"kind": state["kind"], **state["documents"]},
            {"kind": self.kind, **self.fingerprint},
            self.key,
        )

    @property
    def may_be_repacked(self) -> bool:
        """True if rows may be packed with other options after a resume."""
        return False

    def former_packer(self, packing: Mapping[str, Any]) -> Packer:
        """The packer of a state, by the fields of its fingerprint that say how rows are packed.

        Raises:
            ConfigError: there is none any more, or what it packed does not fit in the current rows.
        """
        raise NotImplementedError

    @abstractmethod
    def restore_state(self, state: Mapping[str, Any], former: Packer | None = None) -> None:
        """Continue from :meth:`state_at`.

        Args:
            former: packed the rows of the state, where that is not the current packer.
        """
