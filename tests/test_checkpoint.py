# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints: what is saved comes back, and damage, strangers and interrupts are noticed."""

import hashlib
import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import socket
import sys
import zipfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from megatron.energon import DefaultTaskEncoder, get_train_dataset
from megatron.energon.savable_loader import SavableDataLoaderState
from megatron.energon.state import FlexState
from megatron.energon.tools.checkpoint import command_redist

from energon_ext.errors import ConfigError, EnergonExtError, StateFormatError
from energon_ext.state.checkpoint import CheckpointStore
from energon_ext.state.manifest import HASHED_BYTES
from energon_ext.state.serialize import read_state_file, write_state_file
from tests.support import config, loader_for, take, write_dataset

PACKAGE = str(Path(sys.modules[CheckpointStore.__module__].__file__).parent)


def save(root, step, value=None, **store_options):
    with CheckpointStore(root, **store_options) as store:
        return store.save(step, {"a.pt": value}, metadata={"step": step})


def write_model(folder):
    """Two files as a model has them: a small one, and one that is not hashed."""
    (folder / "deep").mkdir()
    (folder / "deep" / ".metadata").write_bytes(b"where each tensor is")
    with open(folder / "tensors", "wb") as file:
        file.truncate(HASHED_BYTES + 1)


def save_model(root, step, data=None, **store_options):
    with CheckpointStore(root, **store_options) as store:
        return store.save(step, write_model=write_model, data=data)


def names(root):
    return sorted(path.name for path in Path(root).glob("step_*"))


def reseal(directory, **changes):
    """Write a manifest by the documented rule, as somebody who may write to the folder could."""
    path = directory / "manifest.json"
    content = {**json.loads(path.read_text()), **changes}
    del content["checksum"]
    checksum = hashlib.sha256(json.dumps(content, indent=1).encode()).hexdigest()
    path.write_text(json.dumps({**content, "checksum": checksum}, indent=1))


def plant(directory, data):
    """Replace ``a.pt`` and make the manifest agree."""
    (directory / "a.pt").write_bytes(data)
    record = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    reseal(directory, files={"a.pt": record})


