# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Batches of any class in a Megatron-LM launch script: drawn, evaluated, resumed and logged."""

import functools
import json
import sys

import pytest
import torch
from megatron.energon import Cooker, DefaultTaskEncoder, stateless
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from energon_ext import ConfigError, DynamicBlendMixin
from energon_ext.megatron import train_valid_test_dataloaders_provider
from energon_ext.megatron.lm.log import DataLog
from energon_ext.plan.lookup import find_blend
from tests import support
from tests.megatron.test_megatron_lm import (
    launch_arguments,
    pretend_megatron_lm,
    save_as_megatron_does,
)
from tests.samples.vision import Captioned, PackedCaptions, PlannedCaptions, cook, write_images


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    write_images(folder / "photos", 50)
    write_images(folder / "charts", 30)
    parts = [
        {"path": "./photos", "split_part": "train"},
        {"path": "./charts", "split_part": "train"},
    ]
    splits = {name: {"blend": parts} for name in ("train", "val")}
    content = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset", "splits": splits}
    path = folder / "mix.yaml"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def launch(images, tmp_path, monkeypatch, one_rank):
    args = launch_arguments(images, str(tmp_path))
    args.__dict__.update(eval_iters=1, energon_run_dir=None, tensorboard_log_interval=1)
    pretend_megatron_lm(args, functools.partial(monkeypatch.setitem, sys.modules))
    return args


def provide(encoder, **options):
    loaders = train_valid_test_dataloaders_provider([0, 0, 0], task_encoder=encoder, **options)
    support._open_loaders.extend(loader for loader in loaders if loader is not None)
    return loaders[:2]


class StreamedCaptions(PlannedCaptions):
    """Draws, and validates, by Energon's own loaders."""

    plan_samples = False


@pytest.mark.parametrize(
    ("encoder", "workers"), [(PlannedCaptions, 0), (PackedCaptions, 0), (StreamedCaptions, 1)]
)
def test_batches_of_any_class_are_drawn_evaluated_and_resumed(launch, encoder, workers):
    """Lists of samples, and of packed samples."""
    launch.num_workers = workers
    training, validation = provide(encoder())
    for _ in range(8):
        next(training)
    save_as_megatron_does(training, launch, iteration=1)
    expected = [next(training) for _ in range(8)]
    evaluated = [next(validation) for _ in range(8)]
    assert all(isinstance(batch, list) for batch in (*expected, *evaluated))
    launch.iteration = 1
    resumed, validation_again = provide(encoder())
    assert [next(resumed) for _ in range(8)] == expected
    assert [next(validation_again) for _ in range(8)] == evaluated


def test_every_evaluation_of_any_batch_is_the_same_and_sources_take_turns(launch):
    _, validation = provide(PlannedCaptions())
    first = [next(validation) for _ in range(8)]
    assert [next(validation) for _ in range(8)] == first
    # One sample a batch, in order, from each source in turn.
    assert [number for ((_, number, *_),) in first] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_a_file_of_figures_needs_batches_that_can_be_counted(launch, tmp_path):
    training = sys.modules["megatron.training"]
    training.get_tensorboard_writer = training.get_wandb_writer = lambda: None
    loader, _ = provide(PlannedCaptions())
    launch.energon_run_dir = str(tmp_path / "run")
    DataLog(loader, launch)
    with pytest.raises(
        ConfigError, match="--energon-run-dir: .* `batch` returned a list; return a"
    ):
        next(loader)


def test_boards_show_the_planned_shares_of_batches_that_cannot_be_counted(launch, tmp_path, caplog):
    writer = SummaryWriter(tmp_path / "boards")
    training = sys.modules["megatron.training"]
    training.get_tensorboard_writer, training.get_wandb_writer = lambda: writer, lambda: None
    loader, _ = provide(PlannedCaptions())
    log = DataLog(loader, launch)
    for iteration in (1, 2):
        for _ in range(launch.global_batch_size):
            next(loader)
        log.step({"lm loss": torch.tensor(2.5)}, iteration)
    writer.close()
    assert caplog.text.count("batches are no PackedBatch, so tokens") == 1
    boards = EventAccumulator(str(tmp_path / "boards")).Reload()
    keys = find_blend(loader.loader).keys
    assert set(boards.Tags()["scalars"]) == {f"data/planned_share/{key}" for key in keys}
    for key in keys:
        assert [each.value for each in boards.Scalars(f"data/planned_share/{key}")] == [0.5, 0.5]


class Pictures(DynamicBlendMixin, DefaultTaskEncoder):
    """Needs images of PIL, but sets no decoder."""

    cookers = [Cooker(cook, has_subflavors={"caption": True})]

    @stateless
    def encode_sample(self, sample: Captioned):
        return [image.size for image in sample.images]

    @stateless
    def batch(self, samples):
        return samples


def test_options_of_energon_reach_both_datasets(launch):
    training, validation = provide(Pictures(), image_decode="pilrgb")
    for loader in (training, validation):
        samples = [sample for _ in range(8) for sample in next(loader)]
        sizes = [size for sample in samples for size in sample]
        assert sizes and all(width == 6 for width, _ in sizes)
    with pytest.raises(ConfigError, match="get_train_dataset: no option 'image_decoder'"):
        provide(Pictures(), image_decoder="pilrgb")
    with pytest.raises(ConfigError, match="batch_size follows from Megatron-LM's arguments"):
        provide(Pictures(), batch_size=2)


def test_an_option_for_balance_needs_an_encoder_with_a_cost(launch):
    launch.energon_balance = "attention"
    with pytest.raises(
        ConfigError, match="--energon-balance: your own PackedCaptions has no `cost`"
    ):
        provide(PackedCaptions())


def test_a_validation_source_without_a_batch_for_a_rank_is_named(launch, images, tmp_path):
    path = images.parent / "few.yaml"
    content = json.loads(images.read_text())
    few = {"path": "./photos", "split_part": "train", "subset": {"range": [0, 0]}}
    content["splits"]["val"] = few
    path.write_text(json.dumps(content))
    launch.data_path = [str(path)]
    with pytest.raises(ConfigError, match="no batch for data-parallel rank 0 of 1"):
        next(provide(PlannedCaptions())[1])
