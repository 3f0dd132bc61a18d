# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rewards of answers, computed for many prompts together."""

import asyncio
import contextlib
import inspect
import threading
from typing import Any, Awaitable, Callable, Mapping, Sequence

from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import SamplerError
from energon_ext.rl.event_loop import run_coroutine
from energon_ext.rl.response import Response

#: The rewards of the answers to a prompt: one number each, or by name.
Rewards = Sequence[float] | Mapping[str, Sequence[float]]

#: ``(prompt, responses) -> rewards``, a function or a coroutine function.
RewardFunction = Callable[[Prompt, list[Response]], Rewards | Awaitable[Rewards]]


async def score(
    reward: RewardFunction, prompt: Prompt, responses: list[Response], turn: asyncio.Semaphore
) -> Rewards:
    """Return the rewards of the answers to one prompt.

    A coroutine function runs here, any other function in a thread of its own.

    Args:
        turn: limits how many are computed at a time.

    Raises:
        SamplerError: the reward raised, or not every answer has one.
    """
    try:
        async with turn:
            if inspect.iscoroutinefunction(reward):
                found = await reward(prompt, responses)
            else:
                found = await _in_thread(reward, prompt, responses)
            if inspect.isawaitable(found):  # from an object whose __call__ is a coroutine function
                found = await found
    except Exception as error:  # a user's function may raise anything
        reason = f"the reward raised {type(error).__name__}: {error}"
        raise SamplerError(reason, key=prompt.__key__) from error
    try:
        if isinstance(found, Mapping):
            rewards: Rewards = {name: list(map(float, each)) for name, each in found.items()}
        else:
            rewards = list(map(float, found))
    except Exception as error:  # so may what it returned
        reason = (
            f"the reward returned {str(found)!r:.80}; a number for each answer is needed, or such "
            f"numbers by name"
        )
        raise SamplerError(reason, key=prompt.__key__) from error
    parts = rewards if isinstance(rewards, Mapping) else {"": rewards}
    for name, values in parts.items():
        if len(values) != len(responses):
            numbers = f"{len(values)} numbers{f' as {name!r}' if name else ''}"
            reason = f"the reward returned {numbers} for {len(responses)} answers"
            raise SamplerError(reason, key=prompt.__key__)
    return rewards


def score_all(
    reward: RewardFunction,
    prompts: Sequence[Prompt],
    responses: Sequence[list[Response]],
    timeout_seconds: float = 3600.0,
    max_concurrent: int = 64,
) -> list[Rewards]:
    """Return the rewards of the answers to each prompt, computed together.

    Raises:
        SamplerError: a reward raised, not every answer has one, or time is over.
    """

    async def gather() -> list[Rewards]:
        turn = asyncio.Semaphore(max_concurrent)
        return await asyncio.gather(
            *(score(reward, prompt, each, turn) for prompt, each in zip(prompts, responses))
        )

    try:
        return run_coroutine(lambda: asyncio.wait_for(gather(), timeout_seconds))
    except asyncio.TimeoutError as error:
        raise SamplerError(
            f"the rewards for {len(prompts)} prompts took more than {timeout_seconds:g} seconds"
        ) from error


async def _in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Await a function in a thread that does not keep the process alive if it never returns."""
    loop = asyncio.get_running_loop()
    outcome: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if not outcome.done():
            outcome.set_result((result, error))

    def work() -> None:
        result, error = None, None
        try:
            result = function(*arguments)
        except BaseException as caught:
            error = caught
        with contextlib.suppress(RuntimeError):  # nobody waits any more, and the loop is closed
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True, name="reward").start()
    result, error = await outcome
    if error is not None:
        raise error
    return result
