# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Data states in folders: finding the newest save and reading it."""

import io
import os
import pickle
import random
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from megatron.energon.state import FlexState

from energon_ext.errors import StateFormatError
from energon_ext.state.checkpoint_folder import (
    TRACKER,
    checkpoints_in,
    cursors_in,
    newest_checkpoint,
    read_megatron_lm_state,
    read_sealed,
    read_state,
    write_state,
)
from energon_ext.state.schema import seal
from tests.saves import save_cursor, save_states

STATE = {"key": ["web", 3], "credits": -0.1, "none": None}


def save_as_megatron_lm(folder, iteration, ranks=2, state=STATE, part="mp_rank_00"):
    folder = folder / f"iter_{iteration:07d}" / part
    folder.mkdir(parents=True)
    for rank in range(ranks):
        saved = {"dataloader_state_dict": {"rank": rank, "state": state}}
        torch.save(saved, folder / f"train_dataloader_dprank{rank:03d}.pt")
    return folder.parent


# The newest save ----------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [".", "checkpoints"])
def test_the_tracker_names_the_newest_save(place, tmp_path):
    folders = [save_cursor(tmp_path / place, step, seal({"row": step})) for step in (2, 9, 10)]
    (tmp_path / place / TRACKER).write_text("9\n")  # as if edited by hand to go back
    assert checkpoints_in(tmp_path) == folders[:2]
    assert newest_checkpoint(tmp_path) == newest_checkpoint(folders[1]) == folders[1]


def test_without_a_tracker_the_highest_step_is_the_newest(tmp_path):
    """Megatron-LM keeps its tracker in --save; --dataloader-save has none."""
    for iteration in (9, 10_000_000, 10):
        save_as_megatron_lm(tmp_path / "data", iteration)
    (tmp_path / "data" / "iter_last").mkdir()
    (tmp_path / "data" / "iter_0000011").mkdir()  # a save that was killed
    for folder in (tmp_path, tmp_path / "data"):
        assert newest_checkpoint(folder).name == "iter_10000000"


def test_the_megatron_lm_tracker_names_the_data_states_below_it(tmp_path):
    """With --save checkpoints --dataloader-save checkpoints/data."""
    for iteration in (50, 100):
        (tmp_path / f"iter_{iteration:07d}").mkdir()
        (tmp_path / f"iter_{iteration:07d}" / "__0_0.distcp").touch()
        save_as_megatron_lm(tmp_path / "data", iteration)
    (tmp_path / TRACKER).write_text("50")
    assert newest_checkpoint(tmp_path) == tmp_path / "data" / "iter_0000050"


def test_a_folder_without_saves_has_none(tmp_path):
    assert newest_checkpoint(tmp_path) is newest_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("tracker", ["", "release", "-3", "7.5", "٣", "1" * 30, "3"])
def test_a_tracker_without_its_save_is_refused(tracker, tmp_path):
    save_cursor(tmp_path, 2, seal({"row": 2}))
    (tmp_path / TRACKER).write_text(tracker)
    with pytest.raises(StateFormatError, match="not the number of a save|no data state") as caught:
        newest_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


# Reading ------------------------------------------------------------------------------------------


def test_a_planned_cursor_round_trips(tmp_path):
    cursor = seal({"row": 2**60, "credits": {"web": -0.1}, "carried": [[3, 4], []], "none": None})
    assert dict(cursors_in(save_cursor(tmp_path, 3, cursor))) == {None: cursor}


def test_rank_states_round_trip_by_number(tmp_path):
    found = dict(cursors_in(save_states(tmp_path, 3, *range(11))))
    assert list(found.items()) == [(rank, rank) for rank in range(11)]


def test_states_saved_by_megatron_lm_round_trip(tmp_path):
    folder = save_as_megatron_lm(tmp_path, 3, part="mp_rank_00_000")
    # With expert parallelism, the state of a rank is in several folders.
    save_as_megatron_lm(tmp_path, 3, part="mp_rank_00_001", state=None)
    found = dict(cursors_in(folder))
    assert [found[rank]["rank"] for rank in found] == [0, 1]
    assert found[1]["state"] == STATE


def damage(path):
    """Flip each bit of the file in turn, then cut it to each proper prefix."""
    intact = path.read_bytes()
    with open(path, "r+b") as file:  # in place: rewriting would flush to disk
        for position, byte in enumerate(intact):
            for bit in range(8):
                os.pwrite(file.fileno(), bytes([byte ^ 1 << bit]), position)
                yield
            os.pwrite(file.fileno(), bytes([byte]), position)
        for length in reversed(range(len(intact))):
            os.ftruncate(file.fileno(), length)
            yield
    path.write_bytes(intact)


