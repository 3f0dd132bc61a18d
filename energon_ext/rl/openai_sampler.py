# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers from a server: vLLM or SGLang over HTTP, token ids in and token ids out.

Text would not do: what a server decodes and this process encodes again need not be the tokens that
were sampled, and the log-probabilities belong to those.
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

#: An answer may be so large, beside what its tokens take.
_MOST_BYTES, _MOST_BYTES_OF_A_TOKEN = 64 * 2**20, 2**10

#: Headers of a request; a client adds those that the environment names.
_HEADERS = ("accept", "accept-encoding", "connection", "content-length", "content-type", "host")

#: Statuses by which a server refuses one prompt: no valid request, too large, cannot be processed.
_REFUSED = (400, 413, 422)

#: Why a response is over; None where a server does not say.
_ENDS = ("stop", "length", None)

#: Responses of a group, the log-probabilities of their tokens, and why each response ended.
Answers = tuple[list[list[int]], list[list[float]], list[Any]]


@dataclass(kw_only=True, eq=False, repr=False)
class OpenAISampler:
    """A :class:`~energon_ext.rl.BatchSampler` that asks a server, all prompts of a call at once.

    Keeps nothing between calls. The server must hold the weights that are trained: see
    ``sync_weights`` of :class:`~energon_ext.rl.RLDataset`. Requests go through the client of the
    package ``openai``, which tries again after connection errors, time-outs and status 408, 409,
    429 and 5xx, each time later or when the server says.

    Args:
        base_url: of the server, without ``/v1``.
        reward: ``(prompt, responses) -> rewards``; responses are lists of token ids.
        group_size: answers to a prompt, >= 2.
        max_new_tokens: longest response.
        model: name that vLLM serves it under; SGLang serves one model and takes none.
        api: ``vllm`` (``/v1/completions`` with ``return_token_ids``, vLLM 0.10.2 or later) or
            ``sglang`` (``/generate``).
        sampling: further sampling parameters of the server, as ``{"top_k": 20, "stop_token_ids":
            [2]}``; ``temperature`` and ``top_p`` are 1 where it does not say.
        api_key: sent as a bearer token.
        timeout_seconds: longest silence of the server in a request.
        call_timeout_seconds: longest time for all prompts of a call, further tries included: a
            server that goes on for ever, byte by byte, is not waited for.
        max_retries: further tries of a request.
        max_concurrent: requests at the same time.

    Raises:
        ConfigError: the package ``openai`` is missing, or an argument is out of range.
        SamplerError: from a call: the server kept failing, took too long, or answered something
            else; the other requests of the call are cancelled. Or the reward failed on the answers.

    A prompt that the server refuses (status 400, 413, 422) is
    :class:`~energon_ext.rl.Unanswered`: the others of the call have their groups.
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
            raise ConfigError(f"api: {self.api!r} found, {' or '.join(_APIS)} allowed.")
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
        """A group for each prompt, in order, or that the server refused it."""
        limit = self.call_timeout_seconds
        try:
            answers = asyncio.run(asyncio.wait_for(self._ask_all(prompts, seed), limit))
        except asyncio.TimeoutError as error:
            late = f"all {len(prompts)} prompts of a call in {limit:g} seconds"
            reason = f"{self.base_url} did not answer {late} (call_timeout_seconds)"
            raise SamplerError(reason) from error
        return list(map(self._score, prompts, answers))

    def _score(self, prompt: Prompt, answers: Answers | Unanswered) -> ScoredGroup | Unanswered:
        if isinstance(answers, Unanswered):
            return answers
        responses, log_probs, ends = answers
        if fault := self._fault(answers):
            raise SamplerError(f"the server sent {fault}", key=prompt.__key__)
        rewards = score(self.reward, prompt, responses)
        try:
            cut = None if None in ends else [end == "length" for end in ends]
            return ScoredGroup.from_responses(prompt.tokens, responses, log_probs, rewards, cut)
        except SampleError as error:
            raise SamplerError(f"the server sent {error}", key=prompt.__key__) from error

    def _fault(self, answers: Answers) -> str | None:
        """Describe an answer that no request of this sampler can have; None if all are fine."""
        responses, log_probs, ends = answers
        if len(responses) != self.group_size:
            return f"{len(responses)} answers, {self.group_size} were asked for"
        if strange := [end for end in ends if end not in _ENDS]:
            return f"an answer that was ended by {strange[0]!r:.40}"
        longest = max(map(len, responses))
        if longest > self.max_new_tokens:
            return f"{longest} tokens, and max_new_tokens is {self.max_new_tokens}"
        if {type(token) for tokens in responses for token in tokens} - {int}:
            return "token ids that are no integers"
        if {type(value) for values in log_probs for value in values} - {int, float}:
            return "log-probabilities that are no numbers"
        return None

    async def _ask_all(self, prompts: Sequence[Prompt], seed: int) -> list[Answers | Unanswered]:
        turn = asyncio.Semaphore(self.max_concurrent)
        http_client = self._openai.DefaultAsyncHttpxClient(
            event_hooks={"request": [self._bare], "response": [self._limit]},
            follow_redirects=False,  # prompts and the key are for this server
        )
        async with self._openai.AsyncOpenAI(
            http_client=http_client,
            base_url=self.base_url,
            api_key=self.api_key or "none",  # else the client takes one of the environment
            timeout=self.timeout_seconds,
            max_retries=self.max_retries,
        ) as client:
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

    async def _bare(self, request: Any) -> None:
        """Leave out what a request need not say."""
        key = f"Bearer {self.api_key}" if self.api_key else None
        if request.url.userinfo:  # a login in the URL, of which the client has made a header
            key = request.headers.get("Authorization")
        for name in {*request.headers} - {*_HEADERS}:
            del request.headers[name]
        if key is not None:
            request.headers["Authorization"] = key

    async def _limit(self, response: Any) -> None:
        """Read an answer, however it is compressed, no further than answers go."""
        most = _MOST_BYTES + _MOST_BYTES_OF_A_TOKEN * self.group_size * self.max_new_tokens
        parts = response.aiter_bytes

        async def limited(chunk_size: int | None = None) -> AsyncIterator[bytes]:
            size = 0
            async for part in parts(chunk_size):
                size += len(part)
                if size > most:
                    raise self._openai.OpenAIError(f"the answer is larger than {most:,} bytes")
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
            status, text = error.status_code, self._said(error.response.text)
            reason = printable(f"{self.base_url} answered status {status}: {text!r}")
            if status in _REFUSED:
                return Unanswered(reason)
            raise SamplerError(reason, key=prompt.__key__) from None  # it holds the whole answer
        except self._openai.OpenAIError as error:
            said = self._said(str(error))
            raise SamplerError(f"{self.base_url}: {said}", key=prompt.__key__) from error
        except (KeyError, TypeError, ValueError, IndexError) as error:
            found = f"without token ids and log-probabilities ({type(error).__name__} {error})"
            asked = "is it the server that api= names, and new enough?"
            said = f"{self.base_url} answered {found}; {asked}"
            raise SamplerError(said, key=prompt.__key__) from error

    def _said(self, text: str) -> str:
        """The beginning of what a server said, which may repeat the key."""
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
        raise ValueError("answers are missing, or there twice")
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


#: Path, request and answers of each server.
_APIS = {
    "vllm": ("/v1/completions", _vllm_request, _vllm_answers),
    "sglang": ("/generate", _sglang_request, _sglang_answers),
}
