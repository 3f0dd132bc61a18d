# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One call of a server: its requests, how long it waits for them, and what it accepts."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import Any, AsyncIterator

from energon_ext.compat import http_timeout_of
from energon_ext.data_files import parse_json
from energon_ext.errors import SampleError, SamplerError, log_of, printable
from energon_ext.rl.response import Response
from energon_ext.rl.routed_experts import RoutedExperts
from energon_ext.rl.sampler import Unanswered
from energon_ext.rl.server_apis import APIS, Question

_logger = log_of(__name__)

#: Maximum size of an answer: a fixed part, and bytes per token.
_MAX_BYTES, _MAX_BYTES_PER_TOKEN = 64 * 2**20, 2**10

#: Allowed headers of a request; the client adds others from the environment.
_HEADERS = ("accept", "accept-encoding", "connection", "content-length", "content-type", "host")

#: Statuses with which a server rejects one prompt: bad request, too large, cannot be processed.
_REJECTED = (400, 413, 422)

#: Statuses of a proxy before a server that is not there, and of a server that starts.
_OUTAGE = (502, 503)

#: Finish reason of answers that something else than the request ended, such as vLLM's /pause. The
#: same seed gives the same answers when they are asked for again.
_ABORTED = "abort"

#: A connection is made within this time, or the server is not there.
_CONNECT_SECONDS = 30.0


@dataclass(kw_only=True, eq=False, repr=False)
class Server:
    """A server, what is asked of it, and for how long.

    See :class:`~energon_ext.rl.OpenAISampler` for the meaning of each field.
    """

    base_url: str = field(kw_only=False)
    group_size: int
    max_new_tokens: int
    model: str = ""
    api: str = "vllm"
    api_key: str | None = None
    timeout_seconds: float = 1800.0
    max_retries: int = 5
    outage_seconds: float = 600.0
    max_concurrent: int = 64
    routed_experts: RoutedExperts | None = None


