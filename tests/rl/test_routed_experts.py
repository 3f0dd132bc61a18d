# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The experts that vLLM and SGLang send, from their answers to the batch."""

import base64
import io

import numpy as np
import pytest
import torch

from energon_ext import ConfigError
from energon_ext.errors import SampleError, SamplerError
from energon_ext.rl import OpenAISampler, Response, RLDataset, RoutedExperts, ScoredGroup
from energon_ext.rl.server_call import ServerCall
from tests.rl.inference_server import Server, vllm_answers
from tests.rl.prompts import prompt_dataset, write_sums
from tests.rl.test_openai_sampler import count_tokens, prompts

#: Three layers; two of five experts.
EXPERTS = RoutedExperts(layers=3, top_k=2, experts=5)


def experts_of(token):
    return [[(token + layer) % 5, (token + layer + 2) % 5] for layer in range(3)]


@pytest.fixture
def server():
    server = Server()
    server.experts_of = experts_of
    yield server
    server.stop()


def sampler_for(server, **options):
    defaults = {"group_size": 3, "max_new_tokens": 8, "outage_seconds": 0}
    return OpenAISampler(
        server.url, count_tokens, **{**defaults, "routed_experts": EXPERTS, **options}
    )


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_every_position_of_a_batch_has_the_experts_of_its_token(server, api, tmp_path):
    columns = {"experts": EXPERTS.column}
    dataset = RLDataset(
        prompt_dataset(write_sums(tmp_path), prompts_per_call=2),
        sampler_for(server, api=api),
        seq_len=48, rows=2, groups_per_batch=4, alignment=4, columns=columns,
    )  # fmt: skip
    batch = next(dataset)
    is_last = torch.zeros(batch.num_tokens, dtype=torch.bool)
    is_last[batch.cu_seqlens[1:].long() - 1] = True
    has_none = is_last | batch.padding_mask()
    assert 12 <= (~batch.padding_mask() & is_last).sum() < batch.num_tokens / 2
    expected = torch.tensor([experts_of(token) for token in batch.tokens.tolist()])
    expected[has_none] = -1
    assert batch.columns["experts"].dtype == torch.int16
    assert batch.columns["experts"].tolist() == expected.tolist()


def test_sglang_is_asked_for_experts_only_if_they_are_wanted(server):
    for wanted in (EXPERTS, None):
        sampler = sampler_for(server, api="sglang", routed_experts=wanted)
        sampler.sample_and_score_batch(prompts(10), [4])
    asked = [body.get("return_routed_experts") for _, _, body in server.requests]
    assert asked == [True, None]


def test_experts_that_nobody_wants_are_no_column(server):
    (group,) = sampler_for(server, routed_experts=None).sample_and_score_batch(prompts(10), [4])
    assert not group.columns


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_a_server_that_sends_no_experts_is_refused_with_its_option(server, api):
    server.experts_of = None
    message = "Prompt p10: http.* sent an answer with no routed_experts; start the server with --en"
    with pytest.raises(SamplerError, match=message + "able-return-routed-experts"):
        sampler_for(server, api=api).sample_and_score_batch(prompts(10), [4])


def npy(values):
    file = io.BytesIO()
    np.save(file, values)
    return base64.b64encode(file.getvalue()).decode()


#: For a prompt and an answer of four tokens.
GOOD = np.array([experts_of(token) for token in (7, 8, 9)], np.int32)


@pytest.mark.parametrize("dtype", ["u1", "i2", "<u2", ">i4", "i8"])
def test_all_integer_types_of_numpy_are_read(dtype):
    found = EXPERTS.read_npy(npy(GOOD.astype(dtype)), 4)
    assert found.dtype == np.int16
    assert found.tolist() == [*GOOD.tolist(), [[-1, -1]] * 3]


