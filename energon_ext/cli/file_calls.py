# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Counts what Python asks the file system, as a start on thousands of ranks multiplies it."""

import os
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

_Result = TypeVar("_Result")

#: Kinds of calls, as titles of columns.
STATS, OPENS, LISTS, BYTES = KINDS = ("stat", "open", "list a folder", "bytes read by calls")

_OF_EVENTS = {"open": OPENS, "os.listdir": LISTS, "os.scandir": LISTS}

_counted: Counter[str] = Counter()
_hooks: list[Any] = []


def count_file_calls(call: Callable[[], _Result]) -> tuple[_Result, dict[str, int]]:
    """Call a function; return its result and the number of its file system calls by kind.

    Pages of mapped files are not counted: the kernel reads them without a call.
    """
    if not _hooks:
        _hooks.append(_count_event)
        sys.addaudithook(_count_event)  # it cannot be removed
    asked = {name: getattr(os, name) for name in ("stat", "lstat")}
    read_before = _bytes_read()
    before = Counter(_counted)
    try:
        for name, ask in asked.items():
            setattr(os, name, _count_calls(ask))
        result = call()
    finally:
        for name, ask in asked.items():
            setattr(os, name, ask)
    counted = Counter(_counted)
    counted.subtract(before)
    return result, {**{kind: counted[kind] for kind in KINDS}, BYTES: _bytes_read() - read_before}


def _count_calls(ask: Callable[..., Any]) -> Callable[..., Any]:
    def count(path: Any, *args: Any, **options: Any) -> Any:
        _counted[STATS] += 1
        return ask(path, *args, **options)

    return count


def _count_event(event: str, _: Any) -> None:
    if event in _OF_EVENTS:
        _counted[_OF_EVENTS[event]] += 1


def _bytes_read() -> int:
    with open("/proc/self/io") as file:
        return int(file.readline().split()[1])
