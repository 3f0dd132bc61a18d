# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers of several turns by a real GPTModel with a calculator."""

import importlib.util

import pytest

from tests.megatron.example_code import EXAMPLES, Sampling
from tests.megatron.small_gpt import small_config, small_model
from tests.megatron.test_sampler import training_log_probs

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("tool_use", EXAMPLES / "09_tool_use.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_calculator_adds_and_answers_anything(example):
    def answer(text):
        return example.TOKENIZER.decode(
            example.calculate([example.TOKENIZER.ids[character] for character in text])
        )

    assert [answer(call) for call in ("38+5=", "99+9=", "1+1=", "3+8+5", "+=", "38=")] == [
        "43>", "08>", "02>", "00>", "00>", "00>"
    ]  # fmt: skip


def test_a_trajectory_has_the_log_probs_of_training_on_the_policys_turns(example):
    """Each turn of the policy is drawn after all tokens before it, those of the tool included."""
    model = small_model(small_config(), vocabulary=16)
    sampler = example.CalculatorSampler(model, None, group_size=1, sampling=Sampling(1))
    prompts = [example.TOKENIZER.encode("38+5>")[:-1]] * 60
    answers = sampler.answer(prompts, range(60))
    called = 0
    for prompt, answer in zip(prompts, answers):
        expected = training_log_probs(model, prompt, answer.tokens)
        mask = answer.response_mask
        for drawn, found, wanted in zip(mask, answer.log_probs, expected):
            assert found == (pytest.approx(wanted, abs=1e-4) if drawn else 0)
        if not all(mask):
            called += 1
            first = mask.index(False)
            assert answer.tokens[first - 1] == example.EQUALS
            told = example.calculate(answer.tokens[:first])
            assert answer.tokens[first : first + 3] == told
            assert mask[first:] == [False] * 3 + [True] * (len(mask) - first - 3)
            assert answer.finish_reason == (
                "stop" if answer.tokens[-1] == example.END else "length"
            )
    assert 0 < called < 60
    again = sampler.answer(prompts[:7], range(7))  # whoever else is asked
    assert [each.tokens for each in again] == [each.tokens for each in answers[:7]]
