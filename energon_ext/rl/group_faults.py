# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The checks of a group that a sampler returns."""

from dataclasses import dataclass, field, replace
from typing import Any, Iterator, Mapping, Sequence

import numpy as np
import torch

from energon_ext.batch.columns import RESERVED, Column, convert_values
from energon_ext.encoders.prompts import Prompt
from energon_ext.rl.scored_group import ScoredGroup, array_of

#: Largest log-probability: half precision may round that of a certain token above 0.
_MAX_LOG_PROB = 1e-2

#: Fields that may be None.
_OPTIONAL = (
    *("response_lens", "truncated", "response_mask"),
    *("advantages", "sample_weights", "columns"),
)
#: Fields of one kind of numbers, besides the tokens.
_KINDS = {
    "response_lens": "integers",
    "response_mask": "bool",
    "truncated": "bool",
}


@dataclass(frozen=True)
class GroupRules:
    """Requirements of a group besides its own consistency.

    Attributes:
        vocab_size: token ids are below it.
        reward_names: names that rewards must have; empty if they have none.
        least_answers: answers that a group without ``advantages`` must have.
        needs_truncated: whether ``truncated`` must be known.
        columns: names of the columns, which all groups of a batch have; None if not known yet.
        described: columns that are described, and not a number per response token.
    """

    vocab_size: int = 2**31
    reward_names: Sequence[str] = field(default=())
    least_answers: int = 2
    needs_truncated: bool = False
    columns: frozenset[str] | None = None
    described: Mapping[str, Column] = field(default_factory=dict)

    def like(self, group: ScoredGroup) -> "GroupRules":
        """Return the rules for groups of the same batch."""
        return replace(self, columns=frozenset(group.columns or ()))


def find_fault(group: Any, prompt: Prompt, rules: GroupRules) -> str | None:
    """Describe what is wrong with a sampler's answer to a prompt; None if nothing is."""
    return next(_faults(group, prompt, rules), None)


def _faults(group: Any, prompt: Prompt, rules: GroupRules) -> Iterator[str]:
    """Yield faults; after the first one, later checks may not be meaningful."""
    if not isinstance(group, ScoredGroup):
        yield f"the sampler returned a {type(group).__name__}, not a ScoredGroup"
        return
    yield from _faults_of_kinds(group, rules)
    tokens = group.tokens
    least = 1 if group.advantages is not None else rules.least_answers
    if tokens.dim() != 2 or not _is_integer(tokens) or len(tokens) < least:
        yield f"tokens must be integers [N >= {least}, T], got {_shape(tokens)}" + (
            "; groups of one answer need drop_equal=False and advantages='reinforce', a function, "
            "or those of the sampler"
            if tokens.dim() == 2 and len(tokens) == 1
            else ""
        )
    if rules.needs_truncated and group.truncated is None:
        yield "truncated is None, but mask_truncated needs to know which answers were cut"
    yield from _faults_of_prompts(group, prompt)
    yield from _faults_of_values(group, rules.described)
    ids = tokens.cpu()
    is_sample = torch.arange(tokens.shape[1]) < torch.tensor(group.sample_lengths())[:, None]
    unknown = ids[is_sample & ((ids < 0) | (ids >= rules.vocab_size))]
    if len(unknown):
        yield (
            f"tokens of a response must be in the tokenizer's range [0, {rules.vocab_size}), got "
            f"{unknown.tolist()!s:.80}"
        )


def _faults_of_kinds(group: ScoredGroup, rules: GroupRules) -> Iterator[str]:
    rewards, reward_names = group.rewards, rules.reward_names
    found = [*rewards] if isinstance(rewards, Mapping) else []
    if sorted(found, key=str) != sorted(reward_names):
        needed = f"those of reward_weights, {[*reward_names]}" if reward_names else "none"
        yield (
            f"rewards have the names {found}, needed are {needed}; give the RLDataset "
            f"reward_weights with a factor for each name, or return rewards without names"
        )
    if reserved := RESERVED & {*map(str, group.columns or ())}:
        yield f"columns has the name {min(reserved)!r}, which the batch uses itself; take another"
    columns = {} if group.columns is None else group.columns
    if not isinstance(columns, Mapping) or not all(isinstance(name, str) for name in columns):
        yield f"columns must be tensors by name, got {columns!r:.80}"
    if missing := sorted(rules.described.keys() - columns.keys()):
        yield f"columns lacks {missing}, which the RLDataset describes; it has {sorted(columns)}"
    if rules.columns is not None and rules.columns != {*columns}:
        yield (
            f"columns has the names {sorted(columns)}, but that of another prompt "
            f"{sorted(rules.columns)}; all groups need the same"
        )
    for name, value in _tensors(group):
        if value is None and name in _OPTIONAL:
            continue
        if not isinstance(value, torch.Tensor):
            yield f"{name} must be a tensor, got a {type(value).__name__}"
        if value.layout != torch.strided or value.is_complex():
            yield f"{name} must be a dense tensor of real numbers, got {_shape(value)}"
        kind = _KINDS.get(name)
        if kind == "integers" and not _is_integer(value):
            yield f"{name} must be integers, got {_shape(value)}"
        if kind == "bool" and value.dtype != torch.bool:
            yield f"{name} must be bool, got {_shape(value)}"


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
        if not _is_integer(found) or list(found.shape) != [samples]:
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


def _faults_of_values(group: ScoredGroup, described: Mapping[str, Column]) -> Iterator[str]:
    samples, width = group.tokens.shape
    generated = width - min(group.prompt_lengths())
    by_token = [samples, generated]
    shapes = {"log_probs": [by_token], "response_mask": [by_token]}
    shapes["advantages"] = [[samples], by_token]
    counts = {"input": [samples, width], "label": by_token}
    for key, column in described.items():
        per_token = counts[column.at] if column.per == "token" else [samples]
        shapes[f"columns[{key!r}]"] = [[*per_token, *column.item]]
    for name, value in _tensors(group):
        if value is None or name == "tokens":
            continue
        default = by_token if name.startswith("columns[") else [samples]
        allowed = shapes.get(name, [default])
        if list(value.shape) not in allowed:
            yield f"{name} must be {' or '.join(map(str, allowed))}, got {_shape(value)}"
        if not bool(torch.isfinite(value.float()).all()):  # as a batch has it
            yield f"{name} must be finite, got {value.tolist()!s:.80}"
    for key, column in described.items():
        values, info = group.columns[key], column.dtype  # type: ignore[index]  # as checked before
        found, (_, unfit) = _shape(values), convert_values(column, array_of(values))
        if info.kind == "f" and unfit is not None:
            yield f"columns[{key!r}] must fit {info}, got {unfit} in {found}"
        if info.kind == "f":
            continue
        low, high = (0, 1) if info.kind == "b" else (np.iinfo(info).min, np.iinfo(info).max)
        if values.is_floating_point() or unfit is not None:
            yield f"columns[{key!r}] must be integers from {low} to {high}, got {found}"
    if (largest := float(group.log_probs.detach().max())) > _MAX_LOG_PROB:
        yield f"log_probs must be at most 0, got {largest:g}"
    if group.sample_weights is not None and bool((group.sample_weights < 0).any()):
        yield f"sample_weights must be at least 0, got {group.sample_weights.tolist()!s:.80}"
    lengths = group.response_lens
    if lengths is None:
        return
    allowed_lengths = [width - length for length in group.prompt_lengths()]
    if not all(1 <= length <= most for length, most in zip(lengths.tolist(), allowed_lengths)):
        most = max(allowed_lengths)
        yield f"response_lens must be integers from 1 to {most}, got {lengths.tolist()}"


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
