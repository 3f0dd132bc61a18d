# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Memory into which readers write their batches, and from which the trainer copies them.

torch makes a shared-memory file for every batch and sends its descriptor through a socket, which
takes longer than to make a batch of token files. This memory is made once, before the readers are
forked, and lies outside ``/dev/shm``.
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

#: Of a slot. Pages of memory are taken when a batch is written to them for the first time.
SLOT_BYTES = 64 * 2**20

_ALIGNMENT = 64


@dataclass(frozen=True)
class SlotBatch:
    """A batch on its way to the trainer.

    Attributes:
        number: of the batch.
        pickled: the batch without the content of its arrays.
        places: of its arrays in the slot, begin and end in bytes.
    """

    number: int
    pickled: bytes
    places: tuple[tuple[int, int], ...]


class Slots:
    """A ring of slots; batch ``n`` uses slot ``n % count``.

    The loader asks for batch ``n + count - 1`` after the trainer was given batch ``n``, and for
    batch ``n + count`` after the trainer has copied it.

    Args:
        count: one more than the batches that are asked for ahead.
    """

    def __init__(self, count: int):
        self._count, self._num_bytes = count, SLOT_BYTES
        try:
            memory = mmap.mmap(-1, count * self._num_bytes)
        except OSError as error:
            raise WorkerError(
                f"No memory for {count} batches of workers, {self._num_bytes:,} bytes each "
                f"({error.strerror}); take fewer workers, a smaller prefetch_factor, or raise the "
                f"limit of the process."
            ) from error
        self._memory = np.frombuffer(memory, np.uint8)

    def put(self, number: int, batch: Any) -> SlotBatch:
        """Write the arrays of a batch into its slot; those of a larger one stay in its pickle."""
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
        """The batch, copied into page-locked memory where there is a GPU."""
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
    except Exception as error:  # whatever the objects of a batch raise
        raise WorkerError(
            f"A worker cannot hand over its batch ({type(error).__name__}: {error}). Leave out of "
            f"the batch what cannot be pickled, or take num_workers=0."
        ) from error
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles a tensor as an array of its bytes, which may stay outside."""

    def reducer_override(self, item: Any) -> Any:
        if type(item) is not torch.Tensor or item.device.type != "cpu" or item.requires_grad:
            return NotImplemented
        flat = item.contiguous().reshape(-1)
        return _tensor, (flat.view(torch.uint8).numpy(), item.dtype, item.shape)


def _tensor(array: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    return torch.from_numpy(array).view(dtype).reshape(shape)
