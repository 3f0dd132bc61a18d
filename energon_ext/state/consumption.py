# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Counts how much of each source a run has consumed.

Workers save what was *drawn*; they are ahead of training by what they prefetch. This module counts
what was *trained*, from the batches that the steps consumed. Counts are local to a rank, which
saves them; global counts are computed from them on request and never added back.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, Mapping, Sequence

import torch.distributed as dist

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.errors import StateFormatError
from energon_ext.state.match import SourceChange
from energon_ext.state.schema import COUNT, check_shape, check_version
from energon_ext.state.together import on_all_ranks

VERSION = 1
_ENTRY = {"spec": str, "row_offset": COUNT, "token_offset": COUNT}


class Consumption:
    """Rows and tokens of each source that were trained on; a row is a document of the dataset.

    Attributes:
        rows: documents that ended in a batch, by source key.
        tokens: positions trained on, padding excluded, by source key.

    Example:
        >>> consumed = Consumption()
        >>> consumed.add("web", rows=2, tokens=640)
        >>> consumed.to_json(current=["code", "web"])["datasets"]
        ... # doctest: +NORMALIZE_WHITESPACE
        [{'spec': 'code', 'row_offset': 0, 'token_offset': 0},
         {'spec': 'web', 'row_offset': 2, 'token_offset': 640}]
    """

    def __init__(self, rows: Mapping[str, int] = {}, tokens: Mapping[str, int] = {}):
        self.rows, self.tokens = Counter(rows), Counter(tokens)

    def add(self, source: str, *, rows: int, tokens: int) -> None:
        """Count rows and tokens of one source."""
        self.rows[source] += rows
        self.tokens[source] += tokens

    def add_batch(self, batch: PackedBatch) -> None:
        """Count a batch that a step consumed."""
        self.rows.update(batch.documents_per_source())
        self.tokens.update(batch.tokens_per_source())

    def reduce(self, group: dist.ProcessGroup | None = None) -> "Consumption":
        """Return the sum over the ranks of a (data-parallel) group; a collective call.

        Local counts do not change. Without torch.distributed, returns a copy of them.
        """
        ranks = on_all_ranks(lambda: (self.rows, self.tokens), group)
        return Consumption(
            sum((rows for rows, _ in ranks), Counter()),
            sum((tokens for _, tokens in ranks), Counter()),
        )

    def epochs(
        self, documents: Mapping[str, int], tokens: Mapping[str, int] | None = None
    ) -> dict[str, float]:
        """Return the number of passes over each source, by tokens if those of an epoch are given.

        All that was consumed is divided by these sizes. If a resume has changed a ``subset``, the
        epochs before it had others; :func:`energon_ext.metrics.file.epochs_after` knows them.

        Args:
            documents, tokens: size of one epoch of each source, over all ranks; see
                :attr:`energon_ext.plan.blend.Blend.documents` and
                :attr:`~energon_ext.plan.blend.Blend.epoch_tokens`. A size of 0 gives 0 passes.
        """
        passes = {key: self.rows[key] / count if count else 0.0 for key, count in documents.items()}
        for key, count in (tokens or {}).items():
            passes[key] = self.tokens[key] / count if count else 0.0
        return passes

    def shares(self) -> dict[str, float]:
        """Return the share of each source in all tokens."""
        total = sum(self.tokens.values())
        return {key: tokens / total for key, tokens in self.tokens.items()} if total else {}

    def to_json(self, current: Sequence[str]) -> dict[str, Any]:
        """Return JSON values: current sources in their order, then former ones by name."""
        former = sorted({*self.rows, *self.tokens} - set(current))
        return {
            "version": VERSION,
            "datasets": [
                {"spec": key, "row_offset": self.rows[key], "token_offset": self.tokens[key]}
                for key in (*current, *former)
            ],
        }

    @classmethod
    def from_json(
        cls, state: Mapping[str, Any], changes: Sequence[SourceChange] = ()
    ) -> "Consumption":
        """Read :meth:`to_json`. A missing token offset counts as 0, a missing version as 1.

        Args:
            changes: effects of the resume on the sources, ``loader.changes``; sources that moved
                are counted under their current key.

        Raises:
            StateFormatError: the state has a newer version or another shape.

        Example:
            >>> old = {"datasets": [{"spec": "web", "row_offset": 7}]}
            >>> Consumption.from_json(old).tokens["web"]
            0
        """
        entries = state.get("datasets") if isinstance(state, Mapping) else None
        if not isinstance(entries, list):
            raise StateFormatError(f"{state!r:.80} is no consumption state: it lists no datasets.")
        check_version("consumption", state.get("version", VERSION), VERSION)
        consumed = cls()
        moved = {change.saved_key: change.key for change in changes}
        for number, entry in enumerate(entries):
            if isinstance(entry, Mapping):
                entry = {"row_offset": 0, "token_offset": 0, **entry}
            check_shape(entry, _ENTRY, f"datasets[{number}]")
            consumed.add(
                moved.get(entry["spec"], entry["spec"]),
                rows=entry["row_offset"],
                tokens=entry["token_offset"],
            )
        return consumed
