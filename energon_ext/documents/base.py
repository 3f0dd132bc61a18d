# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Protocols for the documents of a planned source."""

from typing import Any, Protocol

import numpy as np


class Documents(Protocol):
    """Documents by number, with lengths that cost nothing and tokens that are read when needed.

    A *place* is wherever an implementation keeps the tokens of a document; it is looked up together
    with the length, so that reading a slice looks nothing up again.
    """

    def __len__(self) -> int:
        """Number of documents."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""

    def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Place and length in tokens of each document, both int64 [n]."""

    def tokens(self, place: int, start: int, stop: int) -> np.ndarray:
        """Tokens ``[start, stop)`` of the document at a place; a view where there is one."""

    def label_weights(self, place: int, start: int, stop: int) -> np.ndarray | None:
        """How much predicting each of these tokens counts, float32; None for 1 everywhere."""

    def fingerprint(self) -> dict[str, Any]:
        """JSON values by which a change of the documents is noticed, without reading them."""
