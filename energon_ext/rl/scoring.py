# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""From the rewards of groups to the weights of their tokens."""

import dataclasses
from dataclasses import dataclass
from typing import Any, Mapping, Sequence

import torch

from energon_ext.arguments import check_number
from energon_ext.errors import ConfigError
from energon_ext.losses.unified import check_clips, clip
from energon_ext.rl.advantages import (
    AdvantageFunction,
    check_advantages,
    compute_advantages,
    least_answers,
    name_advantages,
)
from energon_ext.rl.group_faults import GroupRules
from energon_ext.rl.scored_group import ScoredGroup

#: Names of rewards that are metrics already.
_METRICS = ("mean", "std")


@dataclass(kw_only=True, eq=False)
class ScoringOptions:
    """Options by which rewards become weights, described at ``RLDataset``."""

    advantages: str | AdvantageFunction = "grpo"
    reward_weights: Mapping[str, float] | None = None
    reward_clip: float | None = None
    advantage_clip: float | None = None
    drop_equal: bool = True
    min_reward_std: float = 1e-6
    mask_truncated: bool = False


@dataclass(kw_only=True, eq=False)
class Scoring(ScoringOptions):
    """Computes the weights of tokens from the rewards of groups."""

    def __post_init__(self) -> None:
        check_advantages(self.advantages)
        check_clips(reward_clip=self.reward_clip, advantage_clip=self.advantage_clip)
        check_number("RLDataset.min_reward_std", self.min_reward_std)
        for name, factor in (self.reward_weights or {}).items():
            if not isinstance(name, str) or name.split("/")[0] in _METRICS:
                raise ConfigError(
                    f"reward_weights: the name {name!r} found; use a string, and not "
                    f"{' or '.join(_METRICS)}, which are metrics already."
                )
            check_number(f"reward_weights[{name!r}]", abs(factor))

    def rules(self, vocab_size: int) -> GroupRules:
        """Return what a group must be like."""
        return GroupRules(
            vocab_size=vocab_size,
            reward_names=tuple(self.reward_weights or ()),
            least_answers=2 if self.drop_equal else least_answers(self.advantages),
            needs_truncated=self.mask_truncated,
        )

    def combine_rewards(self, group: ScoredGroup) -> tuple[ScoredGroup, dict[str, torch.Tensor]]:
        """Return the group with one reward per answer, and the named rewards it is the sum of."""
        if self.mask_truncated:
            assert group.truncated is not None  # by the rules
            weights = (~group.truncated).float()
            if group.sample_weights is not None:
                weights = weights * group.sample_weights
            group = dataclasses.replace(group, sample_weights=weights)
        if not isinstance(group.rewards, Mapping):
            return group, {}
        assert self.reward_weights is not None  # by the rules
        parts = dict(group.rewards)
        factors = torch.tensor([*self.reward_weights.values()], dtype=torch.float32)
        total = factors @ torch.stack([parts[name] for name in self.reward_weights])
        return dataclasses.replace(group, rewards=total), parts

    def teaches(self, group: ScoredGroup) -> bool:
        """Return False if the answers of a group are equally good, and such groups are dropped."""
        if not self.drop_equal:
            return True
        if group.advantages is not None:
            return bool(group.advantages.any())
        return float(clip(group.reward.double(), self.reward_clip).std()) > self.min_reward_std

    def weigh(self, groups: Sequence[ScoredGroup]) -> list[torch.Tensor]:
        """Return the weight of each response token of the groups of a batch: float32 [N, G]."""
        computed = iter(
            compute_advantages(
                self.advantages,
                [group.reward for group in groups if group.advantages is None],
                self.reward_clip,
                self.advantage_clip,
            )
        )
        weights = []
        for group in groups:
            if group.advantages is None:
                found = next(computed)
            else:
                found = clip(group.advantages, self.advantage_clip)
            found = found if found.dim() == 2 else found[:, None]
            if group.sample_weights is not None:
                found = found * group.sample_weights[:, None]
            weights.append(torch.where(group.trained(), found, 0.0))
        return weights

    def fingerprint(self) -> dict[str, Any]:
        """Return what a state depends on; without later options, if they have their defaults."""
        weights = None if self.reward_weights is None else dict(self.reward_weights)
        found = {
            "advantages": name_advantages(self.advantages),
            "reward_weights": weights,
            "drop_equal": self.drop_equal,
            "mask_truncated": self.mask_truncated,
        }
        defaults = {each.name: each.default for each in dataclasses.fields(self)}
        later = {name: value for name, value in found.items() if value != defaults[name]}
        names = ("reward_clip", "advantage_clip", "min_reward_std")
        return {**{name: getattr(self, name) for name in names}, **later}
