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

from energon_ext.batch import Row
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


class RowAssembler:
    """Writes the arrays of a row.

    Args:
        row_length: T.
        pad_id: token on positions that hold no document.
        mask_boundary_loss: weight 0 where the label is of another segment than the input.
        masked_label: weight 0 where the label is this id; None to mask none.
    """

    def __init__(
        self,
        row_length: int,
        *,
        pad_id: int = 0,
        mask_boundary_loss: bool = True,
        masked_label: int | None = None,
    ):
        self.row_length = row_length
        self.pad_id = pad_id
        self.mask_boundary_loss = mask_boundary_loss
        self.masked_label = masked_label

    def __call__(self, plan: RowPlan) -> Row:
        row_length = self.row_length
        stream = np.full(row_length + 1, self.pad_id, dtype=np.int64)
        label_weights = np.zeros(row_length + 1, dtype=np.float32)
        position_ids = np.zeros(row_length + 1, dtype=np.int64)
        segment_lengths: list[int] = []
        offset = 0
        for piece in plan.pieces:
            length = piece.stop - piece.start
            end = offset + length
            weights = piece.document.label_weights
            stream[offset:end] = piece.document.tokens[piece.start : piece.stop]
            label_weights[offset:end] = (
                1.0 if weights is None else weights[piece.start : piece.stop]
            )
            position_ids[offset:end] = np.arange(length)
            if self.mask_boundary_loss:
                # As a label, the first token of a segment belongs to the segment before it.
                label_weights[offset] = 0.0
            segment_lengths.append(min(end, row_length) - offset)
            offset = end
        if segment_lengths[-1] == 0:  # the last piece is the label of the last position only
            segment_lengths.pop()
        labels, token_weights = stream[1:], label_weights[1:]
        if self.masked_label is not None:
            token_weights[labels == self.masked_label] = 0.0
        return Row(
            tokens=stream[:row_length],
            labels=labels,
            token_weights=token_weights,
            position_ids=position_ids[:row_length],
            segment_lengths=segment_lengths,
            padding=max(0, row_length - offset),
            documents=plan.documents,
        )


class PackedRows(BaseWrapperDataset[Document, Row]):
    """Packs the documents of one source.

    State: the packer's, with a restore key for each document it holds. Those documents are read
    again after a restore, and nothing else is.

    Args:
        documents: a dataset of :class:`Document` that can restore samples.
        source: key of the source, written on every row.
        packer: decides which pieces make a row.
        assemble: writes a row.
    """

    def __init__(
        self,
        documents: SavableDataset[Document],
        *,
        source: str,
        packer: Packer,
        assemble: RowAssembler,
        worker_config: WorkerConfig,
    ):
        super().__init__(documents, worker_config=worker_config)
        self._source = source
        self._packer = packer
        self._empty_packer_state = packer.save_state()
        self._assemble = assemble
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
        row = self._assemble(plan)
        row.source = self._source
        return row

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
