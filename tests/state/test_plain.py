# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""States of Energon round-trip through JSON exactly; anything else is refused."""

import copy
import enum
import json
import random
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from megatron.energon import DefaultTaskEncoder, get_train_dataset
from megatron.energon.flavors.webdataset.sample_loader import SliceState
from megatron.energon.rng import SystemRngState
from megatron.energon.savable_loader import (
    SavableDataLoaderState,
    SavableDatasetCheckpoint,
    SavableDatasetState,
)
from megatron.energon.state import FlexState

from energon_ext.errors import StateFormatError
from energon_ext.state.plain import from_plain, to_plain
from tests.state.mutations import mutations
from tests.support import config, stock_loader_for, take, write_dataset


def through_json(value):
    return from_plain(json.loads(json.dumps(to_plain(value), allow_nan=False)))


def assert_same(found, expected):
    """Check that values and types are equal at every level."""
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key, value in expected.items():
            assert_same(found[key], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected):
            assert_same(one, other)
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected, strict=True)
    elif isinstance(expected, torch.Tensor):
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
    elif hasattr(expected, "__dataclass_fields__"):
        for name in expected.__dataclass_fields__:
            assert_same(getattr(found, name), getattr(expected, name))
    else:
        assert repr(found) == repr(expected)


ATOMS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.tuples(st.integers(), st.text()) | st.just("__type__")


@given(
    st.recursive(
        ATOMS,
        lambda inner: (
            st.lists(inner)
            | st.lists(inner).map(tuple)
            | st.dictionaries(KEYS, inner)
            | st.dictionaries(KEYS, inner).map(FlexState)
            | st.builds(SliceState, index=inner, current=inner)
        ),
        max_leaves=20,
    )
)
def test_containers_round_trip_with_their_types(value):
    assert_same(through_json(value), value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(624, dtype=np.uint32),
        np.array([[1.5, -2.0], [0.0, np.inf]], order="F"),
        np.array([True, False]),
        np.array([1, 2**40], dtype=">i8"),
        np.array(7, dtype=np.int16),
        np.zeros((0, 3), dtype=np.float32),
        np.float64(0.1),
        np.bool_(True),
        np.uint8(255),
        torch.arange(6).view(2, 3).t(),
        torch.tensor(2.5),
        torch.zeros(0, 3, dtype=torch.bool),
        torch.arange(5, dtype=torch.uint8),
    ],
)
def test_arrays_scalars_and_tensors_round_trip(array):
    found = through_json([array])[0]
    assert_same(found, array)
    if not isinstance(array, np.generic):
        found[...] = 0  # numpy and torch need writable states


def test_random_states_of_a_process_round_trip():
    state = SystemRngState(
        torch=torch.get_rng_state(), numpy=np.random.get_state(), random=random.getstate()
    )
    found = through_json(state)
    assert_same(found, state)
    random.setstate(found.random)
    np.random.set_state(found.numpy)
    torch.set_rng_state(found.torch)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stock_loader_resumes_from_its_state_as_json(workers, tmp_path):
    write_dataset(tmp_path / "set", [f"document {index}" for index in range(120)])

    def new_loader():
        dataset = get_train_dataset(
            tmp_path / "set",
            worker_config=config(num_workers=workers),
            batch_size=2,
            shuffle_buffer_size=20,
            max_samples_per_sequence=10,
            task_encoder=DefaultTaskEncoder(),
        )
        return stock_loader_for(dataset)

    loader = new_loader()
    take(loader, 7)
    state = copy.deepcopy(loader.save_state_rank())
    expected = [batch.text for batch in take(loader, 40)]
    found = through_json(state)
    assert_same(found, state)
    resumed = new_loader()
    resumed.restore_state_rank(found)
    assert [batch.text for batch in take(resumed, 40)] == expected


class Color(enum.IntEnum):
    RED = 1


class Words(list):
    pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (object(), "builtins.object"),
        (Path("/data"), "PosixPath"),
        (Color.RED, "Color"),
        (Words(), "Words"),
        (OrderedDict(), "collections.OrderedDict"),
        ({1, 2}, "builtins.set"),
        (bytearray(b"x"), "builtins.bytearray"),
        (np.array([object()]), "an array of object"),
        (np.array(["text"]), "an array of <U4"),
        (np.str_("text"), "an array of <U4"),
        (torch.ones(2, dtype=torch.bfloat16), "bfloat16"),
        (torch.nn.Parameter(torch.ones(2)), "torch.nn.parameter.Parameter"),
        (lambda: 0, "builtins.function"),
    ],
)
def test_any_other_type_is_refused_by_name(value, name):
    with pytest.raises(StateFormatError, match=f"A data state contains .*{name}"):
        to_plain({"deep": [(value,)]})


def tagged(name, value):
    return {"__type__": name, "value": value}


def nested(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        tagged("object", 1),
        tagged(["tuple"], 1),
        tagged("bytes", "not base 64!"),
        tagged("tuple", 7),
        tagged("dict", [[[1], 2]]),  # not a key of a mapping
        tagged("SliceState", {"index": 1}),
        tagged("SliceState", {"index": 1, "current": 2, "more": 3}),
        tagged("SliceState", 1),
        tagged("ndarray", ["O", [1], "QUFBQUFBQUE="]),  # an address
        tagged("ndarray", ["<U1", [1], "QUFBQQ=="]),
        tagged("ndarray", ["<f8", [2**40], "AAAAAAAA+D8="]),
        tagged("ndarray", ["<f8", [0], "AAAAAAAA+D8="]),
        tagged("ndarray", ["i4,i4", [1], "AAAAAAAA+D8="]),
        tagged("Tensor", [1, 2]),
        tagged("generic", 5),
        {"__type__": "tuple"},
        {1: 2},
        OrderedDict(),
        Path("/data"),
        nested(1000),
    ],
)
def test_unreadable_states_are_refused_in_one_line(value):
    with pytest.raises(StateFormatError, match="damaged") as caught:
        from_plain([value])
    assert "\n" not in str(caught.value)


def test_exponentially_nested_lists_are_refused_early():
    """2**50 values, as a pickle of a few hundred bytes can contain."""
    value = [0]
    for _ in range(50):
        value = [value, value]
    with pytest.raises(StateFormatError, match="larger than any state"):
        from_plain(value, max_values=1000)
    assert from_plain([1, 2], max_values=3) == [1, 2]


def test_a_mutated_state_is_either_read_or_refused():
    slices = [SliceState(index=1, current=2)]
    inner = SavableDatasetState(
        rng=SystemRngState(torch=torch.arange(3), numpy=("MT", np.arange(4)), random=(3, (1,))),
        dataset_state=FlexState(slices=slices, key=("a", 1), raw=b"x"),
        sample_index=3,
    )
    state = SavableDataLoaderState(
        worker_states=[SavableDatasetCheckpoint(state=inner, offset=0)],
        next_worker_id=0,
        micro_batch_size=2,
    )
    refused = 0
    for _, mutated in mutations(to_plain(state), 400, seed=0):
        try:
            from_plain(mutated)
        except StateFormatError:
            refused += 1
    assert refused > 50
