# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Requests and answers of inference servers, with token ids in and out.

Text would not do: decoding on the server and encoding here may not give the sampled tokens, to
which the log-probabilities belong.
"""

from dataclasses import dataclass
from typing import Any, Callable, Mapping

import numpy as np

from energon_ext.rl.response import Response
from energon_ext.rl.routed_experts import RoutedExperts

#: Parameters that leave the model's distribution as it is. All are sent with each request: vLLM
#: takes those that are missing from the model's generation_config.json.
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}


@dataclass(frozen=True)
class Question:
    """A request for answers to one prompt.

    Attributes:
        tokens: the prompt.
        answers: number of answers.
        max_new_tokens: maximum tokens per answer.
        seed: int32; answers of one question have different seeds.
        model: name of the model, for servers with several.
        sampling: sampling parameters.
        experts: the experts to return of each token; None for none.
    """

    tokens: list[int]
    answers: int
    max_new_tokens: int
    seed: int
    model: str
    sampling: Mapping[str, Any]
    experts: RoutedExperts | None = None


@dataclass(frozen=True)
class Api:
    """The requests and answers of a kind of server.

    Attributes:
        path: path of the URL.
        build_request: question -> body of the request.
        read_answers: body of the answer -> the responses; raises KeyError, TypeError, ValueError or
            IndexError if it is something else; what the fields hold is checked by the sampler.
        read_experts: body of the answer, the experts asked for, and the tokens of each response
            with its prompt -> their experts, int16 [tokens, layers, k] each; raises SampleError.
        own_parameters: sampling parameters that ``build_request`` sets itself.
    """

    path: str
    build_request: Callable[[Question], dict[str, Any]]
    read_answers: Callable[[Any], list[Response]]
    read_experts: Callable[[Any, RoutedExperts, list[int]], list[np.ndarray]]
    own_parameters: frozenset[str]


def _vllm_request(question: Question) -> dict[str, Any]:
    return {
        "model": question.model,
        "prompt": question.tokens,
        "n": question.answers,
        "max_tokens": question.max_new_tokens,
        "seed": question.seed,  # vLLM adds the number of the answer
        "logprobs": 1,
        "return_token_ids": True,
        **question.sampling,
    }


def _vllm_choices(body: Any) -> list[Any]:
    choices = sorted(body["choices"], key=lambda choice: choice["index"])
    if [choice["index"] for choice in choices] != list(range(len(choices))):
        raise ValueError("answers are missing or duplicated")
    return choices


def _vllm_answers(body: Any) -> list[Response]:
    return [
        Response(
            list(choice["token_ids"]),
            list(choice["logprobs"]["token_logprobs"]),
            choice.get("finish_reason"),
        )
        for choice in _vllm_choices(body)
    ]


def _vllm_experts(body: Any, experts: RoutedExperts, tokens: list[int]) -> list[np.ndarray]:
    sent = [choice.get("routed_experts") for choice in _vllm_choices(body)]
    return [*map(experts.read_npy, sent, tokens)]


def _sglang_request(question: Question) -> dict[str, Any]:
    # Not n answers to one prompt: SGLang would give all of them the same seed.
    return {
        "input_ids": [question.tokens] * question.answers,
        "sampling_params": [
            {
                "max_new_tokens": question.max_new_tokens,
                "sampling_seed": (question.seed + number) % 2**31,
                **question.sampling,
            }
            for number in range(question.answers)
        ],
        "return_logprob": True,
        **({"return_routed_experts": True} if question.experts else {}),
    }


def _sglang_answers(body: Any) -> list[Response]:
    responses = []
    for answer in body:
        about = answer["meta_info"]
        # (log-probability, token id, text) of each token
        drawn = [(log_prob, token) for log_prob, token, _ in about["output_token_logprobs"]]
        reason = about.get("finish_reason")
        responses.append(
            Response(
                [token for _, token in drawn],
                [log_prob for log_prob, _ in drawn],
                reason["type"] if isinstance(reason, dict) else reason,
            )
        )
    return responses


def _sglang_experts(body: Any, experts: RoutedExperts, tokens: list[int]) -> list[np.ndarray]:
    sent = [answer["meta_info"].get("routed_experts") for answer in body]
    return [*map(experts.read_int32, sent, tokens)]


_VLLM_PARAMETERS = ("model", "prompt", "n", "max_tokens", "seed", "logprobs", "return_token_ids")

APIS = {
    "vllm": Api(
        "/v1/completions",
        _vllm_request,
        _vllm_answers,
        _vllm_experts,
        frozenset((*_VLLM_PARAMETERS, "stream", "echo")),
    ),
    "sglang": Api(
        "/generate",
        _sglang_request,
        _sglang_answers,
        _sglang_experts,
        frozenset(("n", "max_new_tokens", "sampling_seed")),
    ),
}
