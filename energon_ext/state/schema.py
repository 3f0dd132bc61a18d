# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checks the shape of a state before anything is read from it.

Every saved state is *sealed*: it contains a digest of itself, so that any change is detected.
"""

import json
import math
from typing import Any, Mapping

from energon_ext.errors import StateFormatError, StateMismatchError
from energon_ext.keyed import sha256

#: The state of a planned run.
STATE_CLASS = "EnergonExtPlan"
STATE_VERSION = 6

SEAL = "energon_ext_digest"

#: Advice for a state of stock Energon.
STOCK_RUN = (
    "Finish that run with stock Energon, or start a new one whose sources begin at given "
    "documents: `subset: {range: [DOCUMENT, end]}`."
)

#: The shape of a count.
COUNT = "an integer >= 0"
_MAX_COUNT = 2**62

#: Numbers of positions of a row, which are int32.
_POSITIONS = ("row_tokens", "alignment")
_PLANNED = {
    "kind": str,
    "documents": {str: object},
    "next_row": COUNT,
    "epoch": COUNT,
    "position": COUNT,
    "carried": {
        "documents": [COUNT],
        "starts": [COUNT],
        "stops": (None, [COUNT]),
        "visits": [COUNT],
    },
    "rows_before": COUNT,
    "taken": (None, COUNT),
    "excluded": [COUNT],
    "last": bool,
    "digest": str,
    "pass_start": COUNT,
}
_ROWS = {
    "documents": _PLANNED,
    "samples": _PLANNED,
    "spliced": {"kind": str, "documents": {str: object}, "next_row": COUNT, "pass_start": COUNT},
}
#: The shape of the state of a mixture, for other states that contain one.
MIXTURE = {str: {"identity": str, "credits": {str: float}, "tokens": COUNT}}


def _check_range(value: Any, where: str) -> None:
    is_range = isinstance(value, (list, tuple)) and len(value) == 2 and all(map(is_count, value))
    _require(is_range, value, "two counts", where)


def _check_rows(value: Any, where: str) -> None:
    kind = str(value.get("kind")) if isinstance(value, Mapping) else None
    _require(kind in _ROWS, kind, " or ".join(_ROWS), f"{where}.kind")
    shape = _ROWS[str(kind)]
    if "position" in shape and "blocks" in value:
        shape = {**shape, "blocks": _check_blocks}
    if "position" in shape and "order" in value:
        shape = {**shape, "order": _check_order}
    if "position" in shape and "subset" in value:
        shape = {**shape, "subset": COUNT}
    check_shape(value, shape, where)


def _check_order(value: Any, where: str) -> None:
    if value != "stored":
        fields = {"by": str, "descending": bool, "buckets": (None, COUNT), "digest": str}
        check_shape(value, fields, where)


def _check_blocks(value: Any, where: str) -> None:
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2
    _require(is_pair and all(is_count(each) and each for each in value), value, "two sizes", where)


def _check_spans(value: Any, where: str) -> None:
    check_shape(value, [_check_span], where)
    _require(len(value) > 0, value, "at least one span", where)


def check_positions(value: Mapping[str, Any], where: str) -> None:
    """Raise StateFormatError for numbers of positions that no row has."""
    for name in _POSITIONS:
        found = value.get(name)
        is_position = type(found) is not int or 0 <= found < 2**31
        _require(is_position, found, "an integer from 0 to 2^31 - 1", f"{where}.{name}")


def _check_packing(value: Any, where: str) -> None:
    check_shape(value, {"row_tokens": COUNT, "packer": (None, {str: object})}, where)
    check_positions(value, where)
    check_positions(value["packer"] or {}, f"{where}.packer")


def _check_span(value: Any, where: str) -> None:
    is_span = isinstance(value, (list, tuple)) and len(value) == 2 and is_count(value[0])
    _require(is_span and isinstance(value[1], str), value, "a step and a digest", where)


_SOURCE = {
    "rows": _check_rows,
    "documents": COUNT,
    "tokens": COUNT,
    "names": [str],
    "packing": (None, _check_packing),
}
_STATE = {
    "spec": {str: object},
    "axis": str,
    "rows_per_step": COUNT,
    "row_lengths": [_check_range],
    "data_digests": _check_spans,
    "plan": {"step": COUNT, "row": COUNT, "mixture": MIXTURE, "sources": {str: _SOURCE}},
    "weights": {str: {"lines": COUNT, "digest": str}},
    "done": COUNT,
    "read": COUNT,
    "skipped": [_check_range],
    "inside": (None, {str: object}),
}
#: What only some runs have.
_OPTIONAL = {
    "loss_weights": {str: object},
    "row_schedule": [_check_range],
    "skip": [_check_range],
    "virtual_epoch_length": COUNT,
}


def read_format(state: Any) -> Mapping[str, Any]:
    """Return the state of a planned run; raise if it has another version or shape."""
    advice = (
        "The state was saved by another loader or TaskEncoder. It identifies sources by position "
        "and contains samples drawn by old weights, so no source can be continued on its own. "
        f"{STOCK_RUN}"
    )
    has = {*state} if isinstance(state, Mapping) else set()
    shape = {**_STATE, **{name: each for name, each in _OPTIONAL.items() if name in has}}
    check_class(state, STATE_CLASS, STATE_VERSION, shape, advice)
    return state


def check_class(state: Any, name: str, version: int, shape: dict[str, Any], advice: str) -> None:
    """Raise if a state has another class (with ``advice``), version or shape."""
    if not isinstance(state, Mapping) or state.get("__class__") != name:
        found = state.get("__class__") if isinstance(state, Mapping) else type(state).__name__
        raise StateMismatchError({"dataset": (found, name)}, advice)
    check_version("data", state.get("version"), version)
    check_shape(state, {"__class__": str, "version": COUNT, **shape}, "state")


def check_version(what: str, found: Any, known: int) -> None:
    """Raise StateFormatError if the version of a state is unknown."""
    if found != known:
        version = f"A {what} state of version {found!r} was found, only {known} is supported"
        raise StateFormatError(f"{version}; use the energon_ext that wrote it, or a newer one.")


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return JSON values together with their digest."""
    return {**state, SEAL: digest_of(state)}


