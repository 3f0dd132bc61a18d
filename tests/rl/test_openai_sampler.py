# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The HTTP sampler against a local server that has both APIs and fails on demand."""

import socket
import sys

import numpy as np
import pytest
import torch

from energon_ext import ConfigError
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import SamplerError
from energon_ext.losses import unified_loss
from energon_ext.rl import OpenAISampler, RLDataset, Unanswered
from energon_ext.rl.group_faults import GroupRules
from energon_ext.rl.sampler import ask_sampler
from tests.rl.inference_server import Server, vllm_answers
from tests.rl.prompts import prompt_dataset, write_sums
from tests.rl.server_weights import sync_sglang


@pytest.fixture
def server():
    server = Server()
    yield server
    server.stop()


def count_tokens(prompt, responses):
    return [float(len(response.tokens)) for response in responses]


def sampler_for(server, **options):
    defaults = {"group_size": 3, "max_new_tokens": 8, "timeout_seconds": 20.0, "outage_seconds": 0}
    return OpenAISampler(server.url, count_tokens, **{**defaults, **options})


def dataset_of(server, folder, prompts_per_call=2, **options):
    """Return a dataset of prompts that a server answers."""
    prompts = prompt_dataset(write_sums(folder), prompts_per_call=prompts_per_call)
    options = {"seq_len": 48, "rows": 2, "groups_per_batch": 4, **options}
    return RLDataset(prompts, sampler_for(server), **options)


def prompts(*last_tokens):
    return [
        Prompt(
            __key__=f"p{last}", __restore_key__=(), __subflavors__=None,
            tokens=np.array([1, last]), source="web", metadata={},
        )
        for last in last_tokens
    ]  # fmt: skip


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_tokens_and_log_probs_of_either_server_become_groups(server, api):
    groups = sampler_for(server, api=api).sample_and_score_batch(prompts(10, 20, 30), [4, 5, 6])
    for last, group in zip((10, 20, 30), groups):
        assert group.tokens.tolist() == [
            [1, last, last + 1, 0, 0],
            [1, last, last + 1, last + 2, 0],
            [1, last, last + 1, last + 2, last + 3],
        ]
        assert group.log_probs.tolist() == [[-0.5, 0, 0], [-0.5, -1, 0], [-0.5, -1, -1.5]]
        assert group.rewards.tolist() == group.response_lens.tolist() == [1, 2, 3]
        assert group.prompt_len == 2
        assert group.truncated.tolist() == [False, False, True]


def test_the_request_has_all_options(server):
    sampler = sampler_for(
        server, model="policy", api_key="secret", sampling={"temperature": 0.7, "top_k": 5}
    )
    sampler.sample_and_score_batch(prompts(10), [4])
    ((path, authorization, body),) = server.requests
    assert (path, authorization) == ("/v1/completions", "Bearer secret")
    assert body == {
        "model": "policy", "prompt": [1, 10], "n": 3, "max_tokens": 8, "temperature": 0.7,
        "top_p": 1.0, "seed": 4, "logprobs": 1, "return_token_ids": True, "top_k": 5,
        "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0,
    }  # fmt: skip


def test_each_prompt_is_asked_with_its_own_seed(server):
    sampler_for(server).sample_and_score_batch(prompts(10, 20), [7, 2**62 + 5])
    asked = {body["prompt"][-1]: body["seed"] for _, _, body in server.requests}
    assert asked == {10: 7, 20: 5}  # servers take less than 2**31


#: Makes the client try again at once.
SOON = [("Retry-After-Ms", "1")]


@pytest.mark.parametrize("happens", [(429, SOON), (500, SOON), (503, SOON), "drop", "hang"])
def test_transient_failures_are_retried(server, happens):
    server.misfortunes = [happens]
    sampler = sampler_for(server, timeout_seconds=0.5 if happens == "hang" else 20.0)
    (group,) = sampler.sample_and_score_batch(prompts(10), range(3))
    assert group.rewards.tolist() == [1, 2, 3]
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("happens", "message"),
    [
        ((503, SOON), "answered status 503: .*out of luck"),
        ("hang", "complete answer in 0.2 sec.*, 2 times"),
    ],
)
def test_a_server_that_keeps_failing_is_an_error_with_the_prompt(server, happens, message):
    server.misfortunes = [happens] * 2
    limits = {"max_retries": 1, "timeout_seconds": 0.2 if happens == "hang" else 20.0}
    with pytest.raises(SamplerError, match=f"Prompt p10: http.*{message}"):
        sampler_for(server, **limits).sample_and_score_batch(prompts(10), range(3))
    assert len(server.requests) == 2