def test_a_server_may_know_the_experts_of_the_last_token_and_may_not_know_others():
    whole = np.concatenate([GOOD, GOOD[:1]])
    whole[1] = -1
    assert EXPERTS.read_npy(npy(whole), 4).tolist() == whole.tolist()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (npy(GOOD[:2]), r"routed_experts \[2, 3, 2\] .* \[3, 3, 2\] \(RoutedExperts\) are needed"),
        (npy(GOOD[:, :2]), r"\[3, 2, 2\]"),
        (npy(GOOD[..., :1]), r"\[3, 3, 1\]"),
        (npy(GOOD[0]), "a .npy file of integers"),
        (npy(GOOD / 2), "a .npy file of integers"),
        (npy(GOOD.astype("O")), "a .npy file of integers"),
        (npy(GOOD)[:-8], r"\[3, 3, 2\] \(int32, 67 bytes\)"),
        (npy(GOOD + 1), "routed_experts from 0 to 5, numbers from 0 to 4 are needed"),
        (npy(GOOD - 2), "routed_experts from -2 to"),
        (npy(GOOD.astype("u8") + 2**63), "routed_experts from 0 to 92233720368547758"),
        ("*", "no base64"),
        ([[[1, 2]]], "routed_experts .*; start the server with .* 0.22"),
        ("", "a .npy file of integers"),
    ],
)
def test_what_is_not_the_experts_of_these_tokens_is_refused(sent, message):
    with pytest.raises(SampleError, match=message):
        EXPERTS.read_npy(sent, 4)


@pytest.mark.parametrize("content", [b"", b"abc", GOOD.tobytes()[:-4], GOOD[:2].tobytes()])
def test_sglang_sends_whole_tokens(content):
    with pytest.raises(SampleError, match=r"\[3, 3, 2\] \(RoutedExperts\) are needed"):
        EXPERTS.read_int32(base64.b64encode(content).decode(), 4)
    assert EXPERTS.read_int32(base64.b64encode(GOOD.tobytes()).decode(), 4)[:3].tolist() == (
        GOOD.tolist()
    )


def test_an_answer_with_experts_may_be_larger_by_their_size(server):
    import openai

    plain, large = (
        ServerCall(sampler_for(server, routed_experts=each), openai, 1000)._most_bytes
        for each in (None, RoutedExperts(layers=48, top_k=8, experts=128))
    )
    # 3 answers to a prompt of 1,000 tokens, 8 more each; int64 in base64 is 8 bytes for 6.
    assert large - plain >= 3 * 1008 * 48 * 8 * 8 * 4 / 3
    assert large - plain < 1.01 * 3 * 1008 * 48 * 8 * 8 * 4 / 3


def test_an_aborted_answer_without_experts_is_asked_for_again(server):
    aborted = vllm_answers({"prompt": [1, 10], "n": 3})
    aborted["choices"][0]["finish_reason"] = "abort"
    server.misfortunes = [aborted]
    sampler = sampler_for(server, outage_seconds=20)
    (group,) = sampler.sample_and_score_batch(prompts(10), [4])
    assert group.columns["experts"].shape == (3, 5, 3, 2)
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 0}, "RoutedExperts.layers: 0 found"),
        ({"top_k": 6}, "6 of 5 experts found"),
        ({"experts": 2**15 + 1}, "2 of 32769 experts found, at most 32768"),
        ({"name": "tokens"}, "RoutedExperts.name: 'tokens' found"),
    ],
)
def test_impossible_numbers_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        RoutedExperts(**{"layers": 3, "top_k": 2, "experts": 5, **options})


def test_columns_of_answers_become_those_of_their_group():
    first = Response([5, 6], [-1.0, -2.0], columns={"place": np.array([0, 1, 2], np.int16)})
    second = Response([8], [-3.0], columns={"place": np.array([0, 1], np.int16)})
    group = ScoredGroup.from_answers([7], [first, second], [1, 0], columns={"v": torch.zeros(2, 2)})
    assert group.columns["place"].tolist() == [[0, 1, 2], [0, 1, 0]]
    assert group.columns["place"].dtype == torch.int16
    assert group.columns["v"].shape == (2, 2)
    with pytest.raises(SampleError, match=r"different columns: \(\), \('place',\)"):
        ScoredGroup.from_answers([7], [first, Response([8], [-3.0])], [1, 0])