def saved_bytes(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def with_pickle(data, change):
    """A file of ``torch.save`` whose pickle is ``change(pickle)``."""
    changed = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(changed, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(name, change(content) if name.endswith("/data.pkl") else content)
    return changed.getvalue()


# A real loader ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def dataset_path(tmp_path_factory):
    texts = [f"document {index}" for index in range(120)]
    return write_dataset(tmp_path_factory.mktemp("data") / "set", texts)


@pytest.fixture
def new_loader(dataset_path):
    def make(workers, rank=0, world_size=1):
        dataset = get_train_dataset(
            dataset_path,
            worker_config=config(num_workers=workers, rank=rank, world_size=world_size),
            batch_size=2,
            shuffle_buffer_size=20,
            max_samples_per_sequence=10,
            task_encoder=DefaultTaskEncoder(),
        )
        return loader_for(dataset)

    return make


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_restored_from_a_checkpoint_goes_on_with_the_same_stream(
    workers, new_loader, tmp_path
):
    loader = new_loader(workers)
    take(loader, 7)
    with CheckpointStore(tmp_path) as store:
        store.save(7, {"data_rank00000.pt": loader.save_state_rank()})
    expected = [batch.text for batch in take(loader, 40)]

    state = CheckpointStore(tmp_path).latest().load("data_rank00000.pt")
    assert type(state) is SavableDataLoaderState
    resumed = new_loader(workers)
    resumed.restore_state_rank(state)
    assert [batch.text for batch in take(resumed, 40)] == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_the_stock_redist_command_reads_the_files(workers, new_loader, tmp_path):
    objects = {}
    for rank in range(2):
        loader = new_loader(workers, rank, world_size=2)
        take(loader, 3)
        objects[f"data_rank{rank:05d}.pt"] = loader.save_state_rank()
    with CheckpointStore(tmp_path / "checkpoints") as store:
        directory = store.save(3, objects)

    (tmp_path / "new").mkdir()
    files = [str(directory / name) for name in objects]
    arguments = [*files, str(tmp_path / "new"), "--new-world-size", "1"]
    result = CliRunner().invoke(command_redist, arguments)
    assert result.exit_code == 0, result.output
    merged = torch.load(tmp_path / "new" / "data_rank00000.pt", weights_only=False)
    assert len(merged.worker_states) == 2

    # What redist wrote is as loadable as what we wrote.
    redistributed = save(tmp_path / "again", 3)
    plant(redistributed, (tmp_path / "new" / "data_rank00000.pt").read_bytes())
    assert repr(CheckpointStore(tmp_path / "again").latest().load("a.pt")) == repr(merged)


# What comes back --------------------------------------------------------------------------------


def test_tensors_containers_and_numbers_come_back_as_they_were(tmp_path):
    shared = FlexState(cursor=(1, [2.5, None, "ä", b"", b"\x00\xff"]), big=2**200)
    value = {
        "model": OrderedDict(w=torch.arange(6).view(2, 3), b=torch.ones(2, dtype=torch.bfloat16)),
        "twice": [shared, shared],
        "nested": FlexState(inner=FlexState(), plain={}),
        "set": {1, 2},
    }
    save(tmp_path, 1, value)
    checkpoint = CheckpointStore(tmp_path).latest()
    loaded = checkpoint.load("a.pt")
    assert torch.equal(loaded["model"].pop("w"), value["model"].pop("w"))
    assert torch.equal(loaded["model"].pop("b"), value["model"].pop("b"))
    assert loaded == value
    first, second = loaded["twice"]
    assert first is second
    assert type(first) is FlexState
    assert type(loaded["nested"]["inner"]) is FlexState
    assert type(loaded["nested"]["plain"]) is dict
    assert checkpoint.load("a.pt")["nested"] is not loaded["nested"]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(624, dtype=np.uint32),
        np.array([[1.5, -2.0], [0.0, np.inf]], order="F"),
        np.array([[1, 2, 3], [4, 5, 6]]),
        np.array([True, False]),
        np.array([1, 2**40], dtype=">i8"),
        np.array(7, dtype=np.int16),
        np.zeros((0, 3), dtype=np.float32),
    ],
)
def test_numeric_numpy_arrays_come_back_as_they_were(array, tmp_path):
    save(tmp_path, 1, [array])
    (loaded,) = CheckpointStore(tmp_path).latest().load("a.pt")
    assert loaded.dtype == array.dtype
    np.testing.assert_array_equal(loaded, array, strict=True)
    loaded.fill(0)  # writable, as a state must be that numpy goes on with


def test_what_is_held_twice_comes_back_as_one(tmp_path):
    array, pair, several = np.arange(3), (np.arange(2), 5), [np.arange(4)]
    save(tmp_path, 1, [array, pair, array, pair, several, several])
    loaded = CheckpointStore(tmp_path).latest().load("a.pt")
    assert loaded[0] is loaded[2] and loaded[0].tolist() == [0, 1, 2]
    assert loaded[1] is loaded[3] and loaded[1][0].tolist() == [0, 1]
    assert loaded[4] is loaded[5] and loaded[4][0].tolist() == [0, 1, 2, 3]


def test_what_holds_itself_comes_back_so(tmp_path):
    items, names = [1], {"one": 1}
    items.append(items)
    names["self"] = names
    save(tmp_path, 1, [items, names])
    items, names = CheckpointStore(tmp_path).latest().load("a.pt")
    assert len(items) == 2 and items[0] == 1 and items[1] is items
    assert list(names) == ["one", "self"] and names["self"] is names


def test_an_array_saved_under_numpy_1_comes_back(tmp_path):
    def as_numpy_1(content):
        assert b"numpy._core." in content or b"numpy.core." in content
        return content.replace(b"numpy._core.", b"numpy.core.")

    array = np.arange(5, dtype=np.uint32)
    plant(save(tmp_path, 1), with_pickle(saved_bytes(array), as_numpy_1))
    np.testing.assert_array_equal(CheckpointStore(tmp_path).latest().load("a.pt"), array)


