# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Files that last, and states that are read without running anybody's code.

A file is written under a temporary name, flushed to disk and renamed, and known by its size and
SHA-256. A state is what plain ``torch.save`` writes, so every tool that reads Energon's states
reads it.

Reading a state is ``torch.load(weights_only=True)``, which builds only the classes on a list. The
list is exact: tensors, numbers, strings and containers (torch's own list), the five state classes
of Energon, its ``FlexState``, and numeric numpy arrays; whatever else this process has allowed is
set aside meanwhile. Two kinds are read as stand-ins and replaced afterwards: a ``FlexState``,
because torch fills only exact dicts, and numpy arrays, because ``numpy.ndarray`` and the
``__setstate__`` of dtypes, given hostile arguments, make arrays over memory that is not theirs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any, Iterator, Mapping

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

#: More than so many are in no state; lists of one list twice, and so on, hold any number.
MOST_VALUES_A_BYTE = 8

#: What torch calls with any argument: a length makes as many bytes of memory.
_MADE_OF_A_NUMBER = re.compile(
    rb"c((?:builtins|__builtin__)\nbytearray|torch[.\w]{,40}\n(?:\w{,40}Tensor|UntypedStorage))\n"
)

_STATE_CLASSES = (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
    SystemRngState,
    SliceState,
)


def write_file(path: Path, content: bytes) -> dict[str, Any]:
    """Write a file that gets its name only when its bytes are on disk.

    Returns:
        Its record: ``{"bytes": int, "sha256": hex}``.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_bytes(content)
    fsync(temporary)
    os.replace(temporary, path)
    return record_of(content)


def read_file(path: Path, record: Mapping[str, Any] | None) -> bytes:
    """Read a file, verified against its record where there is one.

    Raises:
        StateFormatError: it is missing or damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StateFormatError(
            f"{path} cannot be read ({error.strerror}); copy it again from where it came, or open "
            f"the checkpoint of another step."
        ) from error
    if record is not None:
        check_record(path, record_of(content), record)
    return content


def check_record(path: Path, found: Any, saved: Any) -> None:
    """Compare what a file is with what it was.

    Raises:
        StateFormatError: they differ.
    """
    if found != saved:
        raise StateFormatError(
            f"{path} is damaged: found {found}, saved {saved}; copy it again from where it came, "
            f"or open the checkpoint of another step."
        )


def record_of(content: bytes) -> dict[str, Any]:
    """By which a file is known."""
    return {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}


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


def write_state_file(path: Path, value: Any) -> dict[str, Any]:
    """Save an object as :func:`write_file` does.

    Returns:
        Its record.

    Raises:
        ConfigError: the object cannot be pickled, or :func:`read_state_file` would refuse it.
        OSError: it could not be written.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.pt"
        >>> record = write_state_file(path, {"cursor": [3, 4]})
        >>> read_state_file(path, record)
        {'cursor': [3, 4]}
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        _check_archive(buffer.getvalue())
        buffer.seek(0)
        with _allow_only(flex_state=dict):
            refused = torch.serialization.get_unsafe_globals_in_checkpoint(buffer)
    except (pickle.PickleError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"{path.name} cannot be saved: {first_line(error)}.") from error
    if refused:
        raise ConfigError(
            f"{path.name} cannot be saved: it holds {', '.join(sorted(refused))}; allowed are "
            "tensors, numbers, strings, containers, numeric numpy arrays and states of Energon."
        )
    return write_file(path, buffer.getvalue())


def read_state_file(path: Path, record: Mapping[str, Any] | None) -> Any:
    """Read an object back, verified against its record first; tensors arrive on the CPU.

    Without a record, of a file that somebody else wrote, damage shows only where it cannot be read.

    Raises:
        StateFormatError: the file is missing, damaged, or holds a class that is not allowed.
    """
    content = read_file(path, record)
    try:
        return _unpickle(content)
    except Exception as error:  # a malformed pickle can raise anything
        # torch wraps its reason in many lines of advice on how to switch the check off
        reason = first_line(error.__context__ or error).split(" by default")[0]
        raise StateFormatError(
            f"{path} cannot be loaded, and nothing in it was run: {reason}."
        ) from error


def _unpickle(content: bytes) -> Any:
    flex_states: list[dict[str, Any]] = []

    class FlexStateAsDict:
        def __new__(cls):  # type: ignore[no-untyped-def]
            flex_states.append({})
            return flex_states[-1]

    _check_archive(content)
    with _allow_only(flex_state=FlexStateAsDict):
        value = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    value = _replace_stand_ins(value, {id(stand_in) for stand_in in flex_states}, {})
    if (values := _count_values(value, {})) > MOST_VALUES_A_BYTE * len(content):
        raise ValueError(f"its {len(content):,} bytes stand for {values:,} values")
    return value


def _check_archive(content: bytes) -> None:
    """Refuse what unpacks to more than its size; ``torch.save`` neither packs nor repeats."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > len(content) or not content.startswith(b"PK"):
        raise ValueError(f"{unpacked:,} bytes are packed in {len(content):,}, which no state does")
    if found := _MADE_OF_A_NUMBER.search(content):
        raise ValueError(f"GLOBAL {'.'.join(found[1].decode().split())} was not an allowed global")


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
                (lambda: b"", "builtins.bytes"),  # how b"" is pickled; a number would be a length
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

    def __init__(self, code: str, *_: Any):
        self.code = code

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.byte_order = state[1]

    def replacement(self) -> np.dtype[Any]:
        code = f"{self.byte_order}{self.code}"
        if not re.fullmatch(r"[<>|=][biufc]\d+", code):
            raise ValueError(f"numpy arrays of dtype {code!r} are not allowed")
        return np.dtype(code)


class _Array:
    """Stand-in for a numpy array; takes the arguments that numpy pickles."""

    def __init__(self, *_: Any):
        pass

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self.shape, self.dtype, self.column_major, self.data = state

    def replacement(self) -> np.ndarray:
        data = bytearray(memoryview(self.data))  # own and writable, unlike the pickled bytes
        dtype = self.dtype.replacement()
        return np.ndarray(self.shape, dtype, data, order="F" if self.column_major else "C")


def _replace_stand_ins(value: Any, flex_states: set[int], done: dict[int, tuple[Any, Any]]) -> Any:
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


def _count_values(value: Any, counted: dict[int, int]) -> int:
    """How many values it holds; what it holds twice counts twice, and is looked at once."""
    if id(value) in counted:
        return counted[id(value)]
    if isinstance(value, dict):
        inner: Any = value.values()
    elif isinstance(value, (list, tuple)):
        inner = value
    elif type(value) in _STATE_CLASSES:
        inner = vars(value).values()
    else:
        return 1
    counted[id(value)] = 1  # should it hold itself
    counted[id(value)] = 1 + sum(_count_values(each, counted) for each in inner)
    return counted[id(value)]
