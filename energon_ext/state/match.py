# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Match the sources of a saved state with the current configuration.

A source in both continues where it was. A source that is only in the configuration is new. The
state of a source that is only in the state is *retained*: every later save contains it unchanged,
in case the source returns.
"""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Mapping, NamedTuple, Sequence

from energon_ext.errors import StateMismatchError

KEPT, MOVED, NEW, RETAINED = "kept", "moved", "new", "retained"

#: Field for the class that produced the samples; a renamed class is logged, not rejected.
ENCODER = "task_encoder"


class SourceNames(NamedTuple):
    """Further names of a source, which identify its state if its key has changed.

    ``absolute_key`` has absolute paths and stays the same if only the metadataset moves.
    ``shuffle_key`` determines the order of the source and stays the same if all data moves.
    ``content`` is a digest of what the documents' fingerprint says; it depends on no place, so it
    finds a source that was away while everything moved.
    """

    absolute_key: str = ""
    shuffle_key: str = ""
    content: str = ""


@dataclass(frozen=True)
class SourceChange:
    """The effect of a resume on one source.

    Attributes:
        key: current key of the source; the key in the state if it is retained.
        change: ``kept``, ``moved`` (it continues under another key), ``new`` or ``retained``.
        documents, tokens: drawn from it so far, over the workers in the state.
        saved_key: key in the state if the source moved.
    """

    key: str
    change: str
    documents: int = 0
    tokens: int = 0
    saved_key: str | None = None

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
    saved: Mapping[str, Mapping[str, Any]], current: Mapping[str, SourceNames]
) -> dict[str, str]:
    """Find the state of each source.

    Sources are matched by key, or else by place and shuffle key, or else by shuffle key and
    content, if no other source has both. So a match does not change the order in which a source is
    read.

    Args:
        saved: key -> state of a source, with its ``names``.
        current: key -> names of a current source.

    Returns:
        Current key -> key in the state, for every source found in the state.

    Example:
        >>> saved = {"data/web": {"names": ["/data/web", "web", "3f2a"]}}
        >>> current = {"../data/web": SourceNames("/data/web", "web"), "code": SourceNames()}
        >>> match_sources(saved, current)
        {'../data/web': 'data/web'}
    """
    matched = {key: key for key in current if key in saved}
    places = {tuple(e["names"][:2]): key for key, e in saved.items() if key not in matched}
    for key, names in current.items():
        if key not in matched and any(names[:2]) and names[:2] in places:
            matched[key] = places.pop(names[:2])
    away = _unique({k: e["names"][1:] for k, e in saved.items() if k not in matched.values()})
    new = _unique({key: names[1:] for key, names in current.items() if key not in matched})
    return {**matched, **{key: away[names] for names, key in new.items() if names in away}}


def _unique(names: Mapping[str, Sequence[str]]) -> dict[tuple[str, ...], str]:
    """Return the key of each shuffle key with a content that only one source has."""
    counts = Counter(map(tuple, names.values()))
    return {tuple(pair): k for k, pair in names.items() if all(pair) and counts[tuple(pair)] == 1}


def compare_sources(
    sources: Sequence[Mapping[str, Any]], current: Mapping[str, SourceNames]
) -> list[SourceChange]:
    """Return the effect of a resume on every source, current ones first.

    Args:
        sources: saved sources by key; one mapping for a planned run, else one per worker.
        current: key -> names of a current source.
    """

    def count_drawn(key: str) -> tuple[int, int]:
        entries = [worker[key] for worker in sources]
        return sum(e["documents"] for e in entries), sum(e["tokens"] for e in entries)

    matched = match_sources(sources[0], current)
    changes = []
    for key in current:
        saved = matched.get(key)
        if saved is None:
            changes.append(SourceChange(key, NEW))
        elif saved == key:
            changes.append(SourceChange(key, KEPT, *count_drawn(key)))
        else:
            changes.append(SourceChange(key, MOVED, *count_drawn(saved), saved_key=saved))
    gone = sorted(sources[0].keys() - set(matched.values()))
    return [*changes, *(SourceChange(key, RETAINED, *count_drawn(key)) for key in gone)]


def check_fingerprint(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    where: str = "",
    advice: str = "Use the saved values, or start a new run.",
) -> None:
    """Compare the saved configuration of a state with the current one, except for the encoder.

    StateMismatchError lists every field that differs, prefixed with ``where``.

    Example:
        >>> check_fingerprint({"seed": 0, "seq_len": 256}, {"seed": 0, "seq_len": 512})
        Traceback (most recent call last):
        energon_ext.errors.StateMismatchError: The state belongs to another configuration \
(seq_len: saved 256, now 512). Use the saved values, or start a new run.
    """
    prefix = f"{where}: " if where else ""
    differences = {
        f"{prefix}{field}": (saved.get(field), current.get(field))
        for field in {*saved, *current} - {ENCODER}
        if saved.get(field) != current.get(field)
    }
    if differences:
        raise StateMismatchError(differences, advice)
