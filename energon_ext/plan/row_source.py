# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What the rows of a source must be able to do, wherever they come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Mapping

import numpy as np

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
    def row(self, number: int) -> Any:
        """One of them, read."""

    def contents(self, number: int) -> list[tuple[int, int, int]]:
        """Document, first token and the one behind the last, of everything in one of them."""
        raise NotImplementedError("What a stream read is not known without reading it.")

    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """Lengths that attend to themselves in all rows, row after row, and where each row ends."""
        raise NotImplementedError("A private plan deals one row at a time.")


class RowSource(ABC):
    """Where the rows of a source come from.

    Args:
        key: of the source.
        fingerprint: JSON values by which a change of what is read is noticed.
    """

    kind: ClassVar[str]  # what a state calls these rows

    def __init__(self, key: str, fingerprint: Mapping[str, Any]):
        self.key = key
        self.fingerprint = dict(fingerprint)

    @property
    @abstractmethod
    def is_finite(self) -> bool:
        """Whether there may be a last row."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether no row is left, as far as is known."""

    @abstractmethod
    def take(self, count: int) -> Taken:
        """Up to ``count`` further rows; fewer at the end."""

    @abstractmethod
    def restart(self) -> None:
        """Begin with the first row again."""

    @abstractmethod
    def read_part(self, worker: int, workers: int) -> None:
        """Read every ``workers``-th document alone, where many workers read for themselves."""

    @abstractmethod
    def save_state(self) -> Mapping[str, Any]:
        """Where it stands, and of which documents."""

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise StateMismatchError for what rows of another kind or of other documents saved."""
        check_fingerprint(
            {"kind": state["kind"], **state["documents"]},
            {"kind": self.kind, **self.fingerprint},
            self.key,
        )

    @abstractmethod
    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`save_state`, if :meth:`check_state` allows it."""
