# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Interfaces of samplers, and checks of their answers; errors name the prompt."""

import operator
from dataclasses import dataclass, replace
from typing import Any, Callable, Iterator, Protocol, Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import SampleError, SamplerError

#: Status of a failed rank; 1 if it needs groups, 0 if it has enough.
_FAILED = 2

#: Largest log-probability: half precision may round that of a certain token above 0.
_MAX_LOG_PROB = 1e-2


class BatchSource(Protocol):
    """An iterable of packed batches, such as a loader or an :class:`~energon_ext.rl.RLDataset`."""

    def __iter__(self) -> Iterator[PackedBatch]: ...


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """N answers to one prompt.

    Attributes:
        tokens: int64 [N, prompt_len + G], each the prompt and a response; tokens after a response
            are ignored.
        log_probs: float32 [N, G], the sampler's log-probabilities of the response tokens.
        rewards: float32 [N].
        prompt_len: tokens of the prompt.
        response_lens: int64 [N], tokens of each response; None if all have G.
        truncated: bool [N], whether a response reached the maximum length; None if unknown.

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
        """Return the tokens of the prompt and each response together."""
        if self.response_lens is None:
            return [self.tokens.shape[1]] * len(self.tokens)
        return (self.response_lens + self.prompt_len).tolist()

    def plain(self) -> "ScoredGroup":
        """Return the group with the dtypes above, on the CPU and detached."""
        dtypes = {"tokens": torch.int64, "response_lens": torch.int64, "truncated": torch.bool}
        dtypes |= {"log_probs": torch.float32, "rewards": torch.float32}
        tensors = {name: value for name, value in vars(self).items() if torch.is_tensor(value)}
        fields: Any = {name: x.detach().to("cpu", dtypes[name]) for name, x in tensors.items()}
        return replace(self, **fields)

    @classmethod
    def from_responses(
        cls,
        prompt: Sequence[int] | np.ndarray,
        responses: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
        rewards: Sequence[float],
        truncated: Sequence[bool] | None = None,
    ) -> "ScoredGroup":
        """Build a group from lists of response tokens, padded with 0.

        Raises:
            SampleError: a response is empty or its number of log-probabilities differs.

        Example:
            >>> group = ScoredGroup.from_responses([7], [[5, 6], [8]], [[-1, -2], [-3]], [1, 0])
            >>> group.tokens.tolist(), group.log_probs.tolist()
            ([[7, 5, 6], [7, 8, 0]], [[-1.0, -2.0], [-3.0, 0.0]])
        """
        lengths = [len(response) for response in responses]
        counts = [len(values) for values in log_probs]
        if 0 in lengths or lengths != counts:
            raise SampleError(f"responses of {lengths} tokens with {counts} log-probabilities")
        samples = [[operator.index(token) for token in (*prompt, *r)] for r in responses]
        float_log_probs = [torch.as_tensor(values, dtype=torch.float32) for values in log_probs]
        return cls(
            pad_sequence(list(map(torch.tensor, samples)), batch_first=True),
            pad_sequence(float_log_probs, batch_first=True),
            torch.as_tensor(rewards, dtype=torch.float32),
            len(prompt),
            torch.tensor(lengths),
            None if truncated is None else torch.tensor(truncated),
        )


@dataclass(frozen=True)
class Unanswered:
    """Result for a single prompt that cannot be answered; it is counted and dropped."""

    reason: str


class Sampler(Protocol):
    """A sampler of one prompt per call; keeps nothing between calls, and has its own time limit.

    A sampler with its own random generator cannot repeat its answers after a resume; a
    :class:`BatchSampler` is given a seed, and can.
    """

    def sample_and_score(self, prompt: torch.Tensor) -> ScoredGroup | Unanswered:
        """Return N >= 2 answers to a prompt of int64 [n], with their rewards."""


class BatchSampler(Protocol):
    """A sampler of many prompts per call, given the random seed and the prompts' metadata.

    A sampler whose ranks must all be called equally often also has a method ``agree(status) ->
    int``, which returns the largest status of these ranks; it may be called without prompts.
    """

    def sample_and_score_batch(
        self, prompts: Sequence[Prompt], seed: int
    ) -> Sequence[ScoredGroup | Unanswered]:
        """Return a group for each prompt, in order; the same for the same seed and policy."""


#: ``(prompt, response tokens of each answer) -> reward of each answer``
RewardFunction = Callable[[Prompt, list[list[int]]], Sequence[float]]


def score(reward: RewardFunction, prompt: Prompt, responses: list[list[int]]) -> Sequence[float]:
    """Return the rewards of the answers to one prompt; raise SamplerError unless all have one."""
    try:
        rewards = [float(value) for value in reward(prompt, responses)]
    except Exception as error:  # a user's function may raise anything
        reason = f"the reward raised {type(error).__name__}: {error}"
        raise SamplerError(reason, key=prompt.__key__) from error
    if len(rewards) != len(responses):
        reason = f"the reward returned {len(rewards)} numbers for {len(responses)} answers"
        raise SamplerError(reason, key=prompt.__key__)
    return rewards


def sample_in_step(
    sampler: BatchSampler | Sampler, wants: Callable[[], bool], sample: Callable[[], None]
) -> None:
    """Sample until this rank wants no more.

    Ranks that must generate together (``sampler.agree``) continue while one of them wants more, and
    all fail if one fails: if a rank stopped alone, the others would wait forever.
    """
    agree = getattr(sampler, "agree", int)
    error: Exception | None = None
    while True:
        more = False
        try:
            more = error is None and wants()
        except Exception as caught:  # reading prompts may raise anything
            error = caught
        status = agree(_FAILED if error else int(more))
        if status == _FAILED:
            raise error or SamplerError("another rank failed to sample; see its error")
        if not status:
            return
        try:
            if more:
                sample()
            elif hasattr(sampler, "sample_and_score_batch"):
                sampler.sample_and_score_batch([], 0)  # takes part in the other ranks' passes
        except Exception as caught:  # raised after the other ranks have learned of it
            error = caught


def ask_sampler(
    sampler: BatchSampler | Sampler, prompts: Sequence[Prompt], seed: int, vocab_size: int
) -> list[ScoredGroup | Unanswered]:
    """Return a checked group, or Unanswered, for each prompt.

    Raises:
        SamplerError: names the prompt, or the first prompt of a call that failed as a whole.
    """
    if hasattr(sampler, "sample_and_score_batch"):
        groups = _call(prompts, sampler.sample_and_score_batch, prompts, seed)
    else:
        groups = []
        for prompt in prompts:
            tokens = torch.as_tensor(prompt.tokens)
            groups += _call([prompt], lambda tokens: [sampler.sample_and_score(tokens)], tokens)
    results = []
    for prompt, group in zip(prompts, groups):
        if not isinstance(group, Unanswered):
            if fault := _fault(group, prompt, vocab_size):
                raise SamplerError(fault, key=prompt.__key__)
            group = group.plain()
        results.append(group)
    return results


def _call(prompts: Sequence[Prompt], call: Callable[..., Any], *arguments: Any) -> list[Any]:
    key = prompts[0].__key__
    if len(prompts) > 1:
        key += f" (and {len(prompts) - 1} more in the same call)"
    try:
        groups = call(*arguments)
    except SamplerError as error:
        raise SamplerError(error.reason, key=error.key or key) from error
    except Exception as error:  # a user's sampler may raise anything
        reason = f"the sampler raised {type(error).__name__}: {error}"
        raise SamplerError(reason, key=key) from error
    if not isinstance(groups, list) or len(groups) != len(prompts):
        found = f"{len(groups)} groups" if isinstance(groups, list) else type(groups).__name__
        raise SamplerError(f"the sampler returned {found} for {len(prompts)} prompts", key=key)
    return groups


def _fault(group: Any, prompt: Prompt, vocab_size: int) -> str | None:
    """Describe what is wrong with a sampler's answer to a prompt; None if nothing is."""
    if not isinstance(group, ScoredGroup):
        return f"the sampler returned a {type(group).__name__}, not a ScoredGroup"
    for name in ("tokens", "log_probs", "rewards", "response_lens", "truncated"):
        value = getattr(group, name)
        is_absent = value is None and name in ("response_lens", "truncated")
        if not isinstance(value, torch.Tensor) and not is_absent:
            return f"{name} must be a tensor, got a {type(value).__name__}"
    tokens, length = group.tokens, len(prompt.tokens)
    if tokens.dim() != 2 or tokens.is_floating_point() or len(tokens) < 2:
        return f"tokens must be integers [N >= 2, T], got {_shape(tokens)}"
    samples, generated = len(tokens), tokens.shape[1] - length
    if not isinstance(group.prompt_len, int) or group.prompt_len != length or generated < 1:
        return (
            f"prompt_len is {group.prompt_len!r} in {_shape(tokens)} tokens; the prompt has "
            f"{length} tokens, and a response needs at least one"
        )
    if not bool((tokens[:, :length].cpu() == torch.as_tensor(prompt.tokens)).all()):
        return "tokens do not begin with the prompt"
    shapes = {"log_probs": [samples, generated]}
    for name in ("log_probs", "rewards", "response_lens", "truncated"):
        value, shape = getattr(group, name), shapes.get(name, [samples])
        if value is not None and list(value.shape) != shape:
            return f"{name} must be {shape}, got {_shape(value)}"
        if value is not None and not bool(torch.isfinite(value).all()):
            return f"{name} must be finite, got {value.tolist()!s:.80}"
    if (largest := float(group.log_probs.detach().max())) > _MAX_LOG_PROB:
        return f"log_probs must be at most 0, got {largest:g}"
    lengths = group.response_lens
    if lengths is not None and (
        lengths.is_floating_point()
        or not 1 <= int(lengths.min()) <= int(lengths.max()) <= generated
    ):
        return f"response_lens must be integers from 1 to {generated}, got {lengths.tolist()}"
    is_sample = torch.arange(tokens.shape[1]) < torch.tensor(group.sample_lengths())[:, None]
    ids = tokens.cpu()[is_sample]
    unknown = ids[(ids < 0) | (ids >= vocab_size)]
    if len(unknown):
        return (
            f"tokens of a response must be in the tokenizer's range [0, {vocab_size}), got "
            f"{unknown.tolist()!s:.80}"
        )
    return None


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
