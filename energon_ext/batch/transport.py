# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Take a batch apart into one buffer of bytes and a JSON header, and put it together again.

Every field of the batch's dataclass travels, also those that a subclass adds: tensors of any type
and shape in the buffer, everything else in the header. Tensors and values may lie in lists, tuples
and dictionaries. The class is not part of the message: the receiver names it.
"""

import dataclasses
import functools
from typing import Any, Callable, Iterator, Mapping, TypeVar

import numpy as np
import torch

from energon_ext.batch.host_memory import block_of, bytes_of, view, views_of
from energon_ext.errors import ConfigError

B = TypeVar("B")
T = TypeVar("T")

_TENSOR = "tensor"
#: Values that contain no tensor. A list of only these is not walked through: a batch has the names
#: of all sources, of which there may be thousands.
_PLAIN = frozenset((type(None), bool, int, float, str))
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}


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


# The header -------------------------------------------------------------------------------------


def take_apart(batch: Any) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Return a batch's header, of JSON values, and the bytes of its tensors.

    Raises:
        ConfigError: a field that cannot travel, by name.
    """
    values, kind = values_of(batch), type(batch).__name__
    fields = {name: _to_json(value, f"{kind}.{name}") for name, value in values.items()}
    return {"class": kind, "fields": fields}, bytes_of(tensors_of(values))


def put_together(batch_class: type[B], header: Mapping[str, Any], buffer: torch.Tensor) -> B:
    """Return the batch of a header; its tensors are views of the buffer.

    Args:
        batch_class: class of the batch that was taken apart.

    Raises:
        ConfigError: that batch was of another class.
    """
    if header["class"] != batch_class.__name__:
        raise ConfigError(
            f"A batch of class {header['class']} arrived where {batch_class.__name__} was "
            f"expected; name the same class on all ranks."
        )
    layout: list[tuple[torch.dtype, list[int]]] = []
    for value in header["fields"].values():
        layout += _layout_of(value)
    views = iter(views_of(buffer, layout))
    fields = header["fields"].items()
    return build(batch_class, {name: _from_json(value, views) for name, value in fields})


def _to_json(value: Any, place: str) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, torch.Tensor):
        return {_TENSOR: [_name_of(value, place), *value.shape]}
    if kind in (list, tuple):
        is_plain = _PLAIN.issuperset(map(type, value))
        return {kind.__name__: value if is_plain else [_to_json(each, place) for each in value]}
    if kind is dict and all(type(key) is str for key in value):
        return {"dict": {key: _to_json(each, place) for key, each in value.items()}}
    found = "a dict with keys other than str" if kind is dict else f"a {kind.__qualname__}"
    raise ConfigError(
        f"{place}: {found} does not travel between ranks; allowed are tensors, None, bool, int, "
        f"float, str, and lists, tuples and dictionaries of them. Change the field, or do without "
        f"tensor parallelism."
    )


def _name_of(tensor: torch.Tensor, place: str) -> str:
    if not _is_dense_on_cpu(tensor):
        raise ConfigError(
            f"{place}: a tensor on {tensor.device} with layout {tensor.layout} does not travel "
            f"between ranks; allowed are dense tensors on the CPU."
        )
    return str(tensor.dtype).removeprefix("torch.")


def _layout_of(value: Any) -> Iterator[tuple[torch.dtype, list[int]]]:
    if not isinstance(value, dict):
        return
    ((kind, content),) = value.items()
    if kind == _TENSOR:
        yield _DTYPES[content[0]], content[1:]
        return
    items = content.values() if kind == "dict" else content
    if not _PLAIN.issuperset(map(type, items)):
        for each in items:
            yield from _layout_of(each)


def _from_json(value: Any, views: Iterator[torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == _TENSOR:
        return next(views)
    if kind == "dict":
        return {key: _from_json(each, views) for key, each in content.items()}
    is_plain = _PLAIN.issuperset(map(type, content))
    items = content if is_plain else [_from_json(each, views) for each in content]
    return tuple(items) if kind == "tuple" else items
