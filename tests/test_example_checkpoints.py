# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The checkpoints of the examples: what is kept, what is refused, and ranks that fail together."""

import os
import resource
import signal

import pytest
import torch

from energon_ext.errors import ConfigError, EnergonExtError, StateFormatError
from energon_ext.state.checkpoint_folder import TRACKER
from energon_ext.state.schema import seal
from tests.example_checkpoints import RUN, Checkpoints


def write_model(folder):
    (folder / "common.pt").write_bytes(b"model")


def save(root, step, **options):
    checkpoints = Checkpoints(root, **options)
    cursor = seal({"row": 16 * step})
    return checkpoints.save(step, write_model=write_model, run={"lr": 0.1}, cursor=cursor)


def names(root):
    return sorted(int(path.name[5:]) for path in root.glob("iter_*"))


def test_a_save_can_be_read_back(tmp_path):
    folder = save(tmp_path / "deep" / "checkpoints", 30)
    checkpoints = Checkpoints(tmp_path / "deep" / "checkpoints")
    assert (folder.name, checkpoints.newest()) == ("iter_0000030", 30)
    assert checkpoints.run_of(30)["lr"] == 0.1
    assert checkpoints.data_of(30)[None]["row"] == 480
    assert sorted(path.name for path in folder.iterdir()) == ["common.pt", "data.json", "run.json"]
    assert (checkpoints.folder / TRACKER).read_text() == "30"


def test_there_is_no_checkpoint_before_the_first_save(tmp_path):
    assert Checkpoints(tmp_path / "nowhere").newest() is None


# What is kept -------------------------------------------------------------------------------------


def test_the_newest_three_checkpoints_are_kept(tmp_path):
    for step in range(10, 60, 10):
        save(tmp_path, step)
        assert names(tmp_path) == [*range(max(10, step - 20), step + 1, 10)]


def test_the_tracked_checkpoint_is_kept_whatever_keep_is(tmp_path):
    for step in (10, 20):
        save(tmp_path, step, keep=1)
    assert names(tmp_path) == [20]


