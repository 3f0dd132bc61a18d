# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rows of a source, as a plan draws them: in order, from lengths alone.

Rows are taken from a *window*, an immutable description of the next rows of the source (for packed
documents: which documents are packed together). The window and the number of rows taken from it
are the whole state.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import numpy as np

from energon_ext.plan.epochs import EpochCount
from energon_ext.state.match import check_fingerprint


class TakenRows(ABC):
    """Rows taken from a source but not yet read.

    Attributes:
        num_tokens: positions of the rows without padding.
        num_documents: documents that end in the rows.
    """

    num_tokens: int
    num_documents: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def description(self, number: int) -> Any:
        """Return what the reader of the source needs to read one row; small and picklable."""

    def description_of_pieces(self, places: Sequence[tuple[int, int]]) -> Any:
        """Return what the reader needs to read some pieces as one row.

        Args:
            places: the row of each piece, and its number in the row.
        """
        raise NotImplementedError("only rows of documents are taken apart in layouts")

    @abstractmethod
    def contents(self, number: int) -> list[tuple[int, int, int]]:
        """Return ``(document, start, stop)`` of every piece in one row."""

    @abstractmethod
    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the segment lengths of all rows, and where each row ends among them."""

    def further_costs(self) -> np.ndarray:
        """Return the cost of each row in addition to its lengths (images), float64 [rows]."""
        return np.zeros(len(self))


@dataclass(frozen=True, kw_only=True)
class Window:
    """The next rows of a source; subclasses describe them.

    Attributes:
        pass_start: what had been read when the current pass of a repeated blend began: epochs, or
            contents of a spliced source.
    """

    pass_start: int = 0

    def to_json(self) -> dict[str, Any]:
        return {"pass_start": self.pass_start}


class Rows(ABC):
    """The rows of a source.

    Args:
        key: key of the source.
        fingerprint: JSON values that change with the data.

    Attributes:
        kind: names the kind of rows in a state.
        window: the next rows.
        next_row: number of rows taken from the window.
        may_be_repacked: whether rows may be packed with other options after a resume.
        can_exclude: whether single documents can be left out.
        fullest: the largest part of a row that the documents can fill, 1 for all of it.
        subset: documents of an epoch, and of the source; None if an epoch has all of them.
    """

    kind: str
    window: Window
    next_row: int
    may_be_repacked = False
    can_exclude = False
    subset: tuple[int, int] | None = None

    def __init__(self, key: str, fingerprint: Mapping[str, Any]):
        self.key = key
        self.fingerprint = dict(fingerprint)
        self._saved_fingerprint = json.dumps(self.fingerprint)  # each state has a copy of its own

    @property
    @abstractmethod
    def is_finite(self) -> bool:
        """True if there may be a last row."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """True if no row is left."""

    @abstractmethod
    def take(self, count: int) -> TakenRows:
        """Take the next ``count`` rows; fewer at the end."""

    @abstractmethod
    def begin_pass(self) -> None:
        """Continue after the last row, with as many rows again but in another order."""

    @abstractmethod
    def at(self, window: Any, next_row: int) -> Rows:
        """Return these rows at some point of the run, to be taken on their own."""

    def with_length(self, row_tokens: int) -> Rows:
        """Return these rows with another number of positions, for :meth:`at` or a restore."""
        raise NotImplementedError  # only of rows that may be repacked

    def repack(self, row_tokens: int) -> None:
        """Continue in rows with another number of positions, as after a resume."""
        raise NotImplementedError

    @property
    def epoch_tokens(self) -> int | None:
        """Tokens in one epoch; None if documents are not read whole."""
        return None

    @property
    def parts(self) -> dict[str, tuple[float, float]]:
        """``(documents, share of tokens)`` of each part that batches name; empty if one."""
        return {}

    @property
    def fullest(self) -> float:
        return 1.0

    @property
    def stored_documents(self) -> int | None:
        """Documents of the source, whether or not they are read; None for those of an epoch."""
        return None if self.subset is None else self.subset[1]

    @property
    def source_tokens(self) -> int | None:
        """Tokens in one epoch if there were no subset; None if documents are not read whole."""
        return None

    @property
    def epoch_count(self) -> EpochCount | None:
        """Epochs taken so far, if they may differ in size; None if all have the same documents."""
        return None

    @property
    def tokens_per_document(self) -> float | None:
        """Mean of an epoch; None if documents are not read whole."""
        return None

    def options(self) -> dict[str, Any]:
        """Return settings of later rows, which may change between steps, as JSON values."""
        return {}

    def state_at(self, window: Window, next_row: int) -> dict[str, Any]:
        """Return the state after ``next_row`` rows of a window, as JSON values."""
        documents = json.loads(self._saved_fingerprint)
        common = {"kind": self.kind, "documents": documents, "next_row": next_row}
        return {**common, **window.to_json()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise StateMismatchError if the state has another kind of rows or other documents."""
        saved, current = ({**each} for each in (state["documents"], self.fingerprint))
        before, now = saved.get("documents"), current.get("documents")
        advice = "Use the saved values, or start a new run."
        if isinstance(before, int) and isinstance(now, int) and before < now:
            advice = (
                f"The source grew by {now - before:,}: move what was added to a path of its own "
                f"and list that as a source of its own, or start a new run."
            )
        kinds = {"kind": state["kind"]}, {"kind": self.kind}
        check_fingerprint(kinds[0] | saved, kinds[1] | current, self.key, advice)

    @abstractmethod
    def restore_state(
        self, state: Mapping[str, Any], packing: Mapping[str, Any] | None = None
    ) -> None:
        """Continue from :meth:`state_at`.

        Args:
            packing: what packed the rows in the state, as in
                :meth:`~energon_ext.plan.spec.Spec.packing`, if rows are packed in another way now;
                only if they may be repacked.
        """
