# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One source of a blend."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping

from megatron.energon.flavors.base_dataset import SavableDataset

from energon_ext.plan.row_source import RowSource
from energon_ext.plan.streamed import StreamedSamples
from energon_ext.state.match import SourceNames
from energon_ext.weights import ConstantWeight, WeightSpec


@dataclass
class Source:
    """One source of a blend.

    Attributes:
        key: its identity, see :class:`energon_ext.config.source_key.SourceKey`.
        rows: what it yields: planned rows, or any Energon dataset, whose samples are streamed.
        weight: where the blend is given no tree.
        documents: number of documents in one epoch.
        max_epochs: epochs after which ``rows`` end, None where they do not.
        names: by which its state is found where the key has changed.
        shown_as: its name for people, where it is not the key.
        fingerprint: of what a streamed one reads; planned rows bring their own.
    """

    key: str
    rows: RowSource | SavableDataset
    weight: WeightSpec = field(default_factory=lambda: ConstantWeight(1.0))
    documents: int = 0
    max_epochs: int | None = None
    names: SourceNames = SourceNames()
    fingerprint: Mapping[str, Any] = field(default_factory=dict)
    shown_as: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rows, SavableDataset):
            self.rows = StreamedSamples(self.rows, self.max_epochs, self.key, self.fingerprint)

    @property
    def streamed(self) -> StreamedSamples | None:
        """``rows``, where they are known only by reading them; None where they are planned."""
        return self.rows if isinstance(self.rows, StreamedSamples) else None

    @property
    def part_documents(self) -> dict[str, int]:
        """Documents in one epoch, by what batches call them."""
        return getattr(self.rows, "part_documents", {self.key: self.documents})

    @property
    def part_shares(self) -> dict[str, float]:
        """Shares of the tokens of this source, by what batches call its parts."""
        return getattr(self.rows, "part_shares", {self.key: 1.0})