@pytest.mark.parametrize(
    "state", [STATE, *(pytest.param([n] * 3 * n, marks=pytest.mark.nightly) for n in range(9))]
)
def test_a_file_truncated_anywhere_or_with_any_bit_flipped_is_named(state, tmp_path):
    write_state(tmp_path / "new" / "folder" / "a.json", state)  # which it makes
    (tmp_path / "new" / "folder" / "a.json").rename(tmp_path / "a.json")
    for _ in damage(tmp_path / "a.json"):
        with pytest.raises(StateFormatError) as caught:
            read_state(tmp_path / "a.json")
        assert str(tmp_path / "a.json") in str(caught.value)
    assert read_state(tmp_path / "a.json") == state


def test_a_damaged_cursor_file_is_named(tmp_path):
    folder = save_cursor(tmp_path, 1, seal({"row": 5}))
    for _ in damage(folder / "data.json"):
        with pytest.raises(StateFormatError) as caught:
            dict(cursors_in(folder))
        assert str(folder / "data.json") in str(caught.value)


@pytest.mark.parametrize("content", ["7", "[1]", "{}", '{"row": 1}'])
def test_json_without_a_digest_is_refused(content, tmp_path):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(StateFormatError, match=f"^{tmp_path}/a.json: "):
        read_sealed(tmp_path / "a.json")


def test_reading_in_threads_leaves_torchs_class_list_unchanged(tmp_path):
    write_state(tmp_path / "data_rank00000.json", STATE)
    save_as_megatron_lm(tmp_path, 1)
    (path,) = tmp_path.rglob("*dprank000.pt")
    allowed = set(torch.serialization.get_safe_globals())
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            plain = pool.map(read_state, [tmp_path / "data_rank00000.json"] * 100)
            pickled = pool.map(read_megatron_lm_state, [path] * 100)
            assert all(each == STATE for each in plain)
            assert all(each["state"] == STATE for each in pickled)
    finally:
        sys.setswitchinterval(interval)
    assert set(torch.serialization.get_safe_globals()) == allowed


# Hostile files of Megatron-LM ---------------------------------------------------------------------


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


def saved_bytes(value):
    buffer = io.BytesIO()
    torch.save({"dataloader_state_dict": value}, buffer)
    return buffer.getvalue()


def hostile_files(marker):
    in_pickle = [RunsCode(marker), Stranger(), ArrayOverMemory(), np.array([RunsCode(marker)])]
    yield from map(saved_bytes, in_pickle)
    yield saved_bytes(FlexState(state=[RunsCode(marker)]))
    yield saved_bytes(torch.zeros(3))  # torch can read it, but no state contains it
    yield pickle.dumps(RunsCode(marker))
    script = torch.jit.script(torch.nn.Identity())
    buffer = io.BytesIO()
    torch.jit.save(script, buffer)
    yield buffer.getvalue()


def refusal(path):
    with pytest.raises(StateFormatError, match=f"^{path}: cannot be loaded, and no code") as caught:
        read_megatron_lm_state(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore")  # torch warns of old formats before it refuses them
@pytest.mark.parametrize("index", range(8))
def test_a_hostile_file_is_refused_and_runs_no_code(index, tmp_path):
    marker = tmp_path / "ran"
    (tmp_path / "a.pt").write_bytes(list(hostile_files(marker))[index])
    refusal(tmp_path / "a.pt")
    assert not marker.exists()


def test_a_decompression_bomb_is_refused_before_unpacking(tmp_path):
    old = zipfile.ZipFile(io.BytesIO(saved_bytes("0" * 2**24)))
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    assert "it unpacks to more than its size" in refusal(tmp_path / "a.pt")


def test_a_file_of_exponentially_nested_lists_is_refused_early(tmp_path):
    value = [0]
    for _ in range(50):
        value = [value, value]
    (tmp_path / "a.pt").write_bytes(saved_bytes(value))
    assert "larger than any state" in refusal(tmp_path / "a.pt")


def test_a_stock_energon_state_is_refused_with_the_migration(tmp_path):
    (tmp_path / "a.pt").write_bytes(saved_bytes(FlexState(key=("web", 3))))
    assert "FlexState" in (message := refusal(tmp_path / "a.pt"))
    assert "Finish that run with stock Energon, or start a new one" in message


def test_an_unrelated_file_is_refused(tmp_path):
    torch.save({"model": {}}, tmp_path / "a.pt")
    assert "no dataloader_state_dict" in refusal(tmp_path / "a.pt")


def test_a_mutated_pickle_is_either_loaded_or_refused(tmp_path):
    intact, path = saved_bytes(STATE), tmp_path / "a.pt"
    chance, refused = random.Random(0), 0
    with zipfile.ZipFile(io.BytesIO(intact)) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    for _ in range(250):
        with zipfile.ZipFile(path, "w") as new:
            for name, content in entries.items():
                mutated = bytearray(content)
                for _ in range(chance.choice((1, 3, 10)) if name.endswith("data.pkl") else 0):
                    mutated[chance.randrange(len(mutated))] = chance.randrange(256)
                new.writestr(name, bytes(mutated))
        try:
            read_megatron_lm_state(path)
        except StateFormatError:
            refused += 1
    assert refused > 50