def test_the_manifest_says_what_was_saved(tmp_path):
    with CheckpointStore(tmp_path) as store:
        directory = store.save(
            12,
            {"a.pt": 1, "b.pt": 2},
            write_model=write_model,
            data={"row": 192},
            metadata={"sources": ["web"], "n": 3},
        )
    assert directory.name == "step_00000012"
    manifest = json.loads((directory / "manifest.json").read_text())
    size = (directory / "b.pt").stat().st_size
    digest = hashlib.sha256((directory / "b.pt").read_bytes()).hexdigest()
    assert manifest["files"]["b.pt"] == {"bytes": size, "sha256": digest}
    assert manifest["format"] == "energon_ext.state.checkpoint"
    assert (manifest["version"], manifest["step"]) == (1, 12)
    assert {name: record["bytes"] for name, record in manifest["files"].items()} == {
        **dict.fromkeys(("a.pt", "b.pt"), size),
        "data.json": len('{"row": 192}'),
        "model/deep/.metadata": len("where each tensor is"),
        "model/tensors": HASHED_BYTES + 1,
    }
    hashed = {name for name, record in manifest["files"].items() if "sha256" in record}
    assert hashed == manifest["files"].keys() - {"model/tensors"}
    checkpoint = CheckpointStore(tmp_path).open(12)
    assert (checkpoint.path, checkpoint.step) == (directory, 12)
    assert checkpoint.metadata == {"sources": ["web"], "n": 3}
    written = [path.relative_to(directory).as_posix() for path in directory.rglob("*")]
    folders = ["model", "model/deep"]
    assert sorted(written) == sorted([*manifest["files"], *folders, "manifest.json"])


def test_the_model_and_the_cursor_of_all_ranks_come_back(tmp_path):
    state = {"row": 2**60, "credits": {"web": -0.1}, "carried": [[3, 4], []], "none": None}
    directory = save_model(tmp_path, 3, state)
    checkpoint = CheckpointStore(tmp_path).latest()
    assert checkpoint.data() == state
    assert checkpoint.model() == directory / "model"
    assert (checkpoint.model() / "deep" / ".metadata").read_bytes() == b"where each tensor is"


def test_a_save_without_a_model_or_a_cursor_has_none(tmp_path):
    save(tmp_path, 1)
    checkpoint = CheckpointStore(tmp_path).latest()
    assert (checkpoint.model(), checkpoint.data()) == (None, None)


# Which checkpoint -------------------------------------------------------------------------------


def test_no_checkpoint_is_none_and_an_unknown_step_names_those_there_are(tmp_path):
    assert CheckpointStore(tmp_path / "nowhere").latest() is None
    save(tmp_path, 4)
    with pytest.raises(ConfigError, match=r"step 5.*\[4\]"):
        CheckpointStore(tmp_path).open(5)


def test_a_second_save_of_a_step_stands_beside_the_first(tmp_path):
    for value in "first", "second", "third":
        save(tmp_path, 4, value)
    assert names(tmp_path) == ["step_00000004", "step_00000004.2", "step_00000004.3"]
    assert CheckpointStore(tmp_path).open(4).load("a.pt") == "third"
    assert CheckpointStore(tmp_path).latest().load("a.pt") == "third"


def test_latest_is_the_one_saved_last_even_where_the_run_went_back(tmp_path):
    for step in (100, 200, 300, 150):
        save(tmp_path, step, step, keep=3)
    assert CheckpointStore(tmp_path).latest().step == 150
    assert names(tmp_path) == ["step_00000150", "step_00000200", "step_00000300"]


def test_the_newest_k_are_kept(tmp_path):
    with CheckpointStore(tmp_path, keep=2) as store:
        for step in range(5):
            store.save(step, {"a.pt": step})
            steps = [int(name[-8:]) for name in names(tmp_path)]
            assert steps == list(range(max(0, step - 1), step + 1))


def test_a_directory_that_cannot_be_removed_is_no_checkpoint_and_goes_later(tmp_path, monkeypatch):
    save(tmp_path, 1)

    def rmdir(*_, **options):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("os.rmdir", rmdir)
        save(tmp_path, 2, keep=1)
    assert names(tmp_path) == ["step_00000001", "step_00000002"]
    with pytest.raises(ConfigError):
        CheckpointStore(tmp_path).open(1)
    save(tmp_path, 3)
    assert names(tmp_path) == ["step_00000002", "step_00000003"]


def test_nothing_is_pruned_before_the_new_checkpoint_is_complete(tmp_path):
    save(tmp_path, 1, keep=1)
    with pytest.raises(ConfigError, match="metadata"), CheckpointStore(tmp_path, keep=1) as store:
        store.save(2, {"a.pt": 2}, metadata={"not": object()})
    assert CheckpointStore(tmp_path).latest().step == 1


