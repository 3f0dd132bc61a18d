# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Generation with a real GPTModel, against the same model in training."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from energon_ext import ConfigError
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import SamplerError
from tests.megatron.example_code import MegatronSampler, Sampling, draw, generate
from tests.megatron.small_gpt import VOCABULARY, run_packed, small_config, small_model

pytestmark = pytest.mark.usefixtures("one_rank")

PROMPTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15]]


@pytest.fixture(scope="module")
def model(one_rank):
    return small_model(small_config())


def training_log_probs(model, prompt, response):
    """What one training step would see of each response token."""
    tokens = np.array([*prompt, *response])
    batch = BatchAssembler(len(tokens))([Row([tokens])], sources=[""])
    losses = run_packed(model, batch, labels=batch.labels[None])
    return (-losses[len(prompt) - 1 : len(tokens) - 1]).tolist()


def greedy_by_hand(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens]), torch.arange(len(tokens))[None], None)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_greedy_answers_do_not_depend_on_the_batch(model):
    responses, _ = generate(model, PROMPTS, Sampling(4, temperature=0))
    assert responses == [greedy_by_hand(model, prompt, 4) for prompt in PROMPTS]


@pytest.mark.parametrize("rows_per_pass", [None, 2])
def test_log_probs_are_those_of_the_model_in_training(model, rows_per_pass):
    sampling = Sampling(5, temperature=1.7, top_p=0.8)
    responses, log_probs = generate(
        model, PROMPTS, sampling, seeds=[3, 4, 5], rows_per_pass=rows_per_pass
    )
    for prompt, response, found in zip(PROMPTS, responses, log_probs):
        assert found == pytest.approx(training_log_probs(model, prompt, response), abs=1e-4)


def test_a_response_ends_with_the_stop_token_while_others_continue(model):
    full, _ = generate(model, PROMPTS, Sampling(6), seeds=[1, 2, 3])
    stop = full[0][2]
    stopped, log_probs = generate(model, PROMPTS, Sampling(6, stop_id=stop), seeds=[1, 2, 3])
    assert stopped[0] == full[0][: full[0].index(stop) + 1]
    for response, values in zip(stopped, log_probs):
        assert len(values) == len(response) <= 6
        assert stop not in response[:-1]
        assert len(response) == 6 or response[-1] == stop


