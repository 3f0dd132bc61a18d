# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The state of an RLDataset: one on every data-parallel rank, which any number of ranks restore.

The place in the prompts is equal on all ranks. Each rank adds what only it has: prompts that it
drew but did not sample, groups that wait, and counts.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from energon_ext.errors import StateFormatError, StateMismatchError
from energon_ext.rl.group_rows import WaitingGroup
from energon_ext.rl.prompt_plan import PlannedPrompt
from energon_ext.rl.rollout_metrics import add_up
from energon_ext.rl.scored_group import ScoredGroup
from energon_ext.state.match import check_fingerprint
from energon_ext.state.plain import from_plain, to_plain
from energon_ext.state.schema import COUNT, check_class, check_seal, sealed

_CLASS, _VERSION = "EnergonExtRL", 2
#: Fields that :func:`to_plain` converts to JSON values.
_FIELDS = {"drawn": [{str: object}], "groups": [{str: object}], "rollout": {str: object}}
#: Fields that are the same on all ranks.
_COMMON = {
    "fingerprint": {str: object},
    "prompts": object,
    "ranks": COUNT,
    "batches_per_step": COUNT,
    "step": COUNT,
    "batches": COUNT,
}
_SHAPE = {**_COMMON, "rank": COUNT, **_FIELDS}

T = TypeVar("T", PlannedPrompt, WaitingGroup)


@dataclass(frozen=True, kw_only=True)
class RLState:
    """A state.

    Attributes:
        fingerprint: what a resumed run must have in common.
        prompts: cursor of the prompts.
        ranks, rank: number of data-parallel ranks, and this one.
        batches_per_step: batches of an optimizer step on a rank.
        step: optimizer steps whose batches have all been yielded.
        batches: batches of the next step that have been yielded.
        drawn: prompts without answers yet.
        groups: groups that wait.
        rollout: state of :class:`~energon_ext.rl.RolloutMetrics`.
    """

    fingerprint: Mapping[str, Any]
    prompts: Mapping[str, Any]
    ranks: int
    rank: int
    batches_per_step: int
    step: int
    batches: int
    drawn: Sequence[PlannedPrompt] = field(default=())
    groups: Sequence[WaitingGroup] = field(default=())
    rollout: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        fields = {
            "drawn": [vars(prompt) for prompt in self.drawn],
            "groups": [{**vars(each), "group": _save_group(each.group)} for each in self.groups],
            "rollout": self.rollout,
        }
        own = {name: getattr(self, name) for name in (*_COMMON, "rank")}
        return sealed({"__class__": _CLASS, "version": _VERSION, **own, **to_plain(fields)})

    @classmethod
    def from_json(cls, state: Any) -> "RLState":
        """Raises StateFormatError if the state is damaged, or has another version."""
        content = check_seal(state)
        check_class(content, _CLASS, _VERSION, _SHAPE, "Restore a state that an RLDataset saved.")
        fields = from_plain({name: content[name] for name in _FIELDS})
        return cls(
            **{name: content[name] for name in (*_COMMON, "rank")},
            drawn=[PlannedPrompt(**each) for each in fields["drawn"]],
            groups=[_read_group(**each) for each in fields["groups"]],
            rollout=fields["rollout"],
        )


def restored(states: Any, now: RLState) -> RLState:
    """Return the state with which a rank continues, after all checks.

    With as many ranks as saved the states, each continues with its own. Otherwise prompts and
    groups are distributed over the ranks in the order of their numbers, and the first rank
    continues the counts of all.

    Args:
        states: the JSON values of all ranks, or only of this one.
        now: state of the new dataset.

    Raises:
        StateFormatError: a state is damaged, or they are not those of all ranks of one save.
        StateMismatchError: they were saved with another configuration, or cannot be distributed.
    """
    is_one = isinstance(states, Mapping) or not isinstance(states, Sequence)
    found = sorted(map(RLState.from_json, [states] if is_one else states), key=lambda s: s.rank)
    if not found:
        raise StateFormatError("No data state was given; give those of all ranks that saved one.")
    first = found[0]
    for state in found:
        check_fingerprint(state.fingerprint, now.fingerprint)
    if is_one and (first.ranks, first.rank) != (now.ranks, now.rank):
        raise StateMismatchError(
            {
                "data-parallel rank": (
                    f"{first.rank} of {first.ranks}",
                    f"{now.rank} of {now.ranks}",
                )
            },
            "Give the states of all ranks in a list, so that they can be distributed.",
        )
    if not is_one:
        _check_together(found)
    if first.batches and now.batches_per_step != first.batches_per_step:
        _refuse_inside_a_step("batches_per_step", first.batches_per_step, now.batches_per_step)
    if first.ranks == now.ranks:
        return first if is_one else found[now.rank]
    if first.batches:
        _refuse_inside_a_step("data-parallel ranks", first.ranks, now.ranks)
    return dataclasses.replace(
        first,
        ranks=now.ranks,
        rank=now.rank,
        drawn=_share((each for state in found for each in state.drawn), now),
        groups=_share((each for state in found for each in state.groups), now),
        rollout=add_up([state.rollout for state in found], is_first=now.rank == 0),
    )


def _check_together(found: Sequence[RLState]) -> None:
    """Raise StateFormatError unless the states are those of all ranks of one save."""
    ranks = [state.rank for state in found]
    if ranks != [*range(found[0].ranks)]:
        raise StateFormatError(
            f"The data states of ranks {ranks} were given, needed are those of all "
            f"{found[0].ranks} ranks of one save."
        )
    for name in _COMMON:
        for state in found:
            if getattr(state, name) != getattr(found[0], name):
                raise StateFormatError(
                    f"The data states of ranks 0 and {state.rank} differ in {name}; give those of "
                    f"one save."
                )


def _refuse_inside_a_step(name: str, saved: int, now: int) -> None:
    raise StateMismatchError(
        {name: (saved, now)},
        "The state was saved inside a step; continue with the same value, or from a state that was "
        "saved between two steps.",
    )


def _share(items: Iterable[T], now: RLState) -> list[T]:
    """Return this rank's share of what all ranks had."""
    return sorted(items, key=lambda each: each.number)[now.rank :: now.ranks]


def _save_group(group: ScoredGroup) -> dict[str, Any]:
    return {name: value for name, value in vars(group).items() if value is not None}


def _read_group(group: dict[str, Any], **fields: Any) -> WaitingGroup:
    return WaitingGroup(group=ScoredGroup(**group), **fields)
