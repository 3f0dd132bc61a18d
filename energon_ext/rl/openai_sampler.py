# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers from a vLLM or SGLang server over HTTP, with token ids in and out.

Text would not do: decoding on the server and encoding here may not give the sampled tokens, to
which the log-probabilities belong.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, AsyncIterator, Mapping, Sequence

from energon_ext.arguments import check_integer, check_number, optional_module
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import ConfigError, SampleError, SamplerError, printable
from energon_ext.rl.sampler import RewardFunction, ScoredGroup, Unanswered, score

if TYPE_CHECKING:
    from openai import AsyncOpenAI

#: Maximum size of an answer: a fixed part, and bytes per token.
_MAX_BYTES, _MAX_BYTES_PER_TOKEN = 64 * 2**20, 2**10

#: Allowed headers of a request; the client adds others from the environment.
_HEADERS = ("accept", "accept-encoding", "connection", "content-length", "content-type", "host")

#: Statuses with which a server rejects one prompt: bad request, too large, cannot be processed.
_REJECTED = (400, 413, 422)

#: Finish reasons of a response; None if a server does not report one.
_FINISH_REASONS = ("stop", "length", None)

#: Responses of a group, the log-probabilities of their tokens, and their finish reasons.
Answers = tuple[list[list[int]], list[list[float]], list[Any]]


@dataclass(kw_only=True, eq=False, repr=False)
class OpenAISampler:
    """A :class:`~energon_ext.rl.BatchSampler` that sends all prompts of a call to a server at once.

    It keeps nothing between calls. The server must have the weights in training: see
    ``sync_weights`` of :class:`~energon_ext.rl.RLDataset`. Requests use the client of the package
    ``openai``, which retries after connection errors, time-outs and status 408, 409, 429 and 5xx,
    with growing delays or when the server tells it to.

    Args:
        base_url: URL of the server, without ``/v1``.
        reward: ``(prompt, responses) -> rewards``; responses are lists of token ids.
        group_size: answers per prompt, >= 2.
        max_new_tokens: maximum tokens per response.
        model: name under which vLLM serves the model; ignored by SGLang, which serves one model.
        api: ``vllm`` (``/v1/completions`` with ``return_token_ids``, vLLM 0.10.2 or later) or
            ``sglang`` (``/generate``).
        sampling: further sampling parameters of the server, such as ``{"top_k": 20,
            "stop_token_ids": [2]}``; ``temperature`` and ``top_p`` default to 1.
        api_key: sent as a bearer token.
        timeout_seconds: longest time without data from the server in a request.
        call_timeout_seconds: longest time for all prompts of a call, including retries; it also
            ends answers that arrive byte by byte without end.
        max_retries: retries per request.
        max_concurrent: maximum concurrent requests.

    Raises:
        ConfigError: the package ``openai`` is missing, or an argument is out of range.
        SamplerError: from a call: the server kept failing, took too long or sent a bad answer (the
            other requests of the call are cancelled), or the reward failed on the answers.

    A prompt that the server rejects (status 400, 413, 422) is
    :class:`~energon_ext.rl.Unanswered`; the other prompts of the call get their groups.
    """

    base_url: str = field(kw_only=False)
    reward: RewardFunction = field(kw_only=False)
    group_size: int
    max_new_tokens: int
    model: str = ""
    api: str = "vllm"
    sampling: Mapping[str, Any] | None = None
    api_key: str | None = None
    timeout_seconds: float = 300.0
    call_timeout_seconds: float = 3600.0
    max_retries: int = 5
    max_concurrent: int = 64

    def __post_init__(self) -> None:
        install = "energon_ext[openai]"
        self._openai = optional_module("openai", "OpenAISampler", "openai", install)
        if self.api not in _APIS:
            raise ConfigError(f"api: {self.api!r} found, one of {', '.join(_APIS)} is needed.")
        for name, least in {"group_size": 2, "max_new_tokens": 1, "max_concurrent": 1}.items():
            check_integer(f"OpenAISampler.{name}", getattr(self, name), least)
        check_integer("OpenAISampler.max_retries", self.max_retries, 0)
        for name in ("timeout_seconds", "call_timeout_seconds"):
            check_number(f"OpenAISampler.{name}", getattr(self, name), above_zero=True)
        self.base_url = self.base_url.rstrip("/")
        self.parameters = {"temperature": 1.0, "top_p": 1.0, **(self.sampling or {})}
        self._path, self._request, self._answers = _APIS[self.api]

    def sample_and_score_batch(
        self, prompts: Sequence[Prompt], seed: int
    ) -> list[ScoredGroup | Unanswered]:
        """Return a group for each prompt, in order, or Unanswered if the server rejected it."""
        limit = self.call_timeout_seconds
        try:
            answers = asyncio.run(asyncio.wait_for(self._ask_all(prompts, seed), limit))
        except asyncio.TimeoutError as error:
            raise SamplerError(
                f"{self.base_url} did not answer all {len(prompts)} prompts of a call in "
                f"{limit:g} seconds (call_timeout_seconds)"
            ) from error
        return list(map(self._score, prompts, answers))

    def _score(self, prompt: Prompt, answers: Answers | Unanswered) -> ScoredGroup | Unanswered:
        if isinstance(answers, Unanswered):
            return answers
        responses, log_probs, finish_reasons = answers
        if fault := self._fault(answers):
            raise SamplerError(f"the server sent {fault}", key=prompt.__key__)
        rewards = score(self.reward, prompt, responses)
        cut = None if None in finish_reasons else [each == "length" for each in finish_reasons]
        try:
            return ScoredGroup.from_responses(prompt.tokens, responses, log_probs, rewards, cut)
        except SampleError as error:
            raise SamplerError(f"the server sent {error}", key=prompt.__key__) from error

    def _fault(self, answers: Answers) -> str | None:
        """Describe what is invalid in the server's answers to a prompt; None if nothing is."""
        responses, log_probs, finish_reasons = answers
        if len(responses) != self.group_size:
            return f"{len(responses)} answers instead of {self.group_size}"
        if unknown := [reason for reason in finish_reasons if reason not in _FINISH_REASONS]:
            return f"an answer with finish reason {unknown[0]!r:.40}"
        longest = max(map(len, responses))
        if longest > self.max_new_tokens:
            return f"{longest} tokens, but max_new_tokens is {self.max_new_tokens}"
        if {type(token) for tokens in responses for token in tokens} - {int}:
            return "token ids that are not integers"
        if {type(value) for values in log_probs for value in values} - {int, float}:
            return "log-probabilities that are not numbers"
        return None

    async def _ask_all(self, prompts: Sequence[Prompt], seed: int) -> list[Answers | Unanswered]:
        turn = asyncio.Semaphore(self.max_concurrent)
        http_client = self._openai.DefaultAsyncHttpxClient(
            event_hooks={"request": [self._strip_headers], "response": [self._limit_size]},
            follow_redirects=False,  # prompts and the key are for this server only
        )
        async with self._openai.AsyncOpenAI(
            http_client=http_client,
            base_url=self.base_url,
            api_key=self.api_key or "none",  # otherwise the client reads one from the environment
            timeout=self.timeout_seconds,
            max_retries=self.max_retries,
        ) as client:
            tasks = [
                # Servers take int32 seeds, and add an answer's number in its group to the seed.
                asyncio.ensure_future(self._ask(client, turn, p, (seed + n * 9973) % 2**31))
                for n, p in enumerate(prompts)
            ]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _strip_headers(self, request: Any) -> None:
        """Remove all headers that a request does not need."""
        key = f"Bearer {self.api_key}" if self.api_key else None
        if request.url.userinfo:  # a login in the URL, which the client has turned into a header
            key = request.headers.get("Authorization")
        for name in {*request.headers} - {*_HEADERS}:
            del request.headers[name]
        if key is not None:
            request.headers["Authorization"] = key

    async def _limit_size(self, response: Any) -> None:
        """Make reading a response raise an error once its decompressed bytes exceed the maximum."""
        limit = _MAX_BYTES + _MAX_BYTES_PER_TOKEN * self.group_size * self.max_new_tokens
        parts = response.aiter_bytes

        async def limited(chunk_size: int | None = None) -> AsyncIterator[bytes]:
            size = 0
            async for part in parts(chunk_size):
                size += len(part)
                if size > limit:
                    raise self._openai.OpenAIError(f"the answer is larger than {limit:,} bytes")
                yield part

        response.aiter_bytes = limited

    async def _ask(
        self, client: AsyncOpenAI, turn: asyncio.Semaphore, prompt: Prompt, seed: int
    ) -> Answers | Unanswered:
        request = self._request(self, prompt.tokens.tolist(), seed)
        try:
            async with turn:
                body = await client.post(self._path, cast_to=object, body=request)
            return self._answers(body)
        except self._openai.APIStatusError as error:
            status, text = error.status_code, self._excerpt(error.response.text)
            reason = printable(f"{self.base_url} answered status {status}: {text!r}")
            if status in _REJECTED:
                return Unanswered(reason)
            # Not chained, as the client's error contains the whole answer.
            raise SamplerError(reason, key=prompt.__key__) from None
        except self._openai.OpenAIError as error:
            reason = f"{self.base_url}: {self._excerpt(str(error))}"
            raise SamplerError(reason, key=prompt.__key__) from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise SamplerError(
                f"{self.base_url} answered without token ids and log-probabilities "
                f"({type(error).__name__} {error}); check that it is a recent {self.api} server",
                key=prompt.__key__,
            ) from error

    def _excerpt(self, text: str) -> str:
        """Return the beginning of a server's text without the key, which it may repeat."""
        return (text.replace(self.api_key, "***") if self.api_key else text)[:200]


