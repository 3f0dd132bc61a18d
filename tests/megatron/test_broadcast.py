# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Batches of a user's class on real ranks: every field arrives, or the batch is refused."""

import dataclasses
import datetime
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from energon_ext import ConfigError, PackedBatch
from energon_ext.errors import SampleError
from energon_ext.megatron import (
    create_broadcast_groups,
    get_batch,
    slice_for_context_parallel,
)
from tests.megatron.pretend_gpu import PretendGpu
from tests.megatron.small_gpt import model_parallel, synthetic_batch
from tests.megatron.small_training import run_ranks
from tests.megatron.test_context_parallel import LENGTHS, aligned_batch, slow_positions


@dataclass
class Pictures(PackedBatch):
    """A batch with more tensors of more types than a buffer of tokens has, and other values."""

    whole_fields = ("pixels", "shape", "angle", "tiles", "by_name")

    pixels: torch.Tensor | None = None
    shape: torch.Tensor | None = None
    angle: torch.Tensor | None = None
    is_picture: torch.Tensor | None = None
    tiles: list[torch.Tensor] = dataclasses.field(default_factory=list)
    by_name: dict[str, Any] = dataclasses.field(default_factory=dict)
    names: tuple[str, ...] = ()
    notes: Any = None
    size: int = dataclasses.field(default=0, init=False)


def pictures(seed, whole=None):
    """Return a batch with pictures, from a batch without."""
    whole = synthetic_batch(seed) if whole is None else whole
    values = torch.randn(3, 2, 5, generator=torch.Generator().manual_seed(seed))
    batch = Pictures(
        **{field.name: getattr(whole, field.name) for field in dataclasses.fields(whole)},
        pixels=values.bfloat16().permute(2, 0, 1),  # not contiguous
        shape=torch.tensor([[2, 5], [300 + seed, 1]], dtype=torch.int16),
        angle=torch.tensor(0.5 - seed, dtype=torch.complex128),
        is_picture=whole.tokens % 3 == 0,
        tiles=[
            values[0],
            values[1, :, :3] > 0,
            torch.zeros((seed == 1) * 3000, 4, dtype=torch.int8),
        ],
        by_name={"left": values[2], "kind": ("a", 1.5, None)},
        names=("first", "sécond"),
        notes=[1, True, None, {"tensor": [2.0, ()], 3: np.arange(seed + 2)}],
    )
    batch.size = seed + 7  # no argument of the constructor
    return batch


def described(value):
    """Return a value as JSON that tells types apart."""
    if isinstance(value, torch.Tensor):
        return ["tensor", str(value.dtype), [*value.shape], str(value.tolist())]
    if isinstance(value, np.ndarray):
        return ["array", str(value.dtype), value.tolist()]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(described, value)]
    if isinstance(value, dict):
        return ["dict", *([key, described(each)] for key, each in value.items())]
    return [type(value).__name__, value]


def fields_of(batch):
    return {
        field.name: described(getattr(batch, field.name)) for field in dataclasses.fields(batch)
    }


LAYOUTS = {
    "tensor parallel": {"tensor_model_parallel_size": 2},
    "pipeline parallel": {"pipeline_model_parallel_size": 2},
    "context parallel": {"context_parallel_size": 2},
}


def draw_all(data_iterator, count=3, **options):
    """Draw a few batches; messages grow and shrink."""
    found = []
    for _ in range(count):
        batch = get_batch(data_iterator, batch_class=Pictures, **options)
        assert isinstance(batch, Pictures)
        found.append(fields_of(batch))
    return found


def loads(batches):
    return iter(batches) if parallel_state.get_tensor_model_parallel_rank() == 0 else None


def batch_of_layout(seed, sizes):
    aligned = "context_parallel_size" in sizes
    return pictures(seed, aligned_batch(LENGTHS, 2, seed) if aligned else None)


def batches_of_ranks():
    found = {}
    for layout, sizes in LAYOUTS.items():
        with model_parallel(**sizes):
            batches = [batch_of_layout(seed, sizes) for seed in range(3)]
            found[layout] = draw_all(loads(batches))
    found["errors"] = errors_of_ranks()
    return found


def errors_of_ranks():
    """Return what each rank raises for batches that cannot travel, and for a missing group."""
    odd = {name: pictures(0) for name in ("code", "attribute", "class", "no batch")}
    odd["code"].notes = [lambda: None]
    odd["attribute"].caption = "set without a field"
    odd["no batch"] = {"tokens": torch.arange(3)}
    errors = {}
    with model_parallel(tensor_model_parallel_size=2):
        for name, batch in odd.items():
            expected = {} if name == "class" else {"batch_class": Pictures}
            errors[name] = error_of(lambda: get_batch(loads([batch]), **expected))  # noqa: B023
        draw_all(loads([pictures(0)]), count=1)  # the ranks are still together
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    errors["no group"] = error_of(lambda: get_batch(loads([pictures(0)]), batch_class=Pictures))
    parallel_state.destroy_model_parallel()
    return errors


