# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Advantages of answers from their rewards."""

from typing import Any, Callable, Sequence

import torch

from energon_ext.arguments import check_choice
from energon_ext.errors import SampleError
from energon_ext.losses.unified import clip, group_advantages

#: ``rewards of each group of a batch -> advantages of each``, all float64 [N]
AdvantageFunction = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]


def grpo(groups: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``(r - mean) / (std + 1e-8)`` in each group (https://arxiv.org/abs/2402.03300)."""
    return [group_advantages(rewards) for rewards in groups]


def dr_grpo(groups: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``r - mean`` in each group (https://arxiv.org/abs/2503.20783)."""
    return [rewards - rewards.mean() for rewards in groups]


def rloo(groups: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``r`` less the mean of the group's other answers (https://arxiv.org/abs/2402.14740).

    Example:
        >>> rloo([torch.tensor([3.0, 0.0, 0.0])])[0].tolist()
        [3.0, -1.5, -1.5]
    """
    return [(r - r.mean()) * (len(r) / (len(r) - 1)) for r in groups]


def reinforce(groups: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return ``r`` less the mean over all answers of the batch; groups may have one answer."""
    baseline = torch.cat(list(groups)).mean()
    return [rewards - baseline for rewards in groups]


ADVANTAGES: dict[str, AdvantageFunction] = {
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "rloo": rloo,
    "reinforce": reinforce,
}
#: Those that compare an answer with the others of its group.
_WITHIN_GROUPS = ("grpo", "dr_grpo", "rloo")


def check_advantages(advantages: str | AdvantageFunction) -> None:
    """Raise ConfigError unless this is a name in :data:`ADVANTAGES` or a function."""
    if not callable(advantages):
        check_choice("advantages", advantages, ADVANTAGES)


def name_advantages(advantages: str | AdvantageFunction) -> str:
    """Return a name for a state."""
    if isinstance(advantages, str):
        return advantages
    return str(getattr(advantages, "__qualname__", type(advantages).__qualname__))


def least_answers(advantages: str | AdvantageFunction) -> int:
    """Return the answers that a group needs."""
    return 2 if advantages in _WITHIN_GROUPS else 1


def compute_advantages(
    advantages: str | AdvantageFunction,
    groups: Sequence[torch.Tensor],
    reward_clip: float | None = None,
    advantage_clip: float | None = None,
) -> list[torch.Tensor]:
    """Return the advantages of each answer, float32 [N] for each group.

    Args:
        advantages: name or function.
        groups: rewards of each group, float [N].
        reward_clip, advantage_clip: clip the rewards before and the advantages after, to
            ``[-clip, clip]``.

    Raises:
        SampleError: a function returned something else than one finite number for each answer.

    Example:
        >>> groups = [torch.tensor([1.0, 0.0]), torch.tensor([1.0])]
        >>> [each.tolist() for each in compute_advantages("reinforce", groups, None, 0.5)]
        [[0.3333333432674408, -0.5], [0.3333333432674408]]
    """
    if not groups:
        return []
    function = ADVANTAGES[advantages] if isinstance(advantages, str) else advantages
    found = _call(function, [clip(rewards.double(), reward_clip) for rewards in groups])
    shapes = [list(each.shape) if torch.is_tensor(each) else type(each).__name__ for each in found]
    if shapes != [list(rewards.shape) for rewards in groups]:
        raise SampleError(
            f"advantages: the function returned {shapes}, needed is a tensor like the rewards for "
            f"each group, {[list(rewards.shape) for rewards in groups]}."
        )
    clipped = [clip(each.detach(), advantage_clip).float() for each in found]
    for each, values in zip(found, clipped):
        if not bool(torch.isfinite(values).all()):
            raise SampleError(f"advantages: the function returned {each.tolist()}; finite needed.")
    return clipped


def _call(function: AdvantageFunction, groups: list[torch.Tensor]) -> list[Any]:
    try:
        return list(function(groups))
    except Exception as error:  # a user's function may raise anything
        reason = f"advantages: the function raised {type(error).__name__}: {error}"
        raise SampleError(f"{reason.rstrip('.')}.") from error
