# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The state of an RLDataset: one on every data-parallel rank, which any number of ranks restore.

The place in the prompts is equal on all ranks. Each rank adds what only it has: prompts that it
drew but did not sample, groups that wait, and counts.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from energon_ext.errors import StateFormatError, StateMismatchError, log_of
from energon_ext.rl.answer_file import read_tensors, write_tensors
from energon_ext.rl.group_rows import WaitingGroup
from energon_ext.rl.place import Place
from energon_ext.rl.prompt_plan import PlannedPrompt
from energon_ext.rl.request import Answered
from energon_ext.rl.rollout_metrics import add_up
from energon_ext.rl.sampler import Unanswered
from energon_ext.rl.scored_group import ScoredGroup
from energon_ext.state.match import check_fingerprint
from energon_ext.state.plain import from_plain, to_plain
from energon_ext.state.schema import COUNT, check_class, check_seal, seal

_logger = log_of(__name__)

_CLASS, _VERSION = "EnergonExtRL", 3
#: Fields that :func:`to_plain` converts to JSON values.
_FIELDS = {
    "drawn": [{str: object}],
    "groups": [{str: object}],
    "answered": [{str: object}],
    "kept": [[{str: object}]],
    "rollout": {str: object},
}
#: Fields that are the same on all ranks.
_COMMON = {
    "fingerprint": {str: object},
    "prompts": object,
    "ranks": COUNT,
    "batches_per_step": COUNT,
    "steps_per_version": COUNT,
    "epochs_per_batch": COUNT,
    "place": {each.name: COUNT for each in dataclasses.fields(Place)},
}
#: Further fields of a rank.
_OWN = {"rank": COUNT, "asked_in": (None, COUNT)}
_SHAPE = {**_COMMON, **_OWN, **_FIELDS, "file": (None, {"name": str, "digest": str})}

T = TypeVar("T", PlannedPrompt, WaitingGroup, Answered)


@dataclass(frozen=True, kw_only=True)
class RLState:
    """A state.

    Attributes:
        fingerprint: what a resumed run must have in common.
        prompts: cursor of the prompts.
        ranks, rank: number of data-parallel ranks, and this one.
        batches_per_step: batches of an optimizer step on a rank.
        steps_per_version: steps whose answers are sampled together.
        epochs_per_batch: passes over the same answers.
        place: counts of steps and passes.
        asked_in: the last version in which prompts were asked ahead.
        drawn: prompts without answers yet.
        groups: groups that wait.
        answered: answers that were asked for ahead.
        kept: the groups of each batch of a pass that will be repeated.
        rollout: state of :class:`~energon_ext.rl.RolloutMetrics`.
    """

    fingerprint: Mapping[str, Any]
    prompts: Mapping[str, Any]
    ranks: int
    rank: int
    batches_per_step: int
    steps_per_version: int
    epochs_per_batch: int
    place: Place
    asked_in: int | None = None
    drawn: Sequence[PlannedPrompt] = field(default=())
    groups: Sequence[WaitingGroup] = field(default=())
    answered: Sequence[Answered] = field(default=())
    kept: Sequence[Sequence[WaitingGroup]] = field(default=())
    rollout: Mapping[str, Any] = field(default_factory=dict)

    def of_sources(self, sources: Sequence[str]) -> "RLState":
        """Return the state without prompts and groups of other sources; log if there are some.

        StateMismatchError if answers that must be trained on again are to prompts of such a source.
        """
        repeated = {each.source for groups in self.kept for each in groups}
        if missing := sorted(repeated - {*sources}):
            raise StateMismatchError(
                {"sources of answers that must be repeated": (sorted(repeated), sorted(sources))},
                f"Keep {', '.join(missing)} until the last pass over its answers.",
            )
        items = {name: getattr(self, name) for name in ("drawn", "groups", "answered")}
        if removed := {each.source for found in items.values() for each in found} - {*sources}:
            _logger.warning("Dropped prompts and groups of removed sources: %s", sorted(removed))
        known: Any = {
            name: [e for e in found if e.source in sources] for name, found in items.items()
        }
        return dataclasses.replace(self, **known)

    def to_json(self, folder: Path | None = None) -> dict[str, Any]:
        """Return JSON values; the tensors of answers are in a new file if there is a folder."""
        fields: Any = {
            "drawn": [vars(prompt) for prompt in self.drawn],
            "groups": [*map(_save_group, self.groups)],
            "answered": [*map(_save_group, self.answered)],
            "kept": [[*map(_save_group, groups)] for groups in self.kept],
            "rollout": self.rollout,
        }
        file = None
        if folder is not None:
            fields, file = write_tensors(fields, folder, self.rank)
        own = {name: getattr(self, name) for name in (*_COMMON, *_OWN)}
        own["place"] = dict(vars(self.place))
        head = {"__class__": _CLASS, "version": _VERSION, "file": file}
        return seal({**head, **own, **to_plain(fields)})

    @classmethod
    def from_json(cls, state: Any, folder: Path | None = None) -> "RLState":
        """Raises StateFormatError if the state or its file is damaged, or has another version."""
        content = check_seal(state)
        check_class(content, _CLASS, _VERSION, _SHAPE, "Restore a state that an RLDataset saved.")
        fields = from_plain({name: content[name] for name in _FIELDS})
        if content["file"] is not None:
            fields = read_tensors(fields, folder, content["file"])
        own = {name: content[name] for name in (*_COMMON, *_OWN)}
        return cls(
            **{**own, "place": Place(**content["place"])},
            drawn=[PlannedPrompt(**each) for each in fields["drawn"]],
            groups=[_read_group(WaitingGroup, **each) for each in fields["groups"]],
            answered=[_read_group(Answered, **each) for each in fields["answered"]],
            kept=[[_read_group(WaitingGroup, **each) for each in part] for part in fields["kept"]],
            rollout=fields["rollout"],
        )


