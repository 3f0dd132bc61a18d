# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hashes of the rows that a step trains on, by which runs are compared.

The hash of a step is the sum of the hashes of its rows. So it does not depend on their order, on
ranks and on micro-batches, none of which changes the gradient, and ranks can add their sums.
"""

from typing import Iterator, Sequence

import numpy as np

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.keyed import sha256

#: Parts of a sum over rows, and bits per part: a float64 can add the parts of 2**20 ranks exactly.
NUM_PARTS, PART_BITS = 4, 32
_MODULUS = 1 << NUM_PARTS * PART_BITS


class StepHash:
    """The hash of the rows that this rank has read since the last call of :meth:`take`.

    Example:
        >>> from energon_ext.batch.collate import BatchAssembler
        >>> from energon_ext.batch.rows import Row
        >>> assemble, first, second = BatchAssembler(4), StepHash(), StepHash()
        >>> rows = [Row([np.arange(n)], source="web", documents=1) for n in (2, 3)]
        >>> first.add(assemble(rows, ("web",)), seq_len=4)
        >>> for row in reversed(rows):
        ...     second.add(assemble([row], ("web",)), seq_len=4)
        >>> first.take() == second.take()
        True
    """

    def __init__(self) -> None:
        self._sum = 0

    def add(self, batch: PackedBatch, seq_len: int) -> None:
        """Add the rows of a batch in host memory; ``seq_len`` is their number of positions."""
        for digest in row_digests(batch, seq_len):
            self._sum += int.from_bytes(digest, "little")

    def take(self) -> list[int]:
        """Return the sum in parts of ``PART_BITS`` bits, lowest first, and start again."""
        total, self._sum = self._sum, 0
        return [total >> PART_BITS * n & (1 << PART_BITS) - 1 for n in range(NUM_PARTS)]


def hash_of_parts(parts: Sequence[float]) -> str:
    """Return the hash of a step, given the sums of the parts of all ranks."""
    total = sum(int(part) << PART_BITS * number for number, part in enumerate(parts))
    return f"{total % _MODULUS:0{NUM_PARTS * PART_BITS // 4}x}"


def row_digests(batch: PackedBatch, seq_len: int) -> Iterator[bytes]:
    """Yield a digest of each row of a batch in host memory.

    It covers tokens, labels, weights, positions, and where documents and padding begin; not the
    names of sources, which contain paths.
    """
    ends = batch.cu_seqlens[1:].numpy()
    is_padding = batch.source_ids.numpy() < 0
    for first in range(0, batch.num_tokens, seq_len):
        row = slice(first, first + seq_len)
        segments = slice(*np.searchsorted(ends, [first, first + seq_len], "right"))
        ids = (batch.tokens[row], batch.labels[row], batch.position_ids[row])
        digest = sha256(
            *(each.numpy().astype("<i4").data for each in ids),
            batch.token_weights[row].numpy().data,
            (ends[segments] - first).astype("<i4").data,
            is_padding[segments].data,
        )
        yield bytes.fromhex(digest)[: NUM_PARTS * PART_BITS // 8]
