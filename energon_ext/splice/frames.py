# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One content in its frame."""

from typing import NamedTuple

import numpy as np

from energon_ext.arguments import check_integer
from energon_ext.errors import ConfigError


class Frame(NamedTuple):
    """A frame of S positions.

    Attributes:
        tokens: int64 [S].
        labels: int64 [S], the next token.
        token_weights: float32 [S], 1 where input and label are both of the content.
        segment_ids: int64 [S], 0 before the content and 1 from it on.
        position_ids: int64 [S], the absolute position.
    """

    tokens: np.ndarray
    labels: np.ndarray
    token_weights: np.ndarray
    segment_ids: np.ndarray
    position_ids: np.ndarray


def make_frame(
    doc: np.ndarray,
    t: int,
    s: int,
    seq_len: int,
    content_length: int | None = None,
    pad_id: int = 0,
    *,
    eos_id: int | None = None,
    cyclic: bool = False,
) -> Frame:
    """Place ``min(K, L - t, S - s)`` tokens of a document at an offset.

    The filler behind the content has its segment: under a causal mask the content does not see it.

    Args:
        doc: integers [L].
        t: first token in the document.
        s: first position in the frame.
        seq_len: S, positions of the frame.
        content_length: K, tokens; None for as many as fit.
        pad_id: what fills the rest.
        eos_id: put on the position before the content; None for filler.
        cyclic: the document goes on at its beginning, and L tokens are left at any t.

    Raises:
        ConfigError: a start outside the document, an offset outside the frame, no tokens to copy.

    Example:
        >>> frame = make_frame(np.arange(5), t=1, s=1, seq_len=5, content_length=3, pad_id=9)
        >>> frame.tokens.tolist(), frame.token_weights.tolist(), frame.segment_ids.tolist()
        ([9, 1, 2, 3, 9], [0.0, 1.0, 1.0, 0.0, 0.0], [0, 1, 1, 1, 1])
    """
    doc = np.asarray(doc)
    if content_length is not None:
        check_integer("content_length", content_length, 1)
    if doc.ndim != 1:
        raise ConfigError(f"make_frame: a document of shape {list(doc.shape)} found, not [L].")
    if not 0 <= t < len(doc) or not 0 <= s < seq_len:
        raise ConfigError(
            f"make_frame: t={t} and s={s} found; the document has {len(doc)} tokens and the frame "
            f"{seq_len} positions."
        )
    content = content_of(doc, t, min(content_length or seq_len, seq_len - s), cyclic)
    end = s + len(content)
    stream = np.full(seq_len + 1, pad_id, np.int64)
    stream[s:end] = content
    if eos_id is not None and s > 0:
        stream[s - 1] = eos_id
    token_weights = np.zeros(seq_len, np.float32)
    token_weights[s : end - 1] = 1.0
    positions = np.arange(seq_len, dtype=np.int64)
    return Frame(
        tokens=stream[:-1],
        labels=stream[1:],
        token_weights=token_weights,
        segment_ids=(positions >= s).astype(np.int64),
        position_ids=positions,
    )


def content_of(doc: np.ndarray, t: int, copy_len: int, cyclic: bool = False) -> np.ndarray:
    """At most ``copy_len`` tokens of a document from t on; a view, unless it goes round."""
    if not cyclic or t + copy_len <= len(doc):
        return doc[t : t + copy_len]
    copy_len = min(copy_len, len(doc))
    return np.concatenate([doc[t:], doc[: max(0, t + copy_len - len(doc))]])
