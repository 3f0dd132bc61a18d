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
from energon_ext.rl.place import Place
from energon_ext.rl.prompt_plan import PlannedPrompt
from energon_ext.rl.rollout_metrics import add_up
from energon_ext.rl.scored_group import ScoredGroup
from energon_ext.state.match import check_fingerprint
from energon_ext.state.plain import from_plain, to_plain
from energon_ext.state.schema import COUNT, check_class, check_seal, seal

_CLASS, _VERSION = "EnergonExtRL", 2
#: Fields that :func:`to_plain` converts to JSON values.
_FIELDS = {
    "drawn": [{str: object}],
    "groups": [{str: object}],
    "kept": [[{str: object}]],
    "rollout": {str: object},
}
#: Fields that are the same on all ranks.
_COMMON = {
    "fingerprint": {str: object},
    "prompts": object,
    "ranks": COUNT,
    "batches_per_step": COUNT,
    "epochs_per_batch": COUNT,
    "place": {each.name: COUNT for each in dataclasses.fields(Place)},
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
        epochs_per_batch: passes over the same answers.
        place: counts of steps and passes.
        drawn: prompts without answers yet.
        groups: groups that wait.
        kept: the groups of each batch of a pass that will be repeated.
        rollout: state of :class:`~energon_ext.rl.RolloutMetrics`.
    """

    fingerprint: Mapping[str, Any]
    prompts: Mapping[str, Any]
    ranks: int
    rank: int
    batches_per_step: int
    epochs_per_batch: int
    place: Place
    drawn: Sequence[PlannedPrompt] = field(default=())
    groups: Sequence[WaitingGroup] = field(default=())
    kept: Sequence[Sequence[WaitingGroup]] = field(default=())
    rollout: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        fields = {
            "drawn": [vars(prompt) for prompt in self.drawn],
            "groups": [*map(_save_group, self.groups)],
            "kept": [[*map(_save_group, groups)] for groups in self.kept],
            "rollout": self.rollout,
        }
        own = {name: getattr(self, name) for name in (*_COMMON, "rank")}
        own["place"] = dict(vars(self.place))
        return seal({"__class__": _CLASS, "version": _VERSION, **own, **to_plain(fields)})

    @classmethod
    def from_json(cls, state: Any) -> "RLState":
        """Raises StateFormatError if the state is damaged, or has another version."""
        content = check_seal(state)
        check_class(content, _CLASS, _VERSION, _SHAPE, "Restore a state that an RLDataset saved.")
        fields = from_plain({name: content[name] for name in _FIELDS})
        own = {name: content[name] for name in (*_COMMON, "rank")}
        return cls(
            **{**own, "place": Place(**content["place"])},
            drawn=[PlannedPrompt(**each) for each in fields["drawn"]],
            groups=[_read_group(**each) for each in fields["groups"]],
            kept=[[_read_group(**each) for each in groups] for groups in fields["kept"]],
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
    if first.place.batches or first.kept:
        names = ("ranks", "batches_per_step", "epochs_per_batch")
        changed = {name: (getattr(first, name), getattr(now, name)) for name in names}
        if changed := {name: values for name, values in changed.items() if len({*values}) > 1}:
            raise StateMismatchError(
                changed,
                "The state was saved inside a step, or before the last pass over its answers; "
                "continue with the saved values, or from a state that was saved between two steps.",
            )
    if first.ranks == now.ranks:
        return first if is_one else found[now.rank]
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


def _share(items: Iterable[T], now: RLState) -> list[T]:
    """Return this rank's share of what all ranks had."""
    return sorted(items, key=lambda each: each.number)[now.rank :: now.ranks]


def _save_group(waiting: WaitingGroup) -> dict[str, Any]:
    group = {name: value for name, value in vars(waiting.group).items() if value is not None}
    return {**vars(waiting), "group": group}


def _read_group(group: dict[str, Any], **fields: Any) -> WaitingGroup:
    return WaitingGroup(group=ScoredGroup(**group), **fields)
