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
from typing import Any

import numpy as np
import torch

from energon_ext.batch.host_memory import host_buffer
from energon_ext.errors import WorkerError

#: Size of a slot. Its pages are only allocated when a batch is first written to them.
SLOT_BYTES = 64 * 2**20

_ALIGNMENT = 64


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
        pickled, tensors, arrays = _take_apart(batch)
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
        return _Unpickler(batch.pickled, tensors, arrays).load()

    def _slot(self, number: int) -> np.ndarray:
        begin = number % self._count * self._num_bytes
        return self._memory[begin : begin + self._num_bytes]


class _Contents:
    """Contents in the order of their addition, each at an aligned place."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self.end = 0
        self._parts: list[np.ndarray | memoryview] = []

    def add(self, part: np.ndarray | memoryview) -> tuple[int, int]:
        """Return where it begins and ends."""
        place = self.end, self.end + part.nbytes
        self._parts.append(part)
        self.places.append(place)
        self.end = -(-place[1] // _ALIGNMENT) * _ALIGNMENT
        return place

    def write(self, content: np.ndarray) -> None:
        for (begin, end), part in zip(self.places, self._parts):
            content[begin:end] = part


def _take_apart(batch: Any) -> tuple[bytes, _Contents, _Contents]:
    """Return a batch's pickle, and the contents of its tensors and of its arrays."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    try:
        pickler.dump(batch)
    except Exception as error:  # objects in a batch may raise anything
        raise WorkerError(
            f"A worker cannot pickle its batch ({type(error).__name__}: {error}). Remove objects "
            f"that cannot be pickled from the batch, or use num_workers=0."
        ) from error
    return file.getvalue(), pickler.tensors, pickler.arrays


class _Pickler(pickle.Pickler):
    """Pickles a tensor as its place, number, type and shape, and collects its content."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=5, buffer_callback=self._add_array)
        self.tensors, self.arrays = _Contents(), _Contents()
        self._places: dict[int, Any] = {}
        self._kept: list[torch.Tensor] = []  # so that no other tensor gets its id

    def persistent_id(self, item: Any) -> Any:
        if type(item) is not torch.Tensor or item.device.type != "cpu" or item.requires_grad:
            return None
        if id(item) not in self._places:
            flat = item.contiguous().reshape(-1).view(torch.uint8).numpy()
            number, place = len(self._kept), self.tensors.add(flat)
            self._kept.append(item)
            self._places[id(item)] = number, *place, item.dtype, tuple(item.shape)
        return self._places[id(item)]

    def _add_array(self, array: pickle.PickleBuffer) -> None:
        self.arrays.add(array.raw())


class _Unpickler(pickle.Unpickler):
    """Makes tensors as views of the content of all tensors."""

    def __init__(self, pickled: bytes, tensors: torch.Tensor, arrays: list[np.ndarray]):
        super().__init__(io.BytesIO(pickled), buffers=arrays)
        self._content = tensors
        self._views: dict[int, torch.Tensor] = {}

    def persistent_load(self, place: Any) -> torch.Tensor:
        number, begin, end, dtype, shape = place
        if number not in self._views:  # a second reference is the same tensor
            self._views[number] = self._content[begin:end].view(dtype).reshape(shape)
        return self._views[number]
