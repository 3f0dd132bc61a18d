# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The endless loader, its state, and what a Megatron-LM launch script does with both."""

import argparse
import logging
import sys
import types

import pytest
import torch
from megatron.core import parallel_state

from energon_ext import (
    ConfigError,
    PackedTaskEncoder,
    StateFormatError,
    StateMismatchError,
    get_train_dataset,
)
from energon_ext.choice import find_choice
from energon_ext.megatron import (
    MegatronEnergonLoader,
    add_energon_args,
    megatron_lm,
    train_valid_test_dataloaders_provider,
)
from energon_ext.tokenizers import ByteTokenizer
from tests import support

TEXTS = ["one fish two fish", "red fish", "blue fish, black fish, old fish", "new fish"] * 10


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mix")
    support.write_dataset(folder / "a", TEXTS)
    support.write_dataset(folder / "b", [text.upper() for text in TEXTS])
    schedule = {"step": {0: 3, 5: 1}}
    return support.write_mix(folder / "mix.yaml", [("./a", schedule), ("./b", 1)])


def make_loader(mix, num_workers=0, **options):
    dataset = get_train_dataset(
        mix,
        worker_config=support.config(num_workers),
        batch_size=2,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), 32, packing_buffer_docs=8),
        shuffle_buffer_size=4,
        max_samples_per_sequence=None,
        **options,
    )
    loader = MegatronEnergonLoader(dataset, watchdog_timeout_seconds=None)
    support._open_loaders.append(loader)
    return loader


