# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The input of one pack plan, as it is saved in a state."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Mapping

import numpy as np

from energon_ext.packing import Packer, Pieces
from energon_ext.plan.rows import Window
from energon_ext.plan.spec import DOCUMENTS
from energon_ext.tokens.documents import Lengths

_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class PackWindow(Window):
    """The documents of one pack plan.

    Attributes:
        epoch, position: of the order, at the first document taken.
        blocks: of the order in this epoch, see :class:`~energon_ext.plan.order.EpochOrder`; None
            for those that it is given.
        arranged: the order of this epoch as JSON values, None for a random one.
        chosen: documents of this epoch, if it or an earlier one has a nested subset.
        documents, starts: documents and starts of the carried-over pieces, int64 [n].
        stops: stops of the carried-over pieces; None if the packer can compute them.
        visits: visits of the carried-over pieces, int64 [n].
        rows_before: rows in all earlier plans of the stream.
        taken: number of documents taken from the order; None before the first plan.
        excluded: numbers of the taken documents that are excluded, int64 [n].
        is_last: whether the order ended with the documents taken.
        digest: digest of the resulting rows; empty before the first plan.
    """

    epoch: int
    position: int
    blocks: tuple[int, int] | None = None
    arranged: Any = None
    chosen: int | None = None
    documents: np.ndarray = field(default_factory=lambda: _NOTHING)
    starts: np.ndarray = field(default_factory=lambda: _NOTHING)
    stops: np.ndarray | None = None
    visits: np.ndarray = field(default_factory=lambda: _NOTHING)
    rows_before: int = 0
    taken: int | None = None
    excluded: np.ndarray = field(default_factory=lambda: _NOTHING)
    is_last: bool = False
    digest: str = ""

    def carried_of(self, lengths: Lengths, packer: Packer) -> Pieces | None:
        """Return the carried-over pieces; None if they do not fit the documents."""
        numbers, starts, stops, visits = self.documents, self.starts, self.stops, self.visits
        if not len(numbers) == len(starts) == len(visits) or numbers.max(initial=0) >= len(lengths):
            return None
        if visits.max(initial=0) > self.epoch:
            return None
        whole = lengths.lengths(numbers)
        if stops is None:
            rest = Pieces(numbers, starts, whole, whole, visits)
            return packer.with_stops(rest) if (starts < whole).all() else None
        if len(stops) != len(starts) or not ((starts < stops) & (stops <= whole)).all():
            return None
        return Pieces(numbers, starts, stops, whole, visits)

    def to_json(self) -> dict[str, Any]:
        blocks = list(self.blocks or (1, 1))
        return {
            **super().to_json(),
            **({"blocks": blocks} if blocks[0] > 1 else {}),
            **({} if self.arranged is None else {"order": copy.copy(self.arranged)}),
            **({} if self.chosen is None else {"subset": self.chosen}),
            "epoch": self.epoch,
            "position": self.position,
            "carried": {
                "documents": self.documents.tolist(),
                "starts": self.starts.tolist(),
                "stops": None if self.stops is None else self.stops.tolist(),
                "visits": self.visits.tolist(),
            },
            "rows_before": self.rows_before,
            "taken": self.taken,
            "excluded": self.excluded.tolist(),
            "last": self.is_last,
            "digest": self.digest,
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> "PackWindow":
        stops = state["carried"]["stops"]
        # The blocks of samples belong to the spec.
        blocks = state.get("blocks", (1, 1) if state["kind"] == DOCUMENTS else None)
        return cls(
            pass_start=state["pass_start"],
            epoch=state["epoch"],
            position=state["position"],
            blocks=None if blocks is None else tuple(blocks),
            arranged=state.get("order"),
            chosen=state.get("subset"),
            documents=np.array(state["carried"]["documents"], np.int64),
            starts=np.array(state["carried"]["starts"], np.int64),
            stops=None if stops is None else np.array(stops, np.int64),
            visits=np.array(state["carried"]["visits"], np.int64),
            rows_before=state["rows_before"],
            taken=state["taken"],
            excluded=np.array(state["excluded"], np.int64),
            is_last=state["last"],
            digest=state["digest"],
        )
