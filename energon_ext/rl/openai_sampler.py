# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers from a vLLM or SGLang server over HTTP."""

from __future__ import annotations

import asyncio
import urllib.parse
from dataclasses import dataclass, field
from typing import Any, Mapping, Sequence

from energon_ext.arguments import check_choice, check_integer, check_number, optional_module
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import ConfigError, SampleError, SamplerError, log_of
from energon_ext.rl.event_loop import run_coroutine
from energon_ext.rl.response import Response
from energon_ext.rl.rewards import RewardFunction, Rewards, score
from energon_ext.rl.sampler import Unanswered
from energon_ext.rl.scored_group import ScoredGroup
from energon_ext.rl.server_apis import APIS, NEUTRAL, Question
from energon_ext.rl.server_call import Server, ServerCall

_logger = log_of(__name__)

#: Finish reasons of a response; None if a server does not report one.
_FINISH_REASONS = ("stop", "length", None)


@dataclass(kw_only=True, eq=False, repr=False)
class OpenAISampler(Server):
    """A :class:`~energon_ext.rl.BatchSampler` that sends all prompts of a call to a server at once.

    It keeps nothing between calls. The server must have the weights in training: see
    ``sync_weights`` of :class:`~energon_ext.rl.RLDataset`. Requests use the client of the package
    ``openai``, which retries after connection errors, time-outs and status 408, 409, 429 and 5xx,
    with growing delays or when the server tells it to. The reward of a prompt is computed while
    other prompts are still answered.

    Args:
        base_url: URL of the server, without ``/v1``.
        reward: ``(prompt, responses) -> rewards``, see :class:`~energon_ext.rl.Response`: a number
            for each response, or such numbers by name. Functions run in threads, several at a time;
            a coroutine function (``async def``) runs in the thread of the caller.
        group_size: answers per prompt, >= 1.
        max_new_tokens: maximum tokens per response.
        model: name under which vLLM serves the model; ignored by SGLang, which serves one model.
        api: ``vllm`` (``/v1/completions`` with ``return_token_ids``, vLLM 0.10.2 or later) or
            ``sglang`` (``/generate``).
        sampling: further sampling parameters of the server, such as ``{"stop_token_ids": [2]}``.
            Those that shape the distribution are neutral unless given here: ``temperature`` 1,
            ``top_p`` 1, ``top_k`` -1, ``min_p`` 0 and all penalties.
        api_key: sent as a bearer token.
        timeout_seconds: longest time for one request, until the last of the answers to its prompt
            is complete: a server sends nothing before. It is retried then.
        call_timeout_seconds: longest time for all prompts of a call and their rewards, including
            everything that is waited for.
        max_retries: retries per request.
        outage_seconds: longest time to wait, after these retries, for a server that accepts no
            connections or answers 502 or 503, as during a restart, or that aborts answers, as when
            vLLM is paused. The log says so every half minute. Start the server with the newest
            weights.
        max_concurrent: maximum concurrent requests, and rewards.
        routed_experts: the experts that the server returns of each token, as a column of the
            groups; None for none. vLLM (0.22 or later) and SGLang return them if they run with
            ``--enable-return-routed-experts``.

    Raises:
        ConfigError: the package ``openai`` is missing, or an argument is out of range.
        SamplerError: from a call: the server kept failing, took too long, sent a bad answer or
            refused all prompts of a call (two or more), or the reward failed on the answers. The
            other requests of the call are cancelled.

    A prompt that the server rejects (status 400, 413, 422) is
    :class:`~energon_ext.rl.Unanswered`; the other prompts of the call get their groups.
    """

    reward: RewardFunction = field(kw_only=False)
    sampling: Mapping[str, Any] | None = None
    call_timeout_seconds: float = 3600.0

    def __post_init__(self) -> None:
        install = "energon_ext[openai]"
        self._openai = optional_module("openai", "OpenAISampler", "openai", install)
        check_choice("api", self.api, APIS)
        for name in ("group_size", "max_new_tokens", "max_concurrent"):
            check_integer(f"OpenAISampler.{name}", getattr(self, name), 1)
        check_integer("OpenAISampler.max_retries", self.max_retries, 0)
        for name in ("timeout_seconds", "call_timeout_seconds"):
            check_number(f"OpenAISampler.{name}", getattr(self, name), above_zero=True)
        check_number("OpenAISampler.outage_seconds", self.outage_seconds)
        self.base_url = self.base_url.rstrip("/")
        self._check_url()
        self._check_sampling()

    def _check_url(self) -> None:
        url = urllib.parse.urlsplit(self.base_url)
        is_server = url.scheme in ("http", "https") and url.netloc
        if not is_server or url.path.split("/")[-1] == "v1":
            raise ConfigError(
                f"base_url: {self.base_url!r} found, the address of the server is needed, without "
                f"a path such as /v1: http://localhost:8000, for example."
            )

    def _check_sampling(self) -> None:
        given = dict(self.sampling or {})
        if own := sorted(APIS[self.api].own_parameters & {*given}):
            raise ConfigError(
                f"sampling: {', '.join(own)} found, which OpenAISampler sets itself; use its "
                f"arguments group_size, max_new_tokens and model."
            )
        self.parameters = {**NEUTRAL, **given}
        if shaping := {k: v for k, v in self.parameters.items() if v != NEUTRAL.get(k, v)}:
            _logger.warning(
                "sampling: %s changes what is drawn, but servers report the log-probabilities of "
                "the unchanged model (vLLM: unless it runs with --logprobs-mode "
                "processed_logprobs), so that ratios to them are not exact.",
                ", ".join(f"{name}={value}" for name, value in shaping.items()),
            )

    def sample_and_score_batch(
        self, prompts: Sequence[Prompt], seeds: Sequence[int]
    ) -> list[ScoredGroup | Unanswered]:
        """Return a group for each prompt, in order, or Unanswered if the server rejected it."""
        limit = self.call_timeout_seconds
        stages = ["answer"] * len(prompts)  # what each prompt waits for
        try:
            groups = run_coroutine(
                lambda: asyncio.wait_for(self._sample_all(prompts, seeds, stages), limit)
            )
        except asyncio.TimeoutError as error:
            waiting = len(prompts) - stages.count("")
            raise SamplerError(
                f"{self.base_url}: {waiting} of {len(prompts)} prompts of a call were not finished "
                f"in {limit:g} seconds (call_timeout_seconds); {stages.count('reward')} wait for "
                f"their reward"
            ) from error
        refused = [group for group in groups if isinstance(group, Unanswered)]
        if len(refused) == len(groups) > 1:
            # Rather the configuration than the prompts: the others would be refused as well.
            raise SamplerError(f"the server refused all {len(groups)} prompts: {refused[0].reason}")
        return groups

    async def _sample_all(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], stages: list[str]
    ) -> list[ScoredGroup | Unanswered]:
        scoring = asyncio.Semaphore(self.max_concurrent)

        async def sample(call: ServerCall, number: int) -> ScoredGroup | Unanswered:
            prompt = prompts[number]
            # Servers take int32 seeds; the answers of a group have the following ones.
            question = Question(
                prompt.tokens.tolist(),
                self.group_size,
                self.max_new_tokens,
                seeds[number] % 2**31,
                self.model,
                self.parameters,
                self.routed_experts,
            )
            answers = await call.ask(question, prompt.__key__)
            if isinstance(answers, Unanswered):
                stages[number] = ""
                return answers
            if fault := self._fault(answers):
                raise SamplerError(f"the server sent {fault}", key=prompt.__key__)
            stages[number] = "reward"
            rewards = await score(self.reward, prompt, answers, scoring)
            stages[number] = ""
            return _group(prompt, answers, rewards)

        longest = max((len(prompt.tokens) for prompt in prompts), default=0)
        async with ServerCall(self, self._openai, longest) as call:
            tasks = [asyncio.ensure_future(sample(call, n)) for n in range(len(prompts))]
            try:
                return await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    def _fault(self, answers: list[Response]) -> str | None:
        """Describe what is invalid in the server's answers to a prompt; None if nothing is."""
        if len(answers) != self.group_size:
            return f"{len(answers)} answers instead of {self.group_size}"
        for answer in answers:
            if answer.finish_reason not in _FINISH_REASONS:
                return f"an answer with finish reason {answer.finish_reason!r:.40}"
            if len(answer.tokens) > self.max_new_tokens:
                return f"{len(answer.tokens)} tokens, but max_new_tokens is {self.max_new_tokens}"
            if {*map(type, answer.tokens)} - {int}:
                return "token ids that are not integers"
            if max(map(abs, answer.tokens), default=0) >= 2**31:
                return "token ids that int32 cannot hold"
            if {*map(type, answer.log_probs)} - {int, float}:
                return "log-probabilities that are not numbers"
        return None


def _group(prompt: Prompt, answers: list[Response], rewards: Rewards) -> ScoredGroup:
    try:
        return ScoredGroup.from_answers(prompt.tokens, answers, rewards)
    except SampleError as error:
        raise SamplerError(f"the server sent {error}", key=prompt.__key__) from error
