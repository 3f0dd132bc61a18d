# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What servers do with requests in practice: defaults of the model, seeds, restarts, refusals."""

import asyncio
import logging
import os
import socket
import subprocess
import sys
import threading

import pytest
import torch

from energon_ext import ConfigError
from energon_ext.errors import SamplerError
from energon_ext.rl import OpenAISampler
from tests.rl.inference_server import Server, vllm_answers
from tests.rl.prompts import write_sums
from tests.rl.test_openai_sampler import (
    count_tokens,
    dataset_of,
    prompts,
    sampler_for,
    server,  # noqa: F401  # a fixture
)


def drawn_tokens(sampler, calls=4):
    groups = [sampler.sample_and_score_batch(prompts(1), [seed])[0] for seed in range(calls)]
    return torch.cat([group.tokens[:, 2] for group in groups]).tolist()


def test_the_sampling_parameters_of_the_model_do_not_shape_the_answers(server):  # noqa: F811
    """vLLM takes what a request leaves out from the model's generation_config.json."""
    server.policy = torch.zeros(16)
    server.policy[:2] = 0.1
    server.generation_config = {
        "temperature": 0.1, "top_p": 0.8, "top_k": 2, "min_p": 0.5, "repetition_penalty": 1.05,
        "presence_penalty": 1.0, "frequency_penalty": 1.0,
    }  # fmt: skip
    sampler = sampler_for(server, group_size=64, max_new_tokens=1)
    assert len(set(drawn_tokens(sampler))) > 10
    sent = server.requests[0][2]
    assert {name: sent[name] for name in server.generation_config} == {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0,
        "presence_penalty": 0.0, "frequency_penalty": 0.0,
    }  # fmt: skip


def test_a_parameter_that_shapes_the_answers_must_be_asked_for_and_is_logged(server, caplog):  # noqa: F811
    server.policy = torch.arange(16.0) / 100
    sampler = sampler_for(server, group_size=64, max_new_tokens=1, sampling={"top_k": 2})
    assert set(drawn_tokens(sampler)) == {14, 15}
    assert "sampling: top_k=2 changes what is drawn" in caplog.text
    caplog.clear()
    sampler_for(server, sampling={"top_p": 1, "stop_token_ids": [2]})
    assert not caplog.text


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_the_answers_of_a_group_differ(server, api):  # noqa: F811
    """SGLang gives one sampling_seed to all answers that it draws for one prompt."""
    server.policy = torch.zeros(64)
    sampler = sampler_for(server, api=api, group_size=16, max_new_tokens=1)
    first, again = drawn_tokens(sampler, 1), drawn_tokens(sampler, 1)
    assert first == again
    assert len(set(first)) > 8
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("api", "sampling", "message"),
    [
        ("vllm", {"n": 4}, "sampling: n found, which OpenAISampler sets itself"),
        ("vllm", {"max_tokens": 4}, "sampling: max_tokens found"),
        ("vllm", {"stream": True}, "sampling: stream found"),
        ("sglang", {"sampling_seed": 1, "n": 2}, "sampling: n, sampling_seed found"),
    ],
)
def test_parameters_that_the_sampler_sets_are_refused(api, sampling, message):
    with pytest.raises(ConfigError, match=message):
        OpenAISampler(
            "http://x", count_tokens, group_size=2, max_new_tokens=1, api=api, sampling=sampling
        )


# Refusals ---------------------------------------------------------------------------------------


def test_a_call_that_is_refused_as_a_whole_ends_with_the_servers_words(server, tmp_path, caplog):  # noqa: F811
    server.refuses = (400, {"error": "max_tokens is too large"})
    dataset = dataset_of(server, tmp_path, prompts_per_call=8)
    with pytest.raises(SamplerError, match="refused all 8 prompts: .*400.*max_tokens is too"):
        next(dataset)
    assert len(server.requests) == 8
    assert not caplog.records
    server.refuses = None
    next(dataset)
    assert dataset.counts["unanswered_groups"] == 0  # the same prompts were asked again


def test_an_error_after_max_attempts_has_the_last_reason(server, tmp_path):  # noqa: F811
    server.refuses = (400, {"error": "max_tokens is too large"})
    dataset = dataset_of(server, tmp_path, prompts_per_call=1, max_attempts=3)
    with pytest.raises(SamplerError, match="3 unanswered; the last one: .*max_tokens is too large"):
        next(dataset)


