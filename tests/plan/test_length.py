# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The length of a dataset or loader is its batches in a pass."""

import pytest

from energon_ext import PackedTaskEncoder, get_train_dataset, get_val_datasets
from tests.plan.runs import write_numbered, write_split
from tests.support import LargeTokenizer, config, loader_for, stock_loader_for, take


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lengths")
    write_numbered(folder / "a", 50, 1000, seed=1)
    write_numbered(folder / "b", 30, 40_000, seed=2)
    return folder


def encoder(packing="bin"):
    return PackedTaskEncoder(LargeTokenizer(), 64, packing=packing)


def dataset_of(data, *, limits=(None, None), skip=(), packing="bin", batch=2, **options):
    entries = [
        {"path": path, **({} if limit is None else {"max_epochs": limit})}
        for path, limit in zip("ab", limits)
    ]
    path = write_split(data / "mix.yaml", {"blend": entries}, skip=list(skip))
    topology = {"workers": options.pop("workers", 0), "ranks": options.pop("ranks", 1)}
    return get_train_dataset(
        path,
        worker_config=config(topology["workers"], 0, topology["ranks"]),
        batch_size=batch,
        task_encoder=encoder(packing),
        **options,
    )


def validation_of(data, ranks, packing, batch, **options):
    path = write_split(data / "val.yaml", {"blend": [{"path": "a"}, {"path": "b"}]}, split="val")
    found = get_val_datasets(
        path,
        worker_config=config(0, 0, ranks),
        batch_size=batch,
        task_encoder=encoder(packing),
        **options,
    )
    return [dataset for dataset, _ in found]


@pytest.mark.parametrize("limits", [(None, None), (1, None)])
def test_an_endless_dataset_has_no_length_and_says_so(data, limits):
    dataset = dataset_of(data, limits=limits)
    for each in (dataset, loader_for(dataset), stock_loader_for(dataset)):
        with pytest.raises(TypeError, match="endless dataset has no length; .*max_epochs"):
            len(each)


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_the_length_of_a_virtual_epoch_is_its_batches(data, workers):
    """Seven batches, made a multiple of the workers."""
    loader = loader_for(dataset_of(data, workers=workers, virtual_epoch_length=7))
    assert len(loader) == len(loader.dataset) == {0: 7, 2: 8, 3: 9}[workers]
    assert len(list(loader)) == len(loader)


FINITE = [
    {"limits": (1, 2)},
    {"limits": (1, 2), "packing": "sequential", "batch": 3, "ranks": 2},
    {"limits": (1, 2), "rows_per_step": 8, "skip": [[1, 3]]},
    {"limits": (1, 1), "virtual_epoch_length": 1000},
    {"repeat": False, "ranks": 3},
    {"repeat": False, "virtual_epoch_length": 4},
]


@pytest.mark.parametrize("options", FINITE)
def test_the_length_is_the_batches_of_a_pass_and_asking_moves_nothing(data, options):
    batches = list(loader_for(dataset_of(data, **options)))
    loader = loader_for(dataset_of(data, **options))
    assert len(loader) == len(loader.dataset) == len(batches) > 3
    taken = take(loader, 3)
    state = loader.state_dict()
    assert len(loader) == len(batches) and loader.state_dict() == state
    resumed = loader_for(dataset_of(data, **options))
    resumed.load_state_dict(state)
    assert len(resumed) == len(batches)
    rest = list(resumed)
    assert [b.tokens.tolist() for b in taken + rest] == [b.tokens.tolist() for b in batches]


@pytest.mark.parametrize("workers", [0, 3])
def test_energons_loader_has_the_same_length(data, workers):
    loader = stock_loader_for(dataset_of(data, limits=(1, 1), workers=workers))
    count = len(loader)
    assert count == sum(1 for _ in loader)
    dataset = loader.dataset
    shares = [dataset.len_worker(worker) for worker in range(max(1, workers))]
    assert sum(shares) == count and max(shares) - min(shares) <= 1


@pytest.mark.parametrize("packing", ["bin", "sequential"])
@pytest.mark.parametrize(("ranks", "batch"), [(1, 1), (1, 4), (5, 2)])
def test_the_length_of_validation_is_the_batches_of_each_rank(data, packing, ranks, batch):
    for dataset in validation_of(data, ranks, packing, batch):
        loader = loader_for(dataset)
        assert [len(list(loader)) for _ in range(2)] == [len(loader)] * 2


def test_a_limit_is_the_length_of_validation_that_has_more_batches(data):
    for limit in (2, 1000):
        (whole, *_), (limited, *_) = (
            validation_of(data, 1, "bin", 4, **options) for options in ({}, {"limit": limit})
        )
        assert len(limited) == min(limit, len(whole)) == len(list(loader_for(limited)))