def test_a_killed_save_does_not_count_and_is_removed(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    (tmp_path / "iter_0000025").mkdir()
    (tmp_path / "iter_0000025" / "common.pt").touch()
    (tmp_path / "iter_0000035_of_mine").mkdir()
    save(tmp_path, 40)
    (tmp_path / "iter_0000035_of_mine").rmdir()
    assert names(tmp_path) == [20, 30, 40]


def test_a_run_that_goes_back_keeps_later_checkpoints_until_it_overwrites_them(tmp_path):
    for step in (10, 20, 30):
        (save(tmp_path, step) / "old").touch()
    (tmp_path / TRACKER).write_text("10\n")
    assert Checkpoints(tmp_path).newest() == 10
    save(tmp_path, 20)
    assert names(tmp_path) == [10, 20, 30]
    assert not (tmp_path / "iter_0000020" / "old").exists()
    assert (tmp_path / "iter_0000030" / "old").exists()


def test_a_folder_that_cannot_be_removed_is_no_checkpoint_and_is_removed_later(
    tmp_path, monkeypatch
):
    save(tmp_path, 1)

    def rmdir(*_, **options):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr("os.rmdir", rmdir)
        save(tmp_path, 2, keep=1)
    assert names(tmp_path) == [1, 2] and not (tmp_path / "iter_0000001" / RUN).exists()
    save(tmp_path, 3)
    assert names(tmp_path) == [2, 3]


# What is refused ----------------------------------------------------------------------------------


def test_the_newest_checkpoint_is_never_overwritten(tmp_path):
    save(tmp_path, 30)
    with pytest.raises(ConfigError, match="iter_0000030 is the newest checkpoint"):
        save(tmp_path, 30)
    assert Checkpoints(tmp_path).data_of(30)[None]["row"] == 480


def read_newest(checkpoints):
    step = checkpoints.newest()
    return checkpoints.run_of(step), checkpoints.data_of(step)


def lose_the_folder(folder):
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return r"iter_0000020/run.json: cannot be read \(No such file"


def lose_run(folder):
    (folder / RUN).unlink()
    return r"run.json: cannot be read \(No such file"


def damage_run(folder):
    (folder / RUN).write_text((folder / RUN).read_text().replace("0.1", "0.2"))
    return "run.json: .* its digest does not match"


def lose_the_cursor(folder):
    (folder / "data.json").unlink()
    return "data.json is missing"


def damage_the_cursor(folder):
    (folder / "data.json").write_text((folder / "data.json").read_text().replace("320", "321"))
    return "data.json: .* its digest does not match"


def cut_the_cursor(folder):
    (folder / "data.json").write_bytes((folder / "data.json").read_bytes()[:-1])
    return "data.json: is damaged"


def damage_the_tracker(folder):
    (folder.parent / TRACKER).write_text("twenty")
    return "contains 'twenty'"


@pytest.mark.parametrize(
    "harm",
    [
        lose_the_folder,
        lose_run,
        damage_run,
        lose_the_cursor,
        damage_the_cursor,
        cut_the_cursor,
        damage_the_tracker,
    ],
)
def test_a_lost_or_damaged_part_is_named_in_one_line_and_nothing_older_is_used(harm, tmp_path):
    save(tmp_path, 10)
    message = harm(save(tmp_path, 20))
    with pytest.raises(StateFormatError, match=message) as caught:
        read_newest(Checkpoints(tmp_path))
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_full_disk_loses_only_the_current_save(tmp_path):
    save(tmp_path, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
    try:
        with pytest.raises(EnergonExtError, match="iter_0000002: the save failed") as caught:
            Checkpoints(tmp_path).save(
                2, write_model=write_model, run={}, states=[(0, lambda folder: list(range(10_000)))]
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert Checkpoints(tmp_path).newest() == 1


# Several ranks ------------------------------------------------------------------------------------


def save_on_two_ranks(rank, root, pipe):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{root}/rendezvous", rank=rank, world_size=2
    )
    checkpoints = Checkpoints(root / "checkpoints")

    def write_part(folder):
        (folder / f"part{rank}").write_text(f"of rank {rank}")

    def attempt(step, write_model=write_part, state=rank):
        try:
            checkpoints.save(
                step, write_model=write_model, run={}, states=[(rank, lambda folder: state)]
            )
        except EnergonExtError as error:
            return f"{type(error).__name__}: {error}"
        return checkpoints.newest()

    def fail(folder):
        torch.distributed.barrier()
        if rank == 1:
            raise OSError(28, "No space left on device")

    def die(folder):
        if rank == 1:
            pipe.send(results)
            os.kill(os.getpid(), signal.SIGKILL)

    results = [attempt(1), attempt(2, write_model=fail), attempt(3, state={rank} if rank else 0)]
    results.append(attempt(4))
    results.append(attempt(5, write_model=die))
    pipe.send(results)


def test_if_a_rank_fails_or_dies_both_raise_and_the_last_checkpoint_is_kept(tmp_path, processes):
    pipes = [processes.Pipe(duplex=False) for _ in range(2)]
    ranks = [
        processes.Process(target=save_on_two_ranks, args=(rank, tmp_path, there))
        for rank, (_, there) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()
    try:
        assert all(here.poll(120) for here, _ in pipes), "a rank hangs"
        (*first, died), second = (here.recv() for here, _ in pipes)
    finally:
        for process in ranks:
            process.kill()
            process.join()
    for rank, results in enumerate((first, second)):
        assert (results[0], results[3]) == (1, 4)
        expected = ("No space left on device", "type set is not JSON")
        for error, message in zip(results[1:3], expected):
            assert message in error and ("On rank 1" in error) == (rank == 0)
    assert died.startswith("EnergonExtError: ") and "iter_0000005: the save failed" in died
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert (checkpoints.newest(), checkpoints.data_of(4)) == (4, {0: 0, 1: 1})
    for rank in (0, 1):
        part = checkpoints.folder_of(4) / f"part{rank}"
        assert part.read_text() == f"of rank {rank}"