def test_an_unfinished_save_is_ignored_and_removed_by_the_next_writer(tmp_path):
    save(tmp_path, 1, "one")
    unfinished = save(tmp_path, 2, "two")
    (unfinished / "manifest.json").unlink()
    assert CheckpointStore(tmp_path).latest().load("a.pt") == "one"
    save(tmp_path, 3)
    assert names(tmp_path) == ["step_00000001", "step_00000003"]


# Damage -----------------------------------------------------------------------------------------


def damage(path):
    """Make the file each copy of itself with one bit flipped, then each proper prefix, in turn."""
    intact = path.read_bytes()
    with open(path, "r+b") as file:  # in place: truncating and writing anew would flush to disk
        for position, byte in enumerate(intact):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
                yield
            os.pwrite(file.fileno(), bytes([byte]), position)
        assert path.read_bytes() == intact
        for length in reversed(range(len(intact))):
            os.ftruncate(file.fileno(), length)
            yield
    path.write_bytes(intact)


SMALL = {"cursor": 5}
SEVERAL = [
    {"cursor": seed, "tokens": np.random.default_rng(seed).bytes(40).hex(), "more": [seed] * seed}
    for seed in range(9)
]


@pytest.mark.parametrize(
    "content", [SMALL, *(pytest.param(each, marks=pytest.mark.nightly) for each in SEVERAL)]
)
def test_a_file_cut_anywhere_or_with_any_bit_flipped_is_named(tmp_path, content):
    path = save(tmp_path, 1, FlexState(content)) / "a.pt"
    checkpoint = CheckpointStore(tmp_path).latest()
    for _ in damage(path):
        with pytest.raises(StateFormatError) as caught:
            checkpoint.load("a.pt")
        assert str(path) in str(caught.value)
    assert checkpoint.load("a.pt") == content


def test_a_cursor_cut_anywhere_or_with_any_bit_flipped_is_named(tmp_path):
    path = save_model(tmp_path, 1, {"row": 5}) / "data.json"
    checkpoint = CheckpointStore(tmp_path).latest()
    for _ in damage(path):
        with pytest.raises(StateFormatError) as caught:
            checkpoint.data()
        assert str(path) in str(caught.value)
    assert checkpoint.data() == {"row": 5}


def missing(model):
    (model / "tensors").unlink()
    return "tensors"


def cut(model):
    os.truncate(model / "tensors", HASHED_BYTES)
    return "tensors"


def changed(model):
    (model / "deep" / ".metadata").write_bytes(b"where each tensor IS")
    return "deep/.metadata"


def added(model):
    (model / "common.pt").touch()
    return "common.pt"


def gone(model):
    shutil.rmtree(model)
    return "deep/.metadata"


@pytest.mark.parametrize("harm", [missing, cut, changed, added, gone])
def test_a_model_that_is_not_what_was_saved_is_named(harm, tmp_path):
    model = save_model(tmp_path, 1) / "model"
    name = harm(model)
    with pytest.raises(StateFormatError, match=f"model/{name} is damaged"):
        CheckpointStore(tmp_path).latest().model()


def test_a_manifest_cut_anywhere_or_with_any_bit_flipped_is_named_and_nothing_older_taken(tmp_path):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / "manifest.json"
    store = CheckpointStore(tmp_path)
    for _ in damage(path):
        for find in store.latest, lambda: store.open(2):
            with pytest.raises(StateFormatError) as caught:
                find()
            assert str(path) in str(caught.value)
            assert "open(step)" in str(caught.value)
    assert store.latest().step == 2


def test_a_damaged_manifest_hinders_no_save_and_is_not_pruned(tmp_path):
    damaged = save(tmp_path, 1) / "manifest.json"
    damaged.write_bytes(b"{}")
    for step in (2, 3, 4):
        save(tmp_path, step, keep=1)
    assert names(tmp_path) == ["step_00000001", "step_00000004"]


