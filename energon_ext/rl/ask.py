# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A sampler is asked, and what it answers is checked; an error says which prompt it is about."""

from typing import Any, Callable, Sequence

import torch

from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import SampleError, SamplerError
from energon_ext.rl.sampler import BatchSampler, Sampler, ScoredGroup, Unanswered, check_group

#: What a rank tells the others; 1 that it needs groups, 0 that it has enough.
_FAILED = 2


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
        return _call(prompts, vocab_size, sampler.sample_and_score_batch, prompts, seed)
    ask = sampler.sample_and_score
    return [
        _call([prompt], vocab_size, lambda tokens: [ask(tokens)], torch.as_tensor(prompt.tokens))[0]
        for prompt in prompts
    ]


def _call(
    prompts: Sequence[Prompt], vocab_size: int, call: Callable[..., Any], *asked: Any
) -> list[ScoredGroup | Unanswered]:
    key = prompts[0].__key__ if prompts else ""
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
    return [
        group if isinstance(group, Unanswered) else _checked(group, prompt, vocab_size)
        for prompt, group in zip(prompts, groups)
    ]


def _checked(group: Any, prompt: Prompt, vocab_size: int) -> ScoredGroup:
    try:
        check_group(group, prompt, vocab_size)
    except SampleError as error:
        raise SamplerError(str(error), key=prompt.__key__) from error
    return group.plain()
