# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Prompts for a sampler, and its answers."""

import operator
from dataclasses import dataclass
from typing import Callable, Iterator, Protocol, Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import SampleError, SamplerError


class BatchSource(Protocol):
    """Whatever yields packed batches: a loader of text, an :class:`~energon_ext.RLDataset`."""

    def __iter__(self) -> Iterator[PackedBatch]: ...


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """N answers to one prompt.

    Attributes:
        tokens: int64 [N, prompt_len + G], each the prompt and a response; what lies behind a
            response may be anything.
        log_probs: float32 [N, G], of the response tokens, as the sampler saw them.
        rewards: float32 [N].
        prompt_len: tokens of the prompt.
        response_lens: int64 [N], tokens of each response; None where all have G.
        truncated: bool [N], whether a response was cut at its longest; None if not known.

    Example:
        >>> group = ScoredGroup(
        ...     tokens=torch.tensor([[7, 5, 6], [7, 8, 0]]), log_probs=torch.zeros(2, 2),
        ...     rewards=torch.tensor([1.0, 0.0]), prompt_len=1, response_lens=torch.tensor([2, 1]))
        >>> group.sample_lengths()
        [3, 2]
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    rewards: torch.Tensor
    prompt_len: int
    response_lens: torch.Tensor | None = None
    truncated: torch.Tensor | None = None

    def sample_lengths(self) -> list[int]:
        """Tokens of the prompt and each response together."""
        if self.response_lens is None:
            return [self.tokens.shape[1]] * len(self.tokens)
        return (self.response_lens + self.prompt_len).tolist()

    def plain(self) -> "ScoredGroup":
        """The group with the dtypes above, on the CPU and apart from the graph of a model."""
        lengths, truncated = self.response_lens, self.truncated
        return ScoredGroup(
            self.tokens.detach().to("cpu", torch.int64),
            self.log_probs.detach().to("cpu", torch.float32),
            self.rewards.detach().to("cpu", torch.float32),
            self.prompt_len,
            None if lengths is None else lengths.detach().to("cpu", torch.int64),
            None if truncated is None else truncated.detach().to("cpu", torch.bool),
        )

    @classmethod
    def from_responses(
        cls,
        prompt: Sequence[int] | np.ndarray,
        responses: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
        rewards: Sequence[float],
        truncated: Sequence[bool] | None = None,
    ) -> "ScoredGroup":
        """A group from lists of response tokens, padded with 0.

        Example:
            >>> group = ScoredGroup.from_responses([7], [[5, 6], [8]], [[-1, -2], [-3]], [1, 0])
            >>> group.tokens.tolist(), group.log_probs.tolist()
            ([[7, 5, 6], [7, 8, 0]], [[-1.0, -2.0], [-3.0, 0.0]])
        """
        lengths = [len(response) for response in responses]
        counts = [len(values) for values in log_probs]
        if 0 in lengths or lengths != counts:
            raise SampleError(f"responses of {lengths} tokens with {counts} log-probabilities")
        samples = [[operator.index(token) for token in (*prompt, *each)] for each in responses]
        seen = [torch.as_tensor(values, dtype=torch.float32) for values in log_probs]
        return cls(
            pad_sequence(list(map(torch.tensor, samples)), batch_first=True),
            pad_sequence(seen, batch_first=True),
            torch.as_tensor(rewards, dtype=torch.float32),
            len(prompt),
            torch.tensor(lengths),
            None if truncated is None else torch.tensor(truncated),
        )


@dataclass(frozen=True)
class Unanswered:
    """In place of a group: this prompt alone cannot be answered. It is counted and left out."""

    reason: str


class Sampler(Protocol):
    """Answers one prompt; keeps nothing between two calls, and ends or raises in its own time.

    A sampler that draws at random from a generator of its own cannot be repeated after a resume;
    a :class:`BatchSampler` is given a seed, and can.
    """

    def sample_and_score(self, prompt: torch.Tensor) -> ScoredGroup | Unanswered:
        """N >= 2 answers to a prompt of int64 [n], with their rewards."""


class BatchSampler(Protocol):
    """Answers many prompts at once, and is given the random seed and what the reward needs.

    A sampler whose ranks must be called as often as each other has a method ``agree(status) ->
    int`` as well, the largest status of them, and may then be called without prompts.
    """

    def sample_and_score_batch(
        self, prompts: Sequence[Prompt], seed: int
    ) -> Sequence[ScoredGroup | Unanswered]:
        """A group for each prompt, in order; the same for the same seed and policy."""


#: ``(prompt, response tokens of each answer) -> reward of each answer``
RewardFunction = Callable[[Prompt, list[list[int]]], Sequence[float]]


def score(reward: RewardFunction, prompt: Prompt, responses: list[list[int]]) -> Sequence[float]:
    """The rewards of the answers to one prompt; SamplerError unless there is a number for each."""
    try:
        rewards = reward(prompt, responses)
        numbers = [float(value) for value in rewards]
    except Exception as error:  # a user's function may raise anything
        raised = f"the reward raised {type(error).__name__}: {error}"
        raise SamplerError(raised, key=prompt.__key__) from error
    if len(numbers) != len(responses):
        gave = f"the reward gave {len(numbers)} numbers for {len(responses)} answers"
        raise SamplerError(gave, key=prompt.__key__)
    return numbers
