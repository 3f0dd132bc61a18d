# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents that Energon hands over one by one, as rows of a fixed length."""

from __future__ import annotations

from typing import Any, Iterator

import numpy as np
from megatron.energon import Sample, WorkerConfig
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.state import FlexState
from megatron.energon.wrappers.base import BaseWrapperDataset

from energon_ext.batch.rows import Row
from energon_ext.packing import Packer, RowPlan


@edataclass
class Document(Sample):
    """An encoded document.

    Attributes:
        tokens: int64 [n], special tokens included.
        label_weights: float32 [n] or None for 1 everywhere; how much predicting each token counts.
    """

    tokens: np.ndarray
    label_weights: np.ndarray | None = None


class PackedRows(BaseWrapperDataset[Document, Row]):
    """Packs the documents of one source.

    State: the packer's, with a restore key for each document it holds. Those documents are read
    again after a restore, and nothing else is.

    Args:
        documents: a dataset of :class:`Document` that can restore samples.
        source: key of the source, written on every row.
        packer: decides which pieces make a row.
    """

    def __init__(
        self,
        documents: SavableDataset[Document],
        *,
        source: str,
        packer: Packer,
        worker_config: WorkerConfig,
    ):
        super().__init__(documents, worker_config=worker_config)
        self._source = source
        self._packer = packer
        self._empty_packer_state = packer.save_state()
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._packer.restore_state(self._empty_packer_state, [])
        self._pending: FlexState | None = None
        self._source_ended = False

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[Row]:
        self._read_held_documents()
        documents = iter(self.dataset)
        while not self._source_ended:
            while (plan := self._packer.pop()) is not None:
                yield self._row(plan)
            document = next(documents, None)
            if document is None:
                self._source_ended = True
            else:
                self._packer.add(document, len(document.tokens))
        for plan in self._packer.flush():
            yield self._row(plan)
        self._source_ended = False

    def _row(self, plan: RowPlan) -> Row:
        pieces = plan.pieces
        slices = [piece.document.tokens[piece.start : piece.stop] for piece in pieces]
        label_weights = None
        if any(piece.document.label_weights is not None for piece in pieces):
            label_weights = [
                weights if weights is None else weights[piece.start : piece.stop]
                for piece in pieces
                for weights in (piece.document.label_weights,)
            ]
        return Row(
            slices,
            source=self._source,
            documents=plan.documents,
            label_weights=label_weights,
            num_tokens=min(sum(map(len, slices)), self._packer.row_length),
        )

    def _read_held_documents(self) -> None:
        if self._pending is not None:
            held = [self.dataset.restore_sample(key) for key in self._pending["held"]]
            self._packer.restore_state(self._pending["packer"], held)
            self._pending = None

    def save_state(self) -> FlexState:
        packing = self._pending
        if packing is None:
            held = self._packer.held_documents()
            packing = FlexState(
                packer=self._packer.save_state(),
                held=[document.__restore_key__ for document in held],
            )
        return FlexState(**super().save_state(), packing=packing, source_ended=self._source_ended)

    def restore_state(self, state: FlexState) -> None:
        super().restore_state(state)
        # Reading needs an active worker, which there is only while iterating.
        self._pending = state["packing"]
        self._source_ended = state["source_ended"]

    def can_restore_sample(self) -> bool:
        return False

    def assert_can_restore(self) -> None:
        raise NotImplementedError("A packed row cannot be restored from a key.")

    def config(self) -> dict[str, Any]:
        return {
            "type": type(self).__qualname__,
            "packer": type(self._packer).__qualname__,
            "row_length": self._packer.row_length,
            "dataset": self.dataset.config(),
        }
