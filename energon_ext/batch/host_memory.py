# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The bytes of many tensors in one piece of host memory, from which one copy moves them to a GPU.

NumPy copies the bytes. torch would wake all of its threads for each megabyte, and they then spin
for a while.
"""

import math
from typing import Sequence

import numpy as np
import torch

#: Multiple of which a received buffer must begin in memory: the size of the widest type.
ALIGNMENT = 16

#: Integers by their size: NumPy does not have all types of torch.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def host_buffer(num_bytes: int) -> torch.Tensor:
    """Return host memory, page-locked once this process uses a GPU: uint8 [num_bytes].

    A forked process of a loader never does.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_initialized())


def buffer_of(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the bytes of tensors as one :func:`host_buffer`."""
    parts = bytes_of(tensors)
    buffer = host_buffer(sum(map(len, parts)))
    write_bytes(parts, buffer)
    return buffer


def tensors_from(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
    """Copy arrays of any shape to one :func:`host_buffer`; return flat tensors, views of it."""
    layout = [(torch.from_numpy(array).dtype, [array.size]) for array in arrays]
    tensors = views_of(host_buffer(sum(array.nbytes for array in arrays)), layout)
    for tensor, array in zip(tensors, arrays):
        tensor.numpy().reshape(array.shape)[...] = array
    return tensors


def bytes_of(tensors: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Return the bytes of each tensor, uint8 [n], in the order in which a buffer holds them."""
    return [_bytes(tensors[index]) for index in _order([tensor.dtype for tensor in tensors])]


def write_bytes(parts: Sequence[np.ndarray], buffer: torch.Tensor) -> None:
    """Write parts, uint8 [n] each, one after another into a buffer."""
    content, end = buffer.numpy(), 0
    for part in parts:
        begin, end = end, end + len(part)
        content[begin:end] = part


def take(tensor: torch.Tensor, indices: np.ndarray) -> torch.Tensor:
    """Return ``tensor[indices]``, on the tensor's device."""
    if tensor.device.type != "cpu" or tensor.is_complex():
        return tensor[torch.from_numpy(indices).to(tensor.device)]
    array = tensor.detach().view(_INTEGERS[tensor.itemsize]).numpy()
    return torch.from_numpy(array[indices]).view(tensor.dtype)


def views_of(
    buffer: torch.Tensor, layout: Sequence[tuple[torch.dtype, Sequence[int]]]
) -> list[torch.Tensor]:
    """Return tensors as views of a buffer, given the type and shape of each."""
    return [
        view(buffer, start, dtype, shape) for start, (dtype, shape) in zip(_starts(layout), layout)
    ]


def block_of(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]]:
    """Return one piece of host memory with all tensors, and where each begins in it.

    If they are views of one piece already, it is that, without a copy.
    """
    shared = _shared_block(tensors)
    if shared and (shared[0].is_pinned() or not torch.cuda.is_initialized()):
        return shared
    return buffer_of(tensors), _starts([(x.dtype, x.shape) for x in tensors])


def _shared_block(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[int]] | None:
    """Return the memory of which all tensors are views, or None if there is more to copy in it."""
    filled = [x for x in tensors if x.numel()]
    if len({x.untyped_storage().data_ptr() for x in filled}) != 1:
        return None
    if not all(x.is_contiguous() and not (x.is_conj() or x.is_neg()) for x in filled):
        return None
    starts = [int(x.storage_offset()) * x.itemsize for x in filled]
    begin = min(starts) // ALIGNMENT * ALIGNMENT
    length = max(start + x.nbytes for start, x in zip(starts, filled)) - begin
    if length > 2 * sum(x.nbytes for x in filled):  # for example, parts of a whole data set
        return None
    # torch tracks page-locked memory by its storage, so this must be a view of the same one.
    block = torch.empty(0, dtype=torch.uint8)
    block.set_(filled[0].untyped_storage(), begin, (length,))  # type: ignore[call-overload]
    places = iter(starts)
    return block, [next(places) - begin if x.numel() else 0 for x in tensors]


def _bytes(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.is_contiguous() or tensor.is_complex():
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    array = tensor.view(_INTEGERS[tensor.itemsize]).numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def view(
    buffer: torch.Tensor, start: int, dtype: torch.dtype, shape: Sequence[int]
) -> torch.Tensor:
    """Return the tensor of this type and shape that begins at a byte of a buffer."""
    end = start + math.prod(shape) * dtype.itemsize
    return buffer[start:end].view(dtype).reshape(shape)


def _starts(layout: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[int]:
    """Return where each tensor begins in a buffer, given the type and shape of each."""
    starts, end = [0] * len(layout), 0
    for index in _order([dtype for dtype, _ in layout]):
        dtype, shape = layout[index]
        starts[index] = end
        end += math.prod(shape) * dtype.itemsize
    return starts


def _order(dtypes: Sequence[torch.dtype]) -> list[int]:
    """Return indices of tensors by decreasing size of their elements, so that all are aligned."""
    return sorted(range(len(dtypes)), key=lambda index: -dtypes[index].itemsize)