def test_the_seed_decides_the_answers_and_the_model_is_left_unchanged(model):
    model.train()
    torch.manual_seed(7)
    before = torch.get_rng_state()
    one, _ = generate(model, PROMPTS, Sampling(6), seeds=[1, 2, 3])
    again, _ = generate(model, PROMPTS, Sampling(6), seeds=[1, 2, 3])
    other, _ = generate(model, PROMPTS, Sampling(6), seeds=[2, 5, 7])
    assert one == again != other
    assert model.training
    assert torch.equal(torch.get_rng_state(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_ids_beyond_the_vocabulary_are_never_drawn(model):
    responses, _ = generate(model, PROMPTS * 10, Sampling(4, temperature=5.0, vocab_size=7))
    assert max(max(response) for response in responses) == 6
    responses, _ = generate(model, PROMPTS * 10, Sampling(4, temperature=5.0))
    assert 7 < max(max(response) for response in responses) < VOCABULARY


def shares(sampling, draws=20000):
    logits = torch.log(torch.tensor([0.5, 0.3, 0.2])).repeat(draws, 1)
    uniform = torch.rand(draws, generator=torch.Generator().manual_seed(0)).double()
    chosen = draw(logits, sampling, uniform)
    return (torch.bincount(chosen, minlength=3) / draws).tolist()


def test_temperature_and_top_p_shape_the_draws():
    assert shares(Sampling(1)) == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
    roots = [math.sqrt(p) for p in (0.5, 0.3, 0.2)]
    expected = [root / sum(roots) for root in roots]
    assert shares(Sampling(1, temperature=2.0)) == pytest.approx(expected, abs=0.02)
    # .5 + .3 reach .7: the third is out, and the first two keep their odds
    assert shares(Sampling(1, top_p=0.7)) == pytest.approx([5 / 8, 3 / 8, 0], abs=0.02)
    assert shares(Sampling(1, top_p=0.1)) == [1, 0, 0]


def prompt_of(tokens):
    return Prompt(
        __key__="p", __restore_key__=(), __subflavors__=None,
        tokens=np.array(tokens), source="web", metadata={"answer": 3},
    )  # fmt: skip


def test_a_group_holds_answers_log_probs_and_the_users_rewards(model):
    asked = []

    def reward(prompt, responses):
        asked.append((prompt.metadata["answer"], len(responses)))
        for response in responses:
            is_complete = response.tokens[-1] == 3
            assert response.finish_reason == ("stop" if is_complete else "length")
        return [float(len(response.tokens)) for response in responses]

    sampling = Sampling(5, temperature=1.5, stop_id=3)
    sampler = MegatronSampler(model, reward, group_size=4, sampling=sampling)
    groups = sampler.sample_and_score_batch([prompt_of(p) for p in PROMPTS], seeds=[5, 6, 7])
    assert asked == [(3, 4)] * 3
    for prompt, group in zip(PROMPTS, groups):
        assert group.tokens[:, : len(prompt)].tolist() == [prompt] * 4
        assert group.rewards.tolist() == group.response_lens.tolist()
        for sample, length in enumerate(group.response_lens.tolist()):
            response = group.tokens[sample, len(prompt) : len(prompt) + length].tolist()
            assert group.log_probs[sample, :length].tolist() == pytest.approx(
                training_log_probs(model, prompt, response), abs=1e-4
            )
    again = sampler.sample_and_score_batch([prompt_of(p) for p in PROMPTS], seeds=[5, 6, 7])
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(groups, again))


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda prompt, _: [1, 2] if prompt.__key__ != "p1" else 1 / 0, "raised ZeroDivisionError"),
        (
            lambda prompt, _: [1, 2] if prompt.__key__ != "p1" else None,
            "returned 'None'; a number for each answer is needed",
        ),
        (lambda prompt, _: [1, 2] if prompt.__key__ != "p1" else "ab", "returned 'ab'; a number"),
        (lambda prompt, _: [1, 2] if prompt.__key__ != "p1" else [1], "returned 1 numbers for 2"),
    ],
)
def test_a_failed_reward_names_its_prompt(model, reward, message):
    """Of three prompts in the same call."""
    prompts = [
        dataclasses.replace(prompt_of(p), __key__=f"p{n}") for n, p in enumerate(PROMPTS[:3])
    ]
    sampler = MegatronSampler(model, reward, group_size=2, sampling=Sampling(1))
    with pytest.raises(SamplerError, match=f"^Prompt p1: the reward {message}"):
        sampler.sample_and_score_batch(prompts, seeds=[0, 1, 2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: 0 found, an integer >= 1"),
        ({"temperature": -1.0}, "temperature: -1.0 found, a finite number >= 0"),
        ({"top_p": 0.0}, "top_p: 0.0 found, a number > 0 and <= 1"),
        ({"top_p": 1.1}, "top_p: 1.1 found"),
        ({"vocab_size": 0}, "vocab_size: 0 found"),
    ],
)
def test_bad_sampling_is_refused(options, message):
    with pytest.raises(ConfigError, match=f"Sampling.{message}"):
        Sampling(**{"max_new_tokens": 1, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 0}, "group_size: 0 found, an integer >= 1"),
        ({"rows_per_pass": 0}, "rows_per_pass: 0 found"),
    ],
)
def test_bad_groups_are_refused(model, options, message):
    with pytest.raises(ConfigError, match=message):
        MegatronSampler(model, None, **{"group_size": 2, "sampling": Sampling(1), **options})


def test_a_prompt_without_tokens_is_refused(model):
    with pytest.raises(ConfigError, match="every prompt needs at least one token"):
        generate(model, [[3], []], Sampling(1))


def test_no_prompts_give_no_answers(model):
    assert generate(model, [], Sampling(1)) == ([], [])


def test_passes_without_rows_are_refused(model):
    with pytest.raises(ConfigError, match="rows_per_pass: -1 found"):
        generate(model, [[3]], Sampling(1), rows_per_pass=-1)
