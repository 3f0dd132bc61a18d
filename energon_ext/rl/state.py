# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The state of an RLDataset as JSON values."""

from typing import Any, Mapping, Sequence

from energon_ext.encoders.prompts import Prompt
from energon_ext.rl.group_rows import WaitingGroup
from energon_ext.rl.scored_group import ScoredGroup
from energon_ext.state.match import check_fingerprint
from energon_ext.state.plain import from_plain, to_plain
from energon_ext.state.schema import COUNT, check_class, check_seal, seal

_CLASS, _VERSION = "EnergonExtRL", 1
#: Fields that :func:`to_plain` converts to JSON values.
_FIELDS = {
    "drawn": [{str: object}],
    "groups": [{str: object}],
    "calls": COUNT,
    "rollout": {str: object},
}
_SHAPE = {"fingerprint": {str: object}, "prompts": object, **_FIELDS}


def build_state(
    fingerprint: Mapping[str, Any],
    prompts: Any,
    drawn: Sequence[Prompt],
    groups: Sequence[WaitingGroup],
    calls: int,
    rollout: Mapping[str, Any],
) -> dict[str, Any]:
    """Return a state.

    Args:
        prompts: the state of the loader.
    """
    fields = {
        "drawn": [_save_prompt(prompt) for prompt in drawn],
        "groups": [{**vars(waiting), "group": _save_group(waiting.group)} for waiting in groups],
        "calls": calls,
        "rollout": rollout,
    }
    head = {"__class__": _CLASS, "version": _VERSION, "fingerprint": dict(fingerprint)}
    return seal({**head, "prompts": prompts, **to_plain(fields)})


def read_state(state: Any, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of :func:`build_state`, after all checks.

    Raises:
        StateFormatError: the state is damaged, or has another version.
        StateMismatchError: the state was saved with another fingerprint, or by another class.
    """
    content = check_seal(state)
    check_class(content, _CLASS, _VERSION, _SHAPE, "Restore a state that an RLDataset saved.")
    check_fingerprint(content["fingerprint"], fingerprint)
    fields = from_plain({name: content[name] for name in _FIELDS})
    fields["drawn"] = [_read_prompt(**each) for each in fields["drawn"]]
    fields["groups"] = [_read_group(**each) for each in fields["groups"]]
    return {**fields, "prompts": content["prompts"]}


def _save_prompt(prompt: Prompt) -> dict[str, Any]:
    fields = {name: getattr(prompt, name) for name in ("source", "tokens", "metadata")}
    return {"key": prompt.__key__, **fields}


def _read_prompt(key: str, **fields: Any) -> Prompt:
    return Prompt(__key__=key, __restore_key__=(), __subflavors__=None, **fields)


def _save_group(group: ScoredGroup) -> dict[str, Any]:
    return {name: value for name, value in vars(group).items() if value is not None}


def _read_group(group: dict[str, Any], advantages: Any = None, **fields: Any) -> WaitingGroup:
    # Earlier versions saved advantages, which follow from the rewards.
    return WaitingGroup(group=ScoredGroup(**group), **fields)
