# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Answers to one prompt with their rewards, and the checks that they pass."""

import operator
from dataclasses import dataclass, field, replace
from typing import Any, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import SampleError
from energon_ext.losses import RESPONSE_MASK

#: Largest log-probability: half precision may round that of a certain token above 0.
_MAX_LOG_PROB = 1e-2

#: Fields that may be None.
_OPTIONAL = (
    *("response_lens", "truncated", "response_mask"),
    *("advantages", "sample_weights", "columns"),
)
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
    values after a response are ignored.

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
        sample_weights: float32 [N], factor of each answer's advantage, such as 0 for an answer
            whose reward counts in the group's mean but that is not trained on. None for ones.
        columns: float32 [N, G] by name, further values of the response tokens that travel to the
            batch's ``columns``, such as ``ref_log_probs``; the same names in all groups. The batch
            then also has the column ``response_mask``, 1 on the tokens to train on.

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

    def plain(self) -> "ScoredGroup":
        """Return the group with the dtypes above, on the CPU and detached."""

        def convert(name: str, value: Any) -> Any:
            if isinstance(value, Mapping):
                return {key: convert(name, each) for key, each in value.items()}
            if not torch.is_tensor(value):
                return value
            return value.detach().to("cpu", _DTYPES.get(name, torch.float32))

        fields: Any = {name: convert(name, value) for name, value in vars(self).items()}
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


@dataclass(frozen=True)
class GroupRules:
    """Requirements of a group besides its own consistency.

    Attributes:
        vocab_size: token ids are below it.
        reward_names: names that rewards must have; empty if they have none.
        least_answers: answers that a group without ``advantages`` must have.
        needs_truncated: whether ``truncated`` must be known.
    """

    vocab_size: int = 2**31
    reward_names: Sequence[str] = field(default=())
    least_answers: int = 2
    needs_truncated: bool = False


def find_fault(group: Any, prompt: Prompt, rules: GroupRules) -> str | None:
    """Describe what is wrong with a sampler's answer to a prompt; None if nothing is."""
    return next(_faults(group, prompt, rules), None)


def _faults(group: Any, prompt: Prompt, rules: GroupRules) -> Iterator[str]:
    """Yield faults; after the first one, later checks may not be meaningful."""
    if not isinstance(group, ScoredGroup):
        yield f"the sampler returned a {type(group).__name__}, not a ScoredGroup"
        return
    yield from _faults_of_kinds(group, rules.reward_names)
    tokens = group.tokens
    least = 1 if group.advantages is not None else rules.least_answers
    if tokens.dim() != 2 or tokens.is_floating_point() or len(tokens) < least:
        yield f"tokens must be integers [N >= {least}, T], got {_shape(tokens)}" + (
            "; groups of one answer need drop_equal=False and advantages='reinforce', a function, "
            "or those of the sampler"
            if tokens.dim() == 2 and len(tokens) == 1
            else ""
        )
    if rules.needs_truncated and group.truncated is None:
        yield "truncated is None, but mask_truncated needs to know which answers were cut"
    yield from _faults_of_prompts(group, prompt)
    yield from _faults_of_values(group)
    ids = tokens.cpu()
    is_sample = torch.arange(tokens.shape[1]) < torch.tensor(group.sample_lengths())[:, None]
    unknown = ids[is_sample & ((ids < 0) | (ids >= rules.vocab_size))]
    if len(unknown):
        yield (
            f"tokens of a response must be in the tokenizer's range [0, {rules.vocab_size}), got "
            f"{unknown.tolist()!s:.80}"
        )


def _faults_of_kinds(group: ScoredGroup, reward_names: Sequence[str]) -> Iterator[str]:
    rewards = group.rewards
    found = [*rewards] if isinstance(rewards, Mapping) else []
    if sorted(found, key=str) != sorted(reward_names):
        needed = f"those of reward_weights, {[*reward_names]}" if reward_names else "none"
        yield (
            f"rewards have the names {found}, needed are {needed}; give the RLDataset "
            f"reward_weights with a factor for each name, or return rewards without names"
        )
    if reserved := {RESPONSE_MASK, "log_probs"} & {*(group.columns or ())}:
        yield f"columns has the name {min(reserved)!r}, which the batch uses itself; take another"
    for name, value in _tensors(group):
        is_absent = value is None and name in _OPTIONAL
        if not isinstance(value, torch.Tensor) and not is_absent:
            yield f"{name} must be a tensor, got a {type(value).__name__}"


def _tensors(group: ScoredGroup) -> Iterator[tuple[str, Any]]:
    """Yield what should be tensors, with their names."""
    for name, value in vars(group).items():
        if isinstance(value, Mapping):
            yield from ((f"{name}[{key!r}]", each) for key, each in value.items())
        elif name != "prompt_len":
            yield name, value


def _faults_of_prompts(group: ScoredGroup, prompt: Prompt) -> Iterator[str]:
    tokens, found, length = group.tokens, group.prompt_len, len(prompt.tokens)
    (samples, width), place = tokens.shape, f"in {_shape(tokens)} tokens"
    if isinstance(found, torch.Tensor):
        if found.is_floating_point() or list(found.shape) != [samples]:
            yield f"prompt_len must be an integer or integers [{samples}], got {_shape(found)}"
        if not 1 <= int(found.min()) <= int(found.max()) < width:
            yield f"prompt_len is {found.tolist()} {place}; a response needs at least one token"
        return
    if type(found) is not int or found != length or width <= length:
        yield (
            f"prompt_len is {found!r} {place}; the prompt has {length} tokens, and a response "
            f"needs at least one"
        )
    if not bool((tokens[:, :length].cpu() == torch.as_tensor(prompt.tokens)).all()):
        yield "tokens do not begin with the prompt"


def _faults_of_values(group: ScoredGroup) -> Iterator[str]:
    samples, width = group.tokens.shape
    generated = width - min(group.prompt_lengths())
    by_token = [samples, generated]
    shapes = {"log_probs": [by_token], "response_mask": [by_token]}
    shapes["advantages"] = [[samples], by_token]
    for name, value in _tensors(group):
        if value is None or name == "tokens":
            continue
        is_column = name.startswith("columns[")
        allowed = [by_token] if is_column else shapes.get(name, [[samples]])
        if list(value.shape) not in allowed:
            yield f"{name} must be {' or '.join(map(str, allowed))}, got {_shape(value)}"
        if not bool(torch.isfinite(value).all()):
            yield f"{name} must be finite, got {value.tolist()!s:.80}"
    if (mask := group.response_mask) is not None and mask.dtype != torch.bool:
        yield f"response_mask must be bool, got {_shape(mask)}"
    if (largest := float(group.log_probs.detach().max())) > _MAX_LOG_PROB:
        yield f"log_probs must be at most 0, got {largest:g}"
    lengths = group.response_lens
    if lengths is None:
        return
    allowed_lengths = [width - length for length in group.prompt_lengths()]
    if lengths.is_floating_point() or not all(
        1 <= length <= most for length, most in zip(lengths.tolist(), allowed_lengths)
    ):
        most = max(allowed_lengths)
        yield f"response_lens must be integers from 1 to {most}, got {lengths.tolist()}"


def _floats(values: Any) -> torch.Tensor:
    return torch.as_tensor(values, dtype=torch.float32)


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
