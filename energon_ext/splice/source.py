# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Spliced documents as a source of rows, like any other source of a blend."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Iterator, Mapping, Protocol, Sequence

import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.state import FlexState

from energon_ext.batch.rows import Row
from energon_ext.config.source_key import global_worker, global_workers
from energon_ext.documents.order import ENDLESS, Share, deal_anew
from energon_ext.splice.config import SpliceFields
from energon_ext.splice.frames import content_of
from energon_ext.splice.index import Contents, SpliceIndex
from energon_ext.state.match import check_fingerprint

logger = logging.getLogger(__name__)

#: Examples that are found at a time.
CHUNK = 1024


class Examples(Protocol):
    """What shows documents: :class:`~energon_ext.splice.SpliceIndex`, or a grid of it.

    Attributes:
        size: examples in an epoch.
    """

    size: int

    def locate(self, numbers: np.ndarray) -> Contents: ...


class SpliceSource(SavableDataset[Row]):
    """Frames of chosen documents.

    State: how many examples this worker has shown, one integer, and, after a change of the number
    of workers, what it was dealt of the examples that were left over then. Its order depends on the
    seed, the key of the source, the configuration and the chosen documents.

    Args:
        examples: where the documents are shown.
        documents: token ids of each chosen document.
        names: what batches call each document.
        config: how frames are filled.
        seq_len: S, positions of a frame.
        fill_id: token before a content whose prefix is attended to.
        epochs: passes over the examples, None for no end.
        restarts: whether another iteration after the last epoch begins with the first one again;
            else there is none until a state is restored under more epochs.
        fingerprint: JSON values that the order depends on; a state saved under others is refused.
        worker_config: Energon's.
    """

    def __init__(
        self,
        examples: Examples,
        documents: Sequence[np.ndarray],
        names: Sequence[str],
        *,
        config: SpliceFields,
        seq_len: int,
        fill_id: int,
        epochs: float | None,
        restarts: bool = True,
        fingerprint: Mapping[str, Any],
        worker_config: WorkerConfig,
    ):
        super().__init__(worker_config=worker_config)
        self.examples = examples
        self.names = list(names)
        self.fingerprint = dict(fingerprint)
        self._documents = documents
        self._config = config
        self._seq_len = seq_len
        self._fill_id = fill_id
        self._epochs = epochs
        self._restarts = restarts
        self._cyclic = config.mode == "splice" and config.content_start_mode == "cyclic_roll"
        self.reset_state_own()

    # What others may ask ------------------------------------------------------------------------

    @property
    def part_shares(self) -> dict[str, float]:
        """Expected share of each name in the tokens of this source."""
        if not isinstance(self.examples, SpliceIndex):
            return dict.fromkeys(self.names, 1.0 / len(set(self.names)))
        shares: Counter[str] = Counter()
        for name, share in zip(self.names, self.examples.token_shares().tolist()):
            shares[name] += share
        return dict(shares)

    @property
    def part_documents(self) -> dict[str, int]:
        """Examples of each name in an epoch."""
        if not isinstance(self.examples, SpliceIndex):
            return dict.fromkeys(self.names, 0)
        counts: Counter[str] = Counter()
        for name, quota in zip(self.names, self.examples.quotas.tolist()):
            counts[name] += quota
        return dict(counts)

    # Iteration ----------------------------------------------------------------------------------

    def reset_state_own(self) -> None:
        self._share: Share | None = None  # known in the worker, which knows its number
        self._shown = 0

    def len_worker(self, worker_idx: int | None = None) -> int:
        worker = global_worker(self.worker_config, worker_idx)
        share = Share.fresh(worker, global_workers(self.worker_config))
        if self._epochs is not None:
            return share.count(self._end)
        return max(1, share.count(self.examples.size))  # if not of this epoch, then of a later one

    def worker_has_samples(self) -> bool:
        return self._active_share().count(self._end) > 0

    def __iter__(self) -> Iterator[Row]:
        if self._config.pack_contents:
            for contents in self._packed():
                self._shown += len(contents)
                yield self._packed_row(contents)
        else:
            for content in self._contents():
                self._shown += 1
                yield self._row(*content)
        if self._restarts:
            self._shown = 0

    def _packed(self) -> Iterator[list[tuple[int, int, int, int]]]:
        """As many contents together as a frame holds."""
        frame: list[tuple[int, int, int, int]] = []
        filled = 0
        for content in self._contents():
            copy_len = content[-1]
            if frame and filled + copy_len > self._seq_len:
                yield frame
                frame, filled = [], 0
            frame.append(content)
            filled += copy_len
        if frame:
            yield frame

    def _contents(self) -> Iterator[tuple[int, int, int, int]]:
        """``(document, t, s, tokens)`` of what this worker shows next."""
        share, place = self._active_share(), self._shown
        count = share.count(self._end)
        while place < count:
            numbers = share[np.arange(place, min(place + CHUNK, count))]
            yield from zip(*(column.tolist() for column in self.examples.locate(numbers)))
            place += CHUNK

    def _active_share(self) -> Share:
        if self._share is None:
            workers = global_workers(self.worker_config)
            self._share = Share.fresh(global_worker(self.worker_config), workers)
        return self._share

    def _row(self, document: int, start: int, offset: int, copy_len: int) -> Row:
        """A frame of one content."""
        content = content_of(self._documents[document], start, copy_len, self._cyclic)
        name = self.names[document]
        if self._config.attend_prefix:
            return self._row_with_prefix(content, offset, name)
        return Row(
            [content],
            source=name,
            documents=1,
            first_positions=(offset,),
            gaps=(offset,),
            num_tokens=len(content),
        )

    def _packed_row(self, contents: Sequence[tuple[int, int, int, int]]) -> Row:
        documents, starts, offsets, copy_lens = zip(*contents)
        slices = [
            content_of(self._documents[document], start, copy_len, self._cyclic)
            for document, start, copy_len in zip(documents, starts, copy_lens)
        ]
        names = [self.names[document] for document in documents]
        return Row(slices, slice_sources=names, first_positions=offsets)

    def _row_with_prefix(self, content: np.ndarray, offset: int, name: str) -> Row:
        prefix = np.full(offset, self._fill_id, np.int64)
        if offset and self._config.eos_token_id is not None:
            prefix[-1] = self._config.eos_token_id
        label_weights = np.ones(offset + len(content), np.float32)
        label_weights[: offset + 1] = 0.0  # the first token of the content is not predicted
        return Row(
            [np.concatenate([prefix, content])],
            source=name,
            documents=1,
            label_weights=[label_weights],
        )

    @property
    def _end(self) -> int:
        return ENDLESS if self._epochs is None else int(self._epochs * self.examples.size)

    # State --------------------------------------------------------------------------------------

    def save_state(self) -> FlexState:
        return self._state(self._active_share(), self._shown)

    def _state(self, share: Share, shown: int) -> FlexState:
        share, shown = share.without(shown)
        return FlexState(
            __class__=type(self).__name__,
            shown=shown,
            listed=share.listed.tolist(),
            tail=share.tail,
            worker=[share.worker, share.workers],
            fingerprint=dict(self.fingerprint),
        )

    def restore_state(self, state: FlexState) -> None:
        self.reset_state_own()
        own = self._active_share()
        self._check(state, worker=[own.worker, own.workers])
        self._share, self._shown = _share_of(state), state["shown"]

    def redeal(
        self, states: Sequence[FlexState], workers: int, wanted: Sequence[int]
    ) -> list[FlexState]:
        """The states of some of ``workers`` workers that continue what others did.

        Args:
            states: of every old worker.
            workers: how many there are now.
            wanted: the numbers of those whose states are returned.
        """
        for state in states:
            self._check(state)
        dealt = [(_share_of(state), state["shown"]) for state in states]
        return [self._state(deal_anew(dealt, self._end, worker, workers), 0) for worker in wanted]

    def _check(self, state: FlexState, **current: Any) -> None:
        check_fingerprint(
            {
                **state.get("fingerprint", {}),
                "kind": state.get("__class__"),
                **{name: state.get(name) for name in current},
            },
            {**self.fingerprint, "kind": type(self).__name__, **current},
        )

    def can_restore_sample(self) -> bool:
        return False

    def assert_can_restore(self) -> None:
        raise NotImplementedError("A spliced frame cannot be restored from a key.")

    def config(self) -> dict[str, Any]:
        return {"type": type(self).__qualname__, "size": self.examples.size, **self.fingerprint}


def _share_of(state: FlexState) -> Share:
    worker, workers = state["worker"]
    return Share(worker, workers, np.array(state["listed"], np.int64), state["tail"])


def log_plan(index: SpliceIndex, numbers: np.ndarray, source: str) -> None:
    """Write what will be shown of the first documents to the debug log."""
    logger.info(
        "%s: %d documents of %d to %d tokens, %d examples in an epoch.",
        *(source, len(numbers), index.doc_lengths.min(), index.doc_lengths.max(), index.size),
    )
    columns = (numbers, index.doc_lengths, index.pairs, index.quotas)
    shares, coverage = index.token_shares(), index.coverage()
    for row, (number, length, pairs, quota) in enumerate(zip(*columns)):
        if not logger.isEnabledFor(logging.DEBUG) or row >= CHUNK:
            break
        logger.debug(
            "%s/doc%d: %d tokens, %d pairs, %d examples, share %.4f, each token %.2f times.",
            *(source, number, length, pairs, quota, shares[row], coverage[row]),
        )