def test_a_missing_file_is_named(tmp_path):
    path = save(tmp_path, 1) / "a.pt"
    path.unlink()
    with pytest.raises(StateFormatError, match=f"{path} cannot be read"):
        CheckpointStore(tmp_path).latest().load("a.pt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"version": 0}, "version 0"),
        ({"format": "other"}, "format"),
        ({"files": []}, "types"),
        ({"more": 1}, "keys"),
    ],
)
def test_a_manifest_of_another_format_is_refused(changes, message, tmp_path):
    reseal(save(tmp_path, 1), **changes)
    with pytest.raises(StateFormatError, match=message):
        CheckpointStore(tmp_path).latest()


# Hostile files ----------------------------------------------------------------------------------


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Stranger:
    pass


class ArrayOverMemory:
    """An array of objects whose addresses the pickle chooses."""

    def __reduce__(self):
        return np.ndarray, ((1,), np.dtype("O"), b"\x41" * 8)


def hostile_files(marker):
    in_pickle = [RunsCode(marker), Stranger(), ArrayOverMemory(), np.array([RunsCode(marker)])]
    yield from map(saved_bytes, in_pickle)
    yield saved_bytes(FlexState(state=[RunsCode(marker)]))
    yield pickle.dumps(RunsCode(marker))
    script = torch.jit.script(torch.nn.Identity())
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    yield buffer.getvalue()


@pytest.mark.filterwarnings("ignore")  # torch warns of old formats before it refuses them
@pytest.mark.parametrize("index", range(7))
def test_a_hostile_file_runs_nothing_and_is_refused(index, tmp_path):
    marker = tmp_path / "ran"
    directory = save(tmp_path / "root", 1)
    plant(directory, list(hostile_files(marker))[index])
    with pytest.raises(StateFormatError) as caught:
        CheckpointStore(tmp_path / "root").latest().load("a.pt")
    assert str(directory / "a.pt") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("prefix", [b"", b"x"])
def test_a_file_that_unpacks_to_more_than_its_size_is_refused_before_it_does(tmp_path, prefix):
    packed = io.BytesIO()
    zeros = saved_bytes(torch.zeros(2**24, dtype=torch.uint8))
    old = zipfile.ZipFile(io.BytesIO(zeros))
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    plant(save(tmp_path, 1), prefix + packed.getvalue())
    with pytest.raises(StateFormatError, match=r"16,7\d\d,\d{3} bytes are packed in \d\d,\d{3}"):
        CheckpointStore(tmp_path).latest().load("a.pt")


def test_a_file_of_lists_of_one_list_twice_is_refused_before_anybody_counts_them(tmp_path):
    """Two to the power of fifty values in some hundred bytes; whoever walks them never ends."""
    value = [0]
    for _ in range(50):
        value = [value, value]
    torch.save({"a": value}, tmp_path / "a.pt")
    with pytest.raises(
        StateFormatError, match=r"its [\d,]+ bytes stand for 3,377,\d{3},\d{3},.* values"
    ):
        read_state_file(tmp_path / "a.pt", None)


@pytest.mark.parametrize(
    "name", ["builtins bytearray", "__builtin__ bytearray", "torch FloatTensor", "builtins bytes"]
)
def test_a_number_is_not_made_into_so_many_bytes(tmp_path, name):
    module, name = name.split()
    number = b"\x8a\x08" + (10**12).to_bytes(8, "little")
    called = b"\x80\x02c" + f"{module}\n{name}\n".encode() + number + b"\x85R."
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", called)
        archive.writestr("archive/version", "3\n")
    with pytest.raises(StateFormatError, match=f"{name} was not an allowed|takes 0 positional"):
        read_state_file(tmp_path / "a.pt", None)
    with pytest.raises(ConfigError, match="bytearray was not an allowed"):
        write_state_file(tmp_path / "b.pt", {"a": bytearray(b"x")})


def test_no_bytes_come_back(tmp_path):
    write_state_file(tmp_path / "a.pt", {"a": b"", "b": b"x"})
    assert read_state_file(tmp_path / "a.pt", None) == {"a": b"", "b": b"x"}


def test_what_is_held_twice_comes_back(tmp_path):
    shared = ("web", 3)
    torch.save({"a": [shared, shared, [shared]]}, tmp_path / "a.pt")
    assert read_state_file(tmp_path / "a.pt", None) == {"a": [shared, shared, [shared]]}


