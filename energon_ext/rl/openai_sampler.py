# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers from a server: vLLM or SGLang over HTTP, token ids in and token ids out.

Text would not do: what a server decodes and this process encodes again need not be the tokens that
were sampled, and the log-probabilities belong to those.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Mapping, Sequence

from energon_ext.arguments import check_integers, check_number
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import ConfigError, SampleError, SamplerError
from energon_ext.rl.sampler import RewardFunction, ScoredGroup, score

if TYPE_CHECKING:
    import httpx

#: Responses of a group, and the log-probabilities of their tokens.
Answers = tuple[list[list[int]], list[list[float]]]

#: Not a fault of the request: worth another try.
_RETRIED_STATUS = (408, 409, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class _Api:
    """What differs between two servers."""

    path: str
    request: Callable[["OpenAISampler", list[int], int], dict[str, Any]]
    answers: Callable[[Any], Answers]


class OpenAISampler:
    """A :class:`~energon_ext.rl.BatchSampler` that asks a server, all prompts of a call at once.

    Keeps nothing between calls. The server must hold the weights that are trained; sending it new
    ones is the caller's part.

    Args:
        base_url: of the server, without ``/v1``.
        reward: ``(prompt, responses) -> rewards``; responses are lists of token ids.
        model: name that vLLM serves it under; SGLang serves one model and takes none.
        api: ``vllm`` (``/v1/completions`` with ``return_token_ids``, vLLM 0.10.2 or later) or
            ``sglang`` (``/generate``).
        group_size: answers to a prompt, >= 2.
        max_new_tokens: longest response.
        temperature, top_p: of the server's sampling.
        stop_token_ids: end a response, besides the model's own end token.
        api_key: sent as a bearer token.
        timeout_seconds: for a request, from the first byte to the last.
        max_retries: further tries after a connection error, a time-out or status 408, 409, 425,
            429 or 5xx; a try waits ``backoff_seconds`` * 2 ** tries, or what ``Retry-After`` says,
            in either case no longer than ``timeout_seconds``.
        max_concurrent: requests at the same time.
        extra: further fields of the request, for example ``{"top_k": 20}``.

    Raises:
        ConfigError: httpx is missing, or an argument is out of range.
        SamplerError: from a call: the server refused, kept failing, or answered something else; the
            other requests of the call are cancelled. Or the reward failed on the answers.
    """

    def __init__(
        self,
        base_url: str,
        reward: RewardFunction,
        *,
        group_size: int,
        max_new_tokens: int,
        model: str = "",
        api: str = "vllm",
        temperature: float = 1.0,
        top_p: float = 1.0,
        stop_token_ids: Sequence[int] = (),
        api_key: str | None = None,
        timeout_seconds: float = 300.0,
        max_retries: int = 5,
        backoff_seconds: float = 0.5,
        max_concurrent: int = 64,
        extra: Mapping[str, Any] | None = None,
    ):
        try:
            import httpx
        except ImportError as error:
            raise ConfigError(
                "OpenAISampler needs httpx; pip install 'energon_ext[openai]'."
            ) from error
        if api not in _APIS:
            raise ConfigError(f"api: {api!r} found, {' or '.join(_APIS)} allowed.")
        check_integers("OpenAISampler", least=2, group_size=group_size)
        check_integers(
            "OpenAISampler", max_new_tokens=max_new_tokens, max_concurrent=max_concurrent
        )
        check_integers("OpenAISampler", least=0, max_retries=max_retries)
        check_number("OpenAISampler.timeout_seconds", timeout_seconds, above_zero=True)
        check_number("OpenAISampler.temperature", temperature)
        check_number("OpenAISampler.backoff_seconds", backoff_seconds)
        check_number("OpenAISampler.top_p", top_p, most=1, above_zero=True)
        self._httpx = httpx
        self.base_url = base_url.rstrip("/")
        self.reward = reward
        self.group_size = group_size
        self.max_new_tokens = max_new_tokens
        self.model = model
        self.temperature = temperature
        self.top_p = top_p
        self.stop_token_ids = list(stop_token_ids)
        self.timeout_seconds = timeout_seconds
        self.max_retries = max_retries
        self.backoff_seconds = backoff_seconds
        self.max_concurrent = max_concurrent
        self.extra = dict(extra or {})
        self._api = _APIS[api]
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def sample_and_score_batch(self, prompts: Sequence[Prompt], seed: int) -> list[ScoredGroup]:
        """A group for each prompt, in order."""
        try:
            answers = asyncio.run(self._ask_all(prompts, seed))
        except asyncio.CancelledError:
            raise SamplerError("the call was cancelled") from None
        return [self._score(prompt, *answer) for prompt, answer in zip(prompts, answers)]

    def cancel(self) -> None:
        """End the call that another thread is in, if any: it raises SamplerError."""
        if self._running is not None:
            loop, task = self._running
            loop.call_soon_threadsafe(task.cancel)

    def _score(
        self, prompt: Prompt, responses: list[list[int]], log_probs: list[list[float]]
    ) -> ScoredGroup:
        if len(responses) != self.group_size:
            raise SamplerError(
                f"the server sent {len(responses)} answers, {self.group_size} were asked for",
                key=prompt.__key__,
            )
        rewards = score(self.reward, prompt, responses)
        try:
            return ScoredGroup.from_responses(prompt.tokens, responses, log_probs, rewards)
        except SampleError as error:
            raise SamplerError(f"the server sent {error}", key=prompt.__key__) from error

    async def _ask_all(self, prompts: Sequence[Prompt], seed: int) -> list[Answers]:
        task = asyncio.current_task()
        assert task is not None  # asyncio.run made one
        self._running = (asyncio.get_running_loop(), task)
        limits = self._httpx.Limits(max_connections=self.max_concurrent)
        async with self._httpx.AsyncClient(
            base_url=self.base_url, headers=self._headers, limits=limits, timeout=None
        ) as client:
            turn = asyncio.Semaphore(self.max_concurrent)
            tasks = [
                # Servers take signed integers, and count the answers of a group on from the seed.
                asyncio.ensure_future(self._ask(client, turn, p, (seed + n * 9973) % 2**31))
                for n, p in enumerate(prompts)
            ]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._running = None

    async def _ask(
        self, client: httpx.AsyncClient, turn: asyncio.Semaphore, prompt: Prompt, seed: int
    ) -> Answers:
        request = {**self._api.request(self, prompt.tokens.tolist(), seed), **self.extra}
        for tries in range(self.max_retries + 1):
            async with turn:
                wait, reason, answers = await self._try(client, request, prompt)
            if answers is not None:
                return answers
            if tries < self.max_retries:
                wait = max(wait, self.backoff_seconds * 2**tries)
                await asyncio.sleep(min(wait, self.timeout_seconds))
        raise SamplerError(
            f"{self.base_url} failed {self.max_retries + 1} times, at last: {reason}",
            key=prompt.__key__,
        )

    async def _try(
        self, client: httpx.AsyncClient, request: dict[str, Any], prompt: Prompt
    ) -> tuple[float, str, Answers | None]:
        """``(0, "", answers)``, or ``(seconds to wait, what happened, None)``."""
        try:
            response = await asyncio.wait_for(
                client.post(self._api.path, json=request), self.timeout_seconds
            )
        except asyncio.TimeoutError:
            return 0.0, f"no answer within {self.timeout_seconds:g} s", None
        except self._httpx.TransportError as error:
            return 0.0, f"{type(error).__name__} {error}".strip(), None
        if response.status_code in _RETRIED_STATUS:
            return _retry_after(response), f"status {response.status_code}", None
        if response.status_code != 200:
            raise SamplerError(
                f"{self.base_url} answered status {response.status_code}: {response.text[:200]!r}",
                key=prompt.__key__,
            )
        try:
            return 0.0, "", self._api.answers(response.json())
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise SamplerError(
                f"{self.base_url} answered without token ids and log-probabilities "
                f"({type(error).__name__} {error}); is it the server that api= names, and new "
                f"enough?",
                key=prompt.__key__,
            ) from error


def _retry_after(response: httpx.Response) -> float:
    try:
        return max(0.0, float(response.headers.get("Retry-After", 0)))
    except ValueError:  # a date
        return 0.0


def _vllm_request(sampler: OpenAISampler, prompt: list[int], seed: int) -> dict[str, Any]:
    return {
        "model": sampler.model,
        "prompt": prompt,
        "n": sampler.group_size,
        "max_tokens": sampler.max_new_tokens,
        "temperature": sampler.temperature,
        "top_p": sampler.top_p,
        "seed": seed,
        "stop_token_ids": sampler.stop_token_ids,
        "logprobs": 1,
        "return_token_ids": True,
    }


def _vllm_answers(body: Any) -> Answers:
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    return (
        [list(choice["token_ids"]) for choice in choices],
        [list(choice["logprobs"]["token_logprobs"]) for choice in choices],
    )


def _sglang_request(sampler: OpenAISampler, prompt: list[int], seed: int) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {
            "n": sampler.group_size,
            "max_new_tokens": sampler.max_new_tokens,
            "temperature": sampler.temperature,
            "top_p": sampler.top_p,
            "stop_token_ids": sampler.stop_token_ids,
            "sampling_seed": seed,
        },
        "return_logprob": True,
    }


def _sglang_answers(body: Any) -> Answers:
    # (log-probability, token id, text) of each token
    outputs = [answer["meta_info"]["output_token_logprobs"] for answer in body]
    return (
        [[int(token) for _, token, _ in output] for output in outputs],
        [[float(log_prob) for log_prob, _, _ in output] for output in outputs],
    )


_APIS = {
    "vllm": _Api("/v1/completions", _vllm_request, _vllm_answers),
    "sglang": _Api("/generate", _sglang_request, _sglang_answers),
}
