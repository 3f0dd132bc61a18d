# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""All pairs of start and offset, by number."""

from typing import NamedTuple

import numpy as np

from energon_ext.errors import ConfigError
from energon_ext.splice.config import SpliceFields


class Contents(NamedTuple):
    """What examples hold and where; int64 [n] each.

    Attributes:
        documents: which of the documents.
        starts: t, first token in the document.
        offsets: s, first position in the frame.
        copy_lens: tokens.
    """

    documents: np.ndarray
    starts: np.ndarray
    offsets: np.ndarray
    copy_lens: np.ndarray


class PairTable:
    """The pairs (t, s) of many documents, counted and found by number without listing them.

    The pairs of a document are ordered by t, then s. Its first rows (one per t) copy the same
    number of tokens and have equally many offsets. In ``slide_within`` a tail follows: the nearer t
    comes to the end, the fewer tokens are left and the more offsets they fit. How many pairs there
    are from a tail row on depends on the tokens it has left, not on the document, so one array of
    at most S numbers serves all documents.

    Attributes, int64 [documents]:
        totals, tokens: pairs of each document, and tokens that all of them copy.
        copy_lens, rows: tokens of a content that the document does not cut short, and its starts.
    """

    def __init__(self, doc_lengths: np.ndarray, seq_len: int, config: SpliceFields):
        lengths = np.asarray(doc_lengths, np.int64)
        if seq_len < config.min_copy_len:
            raise ConfigError(
                f"seq_len: {seq_len} found, below min_copy_len: {config.min_copy_len}; no content "
                f"fits."
            )
        if lengths.size and int(lengths.min()) < 1:
            raise ConfigError("doc_lengths: every document needs at least one token.")
        if seq_len - config.offset_jitter < config.min_copy_len:
            raise ConfigError(
                f"offset_jitter: {config.offset_jitter} found; it leaves a content "
                f"{seq_len - config.offset_jitter} of seq_len {seq_len} positions, and "
                f"min_copy_len is {config.min_copy_len}."
            )
        self._seq_len, self._longest = seq_len, int(lengths.max(initial=0))
        self._config = config
        stride = config.content_stride
        content = longest_content(seq_len, config)
        self.copy_lens = self._copy_lens(lengths, content)
        if self._is("cyclic_roll"):
            self.rows = -(-lengths // stride)
        elif self._is("anchor_start"):
            self.rows = np.ones_like(lengths)
        else:
            self.rows = np.where(
                lengths >= self.copy_lens, (lengths - self.copy_lens) // stride + 1, 0
            )
        self.rows = np.where(self.copy_lens >= config.min_copy_len, self.rows, 0)
        one_offset = config.mode == "slide" or self._is("coverage_balanced")
        self._per_row = np.ones_like(lengths) if one_offset else self._offsets(self.copy_lens)
        self._tail_pairs, self._tail_tokens = self._tail_table(content)
        has_tail = self.rows if self._is("slide_within") else lengths
        self._tail_lens = np.maximum(lengths - has_tail * stride, 0)
        self.totals = self.rows * self._per_row + self._tail_pairs[self._tail_lens]
        of_rows = self.copy_lens if one_offset else self._row_tokens(self.copy_lens)
        self.tokens = self.rows * of_rows + self._tail_tokens[self._tail_lens]

    def locate(self, documents: np.ndarray, numbers: np.ndarray) -> Contents:
        """The pairs of some numbers, each in ``[0, totals[document])``."""
        stride, offset_stride = self._config.content_stride, self._config.offset_stride
        per_row, rows = self._per_row[documents], self.rows[documents]
        row = numbers // per_row
        copy_lens = self.copy_lens[documents]
        columns = numbers - row * per_row
        in_tail = np.flatnonzero(row >= rows)
        if in_tail.size:
            first = self._tail_lens[documents[in_tail]]
            after = numbers[in_tail] - (rows * per_row)[in_tail]
            # Pairs from this one to the last, this one included.
            remaining = self._tail_pairs[first] - after
            skipped = self._tail_rows_before(first, remaining)
            lens = first - skipped * stride
            row[in_tail] = rows[in_tail] + skipped
            columns[in_tail] = self._tail_pairs[lens] - remaining
            copy_lens[in_tail] = lens
        offsets = columns * offset_stride
        if self._config.mode == "splice" and self._is("coverage_balanced"):
            offsets = self._seq_len - copy_lens
        copy_lens = np.minimum(copy_lens, self._seq_len - offsets)
        return Contents(documents, row * stride, offsets, copy_lens)

    def require_pairs(self) -> None:
        """Refuse documents of which none is long enough."""
        if not self.totals.any():
            config = self._config
            raise ConfigError(
                f"No document has a pair: the longest has {self._longest} tokens; content_length "
                f"{config.content_length}, min_copy_len {config.min_copy_len} and mode "
                f"{config.mode} with seq_len {self._seq_len} need more."
            )

    def row_counts(self, document: int) -> np.ndarray:
        """Pairs of each start of one document, int64 [starts]."""
        stride = self._config.content_stride
        lens = np.arange(self._tail_lens[document], self._config.min_copy_len - 1, -stride)
        return np.concatenate(
            [np.full(self.rows[document], self._per_row[document]), self._offsets(lens)]
        )

    def _is(self, content_start_mode: str) -> bool:
        return (
            self._config.mode == "splice" and self._config.content_start_mode == content_start_mode
        )

    def _copy_lens(self, lengths: np.ndarray, content: int) -> np.ndarray:
        if self._config.mode == "slide":
            return np.full_like(lengths, self._seq_len)
        shortened = self._config.adaptive_k or self._config.content_length is None
        if self._is("coverage_balanced") and not shortened:
            return np.full_like(lengths, content)
        return np.minimum(lengths, content)

    def _offsets(self, copy_lens: np.ndarray) -> np.ndarray:
        """Offsets of contents of so many tokens, the longest if the frame may cut them."""
        least = self._config.min_copy_len if self._config.cut_at_frame_end else copy_lens
        return (self._seq_len - np.minimum(least, copy_lens)) // self._config.offset_stride + 1

    def _row_tokens(self, copy_lens: np.ndarray) -> np.ndarray:
        """Tokens that all offsets of a start copy, with so many there."""
        stride, offsets = self._config.offset_stride, self._offsets(copy_lens)
        whole = np.minimum((self._seq_len - copy_lens) // stride + 1, offsets)
        # Behind the whole ones: S - s, for s = stride * whole .. stride * (offsets - 1).
        cut, steps = offsets - whole, (whole + offsets - 1) * (offsets - whole) // 2
        return whole * copy_lens + cut * self._seq_len - stride * steps

    def _tail_table(self, content: int) -> tuple[np.ndarray, np.ndarray]:
        """Pairs, and tokens, from a row with so many tokens left to the last row; [content]."""
        stride = min(self._config.content_stride, content)  # less than a content is left
        left = np.arange(-(-content // stride) * stride, dtype=np.int64)
        counts = np.stack([self._offsets(left), self._row_tokens(left)])
        both = np.where(left >= self._config.min_copy_len, counts, 0).reshape(2, -1, stride)
        pairs_left, tokens_left = both.cumsum(axis=1).reshape(2, -1)
        return pairs_left, tokens_left

    def _tail_rows_before(self, first: np.ndarray, remaining: np.ndarray) -> np.ndarray:
        """By bisection, how many rows of the tail end before ``remaining`` pairs are left."""
        stride = self._config.content_stride
        low, high = np.zeros_like(first), first // stride
        while bool((low < high).any()):
            middle = (low + high + 1) // 2
            reached = self._tail_pairs[first - middle * stride] >= remaining
            low = np.where(reached, middle, low)
            high = np.where(reached, high, middle - 1)
        return low


def longest_content(seq_len: int, config: SpliceFields) -> int:
    """Tokens of a content that no document cuts short, with room for the jitter beside it."""
    return min(config.content_length or seq_len, seq_len - config.offset_jitter)
