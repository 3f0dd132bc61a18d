# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a Megatron-LM launch script gets: options, loaders, their state, validation."""

import argparse
import enum
import functools
import io
import json
import logging
import pickle
import re
import sys
import time
import types
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import (
    RerunMode,
    RerunState,
    destroy_rerun_state_machine,
    get_rerun_state_machine,
    initialize_rerun_state_machine,
)
from megatron.energon import DefaultTaskEncoder, stateless

from energon_ext import ConfigError, DynamicBlendMixin, StateMismatchError
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.errors import EnergonExtError, StateFormatError
from energon_ext.megatron import (
    add_energon_args,
    forward_step,
    train_valid_test_dataloaders_provider,
)
from energon_ext.megatron.lm import provider
from energon_ext.megatron.validation import ValidationLoader
from energon_ext.plan.cost import AttentionCost
from energon_ext.plan.lookup import find_blend
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests import support
from tests.megatron.small_gpt import model_parallel, small_config, small_model
from tests.megatron.small_training import run_ranks

TEXTS = ["one fish two fish", "red fish", "blue fish, black fish, old fish", "new fish"] * 9
VALIDATION_TEXTS = ["9 fish", "99 red fish", "9 blue fish, 9 old fish", "9 new fish"]


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    """Texts as token files, with a split for validation."""
    folder = tmp_path_factory.mktemp("mix")
    encode = ByteTokenizer().encode
    for name, change in (("a", str.lower), ("b", str.upper)):
        for split, texts in (("train", TEXTS), ("val", VALIDATION_TEXTS)):
            support.write_tokens(folder / name / split, [encode(change(text)) for text in texts])
    train = [("./a/train", {"step": {0: 3, 5: 1}}), ("./b/train", 1)]
    path = support.write_mix(folder / "mix.yaml", train)
    content = json.loads(path.read_text())
    content["splits"]["val"] = {"blend": [{"path": "./a/val"}, {"path": "./b/val"}]}
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Token files, whose lengths are known."""
    folder = tmp_path_factory.mktemp("planned")
    support.write_tokens(folder / "a", [[n % 200] * (5 + n % 40) for n in range(120)])
    support.write_tokens(folder / "b", [[n % 200] * 30 for n in range(80)])
    support.write_mix(folder / "other.yaml", [("a", 1), ("b", 3)])
    return support.write_mix(folder / "mix.yaml", [("a", 3), ("b", 1)])


def launch_arguments(mix, folder):
    """The arguments of a Megatron-LM launch script."""
    args = add_energon_args(argparse.ArgumentParser()).parse_args(["--dataloader-save", folder])
    args.__dict__.update(
        data_path=[str(mix)],
        dataloader_type="external",
        micro_batch_size=1,
        global_batch_size=8,
        train_iters=100,
        eval_iters=0,
        seq_length=32,
        num_workers=0,
        seed=7,
        iteration=0,
        distributed_timeout_minutes=10,
        calculate_per_token_loss=True,
        tensor_model_parallel_size=1,
        context_parallel_size=1,
        sequence_parallel=False,
        virtual_pipeline_model_parallel_size=None,
        save=None,
        energon_packing_buffer_docs=24,  # full buffers take the time of a test, and change nothing
    )
    return args


def pretend_megatron_lm(args, set_module=sys.modules.__setitem__):
    """Stand in for what the provider asks of Megatron-LM."""
    training = types.ModuleType("megatron.training")
    training.get_args = lambda: args
    checkpointing = types.ModuleType("megatron.training.checkpointing")
    checkpointing.get_checkpoint_name = checkpoint_name
    checkpointing.maybe_save_dataloader_state = lambda train_iterator, *_: (
        train_iterator.iterable.save_state()
    )
    training.checkpointing = checkpointing
    training.training = types.ModuleType("megatron.training.training")
    training.training.train_step = lambda forward_step_func: ({}, 0)
    training.training.evaluate = training.training.train_step
    training.training.dummy_train_step = lambda data_iterator: None
    training.training.training_log = lambda loss_dict: None
    for module in (training, checkpointing, training.training):
        set_module(module.__name__, module)


def checkpoint_name(folder, iteration, *, pipeline_rank, basename, expert_rank=None):
    experts = "" if expert_rank is None else f"_{expert_rank:03d}"
    return f"{folder}/iter_{iteration:07d}/mp_rank_00_{pipeline_rank:03d}{experts}/{basename}"


@pytest.fixture
def launch(mix, tmp_path, monkeypatch, one_rank):
    """The arguments of a Megatron-LM launch script, which the provider will find."""
    args = launch_arguments(mix, str(tmp_path))
    pretend_megatron_lm(args, functools.partial(monkeypatch.setitem, sys.modules))
    return args


def provide():
    train, valid, test = train_valid_test_dataloaders_provider([100, 0, 0])
    assert valid is None
    assert test is None
    if train is not None:
        support._open_loaders.append(train)
    return train


def hashes(loader, count):
    return [support.batch_hash(next(loader)) for _ in range(count)]


def save_as_megatron_does(loader, args, iteration, rank=0, **place):
    basename = f"train_dataloader_dprank{rank:03d}.pt"
    path = checkpoint_name(
        args.dataloader_save, iteration, pipeline_rank=0, basename=basename, **place
    )
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save({"dataloader_state_dict": loader.save_state()}, path)
    return Path(path)


def test_the_provider_runs_on_every_rank():
    assert train_valid_test_dataloaders_provider.is_distributed is True


def test_the_provider_builds_an_endless_loader_of_one_row(launch):
    loader = provide()
    batch = next(loader).validate()
    assert batch.num_tokens == 32
    assert loader.loader.worker_config.seed_offset == 7


def scheduled(folder, breakpoint, **fields):
    """A mix whose first source ends at a breakpoint."""
    weights = [("./a", {"step": {0: 1, breakpoint: 0}}), ("./b", 1)]
    path = support.write_mix(folder / "scheduled.yaml", weights)
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return [str(path)]


def growing(folder):
    """A mix whose rows become longer at step 3."""
    path = support.write_mix(folder / "growing.yaml", [("./a", 3), ("./b", 1)])
    rows = {"row_tokens": {"step": {0: 16, 3: 32}}}
    path.write_text(json.dumps({**json.loads(path.read_text()), **rows}))
    return [str(path)]


@pytest.mark.parametrize(
    ("counted", "breakpoint", "first_step", "end"),
    [
        ("steps", 5, 5, 100),
        ("batches", 40, 5, 800),
        ("samples", 40, 5, 800),
        ("tokens", 1000, 4, 100 * 8 * 32),
    ],
)
def test_breakpoints_use_the_axis_of_the_metadataset(
    launch, planned, counted, breakpoint, first_step, end
):
    """8 micro-batches of 32 tokens make a step; token 1000 lies in step 3, so 4 is the first."""
    launch.data_path = scheduled(planned.parent, breakpoint, schedule_axis=counted)
    loader = provide()
    blend = find_blend(loader.loader)
    assert blend.clock.end == end
    a = blend.keys[0]
    steps = (first_step - 1, first_step)
    assert [blend.shares_at_step(step)[a] for step in steps] == [0.5, 0]
    drawn = [a in next(loader).tokens_per_source() for _ in range(8 * first_step + 8)]
    assert any(drawn[: 8 * first_step])
    assert not any(drawn[8 * first_step :])


@pytest.mark.parametrize(
    ("option", "value"), [("rampup_batch_size", [8, 8, 100]), ("step_batch_size_schedule", "0:8")]
)
def test_schedules_in_steps_are_refused_with_a_batch_size_ramp(launch, planned, option, value):
    setattr(launch, option, value)
    launch.data_path = [str(planned)]
    assert provide()  # constants count nothing
    launch.data_path = scheduled(planned.parent, 50)
    with pytest.raises(ConfigError, match="schedule_axis: steps, with --rampup-batch-size"):
        provide()
    launch.data_path = scheduled(planned.parent, 5000, schedule_axis="tokens")
    assert provide()
    launch.data_path = growing(planned.parent)
    with pytest.raises(ConfigError, match="schedule_axis: steps, with --rampup-batch-size"):
        provide()


def test_graphs_of_one_number_of_segments_are_refused_for_rows_that_grow(launch, planned):
    launch.data_path = growing(planned.parent)
    assert provide()
    launch.energon_packing_max_docs_per_bin, launch.cuda_graph_impl = 3, "local"
    with pytest.raises(ConfigError, match="row_tokens: --cuda-graph-impl local replays one number"):
        provide()


def test_the_axis_option_must_agree_with_the_metadataset(launch, planned):
    launch.energon_schedule_axis = "tokens"
    with pytest.raises(ConfigError, match=r"tokens found in the launch script, but .*counts steps"):
        provide()
    launch.data_path = scheduled(planned.parent, 5000, schedule_axis="tokens")
    assert provide()


def test_other_tensor_parallel_ranks_load_nothing(launch, monkeypatch):
    monkeypatch.setattr(parallel_state, "get_tensor_model_parallel_rank", lambda: 1)
    assert provide() is None


@pytest.mark.parametrize("expert_rank", [None, 3], ids=["latest", "until 0.18"])
def test_data_continues_from_the_state_saved_with_the_model(launch, expert_rank):
    """Megatron-core until 0.18 puts the expert-parallel rank in the name of the folder."""
    loader = provide()
    hashes(loader, 3)
    save_as_megatron_does(loader, launch, iteration=3, expert_rank=expert_rank)
    expected = hashes(loader, 3)
    launch.iteration = 3
    assert hashes(provide(), 3) == expected


@pytest.fixture
def rerun_machine():
    """Megatron's machine that runs doubtful steps again, as the training loop has made it."""
    destroy_rerun_state_machine()
    initialize_rerun_state_machine(mode=RerunMode.VALIDATE_RESULTS)
    yield get_rerun_state_machine()
    destroy_rerun_state_machine()


