# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""An outline of everything that all ranks of a run must compute alike, in parts.

No part contains a path by which ranks may differ: nodes may have their data in different folders.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

from energon_ext.plan.blend import Blend
from energon_ext.plan.cursor import save_cursor
from energon_ext.plan.run import Run
from energon_ext.plan.source import Source
from energon_ext.state.match import ENCODER
from energon_ext.state.schema import digest_of
from energon_ext.tokens.documents import FileFacts

#: The parts, in the order in which differences are told, and what to do about a difference.
ADVICE = {
    "versions": "install one version of each package on all nodes",
    "settings": "start all ranks with the same arguments and the same metadataset",
    "mix": "start all ranks with the same metadataset",
    "data": "copy the data again, so that all nodes see the same files",
    "cursor": "restore the same save on all ranks",
}

#: Differences of a part that are listed, and the characters of a value.
_MOST_LISTED, _MOST_CHARACTERS = 3, 40

#: Files that a rank describes to another one: torch's store takes messages of 8 MiB.
_MOST_FILES = 10_000


def versions() -> dict[str, str]:
    """Return the versions of the packages that decide what a rank reads."""
    found = {"energon_ext": str(sys.modules[__name__.partition(".")[0]].__version__)}
    try:
        found["megatron-energon"] = metadata.version("megatron-energon")
    except metadata.PackageNotFoundError:  # a checkout without an installation
        found["megatron-energon"] = "unknown"
    return found


class Outline:
    """The parts of one rank.

    Args:
        blend: what it reads.
        settings, place: further settings, and the place in the run, of what reads the blend.
    """

    def __init__(
        self, blend: Blend, settings: Mapping[str, Any] = {}, place: Mapping[str, Any] = {}
    ):
        self.sources = [*blend.sources.values()]
        self._parts: dict[str, dict[str, Any]] = {
            "versions": versions(),
            "settings": {**_settings_of(blend), **settings},
            "mix": _mix_of(blend),
            "cursor": {**_cursor_of(blend), **place},
        }

    @functools.cached_property
    def parts(self) -> dict[str, dict[str, Any]]:
        """All parts; that of the data has a digest of each source."""
        digests = {f"source {n}": _digest_of_source(each) for n, each in enumerate(self.sources)}
        parts = {name: digests if name == "data" else self._parts[name] for name in ADVICE}
        return _as_sent(parts)

    def summary(self) -> dict[str, Any]:
        """Return the versions, and a digest of each other part."""
        digests = {name: digest_of(part)[:16] for name, part in self.parts.items()}
        return {**digests, "versions": self.parts["versions"]}

    def source(self, number: int) -> dict[str, Any]:
        """Return what the data of a source is known by, as JSON values."""
        source = self.sources[number]
        files = source.describe_files()[:_MOST_FILES]
        return _as_sent({"key": source.key, "facts": _facts_of(source), "files": files})


def _as_sent(values: dict[str, Any]) -> dict[str, Any]:
    """Return JSON values as another rank receives them, without tuples."""
    sent: dict[str, Any] = json.loads(json.dumps(values))
    return sent


def _settings_of(blend: Blend) -> dict[str, Any]:
    """Return the settings of a run that are not those of a source."""
    topology, clock = blend.topology, blend.clock
    settings: dict[str, Any] = {
        **{name: value for name, value in blend.fingerprint.items() if name != ENCODER},
        "rows_per_step": topology.rows_per_step,
        "batch_size": topology.batch_rows,
        "data-parallel ranks": topology.ranks,
        "schedule_axis": clock.axis.counted,
        "skip": [list(each) for each in clock.skip],
        **({"row_tokens": clock.rows.to_json()} if clock.rows else {}),
    }
    if isinstance(blend, Run):
        options = blend.options
        settings["cost"] = blend.step_settings["cost"]
        settings["contexts"] = blend.step_settings.get("contexts")
        settings["virtual_epoch_length"] = options.pass_batches
        settings["repeat"] = [options.repeats, options.restarts, blend.spec.pads]
    else:
        settings.pop("rank", None)  # ranks that stream read different samples
    return settings


def _mix_of(blend: Blend) -> dict[str, Any]:
    names = [source.shuffle_name for source in blend.sources.values()]
    weights = blend.tree.map(lambda key: blend.sources[key].shuffle_name)
    assert weights is not None, "a blend has sources"
    factors = {
        blend.sources[key].shuffle_name: w.to_json() for key, w in blend.loss_weights.items()
    }
    digest = digest_of([weights.to_json(), *([factors] if factors else [])])[:16]
    return {"sources": names, "weights": digest}


