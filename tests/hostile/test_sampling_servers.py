# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers of a sampling server must fit the request, and the server sees only the request."""

import contextlib
import copy
import functools

import pytest

from energon_ext.errors import SamplerError
from energon_ext.rl import OpenAISampler, Unanswered
from energon_ext.rl.group_faults import GroupRules
from energon_ext.rl.openai_sampler import _group
from energon_ext.rl.sampler import ask_sampler
from energon_ext.rl.server_apis import APIS
from tests.rl.inference_server import Server, sglang_answers, vllm_answers
from tests.rl.test_openai_sampler import (
    count_tokens,
    prompts,
    sampler_for,
    server,  # noqa: F401  # a fixture
)
from tests.state.mutations import mutations, places_of


def vllm(**changed):
    """Return three answers with changes in the second."""
    answers = vllm_answers({"prompt": [3], "n": 3})["choices"][::-1]
    answers[1] = {**answers[1], **changed}
    return {"choices": answers}


def sglang(**changed):
    answers = sglang_answers({"input_ids": [[3]] * 3})
    answers[1]["meta_info"].update(changed)
    return answers


ANSWERS = [
    ("vllm", vllm(finish_reason="abort"), "an answer with finish reason 'abort'"),
    ("vllm", vllm(finish_reason=["stop"]), r"an answer with finish reason \['stop'\]"),
    ("sglang", sglang(finish_reason={"type": "abort"}), "an answer with finish reason 'abort'"),
    (
        "vllm",
        vllm(logprobs={"token_logprobs": [-1.0, 50.0]}),
        "log_probs must be at most 0, got",
    ),
    ("vllm", vllm(logprobs={"token_logprobs": [-1.0, True]}), "log-probabilities that are not num"),
    ("vllm", vllm(logprobs={"token_logprobs": [-1.0, "-1"]}), "log-probabilities that are not num"),
    ("vllm", vllm(token_ids=[True, False]), "token ids that are not integers"),
    ("vllm", vllm(token_ids=[4.0, 5.0]), "token ids that are not integers"),
    ("vllm", vllm(index=0), "answers are missing or duplicated"),
    ("vllm", vllm(index=7), "answers are missing or duplicated"),
    (
        "vllm",
        vllm(token_ids=[4] * 40, logprobs={"token_logprobs": [-1.0] * 40}),
        "40 tokens, but max_new_tokens is 8",
    ),
    ("sglang", sglang(output_token_logprobs=[[0.5, 4, None]]), "log_probs must be at most 0"),
    ("sglang", sglang(output_token_logprobs=[[-0.5, True, None]]), "that are not integers"),
    ("vllm", vllm(token_ids=[4, 2**63]), "token ids that int32 cannot hold"),
    ("vllm", vllm(token_ids=[4, -(2**31)]), "token ids that int32 cannot hold"),
    ("vllm", vllm(token_ids=[4, 10**30]), "the integer 10000.* has more than 64 bits"),
    ("sglang", sglang(finish_reason=["stop"]), r"an answer with finish reason \['stop'\]"),
    (
        "sglang",
        sglang(finish_reason={"type": ["stop"]}),
        r"an answer with finish reason \['stop'\]",
    ),
    ("sglang", sglang(finish_reason=7), "an answer with finish reason 7"),
    ("sglang", sglang(output_token_logprobs=[[-(10**400), 4, None]]), "has more than 64 bits"),
    ("sglang", sglang(output_token_logprobs=[["-0.5", 4, None]]), "that are not numbers"),
]


@pytest.mark.parametrize("api, answer, message", ANSWERS)
def test_an_answer_that_does_not_fit_the_request_is_refused(server, api, answer, message):  # noqa: F811
    server.misfortunes = [answer]
    with pytest.raises(SamplerError, match=f"Prompt p10: .*{message}"):
        ask_sampler(sampler_for(server, api=api), prompts(10), [0], GroupRules(260))


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_an_answer_with_many_levels_is_refused(server, api):  # noqa: F811
    server.raw = b"[" * 100_000 + b"]" * 100_000
    with pytest.raises(SamplerError, match="Prompt p10: .*too many lists and objects within"):
        ask_sampler(sampler_for(server, api=api), prompts(10), [0], GroupRules(260))


