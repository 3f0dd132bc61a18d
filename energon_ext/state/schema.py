# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a state must look like, checked before anything is taken from it.

Every state that the loader hands out is *sealed*: it carries a digest of itself, so that a value
that was changed anywhere is noticed. Its shape is checked as well, since a state may come from a
loader that does not seal.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any

import numpy as np
import torch

from energon_ext.errors import StateFormatError, StateMismatchError

#: Of the state of a :class:`~energon_ext.plan.dataset.BlendedDataset`, whatever its class is: a
#: source does not care how it is drawn.
STATE_CLASS = "EnergonExtBlend"
STATE_VERSION = 2

#: What Energon writes the class name of into the restore keys of samples.
BLEND = type(STATE_CLASS, (), {})()

SEAL = "energon_ext_digest"

STOCK_RUN = (
    "Finish that run with stock Energon; or start a new one whose sources begin at given rows, "
    "`subset: {range: [ROW, end]}`."
)

_COUNT = "an integer >= 0"
_PLANNED = {
    "kind": str,
    "documents": {str: object},
    "epoch": _COUNT,
    "position": _COUNT,
    "carried": {"documents": [_COUNT], "starts": [_COUNT]},
    "rows_before": _COUNT,
    "taken": (None, _COUNT),
    "left_out": [_COUNT],
    "next_row": _COUNT,
    "last": bool,
}
_SPLICED = {"kind": str, "documents": {str: object}, "shown": _COUNT}
_STREAMED = {
    "kind": str,
    "documents": {str: object},
    "dataset": dict,
    "ended": bool,
    "max_epochs": (None, _COUNT),
}
_ROWS = {"planned": _PLANNED, "spliced": _SPLICED, "streamed": _STREAMED}
_NODE = {"identity": str, "credits": {str: float}, "tokens": _COUNT}
_SOURCE = {
    "rows": lambda value, where: _check(value, _rows_shape(value, where), where),
    "documents": _COUNT,
    "tokens": _COUNT,
    "names": [str],
}
_STATE = {
    "__class__": str,
    "version": _COUNT,
    "fingerprint": {str: object},
    "worker": (None, _COUNT),
    "plan": {"step": _COUNT, "row": _COUNT, "mixture": {str: _NODE}, "sources": {str: _SOURCE}},
    "done": _COUNT,
    "skipped": [[_COUNT]],
    "inside": (
        None,
        {
            "rows_per_step": _COUNT,
            "batch_size": _COUNT,
            "ranks": _COUNT,
            "mixture": str,
            "cost": (None, str),
        },
    ),
    "skip": (None, _COUNT),
}


def check_format(state: Any) -> None:
    """Refuse what is no state of a blend.

    Raises:
        StateMismatchError: stock Energon saved it.
        StateFormatError: another version, or not of the shape that this version writes.
    """
    if not isinstance(state, Mapping) or state.get("__class__") != STATE_CLASS:
        found = state.get("__class__") if isinstance(state, Mapping) else type(state).__name__
        raise StateMismatchError(
            {"dataset": (found, STATE_CLASS)},
            "The state was saved without this package's mixin. It knows its sources by their "
            "places in the blend and holds samples drawn by weights of then, so no source can be "
            f"continued alone. {STOCK_RUN}",
        )
    if state.get("version") != STATE_VERSION:
        raise StateFormatError(
            f"A blend state of version {state.get('version')!r} was found, {STATE_VERSION} is "
            f"known; use the energon_ext that wrote it, or a newer one."
        )
    _check(state, _STATE, "state")


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """A state with the digest of itself."""
    return {**state, SEAL: digest_of(state)}


def check_seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """What was sealed.

    Raises:
        StateFormatError: it is not what was saved.
    """
    if not isinstance(state, Mapping):
        raise StateFormatError(f"A {type(state).__name__} is no data state.")
    content = {key: value for key, value in state.items() if key != SEAL}
    if state.get(SEAL) != digest_of(content):
        raise StateFormatError(
            "The data state is not what was saved: its digest differs. Copy it again from where it "
            "came, or take another checkpoint."
        )
    return content