def _cursor_of(blend: Blend) -> dict[str, Any]:
    """Return the place of a planned run; ranks that stream have places of their own."""
    if not isinstance(blend, Run):
        return {}
    state = save_cursor(blend)
    plan = state["plan"]
    sources = [[plan["sources"][key][name] for name in _OF_SOURCE] for key in blend.keys]
    weights = sorted(used["digest"] for used in state["weights"].values())
    credits_ = [[*node["credits"].values()] for node in plan["mixture"].values()]
    return {
        "step": plan["step"],
        "row": plan["row"],
        "rows read": state["read"],
        "rows of the step": state["done"],
        "state": digest_of([sources, weights, credits_, state["skipped"]])[:16],
    }


#: Fields of the state of a source that are no names.
_OF_SOURCE = ("rows", "documents", "tokens")


def _digest_of_source(source: Source) -> str:
    facts = [file.facts for file in source.describe_files()]
    return digest_of([source.identity(), facts])[:16]


def _facts_of(source: Source) -> dict[str, Any]:
    """Return the identity of a source as fields with names."""
    identity = source.identity()[1:]
    known = [each for each in identity if isinstance(each, Mapping)]
    rest = [each for each in identity if not isinstance(each, Mapping)]
    return {"kind": rest, **{name: value for each in known for name, value in each.items()}}


# Differences ------------------------------------------------------------------------------------


def differing_parts(first: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the parts that differ between two ranks; the cursor follows from the others."""
    parts = [name for name in ADVICE if first[name] != other[name]]
    return [name for name in parts if name != "cursor"] or parts


def list_differences(
    first: Mapping[str, Any], other: Mapping[str, Any], names: tuple[str, str]
) -> str:
    """List the fields that differ between two ranks, as part of a sentence.

    Example:
        >>> list_differences({"seed": 1, "rows": 8}, {"seed": 2, "rows": 8}, ("here", "there"))
        'seed 1 here, 2 there'
    """
    own, others = _flatten(first), _flatten(other)
    found = [
        f"{field} {_show(own.get(field))} {names[0]}, {_show(others.get(field))} {names[1]}"
        for field in dict.fromkeys([*own, *others])
        if own.get(field) != others.get(field)
    ]
    return _join(found)


def _flatten(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of mappings in a mapping beside its own."""
    flat: dict[str, Any] = {}
    for name, value in fields.items():
        inner = _flatten(value) if isinstance(value, Mapping) else {"": value}
        flat |= {f"{name}.{key}" if key else name: each for key, each in inner.items()}
    return flat


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def _join(differences: Sequence[str]) -> str:
    more = len(differences) - _MOST_LISTED
    return "; ".join(differences[:_MOST_LISTED]) + (f"; {more} more" if more > 0 else "")


def list_sources(first: Sequence[str], other: Sequence[str], names: tuple[str, str]) -> str:
    """Name the sources that only one of two ranks has; empty if both have the same."""
    only = [(name, names[0]) for name in first if name not in other]
    only += [(name, names[1]) for name in other if name not in first]
    return _join([f"source {name} is only {where}" for name, where in only])


def first_difference(
    first: Mapping[str, Any], other: Mapping[str, Any], names: tuple[str, str]
) -> str:
    """Name the first file, or else the facts, by which a source differs between two ranks.

    Args:
        first, other: as :meth:`Outline.source` returns them.
    """
    key = first["key"]
    files = [_by_name(rank["files"]) for rank in (first, other)]
    for one, two in itertools.zip_longest(*files):
        if one != two:
            number = 0 if two in files[0] or two is None else 1
            path = files[number][two if number else one].path
            return f"{key}: {path} is only {names[number]}"
        found = [rank[one] for rank in files]
        if found[0].facts != found[1].facts:
            texts = [f"{file.facts} {where}" for file, where in zip(found, names)]
            return f"{key}: {found[0].path} has {', '.join(texts)}"
    facts = list_differences(first["facts"], other["facts"], names)
    return f"{key}: {facts}" if facts else key


def _by_name(files: Sequence[Sequence[str]]) -> dict[str, FileFacts]:
    """Return files by their paths below their common folder."""
    found = [FileFacts(*each) for each in files]
    folder = os.path.commonpath([os.path.dirname(file.path) for file in found]) if found else ""
    return {os.path.relpath(file.path, folder or "."): file for file in found}
