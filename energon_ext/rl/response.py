# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers as samplers draw them and reward functions see them, of one turn or several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from energon_ext.errors import SampleError


@dataclass(frozen=True)
class Turn:
    """A part of an answer that one party wrote.

    Attributes:
        tokens: its token ids.
        log_probs: the sampler's log-probability of each token; None if the policy did not draw
            them, such as the output of a tool, or the words of a user.
    """

    tokens: Sequence[int]
    log_probs: Sequence[float] | None = None


@dataclass(frozen=True)
class Response:
    """An answer.

    Attributes:
        tokens: its token ids, including one that ends it.
        log_probs: the sampler's log-probability of each token; 0 where the policy drew none.
        finish_reason: ``"stop"``, ``"length"`` if it reached the maximum length, or None if the
            sampler does not say.
        response_mask: whether the policy drew each token; None if it drew all.
        columns: by name, further values of the tokens of the prompt and the answer,
            ``[tokens, *item]`` each, such as the experts that the sampler chose for them.
    """

    tokens: list[int]
    log_probs: list[float]
    finish_reason: str | None = None
    response_mask: list[bool] | None = None
    columns: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)

    @classmethod
    def from_turns(cls, turns: Sequence[Turn], finish_reason: str | None = None) -> "Response":
        """Join the turns of a trajectory, of which only those of the policy are trained on.

        Raises:
            SampleError: a turn has another number of log-probabilities than tokens.

        Example:
            >>> turns = [Turn([5, 6], [-1.0, -2.0]), Turn([9]), Turn([7], [0])]
            >>> answer = Response.from_turns(turns)
            >>> answer.tokens, answer.response_mask
            ([5, 6, 9, 7], [True, True, False, True])
            >>> answer.log_probs
            [-1.0, -2.0, 0.0, 0]
        """
        tokens: list[int] = []
        log_probs: list[float] = []
        mask: list[bool] = []
        for number, turn in enumerate(turns):
            is_own = turn.log_probs is not None
            values = turn.log_probs if turn.log_probs is not None else [0.0] * len(turn.tokens)
            if len(values) != len(turn.tokens):
                raise SampleError(
                    f"turn {number}: {len(turn.tokens)} tokens with {len(values)} log-probabilities"
                )
            tokens += turn.tokens
            log_probs += values
            mask += [is_own] * len(turn.tokens)
        return cls(tokens, log_probs, finish_reason, mask)