def error_of(function):
    try:
        function()
    except (ConfigError, SampleError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def virtual_stages():
    """Two virtual stages take six micro-batches, the second one two micro-batches later."""
    batches = [pictures(seed) for seed in range(6)]
    own = [loads(batches), loads(batches)]
    order = [0, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 1]
    with PretendGpu() as counts:
        taken = [get_batch(own[s], batch_class=Pictures, vp_stage=s) for s in order]
    first, second = ([b for s, b in zip(order, taken) if s == stage] for stage in (0, 1))
    assert not any(next(iterator or iter(()), None) for iterator in own)
    other = [loads(batches), loads(batches[1:])]
    get_batch(other[0], batch_class=Pictures, vp_stage=0)
    return {
        "taken": [fields_of(batch) for batch in first],
        "is one copy": [a is b for a, b in zip(first, second)],
        "messages": counts.collectives["c10d::broadcast_"],
        "error": error_of(lambda: get_batch(other[1], batch_class=Pictures, vp_stage=1)),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run_ranks(2, batches_of_ranks, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("layout", ["tensor parallel", "pipeline parallel"])
def test_every_field_of_a_users_batch_reaches_every_rank(layout, found):
    expected = [fields_of(pictures(seed)) for seed in range(3)]
    for rank in found:
        assert rank[layout] == expected


def test_context_parallel_ranks_have_whole_fields_whole_and_others_at_their_positions(found):
    for rank, slices in enumerate(each["context parallel"] for each in found):
        for seed, fields in enumerate(slices):
            whole = batch_of_layout(seed, LAYOUTS["context parallel"])
            held = slow_positions(whole.cu_seqlens_padded.tolist(), 2, rank)
            for name in ("is_picture", "tokens", "log_probs"):
                assert fields[name] == described(getattr(whole, name)[held])
            for name in (*Pictures.whole_fields, "names", "notes", "size", "sources"):
                assert fields[name] == described(getattr(whole, name))
            assert fields["whole_length"] == ["int", whole.num_tokens]


REFUSED = {
    "code": r"Pictures: a field cannot be pickled for the other ranks \(.*lambda",
    "attribute": r"Pictures\.caption: an attribute that is no field .* declare it in a dataclass",
    "class": r"class Pictures was drawn, but PackedBatch is expected; .* batch_class=Pictures",
    "no batch": r"a dict was drawn; let the task encoder's `batch` return a PackedBatch",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_travel_is_refused_by_name_on_the_rank_that_drew_it(name, found):
    drew, waited = (each["errors"][name] for each in found)
    with pytest.raises(AssertionError, match=f"^ConfigError: .*{REFUSED[name]}"):
        raise AssertionError(drew)
    assert waited == "SampleError: Rank 0 failed to draw a batch; see its own error."


def test_ranks_without_groups_for_batches_are_told_to_create_them(found):
    for each in found:
        assert (
            "call energon_ext.megatron.create_broadcast_groups() on" in each["errors"]["no group"]
        )


@dataclass
class Album(PackedBatch):
    pixels: Any = None


@pytest.mark.parametrize(
    ("pixels", "found"), [(torch.zeros(3, 2), r"\[3, 2\]"), ([torch.zeros(36)], "list")]
)
def test_context_parallelism_refuses_what_it_cannot_cut(pixels, found):
    values = vars(aligned_batch(LENGTHS, 2))
    with pytest.raises(ConfigError, match=rf"Album\.pixels: {found} found.*\(\"pixels\",\)"):
        slice_for_context_parallel(Album(**values, pixels=pixels), 2, 0)


def four_ranks():
    """Two tensor-parallel groups; first, one rank of each creates a group that others do not."""
    if (rank := dist.get_rank()) % 2:
        dist.new_group([rank], use_local_synchronization=True)
    found = {}
    sizes = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
    with model_parallel(tensor_model_parallel_size=2, **sizes):
        found["virtual stages"] = virtual_stages()
    with model_parallel(tensor_model_parallel_size=2):
        replica = parallel_state.get_data_parallel_rank()
        found["drawn"] = draw_all(loads([pictures(10 * replica)]), count=1)
        create_broadcast_groups(datetime.timedelta(seconds=1))
        store = dist.distributed_c10d._get_default_store()
        if parallel_state.get_tensor_model_parallel_rank():
            with pytest.raises(RuntimeError, match="(?i)timed out"):
                get_batch(None)
            store.set(f"gave up {replica}", "")
        else:
            store.wait([f"gave up {replica}"])
    return found


@pytest.fixture(scope="module")
def found_by_four(tmp_path_factory):
    return run_ranks(4, four_ranks, tmp_path_factory.mktemp("four"))


def test_all_ranks_create_all_groups_with_the_timeout_of_the_run(found_by_four):
    for rank, found in enumerate(found_by_four):
        assert found["drawn"] == [fields_of(pictures(10 * (rank // 2)))]


def test_virtual_stages_draw_send_and_copy_each_micro_batch_once(found_by_four):
    for rank, each in enumerate(found_by_four):
        found = each["virtual stages"]
        assert found["taken"] == [fields_of(pictures(seed)) for seed in range(6)]
        assert found["is one copy"] == [True] * 6
        assert found["messages"] == 6 + 1  # the second batch is longer than a first message
        drew = rank % 2 == 0
        assert ("stage 1 drew a batch that differs" in (found["error"] or "")) == drew