def restored(states: Any, now: RLState, folder: Path | None = None) -> RLState:
    """Return the state with which a rank continues, after all checks.

    With as many ranks as saved the states, each continues with its own. Otherwise prompts and
    groups are distributed over the ranks in the order of their numbers, and the first rank
    continues the counts of all.

    Args:
        states: the JSON values of all ranks, or only of this one.
        now: state of the new dataset.
        folder: folder of the files of the states.

    Raises:
        StateFormatError: a state is damaged, or they are not those of all ranks of one save.
        StateMismatchError: they were saved with another configuration, or cannot be distributed.
    """
    is_one = isinstance(states, Mapping) or not isinstance(states, Sequence)
    given = [RLState.from_json(state, folder) for state in ([states] if is_one else states)]
    found = sorted(given, key=lambda state: state.rank)
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
    if first.place.batches or first.kept or first.place.steps_of_pass:
        names = ["epochs_per_batch"]  # a pass repeats all steps of a version
        if first.place.batches or first.kept:
            names += ["ranks", "batches_per_step", "steps_per_version"]
        changed = {name: (getattr(first, name), getattr(now, name)) for name in names}
        if changed := {name: values for name, values in changed.items() if len({*values}) > 1}:
            raise StateMismatchError(
                changed,
                "The state was saved inside a step or version, or before the last pass over its "
                "answers; continue with the saved values, or from a state that was saved between "
                "two steps.",
            )
    if first.ranks == now.ranks:
        return first if is_one else found[now.rank]
    return dataclasses.replace(
        first,
        ranks=now.ranks,
        rank=now.rank,
        drawn=_share((each for state in found for each in state.drawn), now),
        groups=_share((each for state in found for each in state.groups), now),
        answered=_share((each for state in found for each in state.answered), now),
        asked_in=None if any(state.asked_in is None for state in found) else first.asked_in,
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


def _save_group(waiting: Answered) -> dict[str, Any]:
    group = {name: value for name, value in vars(waiting.group).items() if value is not None}
    return {**vars(waiting), "group": group}


def _read_group(kind: Any, group: dict[str, Any], **fields: Any) -> Any:
    return kind(group=Unanswered(**group) if "reason" in group else ScoredGroup(**group), **fields)
