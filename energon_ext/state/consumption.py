# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""How much of each source a run has consumed.

There are two counts. What was *drawn* is in the state of the workers, which are ahead of the
training by what they prefetch. What was *trained* is counted here, from the batches that the steps
consumed. Counts are local to a rank and are saved by it; a global count is made from the local ones
when it is asked for, and never added back into them.
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
    """Rows and tokens of each source that was trained on. A row is a document of the dataset.

    Attributes:
        rows: documents that ended in a batch, by source key.
        tokens: positions trained on, padding left out, by source key.

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
        """Count what was consumed of one source."""
        self.rows[source] += rows
        self.tokens[source] += tokens

    def add_batch(self, batch: PackedBatch) -> None:
        """Count a batch that a step consumed."""
        self.rows.update(batch.documents_per_source())
        self.tokens.update(batch.tokens_per_source())

    def reduce(self, group: dist.ProcessGroup | None = None) -> "Consumption":
        """The sum over the ranks of a (data-parallel) group; all of them call this together.

        The local counts stay what they are. Without torch.distributed, a copy.
        """
        ranks = on_all_ranks(lambda: (self.rows, self.tokens), group)
        return Consumption(
            sum((rows for rows, _ in ranks), Counter()),
            sum((tokens for _, tokens in ranks), Counter()),
        )

    def epochs(
        self, documents: Mapping[str, int], tokens: Mapping[str, int] | None = None
    ) -> dict[str, float]:
        """Passes over each source, by tokens where those of an epoch are known.

        Args:
            documents, tokens: in one epoch of each source, over all ranks; see
                :attr:`energon_ext.plan.source.Blend.documents` and
                :attr:`~energon_ext.plan.source.Blend.epoch_tokens`; 0 has no passes.
        """
        own: dict[str, float] = {k: self.rows[k] / n if n else 0.0 for k, n in documents.items()}
        for key, count in (tokens or {}).items():
            own[key] = self.tokens[key] / count if count else 0.0
        return own

    def shares(self) -> dict[str, float]:
        """The share of each source in all tokens."""
        total = sum(self.tokens.values())
        return {key: tokens / total for key, tokens in self.tokens.items()} if total else {}

    def to_json(self, current: Sequence[str]) -> dict[str, Any]:
        """JSON values: the sources of the run in its order, then those it no longer has by name."""
        gone = sorted({*self.rows, *self.tokens} - set(current))
        return {
            "version": VERSION,
            "datasets": [
                {"spec": key, "row_offset": self.rows[key], "token_offset": self.tokens[key]}
                for key in (*current, *gone)
            ],
        }

    @classmethod
    def from_json(
        cls, state: Mapping[str, Any], changes: Sequence[SourceChange] = ()
    ) -> "Consumption":
        """Continue from :meth:`to_json`. A missing token offset reads as 0, a missing version as 1.

        Args:
            changes: what the resume did with the sources, ``loader.changes``; those that moved are
                counted under the current key.

        Raises:
            StateFormatError: a newer version, or not of this form.

        Example:
            >>> old = {"datasets": [{"spec": "web", "row_offset": 7}]}
            >>> Consumption.from_json(old).tokens["web"]
            0
        """
        entries = state.get("datasets") if isinstance(state, Mapping) else None
        if not isinstance(entries, list):
            raise StateFormatError(f"Not a consumption state, no list of datasets in {state!r:.80}")
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