def test_what_the_process_allows_elsewhere_is_not_allowed_here(tmp_path):
    plant(save(tmp_path, 1), saved_bytes(Stranger()))
    with torch.serialization.safe_globals([Stranger]):
        allowed = set(torch.serialization.get_safe_globals())
        with pytest.raises(StateFormatError, match="Stranger"):
            CheckpointStore(tmp_path).latest().load("a.pt")
        assert set(torch.serialization.get_safe_globals()) == allowed


def test_a_manifest_cannot_lead_out_of_its_directory(tmp_path):
    torch.save("secret", tmp_path / "outside.pt")
    directory = save(tmp_path / "root", 1)
    reseal(directory, files={"../../outside.pt": {"bytes": 1, "sha256": ""}})
    with pytest.raises(ConfigError, match="has no file"):
        CheckpointStore(tmp_path / "root").latest().load("../../outside.pt")


def test_a_mutated_pickle_is_loaded_or_refused_and_nothing_else(tmp_path, new_loader):
    loader = new_loader(2)
    take(loader, 3)
    directory = save(tmp_path, 1, loader.save_state_rank())
    intact = (directory / "a.pt").read_bytes()
    rng = random.Random(0)
    refused = 0

    def mutate(content):
        mutated = bytearray(content)
        for _ in range(rng.choice((1, 3, 10))):
            mutated[rng.randrange(len(mutated))] = rng.randrange(256)
        return bytes(mutated)

    for _ in range(250):
        plant(directory, with_pickle(intact, mutate))
        try:
            CheckpointStore(tmp_path).latest().load("a.pt")
        except StateFormatError:
            refused += 1
    assert refused > 50


# Bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["../a.pt", "x/a.pt", "..", ".", "", "/a.pt", "x\\a.pt", "a..pt", "a.pt.tmp"]
    + ["manifest.json", "data.json", "model"],
)
def test_a_file_name_that_could_leave_or_hide_is_refused(name, tmp_path):
    with CheckpointStore(tmp_path) as store:
        with pytest.raises(ConfigError, match="name"):
            store.save(1, {name: 1})
        store.save(1, {"a.pt": 1})
        with pytest.raises(ConfigError, match="a.pt"):
            store.latest().load(name)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Stranger(), "Stranger"),
        (Path("/data"), "PosixPath"),
        (lambda: 0, "cannot be saved"),
        (np.float64(1), "scalar"),
    ],
)
def test_what_could_not_be_loaded_is_refused_at_the_save(value, message, tmp_path):
    save(tmp_path, 1)
    with pytest.raises(ConfigError, match=message):
        save(tmp_path, 2, {"state": value})
    assert CheckpointStore(tmp_path).latest().step == 1


@pytest.mark.parametrize("step", [-1, True, 1.0, "1", None])
def test_a_step_is_a_natural_number(step, tmp_path):
    with pytest.raises(ConfigError, match="step"):
        save(tmp_path, step)


@pytest.mark.parametrize("metadata", [{"x": float("nan")}, {"x": {1}}, [1]])
def test_metadata_is_a_json_object(metadata, tmp_path):
    with pytest.raises(ConfigError, match="metadata"), CheckpointStore(tmp_path) as store:
        store.save(1, metadata=metadata)


def test_a_cursor_is_json(tmp_path):
    with pytest.raises(ConfigError, match="data is not JSON"):
        save_model(tmp_path, 1, {"row": np.int64(1)})


@pytest.mark.parametrize("keep", [0, True, 1.5])
def test_at_least_one_checkpoint_is_kept(keep, tmp_path):
    with pytest.raises(ConfigError, match="keep"):
        CheckpointStore(tmp_path, keep=keep)


def test_a_save_needs_the_lock(tmp_path):
    with pytest.raises(ConfigError, match="with CheckpointStore"):
        CheckpointStore(tmp_path).save(1, {})


def test_a_root_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        save(tmp_path / "file", 1)


def test_a_file_system_without_locks_is_refused(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ConfigError, match="without locks: .*No locks available. Choose another"):
        save(tmp_path, 1)
    monkeypatch.undo()
    save(tmp_path, 1)