def test_saving_creates_the_folders_of_all_ranks(launch, tmp_path, rerun_machine):
    """Until megatron-core 0.18 Megatron-LM makes that of data-parallel rank 0 alone."""
    launch.dataloader_save = str(tmp_path / "data")
    loader = provide()
    next(loader)
    rerun_machine.current_iteration = 5
    loader.save_state()
    rerun_machine.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
    rerun_machine.current_iteration = 8  # within the eighth step
    loader.save_state()
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "iter_0000005",
        "iter_0000007",
    ]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_save_within_a_step_resumes_at_its_start(launch, planned, workers, rerun_machine):
    """Three steps of 8 batches; the third is run again elsewhere, perhaps on other workers."""
    launch.data_path = [str(planned)]
    launch.num_workers = workers
    loader = provide()
    for rerun_machine.current_iteration in (1, 2, 3):
        step = hashes(loader, 8)
    rerun_machine.state = RerunState.WILL_RERUN_FROM_CHECKPOINT
    assert loader.state_dict() == loader.save_state() == loader.save_state_rank()  # all its names
    save_as_megatron_does(loader, launch, iteration=2)
    launch.iteration = 2
    launch.num_workers = 1
    assert hashes(provide(), 8) == step


class NoClasses(pickle.Unpickler):
    """As strict as any that Megatron-Bridge reads states with, which knows Energon's classes."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"{module}.{name}")


def test_a_state_can_be_unpickled_without_any_class(launch):
    loader = provide()
    hashes(loader, 3)
    state = loader.save_state()
    assert NoClasses(io.BytesIO(pickle.dumps(state))).load() == state


def test_data_can_be_loaded_from_one_folder_and_saved_to_another(launch, tmp_path):
    loader = provide()
    next(loader)
    save_as_megatron_does(loader, launch, iteration=1)
    launch.iteration = 1
    launch.dataloader_load, launch.dataloader_save = launch.dataloader_save, str(tmp_path / "new")
    assert hashes(provide(), 1) == hashes(loader, 1)


@pytest.mark.parametrize("folder", ["given", "not given"])
def test_a_missing_data_state_is_a_loud_warning(launch, caplog, folder):
    launch.iteration = 40
    if folder == "not given":
        launch.dataloader_save = None
    with caplog.at_level(logging.WARNING):
        loader = provide()
    assert "NO DATA STATE: the model continues from iteration 40" in caplog.text
    assert "--dataloader-load" in caplog.text
    assert loader.next_batch_index == 0


def test_an_empty_dataloader_load_folder_is_an_error(launch, tmp_path):
    launch.iteration, launch.dataloader_load = 40, str(tmp_path / "elsewhere")
    with pytest.raises(StateFormatError, match="--dataloader-load .*elsewhere has no data state"):
        provide()


def test_negative_buffer_sizes_are_refused(launch):
    options = ["--energon-packing-buffer-docs=-5"]
    vars(launch).update(vars(add_energon_args(argparse.ArgumentParser()).parse_args(options)))
    with pytest.raises(ConfigError, match="packing_buffer_docs: -5 found, an integer >= "):
        provide()


@pytest.mark.parametrize(("folder", "said"), [(None, True), ("given", False)])
def test_saving_the_model_without_its_data_is_a_warning_at_startup(
    launch, caplog, tmp_path, folder, said
):
    launch.save, launch.dataloader_save = "checkpoints", folder and str(tmp_path)
    with caplog.at_level(logging.WARNING):
        provide()
    assert ("--save without --dataloader-save" in caplog.text) is said


def test_bad_data_state_is_an_error_and_not_a_fresh_start(launch):
    path = checkpoint_name(
        launch.dataloader_save, 5, pipeline_rank=0, basename="train_dataloader_dprank000.pt"
    )
    launch.iteration = 5
    Path(path).parent.mkdir(parents=True)
    with open(path, "wb") as file:
        file.write(b"not a checkpoint")
    with pytest.raises(StateFormatError):
        provide()
    torch.save({"dataloader_state_dict": {"cursor": 3}}, path)
    with pytest.raises(StateFormatError, match="differs from the saved one"):
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


def pretend_ranks(monkeypatch, world_size):
    ranks = {"rank": 0, "world_size": world_size}
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda: ranks["world_size"])
    monkeypatch.setattr(parallel_state, "get_data_parallel_rank", lambda: ranks["rank"])
    return ranks


def save_two_ranks(launch, monkeypatch, batches):
    """The states of two ranks after some batches, at iteration 5; the patched numbers of ranks."""
    ranks = pretend_ranks(monkeypatch, 2)
    paths = []
    for ranks["rank"] in (0, 1):
        loader = provide()
        hashes(loader, batches)
        paths.append(save_as_megatron_does(loader, launch, iteration=5, rank=ranks["rank"]))
    launch.iteration = 5
    return ranks, paths


def test_the_state_of_any_rank_continues_a_planned_run_on_any_number_of_ranks(
    launch, monkeypatch, planned
):
    """Three steps of 8 rows on two ranks; the fourth and fifth on one, on two, on four."""
    launch.data_path = [str(planned)]
    expected = hashes(provide(), 40)[24:]
    ranks, paths = save_two_ranks(launch, monkeypatch, batches=12)
    for lost in (0, 1):
        content = paths[lost].read_bytes()
        paths[lost].unlink()
        for ranks["world_size"], launch.num_workers in ((1, 0), (1, 3), (2, 0), (4, 0)):
            found = []
            for rank in range(ranks["world_size"]):
                ranks["rank"] = rank
                loader = provide()
                assert loader.next_batch_index == 24 // ranks["world_size"]
                assert {change.change for change in loader.changes} == {"kept"}
                found.append(hashes(loader, 16 // ranks["world_size"]))
            # In turn: a round gives a row to each rank.
            assert [row for turn in zip(*found) for row in turn] == expected
        paths[lost].write_bytes(content)


def test_token_counts_continue_after_a_resume_on_other_ranks(launch, monkeypatch, planned):
    """Three steps on two ranks, and one more on one rank of two workers."""
    launch.data_path = [str(planned)]
    ranks, paths = pretend_ranks(monkeypatch, 2), []
    drawn = Counter()
    for ranks["rank"] in (0, 1):
        loader = provide()
        for _ in range(12):
            drawn.update(next(loader).tokens_per_source())
        paths.append(save_as_megatron_does(loader, launch, iteration=3, rank=ranks["rank"]))
    launch.iteration = 3
    found = Counter()
    for ranks["rank"] in (0, 1):
        found += provide().drawn.tokens
    assert found == drawn
    ranks.update(rank=0, world_size=1)
    launch.num_workers = 2
    loader = provide()
    assert loader.drawn.tokens == drawn
    for _ in range(8):
        drawn.update(next(loader).tokens_per_source())
    assert loader.drawn.tokens == drawn


def test_a_planned_run_saved_within_a_step_needs_the_same_ranks(launch, monkeypatch, planned):
    launch.data_path = [str(planned)]
    ranks, _ = save_two_ranks(launch, monkeypatch, batches=10)
    ranks["rank"] = 0
    assert provide().next_batch_index == 10
    ranks["world_size"] = 1
    with pytest.raises(StateMismatchError, match="ranks: saved 2, now 1.*inside a step"):
        provide()


class Samples(DynamicBlendMixin, DefaultTaskEncoder):
    """Yields streamed samples one by one; they count as batches."""

    plan_samples = False

    @stateless
    def encode_sample(self, sample):
        return sample

    @stateless
    def batch(self, samples):
        row = Row([np.frombuffer(samples[0].text.encode(), np.uint8)], "text", 1)
        return BatchAssembler(32)([row], ["text"])


def test_a_streamed_run_continues_with_the_file_of_its_rank(launch, monkeypatch, tmp_path):
    support.write_dataset(tmp_path / "text", [f"fish {number}" for number in range(40)])
    launch.data_path = [str(support.write_mix(tmp_path / "text.yaml", [("text", 1)]))]
    ranks, paths = pretend_ranks(monkeypatch, 2), []

    def provide_samples():
        loader = train_valid_test_dataloaders_provider([100, 0, 0], task_encoder=Samples())[0]
        support._open_loaders.append(loader)
        return loader

    expected = []
    for ranks["rank"] in (0, 1):
        loader = provide_samples()
        hashes(loader, 4)
        paths.append(save_as_megatron_does(loader, launch, iteration=5, rank=ranks["rank"]))
        expected.append(hashes(loader, 4))
    launch.iteration = 5
    for ranks["rank"] in (0, 1):
        assert hashes(provide_samples(), 4) == expected[ranks["rank"]]
    paths[1].unlink()
    with pytest.raises(StateFormatError, match="data-parallel rank 1 at iteration 5 is missing in"):
        provide_samples()


def test_an_encoder_without_the_mixin_is_refused(launch):
    message = "Megatron-LM draws whole steps, but a DefaultTaskEncoder plans no steps; put energon"
    with pytest.raises(ConfigError, match=message):
        train_valid_test_dataloaders_provider([100, 0, 0], task_encoder=DefaultTaskEncoder())


# Two real processes -------------------------------------------------------------------------------


def outcome(args, change):
    """What a rank hears when it resumes: the next batches, or how an error begins; and when."""
    for name, value in change.items():
        setattr(args, name, value)
    start = time.monotonic()
    try:
        loader = provide()
        found = "no loader" if loader is None else [loader.next_batch_index, hashes(loader, 4)]
    except EnergonExtError as error:
        found = f"{type(error).__name__}: {error}"
    return {"found": found, "seconds": time.monotonic() - start}


def resumed_with_damage(mix, folder):
    """Every scenario of damage on these two ranks."""
    rank = torch.distributed.get_rank()
    found = {}
    for layout, sizes in {"data": {}, "tensor": {"tensor_model_parallel_size": 2}}.items():
        args = launch_arguments(mix, f"{folder}/{layout}")
        pretend_megatron_lm(args)
        with model_parallel(**sizes):
            loader, path = provide(), None
            older = None
            if loader is not None:
                hashes(loader, 4)
                path = save_as_megatron_does(loader, args, 2, loader.loader.worker_config.rank)
                older = path.read_bytes()
                hashes(loader, 4)
            args.data_path = [str(Path(mix).with_name("other.yaml"))]
            stranger, of_another_mix = provide(), None
            args.data_path = [mix]
            if stranger is not None:
                hashes(stranger, 8)
                rank_of = stranger.loader.worker_config.rank
                path = save_as_megatron_does(stranger, args, 2, rank_of)
                of_another_mix = path.read_bytes()
                path = save_as_megatron_does(loader, args, 2, loader.loader.worker_config.rank)
                found[f"{layout} expected"] = [8, hashes(loader, 4)]
            args.iteration = 2
            for name, damage in DAMAGES.items():
                torch.distributed.barrier()
                content = path and path.read_bytes()
                is_damaged = path is not None and rank == (1 if layout == "data" else 0)
                if is_damaged and damage == "removed":
                    path.unlink()
                elif is_damaged and isinstance(damage, str):
                    contents = {"older": older, "other": of_another_mix}
                    path.write_bytes(contents.get(damage, content[:1000]))
                torch.distributed.barrier()
                change = damage if is_damaged and isinstance(damage, dict) else {}
                before = dict(vars(args))
                found[f"{layout} {name}"] = outcome(args, change)
                vars(args).update(before)
                torch.distributed.barrier()
                if is_damaged:
                    path.write_bytes(content)
    return found


DAMAGES = {
    "whole": None,
    "without a file": "removed",
    "with a cut file": "cut",
    "of an older save": "older",
    "of another mix": "other",
    "of another seed": {"seed": 8},
    "with a bad argument": {"micro_batch_size": 4},
}


@pytest.fixture(scope="module")
def two_ranks(planned, tmp_path_factory):
    """What two processes under gloo hear: [rank][scenario]."""
    folder = tmp_path_factory.mktemp("two")
    work = functools.partial(resumed_with_damage, str(planned), str(folder))
    return run_ranks(2, work, folder)


def test_two_ranks_continue_from_undamaged_files(two_ranks):
    for rank in two_ranks:
        assert rank["data whole"]["found"] == rank["data expected"]
    first, second = (rank["tensor whole"]["found"] for rank in two_ranks)
    assert first == two_ranks[0]["tensor expected"]
    assert second == "no loader"


def test_one_file_is_enough_for_two_ranks_of_a_planned_run(two_ranks):
    """Rank 1 has lost its own; it takes that of rank 0."""
    for rank in two_ranks:
        assert rank["data without a file"]["found"] == rank["data expected"]


@pytest.mark.parametrize(
    ("scenario", "words"),
    [
        ("data with a cut file", "StateFormatError: .*dprank001.pt: cannot be loaded"),
        ("tensor with a cut file", "StateFormatError: .*dprank000.pt: cannot be loaded"),
        ("tensor of another seed", "StateMismatchError: .*seed: saved 7, now 8"),
        ("data of another seed", "StateMismatchError: .*seed: saved 7, now 8"),
        ("data with a bad argument", "ConfigError: .*--micro-batch-size must be 1"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_both_at_once(two_ranks, scenario, words):
    for rank in two_ranks:
        heard = rank[scenario]
        assert re.match(words, heard["found"]), heard
        assert heard["seconds"] < 30
    damaged = 1 if scenario.startswith("data ") else 0
    texts = [rank[scenario]["found"] for rank in two_ranks]
    assert f"On rank {damaged}: " in texts[1 - damaged]
    assert f"On rank {damaged}: " not in texts[damaged]


def test_files_of_different_saves_are_refused_on_both(two_ranks):
    for rank in two_ranks:
        heard = rank["data of an older save"]["found"]
        assert re.match(r"StateMismatchError: .*batches drawn: saved \[4, 8\]", heard), heard


def test_a_file_left_by_a_run_of_another_mix_is_refused_on_both(two_ranks):
    """Of as many batches: saved by more ranks before the run was begun anew with fewer."""
    for rank in two_ranks:
        heard = rank["data of another mix"]["found"]
        assert re.match(r"StateMismatchError: .*digest: saved .* use those of one", heard), heard


def test_without_any_file_both_ranks_start_over(two_ranks):
    """No state at all is a decision of the user; rank 1 has no loader here, and does not wait."""
    first, second = (rank["tensor without a file"]["found"] for rank in two_ranks)
    assert first[0] == 0
    assert second == "no loader"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("micro_batch_size", 4, "--micro-batch-size must be 1"),
        ("data_path", None, "--data-path must be one metadataset"),
        ("data_path", ["a", "b"], "--data-path must be one metadataset"),
        ("dataloader_type", "single", "--dataloader-type must be external"),
        ("full_validation", True, "--full-validation must be left out"),
        ("multiple_validation_sets", True, "--multiple-validation-sets must be left out"),
        ("validation_set_names", ["x"], "--validation-set-names must be left out"),
        ("calculate_per_token_loss", False, "--calculate-per-token-loss must be given"),
        ("eval_micro_batch_size", 2, "--eval-micro-batch-size must be 1 with energon_ext, got 2"),
        ("gtp_weight_remat_size", 2, "--tensor-parallel-num-weight-shards must be 1 .*, got 2"),
        ("overlap_moe_expert_parallel_comm", True, "--overlap-moe-.* must be left out"),
        ("check_for_spiky_loss", True, "--check-for-spiky-loss must be left out"),
        ("cuda_graph_impl", "local", "--energon-packing-max-docs-per-bin must be given, .*None"),
        ("cuda_graph_impl", "full_iteration", "--cuda-graph-impl must be local or transformer_"),
        ("enable_cuda_graph", True, "--enable-cuda-graph must be left out"),
        ("eod_mask_loss", True, "--eod-mask-loss must be left out .*--energon-mask-boundary-loss"),
        ("valid_data_path", ["x"], "--valid-data-path must be left out .*has all splits"),
        ("sft", True, "--sft must be left out"),
        ("sequence_packing_scheduler", "dp_balanced", "--sequence-packing-scheduler must be left"),
        ("dynamic_context_parallel", True, "--dynamic-context-parallel must .*context_sizes.md"),
        ("use_varlen_dataset", True, "--use-varlen-dataset must be left out"),
    ],
)
@pytest.mark.parametrize("tensor_parallel_rank", [0, 1])
def test_unsupported_arguments_are_refused_on_every_rank(
    launch, monkeypatch, name, value, message, tensor_parallel_rank
):
    monkeypatch.setattr(
        parallel_state, "get_tensor_model_parallel_rank", lambda: tensor_parallel_rank
    )
    setattr(launch, name, value)
    with pytest.raises(ConfigError, match=message):
        provide()


class CudaGraphScope(enum.Enum):
    """As in Megatron-core."""

    attn = 2
    mlp = 3
    moe_router = 5


@pytest.mark.parametrize(
    ("name", "modules", "found"),
    [
        ("cuda_graph_scope", "full", r"\['full'\]"),  # megatron-core 0.15
        ("cuda_graph_scope", [], r"\[\]"),  # the whole layer
        ("cuda_graph_scope", [CudaGraphScope.attn, CudaGraphScope.mlp], r"\['attn', 'mlp'\]"),
        ("cuda_graph_modules", [CudaGraphScope.moe_router], r"\['moe_router'\]"),  # from 0.18 on
        ("cuda_graph_modules", [CudaGraphScope.mlp], None),
        ("cuda_graph_scope", ["mlp"], None),
    ],
)
def test_graphs_of_transformer_engine_may_only_contain_mlps(launch, name, modules, found):
    launch.cuda_graph_impl = "transformer_engine"
    setattr(launch, name, modules)
    if found is None:
        assert provide()
        return
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"^{flag} must be mlp, as graphs.*, got {found}"):
        provide()


def test_another_way_to_cut_rows_for_context_parallelism_is_refused(launch):
    launch.cp_partition_mode = "contiguous"
    assert provide()  # nothing is cut
    launch.context_parallel_size = 2
    with pytest.raises(ConfigError, match="--cp-partition-mode must be zigzag .*'contiguous'"):
        provide()


def test_a_ramp_that_megatron_lm_would_ignore_is_refused(launch, planned):
    """Since megatron-core 0.18, which has another schedule."""
    launch.rampup_batch_size, launch.data_path = [8, 8, 100], [str(planned)]
    assert provide()
    launch.step_batch_size_schedule = None
    with pytest.raises(ConfigError, match="--rampup-batch-size must be left out .*use --step"):
        provide()


def test_multi_token_prediction_with_context_parallelism_is_refused(launch):
    launch.mtp_num_layers = 1
    assert provide()
    launch.context_parallel_size = 2
    with pytest.raises(ConfigError, match="--context-parallel-size must be 1, as --mtp-num-layers"):
        provide()


def test_defaults_of_megatron_lm_are_accepted(launch):
    """Its defaults from 0.17 to 0.19."""
    launch.__dict__.update(
        eval_micro_batch_size=1,
        gtp_weight_remat_size=1,
        mtp_num_layers=None,
        cuda_graph_impl="none",
        valid_data_path=None,
        mock_data=False,
        rampup_batch_size=None,
        step_batch_size_schedule=None,
    )
    assert provide()


def test_a_global_batch_that_the_ranks_cannot_share_is_refused(launch, monkeypatch):
    pretend_ranks(monkeypatch, 3)
    with pytest.raises(ConfigError, match="--global-batch-size must be a multiple of 3 .*, got 8"):
        provide()


def test_a_tokenizer_with_more_ids_than_embeddings_is_refused(launch):
    """Bytes and four special tokens are 260 ids."""
    launch.padded_vocab_size = 260
    assert provide()
    launch.padded_vocab_size = 256
    with pytest.raises(ConfigError, match="model 256 embeddings.*ids up to 259.*--vocab-size 260"):
        provide()


@pytest.mark.parametrize("name", ["hybrid_layer_pattern", "hybrid_override_pattern"])
def test_balanced_steps_count_the_layers_of_a_hybrid_model(launch, monkeypatch, name):
    config = small_config(is_hybrid_model=True)
    arguments = types.ModuleType("megatron.training.arguments")
    arguments.core_transformer_config_from_args = lambda args: config
    monkeypatch.setitem(sys.modules, arguments.__name__, arguments)
    launch.energon_balance, launch.padded_vocab_size = "attention", 320
    setattr(launch, name, "M-*-")
    found = provider._default_task_encoder(launch).cost
    assert found.quadratic == 2 * 2 * config.hidden_size  # of one layer
    assert found == AttentionCost.of_model(config, 320, "M-*-")


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("", (True, True, None, 0.3, True, True)),
        ("--energon-packing sequential", (True, True, None, None, False, True)),
        (
            "--no-energon-add-bos --energon-packing-max-docs-per-bin 3 --energon-packing-carry 0 "
            "--no-energon-mask-boundary-loss --no-energon-train-on-eos",
            (False, True, 3, 0.0, False, False),
        ),
    ],
)
def test_options_configure_the_encoder(launch, options, found):
    given = add_energon_args(argparse.ArgumentParser()).parse_args(options.split())
    vars(launch).update(vars(given))
    encoder = provider._default_task_encoder(launch)
    packer = encoder.task().spec([], 0).kinds["documents"].packer
    assert found == (
        encoder.tokenizer.add_bos,
        encoder.tokenizer.add_eos,
        packer.get("max_docs_per_bin"),
        packer.get("carry"),
        encoder.mask_boundary_loss,
        encoder.train_on_eos,
    )


@pytest.mark.parametrize(
    ("context", "tensor", "sequence_parallel", "multiple"),
    [(1, 4, True, 4), (4, 4, False, 8), (2, 8, True, 32)],
)
def test_rows_that_the_ranks_cannot_share_are_refused(
    launch, context, tensor, sequence_parallel, multiple
):
    launch.context_parallel_size, launch.tensor_model_parallel_size = context, tensor
    launch.sequence_parallel = sequence_parallel
    launch.seq_length = 3 * multiple
    assert provide()
    launch.seq_length += multiple // 2
    with pytest.raises(ConfigError, match=rf"--seq-length must be a multiple of {multiple} "):
        provide()


def test_virtual_stages_share_one_loader_and_its_state(launch):
    """The second stage lags behind the first, as in an interleaved schedule."""
    expected = hashes(provide(), 6)
    launch.virtual_pipeline_model_parallel_size = 2
    first, second = (
        train_valid_test_dataloaders_provider([100, 0, 0], vp_stage=stage)[0] for stage in (0, 1)
    )
    assert hashes(first, 2) == expected[:2]
    assert hashes(second, 1) == expected[:1]
    assert hashes(first, 1) == expected[2:3]
    assert hashes(second, 2) == expected[1:3]
    save = sys.modules["megatron.training"].checkpointing.maybe_save_dataloader_state
    state = save([types.SimpleNamespace(iterable=each) for each in (first, second)], 3)
    launch.iteration = 3
    saved = types.SimpleNamespace(save_state=lambda: state)
    save_as_megatron_does(saved, launch, iteration=3)
    stages = [train_valid_test_dataloaders_provider([100, 0, 0], vp_stage=n)[0] for n in (0, 1)]
    assert [hashes(stage, 3) for stage in stages] == [expected[3:]] * 2


def test_a_later_run_of_the_process_saves_the_state_of_its_own_loader(launch):
    launch.virtual_pipeline_model_parallel_size = 2
    train_valid_test_dataloaders_provider([100, 0, 0], vp_stage=0)
    launch.virtual_pipeline_model_parallel_size = None
    loader = provide()
    next(loader)
    save = sys.modules["megatron.training"].checkpointing.maybe_save_dataloader_state
    begun = loader.save_state()
    next(loader)
    drawn = save(types.SimpleNamespace(iterable=loader), 3)
    assert drawn == loader.save_state() != begun


@pytest.mark.parametrize(("length", "warned"), [(96, False), (72, True)])
def test_row_lengths_unsuitable_for_fp8_are_a_warning(launch, caplog, length, warned):
    launch.seq_length, launch.context_parallel_size, launch.fp8 = length, 2, "hybrid"
    with caplog.at_level(logging.WARNING):
        provide()
    assert ("each rank gets 36 positions of a row" in caplog.text) is warned
    assert caplog.text.endswith("make --seq-length a multiple of 32.\n") is warned


def test_cuda_graphs_see_rows_of_one_shape_and_train_the_same(launch):
    """Rows of at most three documents and padding are described as four segments, some empty."""
    launch.energon_packing_max_docs_per_bin, launch.cuda_graph_impl = 3, "local"
    model = small_model(small_config(), vocabulary=320)
    loader, shapes, losses = provide(), [], []
    plain = [next(loader) for _ in range(16)]
    assert len({len(batch.cu_seqlens) for batch in plain}) > 1

    def note(module, args, kwargs):
        params = kwargs["packed_seq_params"]
        shapes.append((len(params.cu_seqlens_q), int(params.cu_seqlens_q[-1]), params.max_seqlen_q))

    model.register_forward_pre_hook(note, with_kwargs=True)
    for model.config.cuda_graph_impl in ("none", "local"):
        shapes.clear()
        with torch.no_grad():
            found = [forward_step(iter([batch]), model)[0] for batch in plain]
        losses.append(torch.cat(found))
    assert set(shapes) == {(5, 32, 32)}
    torch.testing.assert_close(*losses, rtol=0, atol=1e-5)
    launch.energon_packing_max_docs_per_bin = 1
    with pytest.raises(ConfigError, match="A row has [34] segments, with padding; CUDA graphs"):
        for batch in plain:
            forward_step(iter([batch]), model)


# Validation --------------------------------------------------------------------------------------


def provide_validation(launch, eval_iters=2):
    launch.eval_iters = eval_iters
    _, validation, _ = train_valid_test_dataloaders_provider([100, 0, 0])
    support._open_loaders.append(validation)
    return validation


def test_every_evaluation_sees_the_same_batches(launch):
    """Two iterations of 8 micro-batches."""
    validation = provide_validation(launch)
    assert iter(validation) is validation
    first = hashes(validation, 16)
    assert len(set(first)) > 2
    assert hashes(validation, 16) == first
    assert hashes(provide_validation(launch), 16) == first


def test_evaluation_may_have_its_own_batch_size(launch):
    launch.eval_global_batch_size = 3
    validation = provide_validation(launch, eval_iters=1)
    first = hashes(validation, 3)
    assert len(set(first)) == 3
    assert hashes(validation, 3) == first


def test_an_evaluation_that_does_not_read_every_source_is_refused(launch):
    launch.eval_global_batch_size = 1
    with pytest.raises(ConfigError, match="1 micro-batches, too few for 2 validation sources"):
        provide_validation(launch, eval_iters=1)


def test_sources_take_turns_and_every_batch_names_all_of_them(launch):
    validation = provide_validation(launch)
    batches = [next(validation).validate() for _ in range(16)]
    assert validation.sources == ("a/val", "b/val")
    assert {batch.sources for batch in batches} == {("a/val", "b/val")}
    held = [list(batch.tokens_per_source()) for batch in batches]
    assert held == [["a/val"], ["b/val"]] * 8
    assert any(batch.documents_per_source().get("b/val") for batch in batches)


def test_training_and_validation_read_their_own_splits(launch):
    def text(loader):
        return ByteTokenizer().decode(torch.cat([next(loader).tokens for _ in range(8)]))

    assert "9" not in text(provide())
    assert text(provide_validation(launch)).count("9") > 8


@pytest.fixture
def tested(mix):
    """A metadataset whose test split reads the training text of one source."""
    content = json.loads(mix.read_text())
    content["splits"]["test"] = {"blend": [{"path": "./b/train"}]}
    path = mix.with_name("tested.yaml")
    path.write_text(json.dumps(content))
    return path


def test_the_test_split_is_evaluated_where_there_is_one(launch, tested):
    """One source of upper case and no digits, of which validation has some."""
    launch.data_path, launch.eval_iters = [str(tested)], 2
    *loaders, test = train_valid_test_dataloaders_provider([100, 0, 0])
    support._open_loaders.extend([*loaders, test])
    assert test.sources == ("b/train",)
    batches = [next(test) for _ in range(16)]
    text = ByteTokenizer().decode(torch.cat([batch.tokens for batch in batches]))
    assert "RED FISH" in text and "fish" not in text and "9" not in text
    assert hashes(test, 16) == [support.batch_hash(batch) for batch in batches]


def test_nothing_is_tested_without_evaluations(launch, tested):
    launch.data_path = [str(tested)]
    assert provide()


def test_an_evaluation_that_does_not_read_every_test_source_is_refused(launch, tested):
    content = json.loads(tested.read_text())
    content["splits"]["test"]["blend"] = [{"path": f"./{name}/val"} for name in "abab"]
    tested.write_text(json.dumps(content))
    launch.data_path, launch.eval_global_batch_size = [str(tested)], 3
    with pytest.raises(ConfigError, match="3 micro-batches, too few for 4 test sources"):
        provide_validation(launch, eval_iters=1)


def test_every_virtual_stage_has_the_test_split(launch, tested):
    launch.data_path, launch.eval_iters = [str(tested)], 1
    launch.virtual_pipeline_model_parallel_size = 2
    first, second = (
        train_valid_test_dataloaders_provider([100, 0, 0], vp_stage=stage)[2] for stage in (0, 1)
    )
    assert hashes(first, 8) == hashes(second, 8)


def test_a_metadataset_without_a_validation_split_is_refused(launch, mix):
    path = support.write_mix(mix.parent / "train_only.yaml", [("./a/train", 1)])
    launch.data_path = [str(path)]
    with pytest.raises(ConfigError, match="val"):
        provide_validation(launch)


def test_an_evaluation_without_batches_is_refused():
    with pytest.raises(ConfigError, match="at least one micro-batch"):
        ValidationLoader([], 0)
