# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Take a batch apart into the bytes of its tensors and a pickle of the rest, and put it together.

Batches travel in this form from the processes of a loader to the trainer, and from one rank to
another. Each tensor, of any type and shape and wherever it is in the batch, becomes a view of one
buffer. Both ends are processes of one run, so that pickles are safe.
"""

import dataclasses
import functools
import io
import pickle
from typing import Any, Callable, Mapping, Sequence, TypeVar

import numpy as np
import torch

from energon_ext.batch.host_memory import block_of, bytes_of, view
from energon_ext.errors import ConfigError

B = TypeVar("B")
T = TypeVar("T")

#: Multiple at which the bytes of each tensor and array begin: a cache line.
_ALIGNMENT = 64
#: Values that contain no tensor. A list of only these is not walked through: a batch has the names
#: of all sources, of which there may be thousands.
_PLAIN = frozenset((type(None), bool, int, float, str))


def values_of(batch: Any) -> dict[str, Any]:
    """Return all fields of a batch, which is an instance of a dataclass, by name.

    Raises:
        ConfigError: the batch has an attribute that is no field, so that copies would lose it.
    """
    names = [field.name for field in dataclasses.fields(batch)]
    kind = type(batch)
    for name in getattr(batch, "__dict__", ()):
        if name not in names and not isinstance(
            getattr(kind, name, None), functools.cached_property
        ):
            raise ConfigError(
                f"{kind.__name__}.{name}: an attribute that is no field of the class does not move "
                f"with the batch; declare it in a dataclass that inherits from {kind.__name__}."
            )
    return {name: getattr(batch, name) for name in names}


def build(batch_class: type[B], values: Mapping[str, Any]) -> B:
    """Return a batch with these fields, as a copy: its constructor is not called again."""
    batch = object.__new__(batch_class)
    for name, value in values.items():
        setattr(batch, name, value)
    return batch


def replace_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return a value with each tensor in it changed, in the order of :func:`tensors_of`."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple) and not _PLAIN.issuperset(map(type, value)):
        return type(value)([replace_tensors(each, change) for each in value])
    if type(value) is dict:
        return {key: replace_tensors(each, change) for key, each in value.items()}
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a value."""
    found: list[torch.Tensor] = []
    replace_tensors(value, found.append)
    return found


def move(batch: B, transfer: Callable[[torch.Tensor], torch.Tensor]) -> B:
    """Return a batch, an instance of a dataclass, as :func:`move_tensors` moves its fields."""
    return build(type(batch), move_tensors(values_of(batch), transfer))


def move_tensors(value: T, transfer: Callable[[torch.Tensor], torch.Tensor]) -> T:
    """Return a value of which all tensors, on the CPU, moved together.

    Args:
        transfer: moves their bytes, uint8 [n]; the new tensors are views of its result.
    """
    tensors = tensors_of(value)
    block, starts = block_of(tensors)
    moved = transfer(block)
    views = (view(moved, start, x.dtype, x.shape) for start, x in zip(starts, tensors))
    moved_value: T = replace_tensors(value, lambda _: next(views))
    return moved_value


def page_lock(batch: Any) -> Any:
    """Return any batch in page-locked memory if this process uses a GPU, else as it is.

    Tensors may lie in lists, tuples and dictionaries; objects do it by their own ``pin_memory``.
    """
    if not torch.cuda.is_initialized():
        return batch
    if not (tensors := tensors_of(batch)):
        return batch.pin_memory() if hasattr(batch, "pin_memory") else batch
    if not all(_is_dense_on_cpu(each) and not each.requires_grad for each in tensors):
        return batch
    return move_tensors(batch, lambda block: block)


def _is_dense_on_cpu(tensor: torch.Tensor) -> bool:
    is_dense = tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)
    return is_dense and tensor.device.type == "cpu"


# Messages ---------------------------------------------------------------------------------------


class Detachable:
    """Base of a batch whose tensors take memory of their own when it is saved or pickled.

    Tensors of several types in one piece of memory cannot be saved by ``torch.save``, which
    Megatron-core uses for a step that it reruns in another process; and any tensor alone would be
    saved with the memory of all.
    """

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = replace_tensors(vars(self), torch.Tensor.clone)
        return state

    def __copy__(self) -> "Detachable":  # which would copy by pickling
        return build(type(self), vars(self))


class Contents:
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
        """Write all into uint8 [end]."""
        for (begin, end), part in zip(self.places, self._parts):
            content[begin:end] = part


def take_apart(value: Any, *, arrays: Contents | None = None) -> tuple[bytes, Contents]:
    """Return a pickle of any value, and the contents of its dense tensors on the CPU.

    Args:
        arrays: receives the contents of NumPy's arrays, which otherwise stay in the pickle.

    Raises:
        PicklingError: it has an object that cannot be pickled.
    """
    file = io.BytesIO()
    pickler = _Pickler(file, arrays)
    try:
        pickler.dump(value)
    except Exception as error:  # objects in a batch may raise anything
        raise pickle.PicklingError(f"{type(error).__name__}: {error}") from error
    return file.getvalue(), pickler.tensors


def put_together(pickled: Any, content: torch.Tensor, arrays: Sequence[np.ndarray] = ()) -> Any:
    """Return the value of a pickle; its tensors are views of the content, uint8 [bytes].

    Args:
        arrays: the content of each array that was not pickled.
    """
    return _Unpickler(pickled, content, arrays).load()


class _Pickler(pickle.Pickler):
    """Pickles a tensor as its number, place, type and shape, and collects its content."""

    def __init__(self, file: io.BytesIO, arrays: Contents | None):
        apart = None if arrays is None else self._add_array
        super().__init__(file, protocol=5, buffer_callback=apart)
        self.tensors, self._arrays = Contents(), arrays
        self._places: dict[int, Any] = {}
        self._kept: list[torch.Tensor] = []  # so that no other tensor gets its id

    def persistent_id(self, item: Any) -> Any:
        if type(item) is not torch.Tensor or not _is_dense_on_cpu(item) or item.requires_grad:
            return None
        if id(item) not in self._places:
            (flat,) = bytes_of([item])
            number, place = len(self._kept), self.tensors.add(flat)
            self._kept.append(item)
            self._places[id(item)] = number, *place, item.dtype, tuple(item.shape)
        return self._places[id(item)]

    def reducer_override(self, item: Any) -> Any:
        if isinstance(item, Detachable):  # its tensors are collected, without a further copy
            return build, (type(item), vars(item))
        return NotImplemented

    def _add_array(self, array: pickle.PickleBuffer) -> None:
        assert self._arrays is not None, "without it, arrays stay in the pickle"
        self._arrays.add(array.raw())


class _Unpickler(pickle.Unpickler):
    """Makes tensors as views of the content of all tensors."""

    def __init__(self, pickled: Any, content: torch.Tensor, arrays: Sequence[np.ndarray]):
        super().__init__(io.BytesIO(pickled), buffers=arrays)
        self._content = content
        self._views: dict[int, torch.Tensor] = {}

    def persistent_load(self, place: Any) -> torch.Tensor:
        number, begin, _, dtype, shape = place
        if number not in self._views:  # a second reference is the same tensor
            self._views[number] = view(self._content, begin, dtype, shape)
        return self._views[number]
