# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A server whose answers depend on all that was trained, and that answers when it may."""

import threading

from energon_ext.keyed import stable_hash
from energon_ext.rl import ScoredGroup, Unanswered
from tests.support import batch_hash

WAIT_SECONDS = 30.0


class Policy:
    """A server whose weights are a hash of all that was trained, so that any difference stays.

    Its answers depend on the prompt, the seed and the weights; one of five groups is of no use, and
    some prompts are refused.
    """

    def __init__(self):
        self.weights = self.trained = stable_hash("initial")
        self.calls = []  # weights and number of prompts of each
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.asking = threading.Event()
        self.fails = False

    def sync_weights(self, step):
        assert not self.asking.is_set(), "weights never change inside an answer"
        self.weights = self.trained

    def sample_and_score_batch(self, prompts, seeds):
        weights = self.weights
        self.calls.append((weights, len(prompts)))
        self.asking.set()
        assert self.may_answer.wait(WAIT_SECONDS)
        groups = [self.answer(prompt, f"{weights}/{seed}") for prompt, seed in zip(prompts, seeds)]
        assert weights == self.weights
        self.asking.clear()
        if self.fails:
            self.fails = False
            raise OSError("server gone")
        return groups

    @staticmethod
    def answer(prompt, key):
        number = stable_hash(key)
        if number % 11 == 0:
            return Unanswered("refused")
        responses = [[100 + number % 20, 101], [102 + number // 20 % 20]]
        rewards = [1.0, float(number % 5 == 0)]
        return ScoredGroup.from_responses(
            prompt.tokens, responses, [[-0.5, -0.25], [-1.0]], rewards
        )

    def train(self, batch):
        self.trained = stable_hash(f"{self.trained}/{batch_hash(batch)}")
