# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Shared memory that passes batches from readers to the loader."""

import numpy as np
import torch

from energon_ext.loader import slots
from energon_ext.loader.slots import Slots


def any_batch(number):
    """Return tensors of all kinds at odd offsets, and other objects."""
    generator = torch.Generator().manual_seed(number)
    values = torch.randn(7 + number, 3, generator=generator)
    return {
        "floats": values,
        "transposed": values.T,
        "halves": values.bfloat16(),
        "bytes": torch.arange(number + 1, dtype=torch.uint8),
        "masks": [values > 0, torch.empty(0)],
        "scalar": torch.tensor(number),
        "array": np.arange(5) * number,
        "with a gradient": values.clone().requires_grad_(),
        "names": ("a", number, None),
        "sparse": torch.eye(3).to_sparse() * number,
    }


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype
            assert found[name].shape == value.shape
            assert found[name].to_dense().equal(value.to_dense()), name
        elif name == "array":
            assert found[name].tolist() == value.tolist()
        elif name == "masks":
            assert [mask.tolist() for mask in found[name]] == [mask.tolist() for mask in value]
        else:
            assert found[name] == value


def test_a_batch_survives_the_reuse_of_its_slot():
    ring = Slots(3)
    taken = [ring.take(ring.put(number, any_batch(number))) for number in range(9)]
    for number, batch in enumerate(taken):
        assert_equal(batch, any_batch(number))


def test_every_slot_can_hold_a_batch_in_transit():
    ring = Slots(3)
    in_transit = [ring.put(number, any_batch(number)) for number in (4, 5, 6)]
    for number, batch in zip((4, 5, 6), in_transit):
        assert_equal(ring.take(batch), any_batch(number))


def test_a_taken_batch_is_writable():
    ring = Slots(2)
    batch = ring.take(ring.put(0, any_batch(0)))
    batch["floats"] += 1
    assert batch["floats"].equal(any_batch(0)["floats"] + 1)


def test_a_batch_larger_than_a_slot_arrives_too(monkeypatch):
    monkeypatch.setattr(slots, "SLOT_BYTES", 4096)
    ring = Slots(2)
    large = {"floats": torch.arange(5000.0), "array": np.arange(3), "names": "large"}
    sent = ring.put(1, large)
    assert sent.content.nbytes == 20_032 + 64  # both filled up to a multiple of 64 bytes
    found = ring.take(sent)
    assert_equal(found, large)
    assert storage_of(found["floats"]).nbytes() == 20_032
    fits = {"floats": torch.arange(1024.0)}
    sent = ring.put(0, fits)
    assert sent.content is None
    assert_equal(ring.take(sent), fits)


def storage_of(tensor):
    return tensor.untyped_storage()


def tensors_of(batch):
    plain = ("floats", "transposed", "halves", "bytes", "scalar")
    return [*(batch[name] for name in plain), *batch["masks"]]


def test_every_tensor_is_a_view_of_one_tensor_as_page_locked_memory_is_tracked_by_storage():
    """torch's allocator finds a block by its storage or first byte, not by a byte inside."""
    ring = Slots(2)
    batch = ring.take(ring.put(0, any_batch(3)))
    storages = {storage_of(each).data_ptr() for each in tensors_of(batch)}
    assert len(storages) == 1
    sparse = any_batch(3)["sparse"]  # its parts are pickled as tensors of their own
    parts = [sparse._indices(), sparse._values()]
    sizes = [each.nbytes for each in [*tensors_of(any_batch(3)), *parts]]
    assert storage_of(batch["floats"]).nbytes() == sum(-(-size // 64) * 64 for size in sizes)
    assert batch["bytes"].data_ptr() not in storages  # somewhere inside
    # An array has no storage that could be tracked, so its memory is its own.
    (first,) = storages
    place = batch["array"].ctypes.data - first
    assert not 0 <= place < storage_of(batch["floats"]).nbytes()


def test_a_tensor_that_a_batch_has_twice_arrives_once():
    ring = Slots(2)
    tensor = torch.arange(3)
    found = ring.take(ring.put(0, {"first": tensor, "again": [tensor], "other": torch.arange(3)}))
    assert found["first"] is found["again"][0]
    assert found["first"] is not found["other"]
