# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The parts of an RLDataset's state as plain values."""

from typing import Any

from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import StateFormatError
from energon_ext.rl.group_rows import WeightedGroup
from energon_ext.rl.sampler import ScoredGroup

STATE_VERSION = 1


def check_state(state: Any, fresh: dict[str, Any]) -> None:
    """Raise StateFormatError for another version, or fields unlike those of a fresh state."""
    if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
        raise StateFormatError(
            f"A state of RLDataset, version {STATE_VERSION}, is needed, found "
            f"{state.get('version') if isinstance(state, dict) else type(state).__name__!r}. "
            "Restore another checkpoint."
        )
    for name, value in fresh.items():
        if not isinstance(state.get(name), type(value)) and name != "prompts":
            raise StateFormatError(
                f"The state of RLDataset is damaged: {name} is {state.get(name)!r:.80}, a "
                f"{type(value).__name__} is needed. Restore another checkpoint."
            )


def save_prompt(prompt: Prompt) -> dict[str, Any]:
    fields = {name: getattr(prompt, name) for name in ("source", "tokens", "metadata")}
    return {"key": prompt.__key__, **fields}


def load_prompt(state: dict[str, Any]) -> Prompt:
    fields = {name: value for name, value in state.items() if name != "key"}
    return Prompt(__key__=state["key"], __restore_key__=(), __subflavors__=None, **fields)


def save_group(weighted: WeightedGroup) -> dict[str, Any]:
    return {**vars(weighted), "group": dict(vars(weighted.group))}


def load_group(state: dict[str, Any]) -> WeightedGroup:
    return WeightedGroup(**{**state, "group": ScoredGroup(**state["group"])})
