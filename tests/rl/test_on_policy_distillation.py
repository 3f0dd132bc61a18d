# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A teacher's words of sampled answers, which a sampler returns with them."""

import pytest
import torch

from energon_ext.losses import Distillation, distillation_loss, unified_loss
from energon_ext.prepare.teacher import teacher_columns
from energon_ext.rl import RLDataset, ScoredGroup
from tests.rl.prompts import prompt_dataset, write_prompts

WORDS, K = 300, 2
ANSWERS = torch.tensor([[50, 51], [52, 53]])
IDS = torch.tensor([[[50, 7], [51, 8]], [[9, 52], [53, 10]]])
PROBABILITIES = torch.tensor([[[0.5, 0.25], [0.5, 0.5]], [[0.75, 0.125], [0.25, 0.125]]])
#: Of the answers' own words, under the teacher and the sampler.
OF_TEACHER = torch.tensor([[0.5, 0.5], [0.125, 0.25]]).log()
OF_SAMPLER = torch.tensor([[0.25, 0.5], [0.5, 0.5]]).log()


class Graded:
    """Returns two answers with the teacher's words."""

    def __init__(self, advantages):
        self.advantages = advantages

    def sample_and_score(self, prompt):
        return ScoredGroup(
            tokens=torch.cat([prompt.repeat(2, 1), ANSWERS], dim=1),
            log_probs=OF_SAMPLER,
            rewards=torch.zeros(2),
            prompt_len=len(prompt),
            advantages=self.advantages,
            columns={"teacher_ids": IDS, "teacher_log_probs": PROBABILITIES.log()},
        )


@pytest.fixture(scope="module")
def draw(tmp_path_factory):
    path = write_prompts(tmp_path_factory.mktemp("one") / "one.jsonl", [{"prompt": "ab"}])

    def draw(advantages):
        dataset = RLDataset(
            prompt_dataset(path, prompts_per_call=1),
            Graded(advantages),
            seq_len=5,
            rows=3,
            groups_per_batch=1,
            drop_equal=False,
            columns=teacher_columns(K, dtype="float32"),
        )
        return next(dataset).validate()

    return draw


def test_sampled_answers_follow_the_words_of_their_teacher(draw):
    batch = draw(torch.ones(2))
    assert batch.token_weights.view(3, 5)[:2].tolist() == [[0, 0, 1, 1, 0]] * 2
    loss = distillation_loss(batch, torch.zeros(15, WORDS), Distillation(alpha=1))
    expected = 0.0
    for known in PROBABILITIES.double().reshape(4, K):
        outcomes = torch.tensor([*known, 1 - known.sum()], dtype=torch.float64)
        uniform = torch.tensor([1, 1, WORDS - K], dtype=torch.float64) / WORDS
        expected += torch.xlogy(outcomes, outcomes / uniform).sum() / 4
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_gap_to_the_teacher_as_advantage_gives_the_reverse_divergence(draw):
    """Its gradient is the sum of (log sampler - log teacher) * gradient of log-probability."""
    batch = draw(OF_TEACHER - OF_SAMPLER)
    logits = torch.zeros(15, WORDS, requires_grad=True)
    unified_loss(logits, batch.labels, batch.token_weights, "tokens").backward()
    # The second word of the first answer is as probable under both and has no weight.
    gaps = {2: (50, 0.25 / 0.5), 7: (52, 0.5 / 0.125), 8: (53, 0.5 / 0.25)}
    expected = torch.zeros(15, WORDS)
    for position, (label, ratio) in gaps.items():
        gap = torch.tensor(ratio).log()
        expected[position] = -gap / WORDS / 3
        expected[position, label] += gap / 3
    assert torch.allclose(logits.grad, expected, atol=1e-6)