def _vllm_request(sampler: OpenAISampler, prompt: list[int], seed: int) -> dict[str, Any]:
    return {
        "model": sampler.model,
        "prompt": prompt,
        "n": sampler.group_size,
        "max_tokens": sampler.max_new_tokens,
        "seed": seed,
        "logprobs": 1,
        "return_token_ids": True,
        **sampler.parameters,
    }


def _vllm_answers(body: Any) -> Answers:
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(len(choices))):
        raise ValueError("answers are missing or duplicated")
    return (
        [list(choice["token_ids"]) for choice in choices],
        [list(choice["logprobs"]["token_logprobs"]) for choice in choices],
        [choice.get("finish_reason") for choice in choices],
    )


def _sglang_request(sampler: OpenAISampler, prompt: list[int], seed: int) -> dict[str, Any]:
    return {
        "input_ids": prompt,
        "sampling_params": {
            "n": sampler.group_size,
            "max_new_tokens": sampler.max_new_tokens,
            "sampling_seed": seed,
            **sampler.parameters,
        },
        "return_logprob": True,
    }


def _sglang_answers(body: Any) -> Answers:
    # (log-probability, token id, text) of each token
    outputs = [answer["meta_info"]["output_token_logprobs"] for answer in body]
    return (
        [[token for _, token, _ in output] for output in outputs],
        [[log_prob for log_prob, _, _ in output] for output in outputs],
        [(answer["meta_info"].get("finish_reason") or {}).get("type") for answer in body],
    )


#: Path, request builder and answer parser of each server.
_APIS = {
    "vllm": ("/v1/completions", _vllm_request, _vllm_answers),
    "sglang": ("/generate", _sglang_request, _sglang_answers),
}
