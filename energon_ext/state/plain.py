# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The states of Energon, and of waiting prompts and answers, as JSON values, and back.

What JSON has stays as it is; everything else becomes a mapping with a tag::

    (1, 2)              {"__type__": "tuple", "value": [1, 2]}
    b"abc"              {"__type__": "bytes", "value": "YWJj"}
    SliceState(...)     {"__type__": "SliceState", "value": {"index": 0, "current": 7}}
"""

from __future__ import annotations

import base64
import functools
import io
import math
import operator
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


def to_plain(value: Any) -> Any:
    """Turn a state into JSON values.

    Raises:
        StateFormatError: it holds an object of another type, which is named.

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
            f"A data state holds a {kind.__module__}.{kind.__qualname__}; allowed are numbers, "
            "strings, bytes, containers, numeric arrays, tensors and the states of Energon."
        )
    take_apart, _ = _TYPES[kind]
    return {TAG: kind.__name__, "value": to_plain(take_apart(value))}


def from_plain(value: Any) -> Any:
    """Turn the JSON values of :func:`to_plain` back into a state, running nobody's code.

    Raises:
        StateFormatError: :func:`to_plain` returns no such value.
    """
    try:
        return _read(value)
    except (ValueError, TypeError, LookupError, RuntimeError, MemoryError) as error:
        raise StateFormatError(f"The data state is damaged: {error!r:.200}.") from error


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(each) for each in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _read(each) for key, each in value.items()}
    _, put_together = _TYPES[_NAMED[value[TAG]]]
    return put_together(_read(value["value"]))


def _array_to_bytes(array: np.ndarray) -> bytes:
    if array.dtype.hasobject:
        raise StateFormatError(f"A data state holds an array of {array.dtype}, not of numbers.")
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _array_from_bytes(content: bytes) -> np.ndarray:
    return np.lib.format.read_array(io.BytesIO(content), allow_pickle=False)


def _fields_of(state: Any) -> dict[str, Any]:
    return {name: getattr(state, name) for name in state.__dataclass_fields__}


def _build(cls: type, fields: dict[str, Any]) -> Any:
    return cls(**fields)


#: How a value of the type is taken apart, and put together from what was read.
_TYPES: dict[type, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    float: (str, float),  # infinite, or no number
    bytes: (lambda value: base64.b64encode(value).decode(), base64.b64decode),
    tuple: (list, tuple),
    dict: (lambda value: [list(pair) for pair in value.items()], dict),
    np.ndarray: (_array_to_bytes, _array_from_bytes),
    np.generic: (np.asarray, operator.itemgetter(())),
    torch.Tensor: (lambda value: value.detach().cpu().numpy(), torch.from_numpy),
    FlexState: (dict, FlexState),
}
_STATES = (SavableDataLoaderState, SavableDatasetCheckpoint, SavableDatasetState)
for _class in (*_STATES, SystemRngState, SliceState):
    _TYPES[_class] = (_fields_of, functools.partial(_build, _class))
_NAMED = {cls.__name__: cls for cls in _TYPES}
