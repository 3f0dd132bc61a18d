# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Match the sources of a saved state with the current configuration.

A source in both continues where it was; one that is only in the configuration is new; the state of
one that is only in the state is *retained*: kept, unchanged, in every later save, for when the
source returns.
"""

from dataclasses import asdict, dataclass
from typing import Any, Mapping, NamedTuple, Sequence

from energon_ext.errors import StateMismatchError

KEPT, MOVED, NEW, RETAINED = "kept", "moved", "new", "retained"

#: The field for the class that made the samples; a renamed class is logged, not rejected.
ENCODER = "task_encoder"


class SourceNames(NamedTuple):
    """By which the state of a source is found where its key has changed.

    ``absolute_key`` has absolute paths, and stays when a metadataset moves alone; ``shuffle_key``
    names the order that it is read in, and stays when all the data moves.
    """

    absolute_key: str = ""
    shuffle_key: str = ""


@dataclass(frozen=True)
class SourceChange:
    """The effect of a resume on one source.

    Attributes:
        key: of the source now; of the state where it is retained.
        change: ``kept``, ``moved`` (it continues under another key), ``new`` or ``retained``.
        documents, tokens: drawn from it so far, over the known workers.
        saved_key: where it was moved, its key in the state.
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

    A source is known by its key; where no key matches, by its absolute path, as long as that does
    not change the order it is read in.

    Args:
        saved: key -> state of a source, with its ``names``.
        current: key -> names of a current source.

    Returns:
        Current key -> key in the state, of every source in the state.

    Example:
        >>> saved = {"data/web": {"names": ["/data/web", "web"]}}
        >>> current = {"../data/web": SourceNames("/data/web", "web"), "code": SourceNames()}
        >>> match_sources(saved, current)
        {'../data/web': 'data/web'}
    """
    matched = {key: key for key in current if key in saved}
    unclaimed = {tuple(entry["names"]): key for key, entry in saved.items() if key not in matched}
    for key, names in current.items():
        if key not in matched and any(names) and tuple(names) in unclaimed:
            matched[key] = unclaimed.pop(tuple(names))
    return matched


def compare_sources(
    sources: Sequence[Mapping[str, Any]], current: Mapping[str, SourceNames]
) -> list[SourceChange]:
    """The effect of a resume on every source, current ones first.

    Args:
        sources: those in a state, by key: of a planned run, or of all workers.
        current: key -> names of a current source.
    """

    def drawn(key: str) -> tuple[int, int]:
        entries = [worker[key] for worker in sources]
        return sum(e["documents"] for e in entries), sum(e["tokens"] for e in entries)

    matched = match_sources(sources[0], current)
    changes = []
    for key in current:
        saved = matched.get(key)
        if saved is None:
            changes.append(SourceChange(key, NEW))
        elif saved == key:
            changes.append(SourceChange(key, KEPT, *drawn(key)))
        else:
            changes.append(SourceChange(key, MOVED, *drawn(saved), saved_key=saved))
    gone = sorted(sources[0].keys() - set(matched.values()))
    return [*changes, *(SourceChange(key, RETAINED, *drawn(key)) for key in gone)]


def check_fingerprint(
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    where: str = "",
    advice: str = "Use the saved values, or start a new run.",
) -> None:
    """Compare what a state was saved under with what it is restored under, but for the encoder.

    StateMismatchError lists every field that differs, each after ``where``.

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
