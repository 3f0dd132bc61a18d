# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Converts stock states of Energon to JSON values and back.

JSON types stay as they are; everything else becomes a mapping with a tag::

    (1, 2)              {"__type__": "tuple", "value": [1, 2]}
    np.array([1.5])     {"__type__": "ndarray", "value": ["<f8", [1], "AAAAAAAA+D8="]}
    SliceState(...)     {"__type__": "SliceState", "value": {"index": 0, "current": 7}}

So a state can be written as JSON, or by ``torch.save`` as plain containers, which
``torch.load(weights_only=True)`` can read with its default list of classes.
"""

import base64
import math
import operator
import re
from typing import Any, Callable

import numpy as np
import torch
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
)
from megatron.energon.state import FlexState

from energon_ext.errors import StateFormatError

TAG = "__type__"
MAX_VALUES = 2**26


def to_plain(value: Any) -> Any:
    """Convert a state to JSON values.

    Raises:
        StateFormatError: the state contains an object of another type, which is named.

    Example:
        >>> to_plain({"rank": 3, "key": (1, None)})
        {'rank': 3, 'key': {'__type__': 'tuple', 'value': [1, None]}}
    """
    kind = np.generic if isinstance(value, np.generic) else type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is list:
        return [to_plain(each) for each in value]
    if kind is dict and TAG not in value and all(type(key) is str for key in value):
        return {key: to_plain(each) for key, each in value.items()}
    if kind not in _TYPES:
        raise StateFormatError(
            f"A data state contains a {kind.__module__}.{kind.__qualname__}; allowed are numbers, "
            "strings, bytes, containers, numeric arrays, tensors and the states of Energon."
        )
    take_apart, _ = _TYPES[kind]
    return {TAG: kind.__name__, "value": to_plain(take_apart(value))}


def from_plain(value: Any, max_values: int = MAX_VALUES) -> Any:
    """Convert the JSON values of :func:`to_plain` back to a state, without running code in it.

    Args:
        max_values: maximum number of values; a list that a pickle shares twice counts twice.

    Raises:
        StateFormatError: the value is too large, or not one that :func:`to_plain` returns.
    """
    left = max_values

    def read(value: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise ValueError("it is larger than any state")
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if kind is list:
            return [read(each) for each in value]
        if kind is not dict or not all(type(key) is str for key in value):
            raise ValueError(f"it contains a {kind.__name__}")
        if TAG not in value:
            return {key: read(each) for key, each in value.items()}
        _, put_together = _TYPES[_BY_NAME[value[TAG]]]
        return put_together(read(value["value"]))

    try:
        return read(value)
    except (ValueError, TypeError, KeyError, RuntimeError) as error:  # RecursionError as well
        raise StateFormatError(f"The data state is damaged: {error!r:.200}.") from error


def _bytes_to_text(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _array_to_list(array: np.ndarray) -> list[Any]:
    if array.dtype.kind not in "biufc":
        raise StateFormatError(f"A data state contains an array of {array.dtype}, not of numbers.")
    return [array.dtype.str, [*array.shape], _bytes_to_text(array.tobytes())]


def _array_from_list(content: list[Any]) -> np.ndarray:
    dtype, shape, text = content
    if not re.fullmatch(r"[<>|][biufc]\d{1,2}", dtype):
        raise ValueError(f"an array of {dtype}")
    data = bytearray(base64.b64decode(text))  # writable
    return np.frombuffer(data, dtype).reshape(shape)


def _tensor_to_array(tensor: torch.Tensor) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:
        raise StateFormatError("A data state contains a bfloat16 tensor, which numpy cannot hold.")
    return tensor.detach().cpu().numpy()


def _fields_of(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in state.__dataclass_fields__}


def _builder(cls: type) -> Callable[[dict[str, Any]], Any]:
    return lambda fields: cls(**fields)


#: For each type, a function that takes a value apart and one that rebuilds it.
_TYPES: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: (str, float),  # infinite or NaN
    bytes: (_bytes_to_text, base64.b64decode),
    tuple: (list, tuple),
    dict: (lambda value: [list(pair) for pair in value.items()], dict),
    np.ndarray: (_array_to_list, _array_from_list),
    np.generic: (np.asarray, operator.itemgetter(())),
    torch.Tensor: (_tensor_to_array, torch.from_numpy),
    FlexState: (dict, FlexState),
}
_LOADER_STATES = (SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState)
for _class in (*_LOADER_STATES, SystemRngState, SliceState):
    _TYPES[_class] = (_fields_of, _builder(_class))
_BY_NAME = {cls.__name__: cls for cls in _TYPES}
