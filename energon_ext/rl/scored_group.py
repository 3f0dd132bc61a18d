# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers to one prompt with their rewards."""

import operator
from dataclasses import dataclass, replace
from typing import Any, Mapping, Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from energon_ext.batch.columns import NO_COLUMNS, Column, convert_values
from energon_ext.errors import SampleError
from energon_ext.rl.response import Response

_DTYPES = {
    "tokens": torch.int64,
    "response_lens": torch.int64,
    "prompt_len": torch.int64,
    "truncated": torch.bool,
    "response_mask": torch.bool,
}


@dataclass(frozen=True, eq=False)
class ScoredGroup:
    """N answers to one prompt.

    Fields of shape [N, G] have one value for each token of a response, from its first token on;
    finite values after a response are ignored.

    Attributes:
        tokens: int64 [N, T], each the prompt and a response; tokens after a response are ignored.
        log_probs: float32 [N, G], the sampler's log-probabilities of the response tokens; 0 for
            tokens that it did not draw, such as the output of a tool.
        rewards: float32 [N]; or by name, such as ``{"exact": [N], "format": [N]}``, see
            ``reward_weights`` of :class:`~energon_ext.rl.RLDataset`.
        prompt_len: tokens of the prompt, the same in all answers, so that ``G = T - prompt_len``.
            Or int64 [N], if the sampler asked with prompts of its own; then ``G`` is T less the
            shortest of them.
        response_lens: int64 [N], tokens of each response; None if all end at T.
        truncated: bool [N], whether a response reached the maximum length; None if unknown.
        response_mask: bool [N, G], the tokens to train on; False on the output of tools or on the
            turns of others. None for all.
        advantages: float32 [N] or [N, G], used as they are, in place of those of the group's
            rewards; None to compute them.
        sample_weights: float32 [N], factor >= 0 of each answer's advantage, such as 0 for an answer
            whose reward counts in the group's mean but that is not trained on. None for ones.
        columns: by name, further values that travel to the batch's ``columns``, such as
            ``ref_log_probs``; the same names in all groups. They are float32 [N, G], of the
            response tokens, unless the ``columns`` of the :class:`~energon_ext.rl.RLDataset`
            describe others: ``[N, T, *item]`` of values that belong to inputs, such as the experts
            that the sampler chose, ``[N, G, *item]`` of those that belong to labels, and
            ``[N, *item]`` per answer. The batch then also has the column ``response_mask``, 1 on
            the tokens to train on.

    Example:
        >>> group = ScoredGroup(
        ...     tokens=torch.tensor([[7, 5, 6], [7, 8, 0]]), log_probs=torch.zeros(2, 2),
        ...     rewards=torch.tensor([1.0, 0.0]), prompt_len=1, response_lens=torch.tensor([2, 1]))
        >>> group.sample_lengths()
        [3, 2]
        >>> group.trained().tolist()
        [[True, True], [True, False]]
    """

    tokens: torch.Tensor
    log_probs: torch.Tensor
    rewards: torch.Tensor | Mapping[str, torch.Tensor]
    prompt_len: int | torch.Tensor
    response_lens: torch.Tensor | None = None
    truncated: torch.Tensor | None = None
    response_mask: torch.Tensor | None = None
    advantages: torch.Tensor | None = None
    sample_weights: torch.Tensor | None = None
    columns: Mapping[str, torch.Tensor] | None = None

    @property
    def reward(self) -> torch.Tensor:
        """Rewards without names: float32 [N]."""
        assert isinstance(self.rewards, torch.Tensor)
        return self.rewards

    def prompt_lengths(self) -> list[int]:
        """Return the tokens of each answer's prompt."""
        if isinstance(self.prompt_len, int):
            return [self.prompt_len] * len(self.tokens)
        return self.prompt_len.tolist()

    def response_lengths(self) -> list[int]:
        """Return the tokens of each response."""
        if self.response_lens is None:
            return [self.tokens.shape[1] - length for length in self.prompt_lengths()]
        return self.response_lens.tolist()

    def sample_lengths(self) -> list[int]:
        """Return the tokens of the prompt and each response together."""
        return list(map(operator.add, self.prompt_lengths(), self.response_lengths()))

    def trained(self) -> torch.Tensor:
        """Return the mask of response tokens to train on: bool [N, G]."""
        lengths = torch.tensor(self.response_lengths())
        is_response = torch.arange(self.log_probs.shape[1]) < lengths[:, None]
        return is_response if self.response_mask is None else is_response & self.response_mask

    def plain(self, described: Mapping[str, Column] = NO_COLUMNS) -> "ScoredGroup":
        """Return the group with the dtypes above, on the CPU and detached.

        Args:
            described: columns that have types of their own, which their values fit.
        """

        def convert(name: str, value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: convert(name, each) for key, each in value.items()}
            if not torch.is_tensor(value):
                return value
            keeps_type = name == "columns" and not value.is_floating_point()
            dtype = value.dtype if keeps_type else _DTYPES.get(name, torch.float32)
            return value.detach().to("cpu", dtype)

        fields: Any = {name: convert(name, value) for name, value in vars(self).items()}
        for name, column in described.items():
            values = array_of(self.columns[name])  # type: ignore[index]  # as checked before
            fields["columns"][name] = torch.from_numpy(convert_values(column, values)[0])
        return replace(self, **fields)

    @classmethod
    def from_responses(
        cls,
        prompt: Sequence[int] | np.ndarray,
        responses: Sequence[Sequence[int]],
        log_probs: Sequence[Sequence[float]],
        rewards: Sequence[float] | Mapping[str, Sequence[float]],
        truncated: Sequence[bool] | None = None,
        **fields: Any,
    ) -> "ScoredGroup":
        """Build a group from lists of response tokens, padded with 0.

        Args:
            **fields: further fields of the group, as tensors.

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
        return cls(
            pad_sequence(list(map(torch.tensor, samples)), batch_first=True),
            pad_sequence(list(map(_floats, log_probs)), batch_first=True),
            {name: _floats(each) for name, each in rewards.items()}
            if isinstance(rewards, Mapping)
            else _floats(rewards),
            len(prompt),
            torch.tensor(lengths),
            None if truncated is None else torch.tensor(truncated),
            **fields,
        )

    @classmethod
    def from_answers(
        cls,
        prompt: Sequence[int] | np.ndarray,
        answers: Sequence[Response],
        rewards: Sequence[float] | Mapping[str, Sequence[float]],
        **fields: Any,
    ) -> "ScoredGroup":
        """Build a group from answers, whose other turns are not trained on.

        All answers have the same columns, which become those of the group.

        Args:
            **fields: further fields of the group, as tensors.

        Raises:
            SampleError: as :meth:`from_responses`.

        Example:
            >>> from energon_ext.rl.response import Turn
            >>> call, result = Turn([5], [-1.0]), Turn([8, 8])
            >>> answers = [Response.from_turns([call, result]), Response([6], [-0.5])]
            >>> group = ScoredGroup.from_answers([7], answers, [1, 0])
            >>> group.tokens.tolist(), group.trained().tolist()
            ([[7, 5, 8, 8], [7, 6, 0, 0]], [[True, False, False], [True, False, False]])
        """
        masks = [each.response_mask or [True] * len(each.tokens) for each in answers]
        reasons = [each.finish_reason for each in answers]
        if any(each.response_mask is not None for each in answers):
            rows = [torch.tensor(mask, dtype=torch.bool) for mask in masks]
            fields = {"response_mask": pad_sequence(rows, batch_first=True), **fields}
        if any(each.columns for each in answers):
            fields = {**fields, "columns": {**_join(answers), **(fields.get("columns") or {})}}
        return cls.from_responses(
            prompt,
            [each.tokens for each in answers],
            [each.log_probs for each in answers],
            rewards,
            None if None in reasons else [reason == "length" for reason in reasons],
            **fields,
        )


def array_of(values: torch.Tensor) -> np.ndarray:
    """Return a tensor as an array, on the CPU and detached; bfloat16 becomes float32."""
    on_host = values.detach().cpu()
    return (on_host.float() if on_host.dtype == torch.bfloat16 else on_host).numpy()


def _join(answers: Sequence[Response]) -> dict[str, torch.Tensor]:
    """Return the columns of answers, ``[N, T, *item]`` each."""
    names = {tuple(sorted(each.columns)) for each in answers}
    if len(names) > 1:
        raise SampleError(f"answers with different columns: {', '.join(map(str, sorted(names)))}")
    (found,) = names
    return {
        name: pad_sequence([torch.tensor(each.columns[name]) for each in answers], batch_first=True)
        for name in found
    }


def _floats(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float32)
