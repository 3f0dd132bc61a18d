# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What becomes of each source of a saved state under the configuration of now."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Mapping, Sequence

from energon_ext.errors import StateFormatError, StateMismatchError

#: Datasets whose state says by number what was read, so that any workers can continue it.
INDEX_ADDRESSED = ("TokenRows", "SpliceSource")

#: Of the state of a blend; the same for every way of choosing, since a source does not care.
STATE_CLASS = "ChoiceDataset"
STATE_VERSION = 1

KEPT, MOVED, NEW, PARKED = "kept", "moved", "new", "parked"


@dataclass(frozen=True)
class SourceChange:
    """What a resume does with one source.

    Attributes:
        key: of the source now; of the state where it is parked.
        change: ``kept``, it continues; ``moved``, it continues under another key; ``new``, it
            starts; ``parked``, its state waits for its return.
        rows, tokens: drawn from it so far, over the workers at hand.
        saved_key: where it was moved, its key in the state.
        any_workers: whether it can continue on another number of ranks and workers.
    """

    key: str
    change: str
    rows: int = 0
    tokens: int = 0
    saved_key: str | None = None
    any_workers: bool = True

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        text = f"{self.key}: {self.change}"
        if self.saved_key is not None:
            text += f", was {self.saved_key}"
        if self.change != NEW:
            text += f", {self.tokens:,} tokens read"
        return text


def match_sources(
    saved: Mapping[str, Mapping[str, Any]], current: Mapping[str, tuple[str, str]]
) -> dict[str, str]:
    """Find the state of each source.

    A source is known by its key; where no key matches, by its absolute path, as long as that does
    not change the order it is read in.

    Args:
        saved: key -> state of a source, with its ``identity`` and ``order``.
        current: key -> identity and order name of a source of now.

    Returns:
        Current key -> key in the state, of every source that the state knows.

    Example:
        >>> saved = {"data/web": {"identity": "/data/web", "order": "web"}}
        >>> match_sources(saved, {"../data/web": ("/data/web", "web"), "code": ("/code", "code")})
        {'../data/web': 'data/web'}
    """
    matched = {key: key for key in current if key in saved}
    unclaimed = {
        (entry["identity"], entry["order"]): key
        for key, entry in saved.items()
        if key not in matched
    }
    for key, names in current.items():
        if key not in matched and names in unclaimed:
            matched[key] = unclaimed.pop(names)
    return matched


def compare_sources(
    states: Sequence[Mapping[str, Any]], current: Mapping[str, tuple[str, str]]
) -> list[SourceChange]:
    """What a resume does with every source, those of now first.

    Args:
        states: of the ``ChoiceDataset`` of some workers of one run.
        current: key -> identity and order name of a source of now.
    """
    sources = [state["sources"] for state in states]
    matched = match_sources(sources[0], current)
    changes = []
    for key in current:
        if key not in matched:
            changes.append(SourceChange(key, NEW))
            continue
        saved_key = matched[key]
        moved = saved_key != key
        changes.append(
            SourceChange(
                key,
                MOVED if moved else KEPT,
                saved_key=saved_key if moved else None,
                **_drawn(sources, saved_key),
            )
        )
    for key in sorted(sources[0].keys() - set(matched.values())):
        changes.append(SourceChange(key, PARKED, **_drawn(sources, key)))
    return changes


def _drawn(sources: Sequence[Mapping[str, Any]], key: str) -> dict[str, Any]:
    entries = [worker[key] for worker in sources]
    return {
        "rows": sum(entry["rows"] for entry in entries),
        "tokens": sum(entry["tokens"] for entry in entries),
        "any_workers": is_index_addressed(entries[0]),
    }


def is_index_addressed(entry: Mapping[str, Any]) -> bool:
    """Whether any number of workers can continue a source, by its state."""
    return bool(entry.get("undealt")) or entry["dataset"].get("__class__") in INDEX_ADDRESSED


def check_format(state: Mapping[str, Any]) -> None:
    """Refuse what is no state of a :class:`~energon_ext.mixture.choice.ChoiceDataset`.

    Raises:
        StateMismatchError: stock Energon saved it.
        StateFormatError: an unknown version.
    """
    if state.get("__class__") != STATE_CLASS or "sources" not in state:
        raise StateMismatchError(
            {"dataset": (state.get("__class__"), STATE_CLASS)},
            "The state was saved without this package's mixin. It knows its sources by their "
            "places in the blend and holds samples chosen by weights of then, so no source can be "
            "continued alone. Finish that run with stock Energon; or start a new one whose sources "
            "begin at given rows, `subset: {range: [ROW, end]}`.",
        )
    if state["version"] != STATE_VERSION:
        raise StateFormatError(
            f"A blend state of version {state['version']!r} was found, {STATE_VERSION} is "
            f"known; use the energon_ext that wrote it, or a newer one."
        )


def check_fingerprint(saved: Mapping[str, Any], current: Mapping[str, Any]) -> None:
    """Compare what a state was saved under with what it is restored under.

    Raises:
        StateMismatchError: lists every field that differs.

    Example:
        >>> check_fingerprint({"seed": 0, "row_length": 256}, {"seed": 0, "row_length": 512})
        Traceback (most recent call last):
        energon_ext.errors.StateMismatchError: The state belongs to another configuration \
(row_length: saved 256, now 512). Use the saved values, or start a new run.
    """
    differences = {
        field: (saved.get(field), current.get(field))
        for field in {*saved, *current}
        if saved.get(field) != current.get(field)
    }
    if differences:
        raise StateMismatchError(differences, "Use the saved values, or start a new run.")


def rename_sources(state: Any, names: Mapping[str, str]) -> Any:
    """JSON values with other keys of sources."""
    if isinstance(state, dict):
        return {names.get(key, key): rename_sources(value, names) for key, value in state.items()}
    if isinstance(state, list):
        return [
            names.get(value, value) if isinstance(value, str) else rename_sources(value, names)
            for value in state
        ]
    return state