def test_no_server_is_an_error_and_not_a_hang():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        limits = {"max_retries": 1, "outage_seconds": 0}
        sampler = OpenAISampler(url, count_tokens, group_size=2, max_new_tokens=1, **limits)
        with pytest.raises(SamplerError, match="Prompt p10: .*Connection error"):
            sampler.sample_and_score_batch(prompts(10), range(3))


def test_a_refused_prompt_is_dropped_and_the_others_are_answered(server):
    server.misfortunes = [(400, ())]
    sampler = sampler_for(server, max_concurrent=1)
    refused, group = sampler.sample_and_score_batch(prompts(10, 20), range(3))
    assert isinstance(refused, Unanswered)
    assert "answered status 400: " in refused.reason and "out of luck" in refused.reason
    assert group.rewards.tolist() == [1, 2, 3]
    assert len(server.requests) == 2  # it is not retried


def test_a_server_that_never_stops_sending_times_out(server):
    server.misfortunes = ["drip"]
    sampler = sampler_for(server, call_timeout_seconds=1.0)
    message = r"Prompt \w+ .and 1 more in the same call.: http.* 1 of 2 prompts of a call were not "
    with pytest.raises(SamplerError, match="were not finished in 1 seconds .call_timeout_sec"):
        sampler.sample_and_score_batch(prompts(10, 20), range(3))
    server.misfortunes = ["drip"]
    with pytest.raises(SamplerError, match=message):
        ask_sampler(sampler, prompts(10, 20), range(2), GroupRules(260))


def test_an_answer_that_drips_is_ended_by_the_time_limit_of_its_request_and_asked_again(server):
    server.misfortunes = ["drip"]
    sampler = sampler_for(server, timeout_seconds=0.4)
    (group,) = sampler.sample_and_score_batch(prompts(10), range(3))
    assert group.rewards.tolist() == [1, 2, 3]
    assert len(server.requests) == 2


def test_answers_are_decompressed_only_up_to_a_limit(server):
    server.misfortunes = ["bomb"]
    with pytest.raises(SamplerError, match="the answer is larger than 67,133,440 bytes"):
        sampler_for(server).sample_and_score_batch(prompts(10), range(3))
    assert len(server.requests) == 1


def test_a_missing_openai_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "openai", None)
    with pytest.raises(ConfigError, match=r"pip install 'energon_ext\[openai\]'"):
        OpenAISampler("http://x", count_tokens, group_size=2, max_new_tokens=1)


def with_choice(**changes):
    """Return an answer of a server whose first choice is changed."""
    choices = vllm_answers({"prompt": [3], "n": 3})["choices"]
    return {"choices": [*choices[:-1], {**choices[-1], **changes}]}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"choices": [{"index": 0, "text": "hi"}]}, "without token ids.*a recent vllm server"),
        ({}, "without token ids"),
        ([], "without token ids"),
        (vllm_answers({"prompt": [3], "n": 2}), "sent 2 answers instead of 3"),
        (
            {"choices": [{"index": n, "token_ids": [4], "logprobs": {"token_logprobs": []}}
                         for n in range(3)]},
            r"responses of \[1, 1, 1\] tokens with \[0, 0, 0\] log-probabilities",
        ),
        (with_choice(index=1), "ValueError answers are missing or duplicated"),
        (with_choice(index=7), "ValueError answers are missing or duplicated"),
        (
            with_choice(token_ids=[], logprobs={"token_logprobs": []}),
            r"responses of \[0, 2, 3\] tokens with \[0, 2, 3\] log-probabilities",
        ),
        (with_choice(token_ids=["4"]), "token ids that are not integers"),
        (with_choice(token_ids=None), "without token ids"),
        (with_choice(logprobs={"token_logprobs": [None]}), "log-probabilities that are not numb"),
        (with_choice(token_ids=[4] * 9), "9 tokens, but max_new_tokens is 8"),
        (with_choice(finish_reason="abort"), "an answer with finish reason 'abort'"),
    ],
)  # fmt: skip
def test_malformed_answers_are_errors_with_the_prompt(server, answer, message):
    server.misfortunes = [answer]
    with pytest.raises(SamplerError, match=f"Prompt p10: .*{message}"):
        sampler_for(server).sample_and_score_batch(prompts(10), range(3))


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        (
            [{"exact": 1.0}, {"form": 0.0}, {"exact": 0.0}],
            r"""returned "\[{'exact': 1.0}, {'form'""",
        ),
        (None, "returned 'None'; a number for each answer is needed, or such numbers by name"),
        ({"exact": 1.0}, "returned \"{'exact': 1.0}\"; a number for each answer is needed"),
        ([1.0, 2.0], "returned 2 numbers for 3 answers"),
        ({"exact": [1.0] * 3, "form": [0.0]}, "returned 1 numbers as 'form' for 3 answers"),
    ],
)
def test_a_reward_that_returns_something_else_is_named_with_the_prompt(server, rewards, message):
    sampler = sampler_for(server)
    sampler.reward = lambda prompt, responses: rewards
    with pytest.raises(SamplerError, match=f"Prompt p10: the reward {message}"):
        sampler.sample_and_score_batch(prompts(10), range(3))


