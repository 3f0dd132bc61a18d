# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Memory that readers write batches to and the trainer copies them from.

torch creates a shared-memory file for every batch and sends its descriptor through a socket, which
takes longer than building a batch from token files. This memory is allocated once, before the
readers are forked, and does not use ``/dev/shm``.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pickle import PicklingError
from typing import Any

import numpy as np

from energon_ext.batch.host_memory import host_buffer
from energon_ext.batch.transport import Contents, put_together, take_apart
from energon_ext.errors import WorkerError

#: Size of a slot. Its pages are only allocated when a batch is first written to them.
SLOT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class SlotBatch:
    """A batch on its way to the trainer.

    Attributes:
        number: number of the batch.
        pickled: the batch without the content of its tensors and arrays.
        tensor_bytes: length of the content of all tensors.
        places: begin and end of each array in the content, after the tensors.
        content: the content, uint8 [bytes], if it does not fit into a slot.
    """

    number: int
    pickled: bytes
    tensor_bytes: int
    places: tuple[tuple[int, int], ...]
    content: np.ndarray | None


class Slots:
    """A ring of slots; batch ``n`` uses slot ``n % count``.

    The loader requests batch ``n + count - 1`` after the trainer received batch ``n``, and batch
    ``n + count`` after the trainer has copied it.

    Args:
        count: number of batches requested ahead, plus one.
    """

    def __init__(self, count: int):
        self._count, self._num_bytes = count, SLOT_BYTES
        try:
            memory = mmap.mmap(-1, count * self._num_bytes)
        except OSError as error:
            raise WorkerError(
                f"No memory for {count} batches of workers, {self._num_bytes:,} bytes each "
                f"({error.strerror}); use fewer workers or a smaller prefetch_factor, or raise the "
                f"memory limit of the process."
            ) from error
        self._memory = np.frombuffer(memory, np.uint8)

    def put(self, number: int, batch: Any) -> SlotBatch:
        """Write the content of a batch into its slot; if it does not fit, send it as well."""
        arrays = Contents()
        try:
            pickled, tensors = take_apart(batch, arrays=arrays)
        except PicklingError as error:
            raise WorkerError(
                f"A worker cannot pickle its batch ({error}). Remove objects that cannot be "
                f"pickled from the batch, or use num_workers=0."
            ) from error
        end = tensors.end + arrays.end
        content = self._slot(number) if end <= self._num_bytes else np.empty(end, np.uint8)
        tensors.write(content[: tensors.end])
        arrays.write(content[tensors.end : end])
        places = tuple((tensors.end + a, tensors.end + b) for a, b in arrays.places)
        sent = content if end > self._num_bytes else None
        return SlotBatch(number, pickled, tensors.end, places, sent)

    def take(self, batch: SlotBatch) -> Any:
        """Return a copy of the batch, with its tensors in page-locked memory if a GPU is in use.

        Each tensor is a view of one tensor: torch knows by its storage, and not by an address, how
        long a copy to the GPU still reads page-locked memory. Arrays have no storage, so their
        memory is not page-locked.
        """
        content = self._slot(batch.number) if batch.content is None else batch.content
        tensors = host_buffer(batch.tensor_bytes)
        tensors.numpy()[:] = content[: batch.tensor_bytes]
        arrays = [content[begin:end].copy() for begin, end in batch.places]
        return put_together(batch.pickled, tensors, arrays)

    def _slot(self, number: int) -> np.ndarray:
        begin = number % self._count * self._num_bytes
        return self._memory[begin : begin + self._num_bytes]
