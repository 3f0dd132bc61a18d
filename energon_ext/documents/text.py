# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents that Energon hands over one by one, as rows of a fixed length."""

import logging
from typing import Any, Iterator

import numpy as np
from megatron.energon import Sample, WorkerConfig
from megatron.energon.edataclass import edataclass
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.state import FlexState
from megatron.energon.wrappers.base import BaseWrapperDataset

from energon_ext.batch.rows import Row
from energon_ext.errors import SampleError
from energon_ext.packing import Packer, PackPlan, Pieces

logger = logging.getLogger(__name__)

#: So many documents without a token in a row are no accident.
MOST_EMPTY_IN_A_ROW = 1000


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

    State: a restore key for each document of which tokens are still to come, and the rows that are
    planned of them. Those documents are read again after a restore, and nothing else is.

    Documents without a token are left out and counted; the log names the first, the tenth, the
    hundredth and so on, and 1000 in a row are a SampleError.

    Args:
        documents: they must be able to restore samples.
        may_go_on: whether ``documents``, once at their end, may have more after a resume.
    """

    def __init__(
        self,
        documents: SavableDataset[Document],
        *,
        source: str,
        packer: Packer,
        buffer_docs: int,
        may_go_on: bool = False,
        worker_config: WorkerConfig,
    ):
        super().__init__(documents, worker_config=worker_config)
        self._source = source
        self._packer = packer
        self._buffer_docs = buffer_docs
        self._may_go_on = may_go_on
        self._empty = self._empty_in_a_row = 0
        self.reset_state_own()

    def reset_state_own(self) -> None:
        self._held: dict[int, Document] = {}  # those of the plan, by a number of our own
        self._next_number = 0
        self._plan = PackPlan.none()
        self._next_row = 0
        self._rows_before = 0
        self._has_ended = False
        self._pending: FlexState | None = None

    def len_worker(self, worker_idx: int | None = None) -> int:
        return self.dataset.len_worker(worker_idx)

    def __iter__(self) -> Iterator[Row]:
        self._read_held_documents()
        documents = iter(self.dataset)
        while True:
            while self._next_row < len(self._plan):
                self._next_row += 1
                yield self._row(self._next_row - 1)
            if self._has_ended and not self._may_go_on:
                break
            carried, rows_before = self._plan.carried, self._rows_before + len(self._plan)
            new = self._read(documents, carried)
            if self._has_ended and not len(new) and not len(carried):
                break
            self._plan = self._packer.plan(
                carried, new, rows_before=rows_before, last=self._has_ended
            )
            self._rows_before, self._next_row = rows_before, 0
            needed = np.unique(np.concatenate([p.documents for p in self._plan.parts()])).tolist()
            self._held = {number: self._held[number] for number in needed}
        self.reset_state_own()

    def _read(self, documents: Iterator[Document], carried: Pieces) -> Pieces:
        """Documents that fill the buffer, as pieces."""
        count = len(np.unique(carried.documents))
        tokens = int((carried.stops - carried.starts).sum())
        first, lengths = self._next_number, []
        self._has_ended = False
        while not self._packer.is_enough(count, tokens, self._buffer_docs):
            document = next(documents, None)
            if document is None:
                self._has_ended = True
                break
            if not len(document.tokens):
                self._leave_out(document)
                continue
            self._empty_in_a_row = 0
            self._held[self._next_number] = document
            self._next_number += 1
            lengths.append(len(document.tokens))
            count, tokens = count + 1, tokens + lengths[-1]
        numbers = np.arange(first, self._next_number)
        return Pieces.whole(numbers, np.zeros_like(numbers), np.array(lengths, np.int64))

    def _leave_out(self, document: Document) -> None:
        self._empty, self._empty_in_a_row = self._empty + 1, self._empty_in_a_row + 1
        found = f"{self._source}: {self._empty} documents without a token left out"
        if self._empty_in_a_row == MOST_EMPTY_IN_A_ROW:
            raise SampleError(
                f"{found}, the last {self._empty_in_a_row} in a row, up to {document.__key__}; "
                f"look at the text and the tokenizer."
            )
        if str(self._empty).rstrip("0") == "1":
            logger.warning("%s, the last: %s.", found, document.__key__)

    def _row(self, number: int) -> Row:
        plan = self._plan
        slices, weights = [], []
        for document, start, stop in plan.pieces[plan.extent(number)].ranges():
            held = self._held[document]
            slices.append(held.tokens[start:stop])
            weights.append(None if held.label_weights is None else held.label_weights[start:stop])
        return Row(
            slices,
            source=self._source,
            documents=int(plan.documents[number]),
            label_weights=None if all(each is None for each in weights) else weights,
            num_tokens=int(plan.tokens[number]),
        )

    # State --------------------------------------------------------------------------------------

    def save_state(self) -> FlexState:
        packing = self._packing_state() if self._pending is None else self._pending
        return FlexState(**super().save_state(), packing=packing)

    def _packing_state(self) -> FlexState:
        plan, next_row = self._plan, self._next_row
        begin = int(plan.ends[next_row - 1]) if next_row else 0
        left = plan.pieces[begin:], plan.carried
        numbers = np.unique(np.concatenate([pieces.documents for pieces in left]))
        rows = (plan.ends[next_row:] - begin, plan.tokens[next_row:], plan.documents[next_row:])
        return FlexState(
            held=[self._held[number].__restore_key__ for number in numbers.tolist()],
            pieces=[
                [
                    [index, start, stop]
                    for index, (_, start, stop) in zip(
                        np.searchsorted(numbers, pieces.documents).tolist(), pieces.ranges()
                    )
                ]
                for pieces in left
            ],
            rows=np.stack(rows, axis=1).tolist(),
            rows_before=self._rows_before + next_row,
            has_ended=self._has_ended,
        )

    def restore_state(self, state: FlexState) -> None:
        super().restore_state(state)
        self.reset_state_own()
        # Reading needs an active worker, which there is only while iterating.
        self._pending = state["packing"]

    def _read_held_documents(self) -> None:
        if self._pending is None:
            return
        state, self._pending = self._pending, None
        documents = [self.dataset.restore_sample(key) for key in state["held"]]
        self._held = dict(enumerate(documents))
        self._next_number = len(documents)
        lengths = np.array([len(document.tokens) for document in documents], np.int64)
        pieces, carried = (Pieces.of_ranges(ranges, lengths) for ranges in state["pieces"])
        ends, tokens, finished = np.array(state["rows"], np.int64).reshape(-1, 3).T
        self._plan = PackPlan(pieces, ends, tokens, finished, carried)
        self._rows_before, self._has_ended = state["rows_before"], state["has_ended"]

    def can_restore_sample(self) -> bool:
        return False

    def assert_can_restore(self) -> None:
        raise NotImplementedError("A packed row cannot be restored from a key.")

    def config(self) -> dict[str, Any]:
        return {
            "type": type(self).__qualname__,
            "packer": type(self._packer).__qualname__,
            "seq_len": self._packer.seq_len,
            "dataset": self.dataset.config(),
        }