def check_seal(state: Any) -> dict[str, Any]:
    """Return values without their digest; StateFormatError if it does not match."""
    if not isinstance(state, Mapping):
        raise StateFormatError(f"A {type(state).__name__} is not a data state.")
    content = {key: value for key, value in state.items() if key != SEAL}
    if state.get(SEAL) != digest_of(content):
        raise StateFormatError(
            "The data state differs from the saved one: its digest does not match. Copy it again, "
            "or use another checkpoint."
        )
    return content


def without_seal(state: Any) -> Any:
    """Return a state without its digest, which is verified if there is one."""
    return check_seal(state) if isinstance(state, Mapping) and SEAL in state else state


def digest_of(value: Any) -> str:
    """Return the SHA-256 of JSON values; StateFormatError for anything else.

    Example:
        >>> digest_of({"a": 1, "b": [2.0]}) == digest_of({"b": [2.0], "a": 1})
        True
        >>> digest_of([1]) == digest_of([1.0])
        False
    """
    try:
        text = json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise StateFormatError(f"A data state contains an invalid value: {error}.") from error
    return sha256(text)


def check_shape(value: Any, shape: Any, where: str) -> None:
    """Raise StateFormatError unless a value fits a shape: type, list, mapping or alternatives."""
    if isinstance(shape, tuple):
        if value is not None or None not in shape:
            check_shape(value, shape[-1], where)
    elif callable(shape) and not isinstance(shape, type):
        shape(value, where)
    elif isinstance(shape, list):
        _require(isinstance(value, (list, tuple)), value, "a list", where)
        for each in value:
            check_shape(each, shape[0], where)
    elif isinstance(shape, dict):
        _check_mapping(value, shape, where)
    elif shape == COUNT:
        _require(is_count(value), value, COUNT, where)
    elif shape is float:
        _require(type(value) is float and math.isfinite(value), value, "a finite number", where)
    else:
        _require(isinstance(value, shape), value, shape.__name__, where)


def _check_mapping(value: Any, shape: dict[Any, Any], where: str) -> None:
    _require(isinstance(value, Mapping), value, "a mapping", where)
    if set(shape) == {str}:
        _require(all(isinstance(key, str) for key in value), value, "strings as keys", where)
        shape = dict.fromkeys(value, shape[str])
    _require(set(value) == set(shape), [*value], ", ".join(map(str, shape)), where)
    for name, inner in shape.items():
        check_shape(value[name], inner, f"{where}.{name}")


def is_count(value: Any) -> bool:
    """Return True if a value is an integer >= 0 that fits into int64, also when a run goes on."""
    return type(value) is int and 0 <= value <= _MAX_COUNT


def _require(holds: bool, found: Any, needed: str, where: str) -> None:
    if not holds:
        mismatch = f"{found!r:.80} found, {needed} is needed"
        raise StateFormatError(f"{where}: {mismatch}; the state is damaged.")
