# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The values allowed at every place of a state, and the bytes that a digest covers."""

import copy
import hashlib
import math

import pytest

from energon_ext.errors import StateFormatError, StateMismatchError
from energon_ext.state.schema import (
    SEAL,
    STATE_CLASS,
    check_seal,
    digest_of,
    is_count,
    read_format,
    seal,
)

#: One value of every kind, and the limits of what an array can contain.
VALUES = {
    "zero": 0,
    "largest": 2**62,
    "too large": 2**62 + 1,
    "negative": -1,
    "bool": True,
    "float": -1.5,
    "nan": math.nan,
    "endless": math.inf,
    "text": "x",
    "bytes": b"x",
    "none": None,
    "list": [],
    "tuple": (),
    "mapping": {},
}
COUNT = {"zero", "largest"}
LIST, MAPPING = {"list", "tuple"}, {"mapping"}

#: The values that each place of STATE accepts.
ACCEPTED = {
    "spec": MAPPING,
    "spec.row_tokens": set(VALUES),
    "axis": {"text"},
    "rows_per_step": COUNT,
    "row_lengths": LIST,
    "row_lengths.0": (),
    "row_lengths.0.1": COUNT,
    "plan": set(),
    "plan.step": COUNT,
    "plan.row": COUNT,
    "plan.mixture": MAPPING,
    "plan.mixture.root.identity": {"text"},
    "plan.mixture.root.credits": MAPPING,
    "plan.mixture.root.credits.web": {"float"},
    "plan.mixture.root.tokens": COUNT,
    "plan.sources": MAPPING,
    "plan.sources.web.documents": COUNT,
    "plan.sources.web.tokens": COUNT,
    "plan.sources.web.packing": {"none"},
    "plan.sources.web.names": LIST,
    "plan.sources.web.names.1": {"text"},
    "plan.sources.web.rows": set(),
    "plan.sources.web.rows.kind": set(),
    "plan.sources.web.rows.documents": MAPPING,
    "plan.sources.web.rows.epoch": COUNT,
    "plan.sources.web.rows.position": COUNT,
    "plan.sources.web.rows.carried": set(),
    "plan.sources.web.rows.carried.documents": LIST,
    "plan.sources.web.rows.carried.documents.0": COUNT,
    "plan.sources.web.rows.carried.documents.2": COUNT,
    "plan.sources.web.rows.carried.starts.1": COUNT,
    "plan.sources.web.rows.carried.stops": {*LIST, "none"},
    "plan.sources.web.rows.carried.stops.2": COUNT,
    "plan.sources.web.rows.carried.visits": LIST,
    "plan.sources.web.rows.carried.visits.0": COUNT,
    "plan.sources.web.rows.rows_before": COUNT,
    "plan.sources.web.rows.taken": {*COUNT, "none"},
    "plan.sources.web.rows.excluded": LIST,
    "plan.sources.web.rows.excluded.0": COUNT,
    "plan.sources.web.rows.next_row": COUNT,
    "plan.sources.web.rows.last": {"bool"},
    "plan.sources.web.rows.digest": {"text"},
    "plan.sources.web.rows.pass_start": COUNT,
    "plan.sources.book.rows": set(),
    "plan.sources.book.rows.documents": MAPPING,
    "plan.sources.book.rows.next_row": COUNT,
    "plan.sources.book.rows.pass_start": COUNT,
    "data_digests": set(),
    "data_digests.0": (),
    "data_digests.0.0": COUNT,
    "data_digests.0.1": {"text"},
    "weights": MAPPING,
    "weights.live": set(),
    "weights.live.lines": COUNT,
    "weights.live.digest": {"text"},
    "done": COUNT,
    "read": COUNT,
    "skipped": LIST,
    "skipped.0": (),
    "skipped.0.1": COUNT,
    "inside": {*MAPPING, "none"},
    "inside.ranks": set(VALUES),
}


def source(**rows):
    return {"rows": rows, "documents": 4, "tokens": 60, "names": ["/d/web", "web"], "packing": None}


