# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Prompts and groups as plain values, for a checkpoint."""

from __future__ import annotations

from typing import Any

from energon_ext.encoders.prompts import Prompt
from energon_ext.errors import StateFormatError
from energon_ext.rl.group_rows import WeightedGroup
from energon_ext.rl.sampler import ScoredGroup

_GROUP_FIELDS = ("tokens", "log_probs", "rewards", "prompt_len", "response_lens")


def check_state(state: Any, version: int, fresh: dict[str, Any]) -> None:
    """Compare the form of a state with that of a fresh one.

    Raises:
        StateFormatError: it is of another version, or a field is missing or of another type.
    """
    if not isinstance(state, dict) or state.get("version") != version:
        raise StateFormatError(
            f"A state of RLDataset, version {version}, is needed, found "
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
    """A drawn prompt; it is not drawn again."""
    return {
        "key": prompt.__key__,
        "source": prompt.source,
        "tokens": prompt.tokens,
        "metadata": prompt.metadata,
    }


def load_prompt(state: dict[str, Any]) -> Prompt:
    """The prompt of :func:`save_prompt`."""
    return Prompt(
        __key__=state["key"],
        __restore_key__=(),
        __subflavors__=None,
        tokens=state["tokens"],
        source=state["source"],
        metadata=state["metadata"],
    )


def save_group(weighted: WeightedGroup) -> dict[str, Any]:
    """A group that waits for its batch."""
    return {
        "key": weighted.key,
        "source": weighted.source,
        "advantages": weighted.advantages,
        "group": {name: getattr(weighted.group, name) for name in _GROUP_FIELDS},
    }


def load_group(state: dict[str, Any]) -> WeightedGroup:
    """The group of :func:`save_group`."""
    group = ScoredGroup(**state["group"])
    return WeightedGroup(state["key"], state["source"], group, state["advantages"])