def test_a_server_that_refuses_each_single_prompt_ends_the_run_soon(server, tmp_path):  # noqa: F811
    server.refuses = (400, {"error": "max_tokens is too large"})
    dataset = dataset_of(server, tmp_path, prompts_per_call=1)
    with pytest.raises(SamplerError, match="at most 32 without answers.*max_tokens is too large"):
        next(dataset)
    assert len(server.requests) == 32


def test_weights_are_synchronized_again_after_a_failure(server, tmp_path):  # noqa: F811
    """A server that was started again has its first weights."""
    synchronized = []
    dataset = dataset_of(server, tmp_path, sync_weights=synchronized.append)
    server.misfortunes = [(403, ())]
    with pytest.raises(SamplerError, match="403"):
        next(dataset)
    assert synchronized == [0]
    next(dataset)
    assert synchronized == [0, 0]
    next(dataset)
    assert synchronized == [0, 0, 1]


# Restarts ---------------------------------------------------------------------------------------


def test_a_server_may_restart_during_a_call(tmp_path, caplog):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    is_waiting = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record):
            if "is not there" in record.getMessage():
                is_waiting.set()

    listener = Listener()
    logging.getLogger("energon_ext").addHandler(listener)
    sampler = OpenAISampler(
        f"http://127.0.0.1:{port}", count_tokens, group_size=3, max_new_tokens=8, max_retries=0
    )
    found = []
    asking = threading.Thread(
        target=lambda: found.extend(sampler.sample_and_score_batch(prompts(10, 20), range(3)))
    )
    asking.start()
    assert is_waiting.wait(30)
    started = Server(port)
    asking.join(60)
    started.stop()
    logging.getLogger("energon_ext").removeHandler(listener)
    assert [group.rewards.tolist() for group in found] == [[1, 2, 3]] * 2
    assert caplog.text.count("is not there") == 1  # for both prompts
    assert f"http://127.0.0.1:{port} is not there (" in caplog.text
    assert "waiting up to 600 seconds (outage_seconds)" in caplog.text


def with_finish_reason(reason, prompt):
    """Return vLLM's answers to a prompt, the first of which has no tokens and this reason."""
    answer = vllm_answers({"prompt": prompt, "n": 3})
    answer["choices"][-1].update(
        finish_reason=reason, token_ids=[], logprobs={"token_logprobs": []}
    )
    return answer


def test_answers_that_the_server_aborts_are_asked_for_again(server, caplog):  # noqa: F811
    """vLLM ends running answers so when it is paused."""
    server.misfortunes = [with_finish_reason("abort", [1, 10])]
    sampler = sampler_for(server, outage_seconds=60)
    (group,) = sampler.sample_and_score_batch(prompts(10), [4])
    assert group.tokens[2].tolist() == [1, 10, 11, 12, 13]
    first, again = (body for _, _, body in server.requests)
    assert first == again and again["seed"] == 4
    assert f"{server.url} aborts answers, for 0 seconds now" in caplog.text
    assert f"{server.url} answers again" in caplog.text


@pytest.mark.parametrize("reason", ["abort", "repetition"])
def test_an_answer_that_ended_for_another_reason_is_an_error_with_the_reason(server, reason):  # noqa: F811
    server.misfortunes = [with_finish_reason(reason, [1, 10])]
    with pytest.raises(SamplerError, match=f"Prompt p10: .*with finish reason '{reason}'"):
        sampler_for(server, outage_seconds=0).sample_and_score_batch(prompts(10), range(3))
    assert len(server.requests) == 1


# Rewards ----------------------------------------------------------------------------------------


def meeting(size):
    """Return a reward that is only given once ``size`` rewards are asked for together."""
    together = threading.Barrier(size)

    def reward(prompt, responses):
        together.wait(30)
        return count_tokens(prompt, responses)

    return reward


def async_meeting(size):
    arrived = []
    complete = asyncio.Event()

    async def reward(prompt, responses):
        arrived.append(prompt)
        if len(arrived) == size:
            complete.set()
        await asyncio.wait_for(complete.wait(), 30)
        return count_tokens(prompt, responses)

    return reward