STATE = {
    "__class__": STATE_CLASS,
    "version": 6,
    "spec": {"row_tokens": 8},
    "axis": "steps",
    "rows_per_step": 8,
    "row_lengths": [[8, 64]],
    "data_digests": [[2, "c0ffee"]],
    "plan": {
        "step": 2,
        "row": 16,
        "mixture": {"root": {"identity": "i", "credits": {"web": 0.5}, "tokens": 60}},
        "sources": {
            "web": source(
                kind="documents",
                documents={"tokens": 99},
                epoch=1,
                position=7,
                carried={
                    "documents": [3, 5, 4],
                    "starts": [0, 9, 2],
                    "stops": [4, 9, 7],
                    "visits": [1, 0, 1],
                },
                rows_before=3,
                taken=6,
                excluded=[8],
                next_row=2,
                last=False,
                digest="c0ffee",
                pass_start=1,
            ),
            "book": source(kind="spliced", documents={}, next_row=5, pass_start=0),
        },
    },
    "weights": {"live": {"lines": 1, "digest": "c0ffee"}},
    "done": 2,
    "read": 18,
    "skipped": [[3, 5]],
    "inside": {"rows_per_step": 8, "ranks": 2},
}


def parent_of(state, place):
    *steps, last = (int(step) if step.isdigit() else step for step in place.split("."))
    for step in steps:
        state = state[step]
    return state, last


def refused_at(state):
    """Return the place at which the format of a state is refused; None if it is accepted."""
    try:
        read_format(state)
    except StateFormatError as error:
        return str(error).split(": ")[0].removeprefix("state.")
    return None


@pytest.mark.parametrize("place", ACCEPTED)
def test_every_place_accepts_only_what_the_schema_says(place):
    for name, value in VALUES.items():
        state = copy.deepcopy(STATE)
        parent, last = parent_of(state, place)
        parent[last] = value
        if name in ACCEPTED[place]:
            assert refused_at(state) is None, name
        else:
            # List elements are not named.
            named = ".".join(step for step in place.split(".") if not step.isdigit())
            assert refused_at(state) in (named, f"{named}.kind"), name


def test_fixed_mappings_have_exactly_their_keys():
    read_format(STATE)
    for place in ("plan", "axis", "plan.sources.book.rows", "plan.sources.web.names"):
        state = copy.deepcopy(STATE)
        parent, last = parent_of(state, place)
        del parent[last]
        assert refused_at(state) == (place.rpartition(".")[0] or "state"), place
        for added in ("another", 3):
            state = copy.deepcopy(STATE)
            parent, last = parent_of(state, place)
            parent[added] = parent[last]
            assert refused_at(state) == (place.rpartition(".")[0] or "state"), place
    assert refused_at({**STATE, "spec": {3: "x"}}) == "spec"


def test_a_wrong_class_or_version_is_reported_first():
    others = {"NoneType": None, "list": [], "None": {}, "Blend": {"__class__": "Blend"}}
    for found, other in others.items():
        words = f"dataset: saved '?{found}'?, now .* saved by another loader or TaskEncoder"
        with pytest.raises(StateMismatchError, match=words):
            read_format(other)
    for version in (5, 7, "6", None):
        with pytest.raises(StateFormatError, match=f"version {version!r} .* only 6 is supported"):
            read_format({"__class__": STATE_CLASS, "version": version})


def test_a_count_fits_an_array():
    assert [name for name, value in VALUES.items() if is_count(value)] == ["zero", "largest"]


def test_digests_are_stable_across_versions():
    """Digests of states saved years ago, worked out by hand."""
    state = {"b": [1, 2.0, None, True], "a": {"é": "\u0007"}}
    content = b'{"a": {"\\u00e9": "\\u0007"}, "b": [1, 2.0, null, true]}'
    assert digest_of(state) == hashlib.sha256(content).hexdigest()


def test_a_digest_distinguishes_what_json_distinguishes():
    alike = [1, 1.0, True, "1", [1], {"1": 1}, None, "null", [], {}, [[]]]
    assert len({digest_of(value) for value in alike}) == len(alike)
    endless: list = []
    endless.append(endless)
    for value in ({1}, b"1", math.nan, object(), endless):
        with pytest.raises(StateFormatError, match="contains an invalid value"):
            digest_of(value)


def test_a_sealed_state_is_returned_only_if_unchanged():
    state = {"a": [1, "b"]}
    assert check_seal(seal(state)) == state
    for changed in (state, {**seal(state), "a": [1, "c"]}, {**seal(state), SEAL: None}):
        with pytest.raises(StateFormatError, match="its digest does not match"):
            check_seal(changed)
    for other in (None, 3, "x", [], ()):
        with pytest.raises(StateFormatError, match=f"A {type(other).__name__} is not a data state"):
            check_seal(other)
