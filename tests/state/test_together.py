# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Three ranks, the first and last of which form a group that acts together."""

import pytest
import torch.distributed as dist
from megatron.energon import WorkerConfig

from energon_ext.errors import DataExhaustedError, EnergonExtError, StateFormatError
from energon_ext.state.consumption import Consumption
from energon_ext.state.together import end_together, on_all_ranks

RANKS = 3


def outcome(work):
    try:
        return work()
    except (EnergonExtError, OSError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"


def fails_on(failing, error):
    def work():
        if dist.get_rank() == failing:
            raise error
        return dist.get_rank()

    return work


def be_a_rank(rank, folder, pipe):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS
    )
    group = [dist.new_group([0, 2]), dist.new_group([1])][rank % 2]
    config = WorkerConfig(
        rank=dist.get_rank(group),
        world_size=dist.get_world_size(group),
        num_workers=0,
        data_parallel_group=group,
    )

    def ends(lacks, is_planned=False):
        return outcome(
            lambda: end_together(
                rank not in lacks, {"a": 2, "b": 1}, 7, config, is_planned=is_planned
            )
        )

    local = Consumption({"a": rank + 1}, {"a": 10 * rank, f"of {rank}": 1})
    found = {
        "all": on_all_ranks(fails_on(None, None)),
        "group": on_all_ranks(fails_on(None, None), group),
        "other group fails": outcome(lambda: on_all_ranks(fails_on(1, OSError("x")), group)),
        "fails": outcome(lambda: on_all_ranks(fails_on(2, StateFormatError("bad")), group)),
        "strange": outcome(lambda: on_all_ranks(fails_on(0, OSError("a\nb")), group)),
        "stopped": outcome(lambda: on_all_ranks(fails_on(2, KeyboardInterrupt()), group)),
        "reduced": local.reduce(group).to_json([])["datasets"],
        "reduced over all": local.reduce().to_json([])["datasets"],
        "local": local.rows["a"],
        "none ends": ends([]),
        "one ends": ends([2]),
        "both end": ends([0, 2]),
        "a plan continues": ends([1], is_planned=True),
    }
    pipe.send(found)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory, processes):
    """The outcomes of each rank."""
    folder, ranks, pipes = tmp_path_factory.mktemp("ranks"), [], []
    try:
        for rank in range(RANKS):
            here, there = processes.Pipe(duplex=False)
            ranks.append(processes.Process(target=be_a_rank, args=(rank, folder, there)))
            pipes.append(here)
            ranks[-1].start()
            there.close()
        assert all(here.poll(120) for here in pipes), "a rank hangs"
        return [here.recv() for here in pipes]
    finally:
        for process in ranks:
            process.kill()
            process.join()


def each(found, name):
    return [of_rank[name] for of_rank in found]


def test_results_come_in_group_order(found):
    assert each(found, "all") == [[0, 1, 2]] * 3
    assert each(found, "group") == [[0, 2], [1], [0, 2]]


def test_a_failure_is_raised_only_in_its_group_with_the_rank_there(found):
    # Alone in its group it is raised as it is.
    assert each(found, "other group fails") == [[0, 2], "OSError: x", [0, 2]]
    assert each(found, "fails") == [
        "StateFormatError: On rank 1: bad",
        [1],
        "StateFormatError: bad",
    ]
    assert each(found, "strange") == [
        "OSError: a\nb",
        [1],
        "EnergonExtError: On rank 0: OSError: a",
    ]
    assert each(found, "stopped") == [
        "EnergonExtError: On rank 1: KeyboardInterrupt: ",
        [1],
        "KeyboardInterrupt: ",
    ]


def test_reducing_a_count_over_the_group_leaves_it_unchanged(found):
    pair = [("a", 4, 20), ("of 0", 0, 1), ("of 2", 0, 1)]
    alone = [("a", 2, 10), ("of 1", 0, 1)]
    reduced = [[tuple(entry.values()) for entry in entries] for entries in each(found, "reduced")]
    assert reduced == [pair, alone, pair]
    for entries in each(found, "reduced over all"):
        assert [tuple(entry.values()) for entry in entries][0] == ("a", 6, 30)
    assert each(found, "local") == [1, 2, 3]


def test_a_group_ends_when_one_rank_has_no_batch(found):
    this, another = (
        "DataExhaustedError: Every source has reached its max_epochs (a: 2, b: 1): "
        f"{which} data-parallel rank has no batch 7. Train for fewer steps, or raise or "
        "remove a limit."
        for which in ("this", "another")
    )
    assert each(found, "none ends") == [None] * 3
    assert each(found, "one ends") == [another, None, this]
    assert each(found, "both end") == [this, None, this]
    assert each(found, "a plan continues") == [None, this, None]
    assert issubclass(DataExhaustedError, EnergonExtError)