def test_any_change_of_an_answer_gives_a_group_or_an_error_of_the_prompt():
    """The answers are read as they come from a server, without one."""
    (prompt,) = prompts(10)
    for api, body in (("vllm", vllm()), ("sglang", sglang())):
        sampler = OpenAISampler("http://x", count_tokens, group_size=3, max_new_tokens=8, api=api)
        refused = 0
        for _, changed in (*mutations(body, 500, seed=1), *with_extremes(body)):
            try:
                answers = APIS[api].read_answers(changed)
            except (KeyError, TypeError, ValueError, IndexError):
                refused += 1
                continue
            if sampler._fault(answers) is None:
                with contextlib.suppress(SamplerError):
                    _group(prompt, answers, [1.0, 2.0, 3.0])
        assert refused > 100


def with_extremes(body):
    """Yield copies of JSON values with one place set to each of some extreme values."""
    extremes = (2**63, -(2**63), 1e308, -1e308, float("nan"), "x", ["x"], {}, {"type": {}}, None)
    for *path, key in filter(None, places_of(body)):
        for value in extremes:
            changed = copy.deepcopy(body)
            parent = functools.reduce(lambda found, step: found[step], path, changed)
            parent[key] = value
            yield (*path, key), changed


def test_prompts_and_key_do_not_follow_a_redirect(server):  # noqa: F811
    other = Server()
    server.misfortunes = [(307, [("Location", f"{other.url}/v1/completions")])]
    with pytest.raises(SamplerError, match="answered status 307"):
        sampler_for(server, api_key="secret-key").sample_and_score_batch(prompts(10), range(3))
    assert other.requests == []
    other.stop()


@pytest.mark.parametrize("key", [None, "secret-key"])
def test_the_environment_adds_nothing_to_a_request(server, key, monkeypatch):  # noqa: F811
    monkeypatch.setenv("OPENAI_API_KEY", "of-the-environment")
    monkeypatch.setenv("OPENAI_ORG_ID", "of-the-environment")
    monkeypatch.setenv("OPENAI_PROJECT_ID", "of-the-environment")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "X-Own: of-the-environment\nAuthorization: mine")
    sampler_for(server, api_key=key).sample_and_score_batch(prompts(10), range(3))
    names = {name.lower() for name in server.headers} - {"authorization"}
    assert names <= {"accept", "accept-encoding", "connection", "content-length"} | {
        "content-type",
        "host",
    }
    assert server.headers.get("authorization", server.headers.get("Authorization")) == (
        f"Bearer {key}" if key else None
    )


def test_a_login_in_the_url_is_sent(server):  # noqa: F811
    sampler = sampler_for(server)
    sampler.base_url = sampler.base_url.replace("//", "//me:password@")
    sampler.sample_and_score_batch(prompts(10), range(3))
    assert server.requests[0][1] == "Basic bWU6cGFzc3dvcmQ="


@pytest.mark.parametrize("status", [400, 403])
def test_a_key_echoed_by_the_server_is_not_in_the_message(server, status, monkeypatch):  # noqa: F811
    key = "secret-" + "k" * 300
    server.says = f"Bearer {key}"
    server.misfortunes = [(status, ())]
    sampler = sampler_for(server, api_key=key)
    sampler.base_url = sampler.base_url.replace("//", "//me:password@")
    try:
        (answer,) = sampler.sample_and_score_batch(prompts(10), range(3))
    except SamplerError as error:
        message = str(error) + error.reason
        assert error.__cause__ is None
    else:
        assert isinstance(answer, Unanswered)
        message = answer.reason
    assert not any(secret in message for secret in ("secret", "kkk", "password"))
    assert "***" in message and f"status {status}" in message
