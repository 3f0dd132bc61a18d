# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Numbers all pairs of a start and an offset."""

from typing import NamedTuple

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.splice.config import SpliceFields
from energon_ext.splice.starts import first_true


class Contents(NamedTuple):
    """Spans of documents and their places in the frame; int64 [n] each.

    Attributes:
        documents: indices of the documents.
        starts: t, first token in the document.
        offsets: s, first position in the frame.
        copy_lens: number of tokens.
    """

    documents: np.ndarray
    starts: np.ndarray
    offsets: np.ndarray
    copy_lens: np.ndarray


class PairTable:
    """The pairs (t, s) of many documents, counted and located by number without listing them.

    The pairs of a document are ordered by t, then s. Its first rows (one per t) copy the same
    number of tokens and have the same number of offsets. In ``slide_within``, a tail follows: the
    closer t is to the end, the fewer tokens remain and the more offsets fit. The number of pairs
    from a tail row onwards depends only on the tokens that remain there, so one array of at most S
    numbers serves all documents.

    Attributes, int64 [documents]:
        totals, tokens: pairs of each document, and tokens that all of its pairs copy.
        copy_lens, rows: tokens of a content before the tail, and the number of its starts.
    """

    def __init__(self, doc_lengths: np.ndarray, seq_len: int, config: SpliceFields):
        lengths = np.asarray(doc_lengths, np.int64)
        self._seq_len, self._config = seq_len, config
        self._longest = int(lengths.max(initial=0))
        placement, least = config.placement, config.min_copy_len
        if seq_len - config.offset_jitter < least:
            found = f"seq_len: {seq_len} found with offset_jitter: {config.offset_jitter}"
            needed = f"a content needs {least} positions in addition to the jitter (min_copy_len)"
            raise ConfigError(f"{found}; {needed}.")
        if (lengths < 1).any():
            raise ConfigError("doc_lengths: every document needs at least one token.")
        content, stride = longest_content(seq_len, config), config.content_stride
        is_whole = placement == "slide" or (
            placement == "coverage_balanced" and config.content_length and not config.adaptive_k
        )
        self.copy_lens = np.full_like(lengths, content) if is_whole else lengths.clip(max=content)
        self.rows = (lengths - self.copy_lens) // stride + 1
        if placement == "cyclic_roll":
            self.rows = -(-lengths // stride)
        elif placement == "anchor_start":
            self.rows = np.ones_like(lengths)
        self.rows[(self.copy_lens < least) | (self.copy_lens > lengths)] = 0
        self._per_row = self._offsets(self.copy_lens)
        per_row_tokens = self._row_tokens(self.copy_lens)
        if placement in ("slide", "coverage_balanced"):  # one offset per start
            self._per_row, per_row_tokens = np.ones_like(lengths), self.copy_lens
        self._tail_lens = np.zeros_like(lengths)
        if placement == "slide_within":
            self._tail_lens = (lengths - self.rows * stride).clip(min=0)
        self._build_tail(content)
        self.totals = self.rows * self._per_row + self._tail_pairs[self._tail_lens]
        self.tokens = self.rows * per_row_tokens + self._tail_tokens[self._tail_lens]

    def locate(self, documents: np.ndarray, numbers: np.ndarray) -> Contents:
        """Return pairs by number, each in ``[0, totals[document])``."""
        row, column = np.divmod(numbers, self._per_row[documents])
        copy_lens, rows = self.copy_lens[documents], self.rows[documents]
        tail = np.flatnonzero(row >= rows)
        if tail.size:
            first = self._tail_lens[documents[tail]]
            # Pairs from this one to the last, inclusive.
            remaining = self.totals[documents[tail]] - numbers[tail]
            left = self._left_in_tail(first, remaining)
            row[tail] = rows[tail] + (first - left) // self._config.content_stride
            column[tail] = self._tail_pairs[left] - remaining
            copy_lens[tail] = left
        offsets = column * self._config.offset_stride
        if self._config.placement == "coverage_balanced":
            offsets = self._seq_len - copy_lens
        copy_lens = np.minimum(copy_lens, self._seq_len - offsets)
        return Contents(documents, row * self._config.content_stride, offsets, copy_lens)

    def require_pairs(self) -> None:
        """Raise ConfigError if no document is long enough."""
        if not self.totals.any():
            config = self._config
            raise ConfigError(
                f"No document has a pair: the longest has {self._longest} tokens; content_length "
                f"{config.content_length}, min_copy_len {config.min_copy_len} and mode "
                f"{config.mode} with seq_len {self._seq_len} need more."
            )

    def row_counts(self, document: int) -> np.ndarray:
        """Return the number of pairs at each start of one document, int64 [starts]."""
        stride = self._config.content_stride
        lens = np.arange(self._tail_lens[document], self._config.min_copy_len - 1, -stride)
        return np.concatenate(
            [np.full(self.rows[document], self._per_row[document]), self._offsets(lens)]
        )

    def _offsets(self, copy_lens: np.ndarray) -> np.ndarray:
        """Return the number of offsets for contents of some lengths, before the frame cuts them."""
        least = self._config.min_copy_len if self._config.cut_at_frame_end else copy_lens
        return (self._seq_len - np.minimum(least, copy_lens)) // self._config.offset_stride + 1

    def _row_tokens(self, copy_lens: np.ndarray) -> np.ndarray:
        """Return the tokens that all offsets of a start copy, by the length of its content."""
        stride, offsets = self._config.offset_stride, self._offsets(copy_lens)
        whole = np.minimum((self._seq_len - copy_lens) // stride + 1, offsets)
        # Cut contents have S - s tokens, for s = stride * whole .. stride * (offsets - 1).
        cut, steps = offsets - whole, (whole + offsets - 1) * (offsets - whole) // 2
        return whole * copy_lens + cut * self._seq_len - stride * steps

    def _build_tail(self, content: int) -> None:
        """Sum the pairs and tokens of a tail row and its successors, by tokens left; [content]."""
        stride = min(self._config.content_stride, content)
        left = np.arange(-(-content // stride) * stride, dtype=np.int64)
        counts = np.stack([self._offsets(left), self._row_tokens(left)])
        counts[:, (left < self._config.min_copy_len) | (left >= content)] = 0
        sums = counts.reshape(2, -1, stride).cumsum(axis=1)
        self._tail_pairs, self._tail_tokens = sums.reshape(2, -1)

    def _left_in_tail(self, first: np.ndarray, remaining: np.ndarray) -> np.ndarray:
        """Return the fewest tokens left from which ``remaining`` pairs follow in the tail."""
        steps, least = np.divmod(first, self._config.content_stride)

        def left(step: np.ndarray) -> np.ndarray:
            return least + step * self._config.content_stride

        return left(first_true(lambda step: self._tail_pairs[left(step)] >= remaining, steps))


def longest_content(seq_len: int, config: SpliceFields) -> int:
    """Return the tokens of a content that no document cuts short, with room left for jitter."""
    return min(config.content_length or seq_len, seq_len - config.offset_jitter)
