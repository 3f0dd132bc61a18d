# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Protocol for the documents of a planned source."""

from typing import Any, Protocol

import numpy as np


class Documents(Protocol):
    """Documents by number: lengths are cheap, tokens are read on demand.

    A *place* tells an implementation where the tokens of a document are. It is looked up together
    with the length, so reading a slice needs no second lookup.
    """

    def __len__(self) -> int:
        """Return the number of documents."""

    def tokens_in(self, first: int, stop: int) -> int:
        """Return the number of tokens in the documents ``first`` to ``stop - 1``, 1 at least."""

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the place of each document and its length in tokens, both int64 [n]."""

    def tokens(self, place: int, start: int, stop: int) -> np.ndarray:
        """Return tokens ``[start, stop)`` of the document at a place, as a view if possible."""

    def label_weights(self, place: int, start: int, stop: int) -> np.ndarray | None:
        """Return the loss weight of each of these tokens as a label, float32; None if all are 1."""

    def fingerprint(self) -> dict[str, Any]:
        """Return JSON values that reveal a change of the documents without reading them all."""