class ServerCall:
    """Asks about the prompts of a call; an asynchronous context manager.

    Args:
        longest_prompt: the most tokens of a prompt of the call.
    """

    def __init__(self, server: Server, openai: Any, longest_prompt: int):
        self._server = server
        self._openai = openai
        self._api = APIS[server.api]
        self._turn = asyncio.Semaphore(server.max_concurrent)
        self._outage = _Outage(server.base_url, server.outage_seconds)
        self._most_bytes = _most_bytes(server, longest_prompt)
        limit = server.timeout_seconds
        http_client = openai.DefaultAsyncHttpxClient(
            event_hooks={"request": [self._strip_headers], "response": [self._limit_size]},
            follow_redirects=False,  # prompts and the key are for this server only
        )
        http_client.send = self._limit_time(http_client.send, http_timeout_of(http_client))
        self._client = openai.AsyncOpenAI(
            http_client=http_client,
            base_url=server.base_url,
            api_key=server.api_key or "none",  # otherwise the client reads the environment's
            timeout=openai.Timeout(limit, connect=min(limit, _CONNECT_SECONDS)),
            max_retries=server.max_retries,
        )

    async def __aenter__(self) -> "ServerCall":
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._client.__aexit__(*error)

    async def ask(self, question: Question, key: str) -> list[Response] | Unanswered:
        """Return the answers, or Unanswered if the server rejects the prompt.

        Raises:
            SamplerError: the server kept failing, or sent something else; names the prompt.
        """
        body = self._api.build_request(question)
        url, api = self._server.base_url, self._server.api
        other = next(each for each in APIS if each != api)
        try:
            async with self._turn:
                return await self._answers(body, question)
        except self._openai.APIStatusError as error:
            status, text = error.status_code, self._excerpt(error.response.text)
            reason = printable(f"{url} answered status {status}: {text!r}")
            if status in _REJECTED:
                return Unanswered(reason)
            if status in (404, 405):
                reason += (
                    f"; with api={api!r} {self._api.path} is asked: check base_url and model, or "
                    f"use api={other!r}"
                )
            # Not chained, as the client's error contains the whole answer.
            raise SamplerError(reason, key=key) from None
        except self._openai.APITimeoutError as error:
            raise SamplerError(
                f"{url} sent no complete answer in {self._server.timeout_seconds:g} seconds "
                f"(timeout_seconds), {self._server.max_retries + 1} times",
                key=key,
            ) from error
        except self._openai.OpenAIError as error:
            raise SamplerError(f"{url}: {self._excerpt(str(error))}", key=key) from error
        except SampleError as error:
            raise SamplerError(f"{url} sent {error}", key=key) from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise SamplerError(
                f"{url} answered without token ids and log-probabilities "
                f"({type(error).__name__} {error}); check that it is a recent {api} server, or use "
                f"api={other!r}",
                key=key,
            ) from error

    async def _answers(self, body: dict[str, Any], question: Question) -> list[Response]:
        """Ask until the answers are there, also while the server restarts or aborts answers."""
        while True:
            try:
                content = await self._client.post(self._api.path, cast_to=str, body=body)
            except self._openai.APITimeoutError:
                raise
            except self._openai.APIConnectionError as error:
                if not await self._outage.wait(f"is not there ({self._excerpt(str(error))})"):
                    raise
            except self._openai.APIStatusError as error:
                fault = f"is not there (status {error.status_code})"
                if error.status_code not in _OUTAGE or not await self._outage.wait(fault):
                    raise
            else:
                answer_body = parse_json(content)
                answers = self._api.read_answers(answer_body)
                if not any(answer.finish_reason == _ABORTED for answer in answers):
                    self._outage.end()
                    return self._add_experts(answers, answer_body, question)
                if not await self._outage.wait("aborts answers"):
                    return answers  # the sampler raises an error that names the reason

    def _add_experts(
        self, answers: list[Response], body: Any, question: Question
    ) -> list[Response]:
        if question.experts is None:
            return answers
        tokens = [len(question.tokens) + len(answer.tokens) for answer in answers]
        found = self._api.read_experts(body, question.experts, tokens)
        name = question.experts.name
        return [replace(answer, columns={name: experts}) for answer, experts in zip(answers, found)]

    async def _strip_headers(self, request: Any) -> None:
        """Remove all headers that a request does not need."""
        api_key = self._server.api_key
        key = f"Bearer {api_key}" if api_key else None
        if request.url.userinfo:  # a login in the URL, which the client has turned into a header
            key = request.headers.get("Authorization")
        for name in {*request.headers} - {*_HEADERS}:
            del request.headers[name]
        if key is not None:
            request.headers["Authorization"] = key

    def _limit_time(self, send: Any, timeout: Any) -> Any:
        """Bound the time of a whole answer; the client's own limit begins again at every byte."""

        async def limited(request: Any, **options: Any) -> Any:
            try:
                sent = send(request, **options)
                return await asyncio.wait_for(sent, self._server.timeout_seconds)
            except asyncio.TimeoutError as error:
                raise timeout("the whole answer", request=request) from error

        return limited

    async def _limit_size(self, response: Any) -> None:
        """Make reading a response raise an error once its decompressed bytes exceed the maximum."""
        limit = self._most_bytes
        parts = response.aiter_bytes

        async def limited(chunk_size: int | None = None) -> AsyncIterator[bytes]:
            size = 0
            async for part in parts(chunk_size):
                size += len(part)
                if size > limit:
                    raise self._openai.OpenAIError(f"the answer is larger than {limit:,} bytes")
                yield part

        response.aiter_bytes = limited

    def _excerpt(self, text: str) -> str:
        """Return the beginning of a server's text without the key, which it may repeat."""
        api_key = self._server.api_key
        return (text.replace(api_key, "***") if api_key else text)[:200]


def _most_bytes(server: Server, longest_prompt: int) -> int:
    """Return the maximum size of an answer."""
    size = _MAX_BYTES + _MAX_BYTES_PER_TOKEN * server.group_size * server.max_new_tokens
    if server.routed_experts is None:
        return size
    tokens = server.group_size * (longest_prompt + server.max_new_tokens)
    return size + server.routed_experts.most_bytes * tokens


class _Outage:
    """A time in which the server gives no answers; the requests of a call wait for it together."""

    _FIRST_PAUSE, _LONGEST_PAUSE, _SECONDS_PER_LINE = 1.0, 10.0, 30.0

    def __init__(self, url: str, limit_seconds: float):
        self._url, self._limit = url, limit_seconds
        self._begin: float | None = None
        self._next_line = 0.0

    async def wait(self, fault: str) -> bool:
        """Wait before the next try and log the fault; return False if it lasted too long."""
        now = time.monotonic()
        if self._begin is None:
            self._begin = self._next_line = now
        away = now - self._begin
        if away >= self._limit:
            return False
        if now >= self._next_line:
            self._next_line = now + self._SECONDS_PER_LINE
            _logger.warning(
                "%s %s, for %.0f seconds now; waiting up to %g seconds (outage_seconds).",
                *(self._url, fault, away, self._limit),
            )
        pause = min(max(away, self._FIRST_PAUSE), self._LONGEST_PAUSE, self._limit - away)
        await asyncio.sleep(pause)
        return True

    def end(self) -> None:
        """The server has answered."""
        if self._begin is not None:
            _logger.warning("%s answers again.", self._url)
            self._begin = None