def hashes(loader, count):
    return [support.batch_hash(next(loader)) for _ in range(count)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_restored_loader_goes_on_with_the_very_next_batch(mix, num_workers):
    straight = hashes(make_loader(mix, num_workers), 12)
    first = make_loader(mix, num_workers)
    assert iter(first) is first
    assert hashes(first, 5) == straight[:5]
    state = first.save_state()
    assert hashes(first, 2) == straight[5:7]

    for _ in range(2):  # one state can be restored more than once
        second = make_loader(mix, num_workers)
        second.restore_state(state)
        assert second.next_batch_index == 5
        assert hashes(second, 3) == straight[5:8]
    assert second.next_batch_index == 8
    third = make_loader(mix, num_workers)
    third.restore_state(second.save_state())
    assert hashes(third, 4) == straight[8:12]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_from_before_the_first_batch_starts_at_the_first_batch(mix, num_workers):
    state = make_loader(mix, num_workers).save_state()
    restored = make_loader(mix, num_workers)
    restored.restore_state(state)
    assert restored.next_batch_index == 0
    assert hashes(restored, 2) == hashes(make_loader(mix, num_workers), 2)


def test_epochs_follow_each_other(mix):
    loader = make_loader(mix, virtual_epoch_length=3)
    straight = hashes(make_loader(mix), 7)
    assert hashes(loader, 7) == straight
    assert loader.next_batch_index == 7


def test_a_rank_without_batches_says_so(mix, monkeypatch):
    loader = make_loader(mix)
    monkeypatch.setattr(loader, "loader", FakeLoader([]))
    with pytest.raises(ConfigError, match="no batch for data-parallel rank 0 of 1"):
        next(loader)


class FakeLoader(list):
    worker_config = support.config()


def test_what_is_no_state_is_refused(mix):
    with pytest.raises(StateFormatError, match="is a dict, not what save_state"):
        make_loader(mix).restore_state({"step": 3})


def test_another_number_of_workers_is_refused(mix):
    loader = make_loader(mix)
    next(loader)
    with pytest.raises(StateMismatchError, match="num_workers: saved 0, now 2"):
        make_loader(mix, num_workers=2).restore_state(loader.save_state())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_loader_that_has_begun_is_not_restored(mix, num_workers):
    loader = make_loader(mix, num_workers)
    next(loader)
    with pytest.raises(ConfigError, match="before the first batch"):
        loader.restore_state(loader.save_state())


# Megatron-LM -------------------------------------------------------------------------------------


@pytest.fixture
def launch(mix, tmp_path, monkeypatch, one_rank):
    """The arguments of a Megatron-LM launch script, which the provider will find."""
    parser = add_energon_args(argparse.ArgumentParser())
    args = parser.parse_args(["--dataloader-save", str(tmp_path)])
    args.__dict__.update(
        data_path=[str(mix)],
        dataloader_type="external",
        micro_batch_size=1,
        global_batch_size=8,
        train_iters=100,
        seq_length=32,
        num_workers=0,
        seed=7,
        iteration=0,
    )
    training = types.ModuleType("megatron.training")
    training.get_args = lambda: args
    checkpointing = types.ModuleType("megatron.training.checkpointing")
    checkpointing.get_checkpoint_name = checkpoint_name
    monkeypatch.setitem(sys.modules, "megatron.training", training)
    monkeypatch.setitem(sys.modules, "megatron.training.checkpointing", checkpointing)
    return args


def checkpoint_name(folder, iteration, *, pipeline_rank, basename):
    return f"{folder}/iter_{iteration:07d}_pp{pipeline_rank}_{basename}"


def provide():
    train, valid, test = train_valid_test_dataloaders_provider([100, 0, 0])
    assert valid is None
    assert test is None
    return train


def save_as_megatron_does(loader, args, iteration):
    path = checkpoint_name(
        args.dataloader_save, iteration, pipeline_rank=0, basename="train_dataloader_dprank000.pt"
    )
    torch.save({"dataloader_state_dict": loader.save_state()}, path)


def test_the_provider_runs_on_every_rank():
    assert train_valid_test_dataloaders_provider.is_distributed is True


def test_the_provider_builds_an_endless_loader_of_one_row(launch):
    loader = provide()
    batch = next(loader).validate()
    assert batch.num_tokens == 32
    assert loader.loader.worker_config.seed_offset == 7


@pytest.mark.parametrize(
    ("counted", "knot", "first_batch", "end"),
    [("batches", 5, 5, 800), ("steps", 5, 40, 100), ("tokens", 1000, 32, 100 * 8 * 32)],
)
def test_knots_count_what_the_launch_script_says(launch, mix, counted, knot, first_batch, end):
    """8 micro-batches of 32 tokens make a step; token 1000 lies in batch 31, so 32 is the first."""
    launch.data_path = [
        str(
            support.write_mix(
                mix.parent / f"{counted}.yaml", [("./a", {"step": {0: 1, knot: 0}}), ("./b", 1)]
            )
        )
    ]
    launch.energon_schedule_axis = counted
    assert megatron_lm.schedule_axis(launch).end == end
    choice = find_choice(provide().loader)
    shares = [choice.planned_shares(index)["a:train"] for index in (first_batch - 1, first_batch)]
    assert shares == [0.5, 0]


def test_steps_are_not_counted_while_the_batch_size_ramps_up(launch):
    launch.energon_schedule_axis = "steps"
    launch.rampup_batch_size = [8, 8, 100]
    with pytest.raises(ConfigError, match="rampup"):
        provide()


def test_other_tensor_parallel_ranks_load_nothing(launch, monkeypatch):
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    assert provide() is None


def test_data_continues_from_the_state_saved_with_the_model(launch):
    loader = provide()
    hashes(loader, 3)
    save_as_megatron_does(loader, launch, iteration=3)
    expected = hashes(loader, 3)
    launch.iteration = 3
    assert hashes(provide(), 3) == expected


def test_data_can_be_loaded_from_another_folder_than_it_is_saved_to(launch, tmp_path):
    loader = provide()
    next(loader)
    save_as_megatron_does(loader, launch, iteration=1)
    launch.iteration = 1
    launch.dataloader_load, launch.dataloader_save = launch.dataloader_save, str(tmp_path / "new")
    assert hashes(provide(), 1) == hashes(loader, 1)


@pytest.mark.parametrize("folder", ["given", "not given"])
def test_missing_data_state_is_said_loudly(launch, caplog, folder):
    launch.iteration = 40
    if folder == "not given":
        launch.dataloader_save = None
    with caplog.at_level(logging.WARNING):
        loader = provide()
    assert "NO DATA STATE: the model continues from iteration 40" in caplog.text
    assert "--dataloader-load" in caplog.text
    assert loader.next_batch_index == 0


def test_bad_data_state_is_an_error_and_not_a_fresh_start(launch):
    path = checkpoint_name(
        launch.dataloader_save, 5, pipeline_rank=0, basename="train_dataloader_dprank000.pt"
    )
    launch.iteration = 5
    with open(path, "wb") as file:
        file.write(b"not a checkpoint")
    with pytest.raises(StateFormatError):
        provide()
    torch.save({"dataloader_state_dict": {"cursor": 3}}, path)
    with pytest.raises(StateFormatError, match="is a dict, not what save_state"):
        provide()
    torch.save(["something else"], path)
    with pytest.raises(StateFormatError, match="dataloader_state_dict"):
        provide()


def test_a_state_of_another_configuration_is_refused(launch):
    loader = provide()
    next(loader)
    save_as_megatron_does(loader, launch, iteration=1)
    launch.iteration, launch.seed = 1, 8
    with pytest.raises(StateMismatchError, match="seed: saved 7, now 8"):
        provide()


def test_a_state_that_only_some_ranks_have_is_refused(launch, monkeypatch):
    monkeypatch.setattr(megatron_lm, "_count_over_data_parallel", lambda here: int(here))
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: 2)
    loader = provide()
    next(loader)
    save_as_megatron_does(loader, launch, iteration=1)
    launch.iteration = 1
    with pytest.raises(StateFormatError, match="Only 1 of 2 data-parallel ranks"):
        provide()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("micro_batch_size", 4, "--micro-batch-size must be 1"),
        ("data_path", None, "--data-path must be one metadataset"),
        ("data_path", ["a", "b"], "--data-path must be one metadataset"),
        ("dataloader_type", "single", "--dataloader-type must be external"),
    ],
)
def test_launch_arguments_that_cannot_work_are_refused(launch, name, value, message):
    setattr(launch, name, value)
    with pytest.raises(ConfigError, match=message):
        provide()
