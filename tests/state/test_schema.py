# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a state may hold at every place, by a table, and the bytes that a digest is over."""

import copy
import hashlib
import math
import struct

import numpy as np
import pytest
import torch

from energon_ext.errors import StateFormatError, StateMismatchError
from energon_ext.state.schema import STATE_CLASS, check_format, digest_of, is_count

#: Of every kind one value, and those at both ends of what an array can hold.
VALUES = {
    "zero": 0,
    "largest": 2**63 - 1,
    "too large": 2**63,
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

#: Which of the values each place of STATE takes.
TAKES = {
    "fingerprint": MAPPING,
    "fingerprint.seed": set(VALUES),
    "worker": {*COUNT, "none"},
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
    "plan.sources.web.rows.rows_before": COUNT,
    "plan.sources.web.rows.taken": {*COUNT, "none"},
    "plan.sources.web.rows.left_out": LIST,
    "plan.sources.web.rows.left_out.0": COUNT,
    "plan.sources.web.rows.next_row": COUNT,
    "plan.sources.web.rows.last": {"bool"},
    "plan.sources.book.rows": set(),
    "plan.sources.book.rows.documents": MAPPING,
    "plan.sources.book.rows.shown": COUNT,
    "plan.sources.text.rows.documents": MAPPING,
    "plan.sources.text.rows.dataset": MAPPING,
    "plan.sources.text.rows.ended": {"bool"},
    "plan.sources.text.rows.max_epochs": {*COUNT, "none"},
    "done": COUNT,
    "skipped": LIST,
    "skipped.0": LIST,
    "skipped.0.1": COUNT,
    "inside": {"none"},
    "inside.rows_per_step": COUNT,
    "inside.batch_size": COUNT,
    "inside.ranks": COUNT,
    "inside.mixture": {"text"},
    "inside.cost": {"text", "none"},
    "skip": {*COUNT, "none"},
}


def source(**rows):
    return {"rows": rows, "documents": 4, "tokens": 60, "names": ["/d/web", "web"]}


STATE = {
    "__class__": STATE_CLASS,
    "version": 2,
    "fingerprint": {"seed": 0},
    "worker": None,
    "plan": {
        "step": 2,
        "row": 16,
        "mixture": {"root": {"identity": "i", "credits": {"web": 0.5}, "tokens": 60}},
        "sources": {
            "web": source(
                kind="planned",
                documents={"tokens": 99},
                epoch=1,
                position=7,
                carried={"documents": [3, 5, 4], "starts": [0, 9, 2]},
                rows_before=3,
                taken=6,
                left_out=[8],
                next_row=2,
                last=False,
            ),
            "book": source(kind="spliced", documents={}, shown=5),
            "text": source(kind="streamed", documents={}, dataset={}, ended=False, max_epochs=2),
        },
    },
    "done": 2,
    "skipped": [[3, 5]],
    "inside": {"rows_per_step": 8, "batch_size": 2, "ranks": 2, "mixture": "m", "cost": None},
    "skip": 1,
}


def parent_of(state, place):
    *steps, last = (int(step) if step.isdigit() else step for step in place.split("."))
    for step in steps:
        state = state[step]
    return state, last


def found_at(state):
    """The place that the format of a state is refused at; None where it is not."""
    try:
        check_format(state)
    except StateFormatError as error:
        return str(error).split(": ")[0].removeprefix("state.")
    return None


@pytest.mark.parametrize("place", TAKES)
def test_every_place_takes_what_the_table_says_and_nothing_else(place):
    for name, value in VALUES.items():
        state = copy.deepcopy(STATE)
        parent, last = parent_of(state, place)
        parent[last] = value
        if name in TAKES[place]:
            assert found_at(state) is None, name
        else:
            # The elements of a list have no names.
            named = ".".join(step for step in place.split(".") if not step.isdigit())
            assert found_at(state) in (named, f"{named}.kind"), name


def test_every_mapping_of_fixed_keys_has_all_of_them_and_no_more():
    check_format(STATE)
    for place in ("plan", "inside.cost", "plan.sources.book.rows", "plan.sources.web.names"):
        state = copy.deepcopy(STATE)
        parent, last = parent_of(state, place)
        del parent[last]
        assert found_at(state) == (place.rpartition(".")[0] or "state"), place
        for added in ("another", 3):
            state = copy.deepcopy(STATE)
            parent, last = parent_of(state, place)
            parent[added] = parent[last]
            assert found_at(state) == (place.rpartition(".")[0] or "state"), place
    assert found_at({**STATE, "fingerprint": {3: "x"}}) == "fingerprint"


def test_another_class_or_version_is_told_before_anything_else():
    others = {"NoneType": None, "list": [], "None": {}, "Blend": {"__class__": "Blend"}}
    for found, other in others.items():
        words = f"dataset: saved '?{found}'?, now .* without this package's mixin"
        with pytest.raises(StateMismatchError, match=words):
            check_format(other)
    for version in (1, 3, "2", None):
        with pytest.raises(StateFormatError, match=f"version {version!r} was found, 2 is known"):
            check_format({"__class__": STATE_CLASS, "version": version})


def test_a_count_is_what_an_array_can_hold():
    assert [name for name, value in VALUES.items() if is_count(value)] == ["zero", "largest"]


@pytest.mark.parametrize(
    ("value", "content"),
    [
        (None, b"null;"),
        ([True, 2**70, 'a"'], b'[true;1180591620717411303424;"a\\"";]'),
        ([3, 5], b"[[3, 5]]"),
        ((3, 5), b"([3, 5]]"),
        ([], b"[]"),
        ({"b": {}, "a": ()}, b'{"a";(]"b";{}}'),
        ({10: b"xy", 9: 1}, b"{10;bxy9;1;}"),
        (1.5, b"f" + struct.pack("<d", 1.5)),
        (np.array([[1, 2]], "<i2"), b"int16(1, 2)" + b"\1\0\2\0"),
        (torch.tensor([7], dtype=torch.uint8), b"uint8(1,)\7"),
        (np.int8(4), b"int8()\4"),
    ],
)
def test_a_digest_is_over_the_same_bytes_in_every_version(value, content):
    """Of states that were saved years ago, worked out by hand."""
    assert digest_of(value) == hashlib.sha256(content).hexdigest()