def test_one_failure_cancels_the_other_requests(server):
    server.misfortunes = ["hang", (403, ())]
    sampler = sampler_for(server)
    with pytest.raises(SamplerError, match="status 403"):
        sampler.sample_and_score_batch(prompts(10, 20), range(3))  # returns although one hangs


def test_a_dataset_samples_from_a_server(server, tmp_path):
    dataset = dataset_of(server, tmp_path)
    batch = next(dataset).validate()
    assert dataset.metrics["reward/mean"] == 2.0
    assert len(batch.rewards) >= 12


def train_on_a_server(server, folder, steps, sync):
    """Train a policy of one token to answer 7; return rewards and gaps ``log mu - log pi``."""
    logits = torch.zeros(8, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=1.0)

    def save_and_load(step):
        torch.save(logits.detach(), folder / f"policy{step}.pt")
        sync_sglang(server.url, folder / f"policy{step}.pt")

    def wants_seven(prompt, responses):
        return [float(response.tokens == [7]) for response in responses]

    save_and_load(0)
    dataset = RLDataset(
        prompt_dataset(write_sums(folder), prompts_per_call=4),
        OpenAISampler(server.url, wants_seven, group_size=8, max_new_tokens=1),
        seq_len=48,
        rows=4,
        groups_per_batch=2,
        max_staleness=0,
        max_attempts=40,
        sync_weights=save_and_load if sync else None,
    )
    rewards, gaps = [], []
    for _ in range(steps):
        batch = next(dataset)
        everywhere = logits.expand(batch.num_tokens, 8)
        loss = unified_loss(
            everywhere,
            batch.labels.clamp(max=7),
            batch.token_weights,
            sampler_log_probs=batch.log_probs,
            ratio_limit=2.0,
        )
        trained = batch.token_weights != 0
        now = torch.log_softmax(logits.detach(), -1)[batch.labels[trained]]
        gaps.append(float((batch.log_probs[trained] - now).abs().max()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(dataset.metrics["reward/mean"])
    return rewards, gaps


def test_a_policy_on_a_server_learns_with_the_weights_sent_to_it(server, tmp_path):
    rewards, gaps = train_on_a_server(server, tmp_path, 8, sync=True)
    assert rewards[0] < 0.3 < 0.5 < sum(rewards[-2:]) / 2
    assert max(gaps) < 1e-5  # the trained weights are those that answered
    updates = [body["model_path"] for path, _, body in server.requests if "update" in path]
    assert updates == [f"{tmp_path}/policy{step}.pt" for step in (0, *range(8))]


def test_a_server_with_old_weights_shows_in_the_gap(server, tmp_path):
    rewards, gaps = train_on_a_server(server, tmp_path, 6, sync=False)
    assert gaps[0] < 1e-5 and gaps[-1] > 0.3
    assert max(rewards) < 0.4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"api": "tgi"}, "api: 'tgi' found, one of vllm, sglang is needed"),
        ({"group_size": 0}, "group_size: 0 found, an integer >= 1"),
        ({"outage_seconds": -1}, "outage_seconds: -1 found"),
        ({"max_new_tokens": 0}, "max_new_tokens: 0 found"),
        ({"max_retries": -1}, "max_retries: -1 found"),
        ({"timeout_seconds": 0}, "timeout_seconds: 0 found"),
        ({"call_timeout_seconds": 0}, "call_timeout_seconds: 0 found"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        OpenAISampler("http://x", count_tokens, **{"group_size": 2, "max_new_tokens": 1, **options})
