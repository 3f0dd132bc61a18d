# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs a coroutine from code that may itself run inside an event loop, such as a notebook."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Awaitable, Callable, TypeVar

T = TypeVar("T")


def run_coroutine(begin: Callable[[], Awaitable[T]]) -> T:
    """Run ``begin()`` to its end and return its result.

    In this thread, unless an event loop already runs in it: then in another thread, while this one
    waits. Ctrl-C cancels it.
    """
    running: list[tuple[asyncio.AbstractEventLoop, Any]] = []

    async def main() -> T:
        running.append((asyncio.get_running_loop(), asyncio.current_task()))
        return await begin()

    if not _is_inside_a_loop():
        return asyncio.run(main())
    with ThreadPoolExecutor(1) as thread:
        future = thread.submit(asyncio.run, main())
        try:
            return future.result()
        except BaseException:
            if not future.done():
                for loop, task in running:
                    loop.call_soon_threadsafe(task.cancel)
            raise


def _is_inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
