# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One file of a checkpoint: written so that it lasts, read without running anybody's code.

A file is what plain ``torch.save`` writes, so every tool that reads Energon's states reads it. It
is written under a temporary name, flushed to disk and renamed, and known by its size and SHA-256.

Reading is ``torch.load(weights_only=True)``, which builds only the classes on a list. The list is
exact: tensors, numbers, strings and containers (torch's own list), the five state classes of
Energon, its ``FlexState``, and numeric numpy arrays; whatever else this process has allowed is set
aside meanwhile. Two kinds are read as stand-ins and replaced afterwards: a ``FlexState``, because
torch fills only exact dicts, and numpy arrays, because ``numpy.ndarray`` and the ``__setstate__``
of dtypes, given hostile arguments, make arrays over memory that is not theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import pickle
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO, Iterator

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

from energon_ext.errors import ConfigError, StateFormatError

_STATE_CLASSES = (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
    SystemRngState,
    SliceState,
)
_DAMAGED = (  # what a malformed pickle can raise inside torch.load
    pickle.UnpicklingError,
    struct.error,
    RuntimeError,
    EOFError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    AssertionError,
    MemoryError,
)


def write_state_file(path: Path, value: Any) -> dict[str, Any]:
    """Save an object under a name that it gets only when its bytes are on disk.

    Returns:
        Its record: ``{"bytes": int, "sha256": hex}``.

    Raises:
        ConfigError: the object cannot be pickled, or :func:`read_state_file` would refuse it.
        OSError, RuntimeError: it could not be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.pt"
        >>> record = write_state_file(path, {"cursor": [3, 4]})
        >>> read_state_file(path, record)
        {'cursor': [3, 4]}
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        torch.save(value, temporary)
        with _allow_only(flex_state=dict):
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(temporary)
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        raise ConfigError(f"{path.name} cannot be saved: {first_line(error)}.") from error
    if refused:
        raise ConfigError(
            f"{path.name} cannot be saved: it holds {', '.join(sorted(refused))}; allowed are "
            "tensors, numbers, strings, containers, numeric numpy arrays and states of Energon."
        )
    with open(temporary, "rb") as file:
        record = _measure(file)
    settle(temporary, path)
    return record


def read_state_file(path: Path, record: dict[str, Any] | None) -> Any:
    """Read an object back, verified against its record first; tensors arrive on the CPU.

    Without a record, of a file that somebody else wrote, damage shows only where it cannot be read.

    Raises:
        StateFormatError: the file is missing, damaged, or holds a class that is not allowed.
    """
    remedy = "copy it again from where it came, or open the checkpoint of another step."
    try:
        with open(path, "rb") as file:
            found = _measure(file)
            if record is None or found == record:
                file.seek(0)
                return _unpickle(file)
    except OSError as error:
        raise StateFormatError(f"{path} cannot be read ({error.strerror}); {remedy}") from error
    except _DAMAGED as error:
        # torch wraps its reason in many lines of advice on how to switch the check off
        reason = first_line(error.__context__ or error).split(" by default")[0]
        raise StateFormatError(
            f"{path} cannot be loaded, and nothing in it was run: {reason}."
        ) from error
    raise StateFormatError(f"{path} is damaged: found {found}, saved {record}; {remedy}")


def settle(temporary: Path, path: Path) -> None:
    """Give a finished file its name, once its bytes are on disk."""
    fsync(temporary)
    os.replace(temporary, path)


def fsync(path: Path) -> None:
    """Flush a file, or the names in a directory, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def first_line(error: BaseException) -> str:
    """What an exception says, cut to one line without a full stop."""
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _measure(file: BinaryIO) -> dict[str, Any]:
    digest = hashlib.sha256()
    size = 0
    while chunk := file.read(1 << 20):
        digest.update(chunk)
        size += len(chunk)
    return {"bytes": size, "sha256": digest.hexdigest()}


def _unpickle(file: BinaryIO) -> Any:
    flex_states = []

    class FlexStateAsDict:
        def __new__(cls):
            flex_states.append({})
            return flex_states[-1]

    with _allow_only(flex_state=FlexStateAsDict):
        value = torch.load(file, map_location="cpu", weights_only=True)
    return _replace_stand_ins(value, {id(stand_in) for stand_in in flex_states}, {})


@contextlib.contextmanager
def _allow_only(flex_state: type) -> Iterator[None]:
    """Let torch build the allowed classes and nothing else that the process has allowed."""
    allowed_before = torch.serialization.get_safe_globals()
    try:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(
            [
                *_STATE_CLASSES,
                (flex_state, f"{FlexState.__module__}.{FlexState.__qualname__}"),
                (bytes, "builtins.bytes"),  # how b"" is pickled
                (_Array, "numpy.ndarray"),
                (_Array, "numpy.core.multiarray._reconstruct"),  # numpy 1
                (_Array, "numpy._core.multiarray._reconstruct"),  # numpy 2
                (_DType, "numpy.dtype"),
            ]
        )
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed_before)


class _DType:
    """Stand-in for a numpy dtype; takes the arguments that numpy pickles."""

    def __init__(self, code: str, *_):
        self.code = code

    def __setstate__(self, state: tuple) -> None:
        self.byte_order = state[1]

    def replacement(self) -> np.dtype:
        code = f"{self.byte_order}{self.code}"
        if not re.fullmatch(r"[<>|=][biufc]\d+", code):
            raise ValueError(f"numpy arrays of dtype {code!r} are not allowed")
        return np.dtype(code)


class _Array:
    """Stand-in for a numpy array; takes the arguments that numpy pickles."""

    def __init__(self, *_):
        pass

    def __setstate__(self, state: tuple) -> None:
        _, self.shape, self.dtype, self.column_major, self.data = state

    def replacement(self) -> np.ndarray:
        order = "F" if self.column_major else "C"
        data = bytearray(memoryview(self.data))  # own and writable, unlike the pickled bytes
        return np.ndarray(self.shape, self.dtype.replacement(), data, order=order)


def _replace_stand_ins(value: Any, flex_states: set[int], done: dict[int, tuple]) -> Any:
    """``value`` with every stand-in replaced, containers in place.

    Args:
        flex_states: ``id`` of each dict that stands in for a FlexState.
        done: ``{id: (object, its replacement)}``; holding the object keeps its id its own.
    """
    if id(value) in done:
        return done[id(value)][1]
    replace = functools.partial(_replace_stand_ins, flex_states=flex_states, done=done)
    result = value
    if isinstance(value, dict):
        result = FlexState() if id(value) in flex_states else value
        done[id(value)] = (value, result)  # before its items, which may refer to it
        for key, item in value.items():
            result[key] = replace(item)
    elif isinstance(value, list):
        done[id(value)] = (value, result)
        value[:] = map(replace, value)
    elif type(value) in _STATE_CLASSES:
        done[id(value)] = (value, result)
        for field in dataclasses.fields(value):
            setattr(value, field.name, replace(getattr(value, field.name)))
    elif type(value) is tuple:
        result = tuple(map(replace, value))
    elif isinstance(value, _Array):
        result = value.replacement()
    else:
        return value
    done[id(value)] = (value, result)
    return result
