# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Memory that readers write batches to and the trainer copies them from.

torch creates a shared-memory file for every batch and sends its descriptor through a socket, which
takes longer than building a batch from token files. This memory is allocated once, before the
readers are forked, and does not use ``/dev/shm``.
"""

from __future__ import annotations

import io
import mmap
import pickle
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
import torch

from energon_ext.errors import WorkerError

#: Size of a slot. Its pages are only allocated when a batch is first written to them.
SLOT_BYTES = 64 * 2**20

_ALIGNMENT = 64


@dataclass(frozen=True)
class SlotBatch:
    """A batch on its way to the trainer.

    Attributes:
        number: number of the batch.
        pickled: the batch without the content of its arrays.
        places: begin and end of each array in the slot, in bytes.
    """

    number: int
    pickled: bytes
    places: tuple[tuple[int, int], ...]


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
        """Write the arrays of a batch into its slot; if they do not fit, pickle them as well."""
        arrays: list[pickle.PickleBuffer] = []
        pickled = _pickled(batch, arrays.append)
        contents = [array.raw() for array in arrays]
        places, end = [], 0
        for content in contents:
            begin = -(-end // _ALIGNMENT) * _ALIGNMENT
            end = begin + content.nbytes
            places.append((begin, end))
        if end > self._num_bytes:
            return SlotBatch(number, _pickled(batch, None), ())
        slot = self._slot(number)
        for (begin, end), content in zip(places, contents):
            slot[begin:end] = content
        return SlotBatch(number, pickled, tuple(places))

    def take(self, batch: SlotBatch) -> Any:
        """Return a copy of the batch, in page-locked memory if there is a GPU."""
        end = batch.places[-1][1] if batch.places else 0
        copied = torch.empty(end, dtype=torch.uint8, pin_memory=torch.cuda.is_available()).numpy()
        copied[:] = self._slot(batch.number)[:end]
        return pickle.loads(batch.pickled, buffers=[copied[a:b] for a, b in batch.places])

    def _slot(self, number: int) -> np.ndarray:
        begin = number % self._count * self._num_bytes
        return self._memory[begin : begin + self._num_bytes]


def _pickled(batch: Any, outside: Callable[[pickle.PickleBuffer], Any] | None) -> bytes:
    file = io.BytesIO()
    try:
        _Pickler(file, protocol=5, buffer_callback=outside).dump(batch)
    except Exception as error:  # objects in a batch may raise anything
        raise WorkerError(
            f"A worker cannot pickle its batch ({type(error).__name__}: {error}). Remove objects "
            f"that cannot be pickled from the batch, or use num_workers=0."
        ) from error
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles a tensor as an array of its bytes, which can be stored outside the pickle."""

    def reducer_override(self, item: Any) -> Any:
        if type(item) is not torch.Tensor or item.device.type != "cpu" or item.requires_grad:
            return NotImplemented
        flat = item.contiguous().reshape(-1)
        return _tensor, (flat.view(torch.uint8).numpy(), item.dtype, item.shape)


def _tensor(array: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(array).view(dtype).reshape(shape)