@pytest.mark.parametrize("meet", [meeting, async_meeting])
def test_rewards_are_computed_together(server, meet):  # noqa: F811
    sampler = sampler_for(server)
    sampler.reward = meet(3)
    groups = sampler.sample_and_score_batch(prompts(10, 20, 30), range(3))
    assert [group.rewards.tolist() for group in groups] == [[1, 2, 3]] * 3


def test_a_reward_may_be_an_object_with_an_async_call(server):  # noqa: F811
    class Judge:
        async def __call__(self, prompt, responses):
            return count_tokens(prompt, responses)

    sampler = sampler_for(server)
    sampler.reward = Judge()
    (group,) = sampler.sample_and_score_batch(prompts(10), range(3))
    assert group.rewards.tolist() == [1, 2, 3]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_reward_without_end_is_named(server, is_async):  # noqa: F811
    never = threading.Event()

    async def waits(prompt, responses):
        await asyncio.Event().wait()

    sampler = sampler_for(server, call_timeout_seconds=3.0)  # time to reach the rewards
    sampler.reward = waits if is_async else lambda prompt, responses: never.wait()
    message = r"2 of 2 prompts of a call were not finished in 3 seconds .*; 2 wait for their reward"
    with pytest.raises(SamplerError, match=message):
        sampler.sample_and_score_batch(prompts(10, 20), range(3))
    never.set()


def test_the_sampler_works_inside_a_running_event_loop(server):  # noqa: F811
    """As in a Jupyter notebook."""

    async def cell():
        return sampler_for(server).sample_and_score_batch(prompts(10), range(3))

    (group,) = asyncio.run(cell())
    assert group.rewards.tolist() == [1, 2, 3]


def test_a_reward_is_told_why_an_answer_ended(server):  # noqa: F811
    told = []

    def reward(prompt, responses):
        told.extend((len(each.tokens), each.log_probs[0], each.finish_reason) for each in responses)
        return [0.0, 1.0, 2.0]

    sampler = sampler_for(server)
    sampler.reward = reward
    sampler.sample_and_score_batch(prompts(10), range(3))
    assert told == [(1, -0.5, "stop"), (2, -0.5, "stop"), (3, -0.5, "length")]


# Mistakes in the configuration -----------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://x:8000/v1", "http://x:8000/v1/", "x:8000", "unix:///x"])
def test_a_wrong_base_url_is_named(url):
    found = url.rstrip("/")
    with pytest.raises(ConfigError, match=f"base_url: '{found}' found, .*http://localhost:8000"):
        OpenAISampler(url, count_tokens, group_size=2, max_new_tokens=1)


def test_a_wrong_api_is_named(server):  # noqa: F811
    sampler = sampler_for(server)
    server.refuses = (404, {"detail": "Not Found"})
    for api, other in (("vllm", "sglang"), ("sglang", "vllm")):
        sampler = sampler_for(server, api=api)
        message = f"404: .*Not Found.*api='{api}'.*api='{other}'"
        with pytest.raises(SamplerError, match=message):
            sampler.sample_and_score_batch(prompts(10), range(3))
    # SGLang also has /v1/completions, but returns no token ids there.
    answer = vllm_answers({"prompt": [3], "n": 3})
    for choice in answer["choices"]:
        del choice["token_ids"]
    server.refuses = (200, answer)
    with pytest.raises(SamplerError, match="without token ids.*api='sglang'"):
        sampler_for(server).sample_and_score_batch(prompts(10), range(3))


LIVES_UNTIL_THE_END = """
import sys
from energon_ext.rl import RLDataset
from tests.rl.prompts import Dice, prompt_dataset
dataset = RLDataset(prompt_dataset(sys.argv[1]), Dice(), seq_len=24, rows=2, groups_per_batch=3)
next(dataset)
print("done", file=sys.stderr)
"""


@pytest.mark.nightly  # it imports everything in a new process
def test_nothing_is_printed_at_exit_while_a_dataset_lives(tmp_path):
    arguments = [sys.executable, "-W", "ignore", "-c", LIVES_UNTIL_THE_END, write_sums(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0
    assert done.stderr.partition("done\n")[1:] == ("done\n", "")
