# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A sampler is asked, and what it answers is checked; an error says which prompt it is about."""

from typing import Any, Callable, Sequence

import torch

from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import SamplerError
from energon_ext.rl.sampler import BatchSampler, Sampler, ScoredGroup, Unanswered

#: What a rank tells the others; 1 that it needs groups, 0 that it has enough.
_FAILED = 2

#: That of a sure token, as sums of half precision have it.
_MOST_LOG_PROB = 1e-2


def sample_in_step(
    sampler: BatchSampler | Sampler, wants: Callable[[], bool], sample: Callable[[], None]
) -> None:
    """Sample until this rank wants no more.

    Ranks that must generate in step (``sampler.agree``) go on while one of them needs it, and fail
    where one fails: a rank that left alone would leave the others waiting for ever.
    """
    agree = getattr(sampler, "agree", int)
    error: Exception | None = None
    while True:
        more = False
        try:
            more = error is None and wants()
        except Exception as caught:  # whatever reading prompts may raise
            error = caught
        status = agree(_FAILED if error else int(more))
        if status == _FAILED:
            raise error or SamplerError("another rank failed to sample; its error says why")
        if not status:
            return
        try:
            if more:
                sample()
            elif hasattr(sampler, "sample_and_score_batch"):
                sampler.sample_and_score_batch([], 0)  # takes part
        except Exception as caught:  # said to the others first, then raised
            error = caught


def ask_sampler(
    sampler: BatchSampler | Sampler, prompts: Sequence[Prompt], seed: int, vocab_size: int
) -> list[ScoredGroup | Unanswered]:
    """A checked group, or why there is none, for each prompt.

    Raises:
        SamplerError: names the prompt; of a call that failed as a whole the first one.
    """
    if hasattr(sampler, "sample_and_score_batch"):
        groups = _call(prompts, sampler.sample_and_score_batch, prompts, seed)
    else:
        groups = []
        for prompt in prompts:
            tokens = torch.as_tensor(prompt.tokens)
            groups += _call([prompt], lambda tokens: [sampler.sample_and_score(tokens)], tokens)
    found = []
    for prompt, group in zip(prompts, groups):
        if not isinstance(group, Unanswered):
            if fault := _fault(group, prompt, vocab_size):
                raise SamplerError(fault, key=prompt.__key__)
            group = group.plain()
        found.append(group)
    return found


def _call(prompts: Sequence[Prompt], call: Callable[..., Any], *asked: Any) -> list[Any]:
    key = prompts[0].__key__
    if len(prompts) > 1:
        key += f" (and {len(prompts) - 1} more in the same call)"
    try:
        groups = call(*asked)
    except SamplerError as error:
        raise SamplerError(error.reason, key=error.key or key) from error
    except Exception as error:  # a user's sampler may raise anything
        raised = f"the sampler raised {type(error).__name__}: {error}"
        raise SamplerError(raised, key=key) from error
    if not isinstance(groups, list) or len(groups) != len(prompts):
        found = f"{len(groups)} groups" if isinstance(groups, list) else type(groups).__name__
        raise SamplerError(f"the sampler returned {found} for {len(prompts)} prompts", key=key)
    return groups


def _fault(group: Any, prompt: Prompt, vocab_size: int) -> str | None:
    """Describe what is wrong with a sampler's answer to a prompt."""
    if not isinstance(group, ScoredGroup):
        return f"the sampler returned a {type(group).__name__}, not a ScoredGroup"
    for name in ("tokens", "log_probs", "rewards", "response_lens", "truncated"):
        value = getattr(group, name)
        is_absent = value is None and name in ("response_lens", "truncated")
        if not isinstance(value, torch.Tensor) and not is_absent:
            return f"{name} must be a tensor, got a {type(value).__name__}"
    tokens, length, lengths = group.tokens, len(prompt.tokens), group.response_lens
    if tokens.dim() != 2 or tokens.is_floating_point() or len(tokens) < 2:
        return f"tokens must be integers [N >= 2, T], got {_shape(tokens)}"
    samples, generated = len(tokens), tokens.shape[1] - length
    if not isinstance(group.prompt_len, int) or group.prompt_len != length or generated < 1:
        return (
            f"prompt_len is {group.prompt_len!r} in {_shape(tokens)} tokens; the prompt has "
            f"{length} tokens, and a response at least one"
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
    if (largest := float(group.log_probs.detach().max())) > _MOST_LOG_PROB:
        return f"log_probs must be at most 0, got {largest:g}"
    if lengths is not None and (
        lengths.is_floating_point()
        or not 1 <= int(lengths.min()) <= int(lengths.max()) <= generated
    ):
        return f"response_lens must be integers from 1 to {generated}, got {lengths.tolist()}"
    is_held = torch.arange(tokens.shape[1]) < torch.tensor(group.sample_lengths())[:, None]
    held = tokens.cpu()[is_held]
    unknown = held[(held < 0) | (held >= vocab_size)]
    if len(unknown):
        return (
            f"tokens of a response must be in [0, {vocab_size}), those of the tokenizer, got "
            f"{unknown.tolist()!s:.80}"
        )
    return None


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