def digest_of(value: Any) -> str:
    """SHA-256 over JSON values, arrays, tensors and the state classes of Energon.

    Example:
        >>> digest_of({"a": 1, "b": [2.0]}) == digest_of({"b": [2.0], "a": 1})
        True
        >>> digest_of([1]) == digest_of([1.0])
        False
    """
    digest = hashlib.sha256()
    try:
        _feed(value, digest.update)
    except StateFormatError:
        raise
    except (ValueError, RecursionError) as error:  # numbers and nestings without an end
        raise StateFormatError(f"A data state holds what none has: {error}.") from error
    return digest.hexdigest()


def _feed(value: Any, update: Callable[[bytes], None]) -> None:
    if isinstance(value, str):  # as `json.dumps` has it, only sooner; integers as well
        update(encode_basestring_ascii(value).encode() + b";")
    elif value is None or isinstance(value, (bool, int)):
        update((str(value) if type(value) is int else json.dumps(value)).encode() + b";")
    elif isinstance(value, float):
        update(b"f" + struct.pack("<d", value))
    elif isinstance(value, Mapping):
        update(b"{")
        for key in sorted(value, key=str):
            _feed(key, update)
            _feed(value[key], update)
        update(b"}")
    elif isinstance(value, (list, tuple)):
        update(b"[" if isinstance(value, list) else b"(")
        if set(map(type, value)) == {int}:  # most of a large state
            update(json.dumps(value).encode())
        else:
            for each in value:
                _feed(each, update)
        update(b"]")
    elif dataclasses.is_dataclass(value):
        update(type(value).__name__.encode())
        _feed({f.name: getattr(value, f.name) for f in dataclasses.fields(value)}, update)
    elif isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        array = np.asarray(value)
        update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    elif isinstance(value, bytes):
        update(b"b" + value)
    else:
        raise StateFormatError(f"A data state holds a {type(value).__name__}.")


def _rows_shape(value: Any, where: str) -> Any:
    kind = value.get("kind") if isinstance(value, Mapping) else None
    if not isinstance(kind, str) or kind not in _ROWS:
        raise StateFormatError(f"{where}.kind: {kind!r} found, one of {', '.join(_ROWS)} is known.")
    return _ROWS[kind]


def _check(value: Any, shape: Any, where: str) -> None:
    """Compare a value with a shape: a type, a list of one shape, a mapping, or alternatives."""
    if isinstance(shape, tuple):
        if value is not None or None not in shape:
            _check(value, shape[-1], where)
        return
    if callable(shape) and not isinstance(shape, type):
        shape(value, where)
        return
    if isinstance(shape, list):
        _require(isinstance(value, (list, tuple)), value, "a list", where)
        if shape[0] == _COUNT and set(map(type, value)) == {int} and is_count(min(value)):
            value = [max(value)]  # in their stead
        for each in value:
            _check(each, shape[0], where)
    elif isinstance(shape, dict):
        _require(isinstance(value, Mapping), value, "a mapping", where)
        if set(shape) == {str}:
            _require(all(isinstance(key, str) for key in value), value, "strings as keys", where)
            shape = dict.fromkeys(value, shape[str])
        if set(value) != set(shape):
            _require(False, sorted(map(str, value)), ", ".join(map(str, shape)), where)
        for name, inner in shape.items():
            _check(value[name], inner, f"{where}.{name}")
    elif shape == _COUNT:
        _require(is_count(value), value, _COUNT, where)
    elif shape is float:
        _require(type(value) is float and np.isfinite(value), value, "a finite number", where)
    else:
        _require(isinstance(value, shape), value, shape.__name__, where)


def is_count(value: Any) -> bool:
    """Whether a value is an integer >= 0 that an array can hold."""
    return type(value) is int and 0 <= value < 2**63


def _require(holds: bool, found: Any, needed: str, where: str) -> None:
    if not holds:
        raise StateFormatError(f"{where}: {found!r:.80} found, {needed} is needed; it is damaged.")