def test_a_full_disk_costs_only_the_save_that_met_it(tmp_path):
    save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(EnergonExtError, match="saving step 2 failed") as caught:
            save(tmp_path, 2, torch.zeros(1 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert CheckpointStore(tmp_path).latest().step == 1


# Order of writing and interrupts ----------------------------------------------------------------


def test_bytes_are_on_disk_before_their_name_and_the_manifest_is_last(tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor):
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def recorded_replace(source, target):
        events.append(("rename", Path(target).name))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    with CheckpointStore(tmp_path / "root") as store:
        store.save(1, {"a.pt": 1, "b.pt": 2}, write_model=write_model, data={"row": 0})
    assert events == [
        ("fsync", "root"),
        ("fsync", "a.pt.tmp"),
        ("rename", "a.pt"),
        ("fsync", "b.pt.tmp"),
        ("rename", "b.pt"),
        ("fsync", "step_00000001"),
        ("fsync", "model"),
        ("fsync", "deep"),
        ("fsync", ".metadata"),
        ("fsync", "tensors"),
        ("fsync", "data.json.tmp"),
        ("rename", "data.json"),
        ("fsync", "step_00000001"),
        ("fsync", "manifest.json.tmp"),
        ("rename", "manifest.json"),
        ("fsync", "step_00000001"),
    ]


class InterruptAtLine:
    """Ctrl-C at the n-th line that the package runs."""

    def __init__(self, line):
        self.left = line

    def __call__(self, frame, event, argument):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            self.left -= 1
            if self.left == 0:
                signal.raise_signal(signal.SIGINT)
        return self


def test_ctrl_c_at_any_line_of_a_save_leaves_the_previous_or_the_new_checkpoint(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # half of the time, and not tested
    outcomes = []
    interrupted = True
    with CheckpointStore(tmp_path, keep=1) as store:
        while interrupted:
            line = len(outcomes) + 1
            store.save(line, {"a.pt": "previous"}, data="previous")
            sys.settrace(InterruptAtLine(line))
            try:
                store.save(line, {"a.pt": "new"}, write_model=write_model, data="new")
                interrupted = False
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            checkpoint = store.latest()
            assert checkpoint.step == line
            assert checkpoint.load("a.pt") == checkpoint.data()
            assert (checkpoint.model() is None) == (checkpoint.data() == "previous")
            outcomes.append(checkpoint.data())
    assert outcomes == sorted(outcomes, reverse=True)  # "previous" up to a line, then "new"
    assert outcomes.count("previous") > 100 and outcomes.count("new") > 10


def test_ctrl_c_while_an_object_is_pickled_leaves_the_previous_checkpoint(tmp_path):
    class PressesCtrlC:
        def __reduce__(self):
            signal.raise_signal(signal.SIGINT)

    save(tmp_path, 1)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, [torch.zeros(10), PressesCtrlC()])
    assert CheckpointStore(tmp_path).latest().step == 1


# Several processes ------------------------------------------------------------------------------


def hold_the_lock(root, pipe):
    with CheckpointStore(root) as store:
        store.save(1, {"a.pt": "held"})
        child = os.fork()  # as a data worker: it outlives its parent for a while
        if child == 0:
            signal.pause()
        pipe.send(child)
        signal.pause()


def test_a_second_writer_is_told_who_holds_the_lock_which_dies_with_the_first(tmp_path, processes):
    here, there = processes.Pipe()
    writer = processes.Process(target=hold_the_lock, args=(tmp_path, there))
    writer.start()
    child = here.recv()
    try:
        with pytest.raises(ConfigError) as caught:
            save(tmp_path, 2)
        held_by = f" is being written by pid {writer.pid} on host {socket.gethostname()}. "
        assert held_by in str(caught.value)
        assert "\n" not in str(caught.value)
        assert CheckpointStore(tmp_path).latest().load("a.pt") == "held"
        writer.kill()
        writer.join()
        os.kill(child, 0)  # still alive
        save(tmp_path, 2)
    finally:
        writer.kill()
        os.kill(child, signal.SIGKILL)
    assert CheckpointStore(tmp_path).latest().step == 2


def attempt(results, name, work):
    try:
        results[name] = work()
    except EnergonExtError as error:
        results[name] = f"{type(error).__name__}: {error}"


def join_group(rank, root):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2
    )
    return CheckpointStore(root / "run")


def run_two_ranks(processes, target, root):
    """What each rank sent; None from one that died."""
    pipes = [processes.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        processes.Process(target=target, args=(rank, root, there))
        for rank, (_, there) in enumerate(pipes)
    ]
    for process, (_, there) in zip(ranks, pipes):
        process.start()
        there.close()
    try:
        assert all(here.poll(120) for here, _ in pipes), "a rank hangs"
        return [receive_or_none(here) for here, _ in pipes]
    finally:
        for process in ranks:
            process.kill()


def receive_or_none(pipe):
    try:
        return pipe.recv()
    except EOFError:
        return None


def save_well_and_badly(rank, root, pipe):
    results = {}

    def write_part(folder):
        (folder / f"part{rank}").write_text(f"of rank {rank}")

    def good(step):
        files = {f"data_rank{rank:05d}.pt": rank}
        written = {"write_model": write_part, "data": ["rank", rank]}
        return store.save(step, files, **written, metadata={"by": rank}).name

    def model_fails(folder):
        torch.distributed.barrier()
        if rank == 1:
            raise OSError(28, "No space left on device")

    with join_group(rank, root) as store:
        attempt(results, "good", lambda: good(1))
        bad = {f"data_rank{rank:05d}.pt": (lambda: 0) if rank == 1 else 0}
        attempt(results, "rank 1 cannot save", lambda: store.save(2, bad))
        attempt(results, "no model", lambda: store.save(2, write_model=model_fails))
        attempt(results, "rank 0 cannot publish", lambda: store.save(3, metadata=[]))
        bad_name = {"../b.pt" if rank == 1 else "a.pt": rank}
        attempt(results, "bad name", lambda: store.save(4, bad_name))
        attempt(results, "one name", lambda: store.save(4, {"a.pt": rank}))
        locked = CheckpointStore(root / "run")
        attempt(results, "locked", locked.__enter__)
        attempt(results, "after that", lambda: good(5))
        checkpoint = store.latest()
        results["read"] = [checkpoint.load(f"data_rank{rank:05d}.pt") for rank in range(2)]
        results["model"] = [(checkpoint.model() / f"part{rank}").read_text() for rank in range(2)]
        results["of rank 0"] = (checkpoint.data(), checkpoint.metadata)
    pipe.send(results)
    torch.distributed.destroy_process_group()


def test_two_ranks_save_together_and_a_failure_of_one_is_raised_on_both(tmp_path, processes):
    for rank, result in enumerate(run_two_ranks(processes, save_well_and_badly, tmp_path)):
        assert (result["good"], result["after that"]) == ("step_00000001", "step_00000005")
        assert (result["read"], result["model"]) == ([0, 1], ["of rank 0", "of rank 1"])
        assert result["of rank 0"] == (["rank", 0], {"by": 0})
        assert result["one name"].startswith("ConfigError: 2 ranks save 'a.pt'")
        assert "'../b.pt'" in result["bad name"]
        for name, kind, culprit, message in [
            ("rank 1 cannot save", "ConfigError", 1, "data_rank00001.pt cannot be saved"),
            ("no model", "EnergonExtError", 1, "No space left on device"),
            ("rank 0 cannot publish", "ConfigError", 0, "metadata"),
            ("locked", "ConfigError", 0, "is being written by pid"),
        ]:
            assert result[name].startswith(f"{kind}: "), result[name]
            assert ("On rank" in result[name]) == (rank != culprit)
            assert message in result[name]


class Dies:
    def __reduce__(self):
        os.kill(os.getpid(), signal.SIGKILL)


def save_until_rank_1_dies(rank, root, pipe):
    results = {}
    with join_group(rank, root) as store:
        attempt(results, "good", lambda: store.save(1).name)
        files = {f"data_rank{rank:05d}.pt": Dies() if rank == 1 else 0}
        attempt(results, "bad", lambda: store.save(2, files))
    pipe.send(results)


def test_a_rank_killed_in_a_save_is_an_error_of_the_other_and_costs_no_checkpoint(
    tmp_path, processes
):
    rank_0, rank_1 = run_two_ranks(processes, save_until_rank_1_dies, tmp_path)
    assert rank_1 is None
    assert rank_0["good"] == "step_00000001"
    assert "EnergonExtError" in rank_0["bad"] and "saving step 2 failed" in rank_0["bad"]
    assert CheckpointStore(tmp_path / "run").latest().step == 1
