# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that go on in the same processes with fewer or more of them: which rows they read."""

import json
import multiprocessing
import random
from collections import Counter

import pytest
from megatron.energon import DefaultTaskEncoder

from energon_ext import (
    ConfigError,
    DynamicBlendMixin,
    PackedTaskEncoder,
    StateMismatchError,
    get_train_dataset,
)
from energon_ext.batch.row_hashes import row_digests
from energon_ext.errors import RankError
from energon_ext.plan.layout import ContextOptions
from energon_ext.plan.trace import rows_of
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.loader.test_layouts import COST
from tests.support import (
    config,
    loader_for,
    take,
    write_dataset,
    write_distinct_rows,
    write_mix,
    write_tokens,
)

SEQ_LEN = 32
STEPS = 9


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    return write_distinct_rows(tmp_path_factory.mktemp("data"))


def new_loader(
    mix, rank=0, ranks=1, rows=12, batch=1, workers=0, virtual_epoch_length=0, **options
):
    dataset = get_train_dataset(
        mix,
        worker_config=config(workers, rank, ranks),
        virtual_epoch_length=virtual_epoch_length,
        batch_size=batch,
        rows_per_step=rows,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN, packing_buffer_docs=20, **options),
    )
    return loader_for(dataset)


def read(loader, count):
    """Return digests of the rows of the next batches, None for padding."""
    rows = []
    for batch in take(loader, count):
        is_trained = batch.token_weights.view(-1, SEQ_LEN).any(1).tolist()
        digests = row_digests(batch, SEQ_LEN)
        rows += [digest if trained else None for digest, trained in zip(digests, is_trained)]
    return rows


def batches_of(loader):
    """Return the batches of a rank in a step."""
    return loader.dataset.run.topology.rounds


def plan_of(mix, steps=STEPS, **options):
    """Return the rows of each step, as one rank reads them that is never interrupted."""
    loader = new_loader(mix, **options)
    return [Counter(read(loader, batches_of(loader))) for _ in range(steps)]


class Group:
    """Loaders that stand for the processes of a run."""

    def __init__(self, mix, ranks, **options):
        self.loaders = [new_loader(mix, rank, ranks, **options) for rank in range(ranks)]
        self.starts = [loader.mark() for loader in self.loaders]
        self._new = lambda: new_loader(mix, **options)  # as rank 0 of 1: it knows no better

    def lose(self, *ranks):
        for rank in sorted(ranks, reverse=True):
            self.loaders.pop(rank).close()
            self.starts.pop(rank)

    def regain(self, count, place=0):
        """Add new processes, which get the state of one that has just gone on."""
        for _ in range(count):
            state = self.loaders[-1].state_dict(self.starts[-1])
            self.loaders.insert(place, self._new())
            self.starts.insert(place, json.loads(json.dumps(state)))

    def begin(self, **options):
        for rank, (loader, start) in enumerate(zip(self.loaders, self.starts)):
            loader.continue_from(start, rank=rank, ranks=len(self.loaders), **options)

    def step(self):
        """Take a step; return its rows."""
        rows = [row for each in self.loaders for row in read(each, batches_of(each))]
        self.starts = [loader.mark() for loader in self.loaders]
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return rows


@pytest.mark.parametrize(
    ("workers", "balance"),
    [(0, None), (0, "attention"), pytest.param(1, None, marks=pytest.mark.nightly)],
)
def test_ranks_lost_inside_a_step_and_regained_read_every_row_once(mix, workers, balance):
    expected = plan_of(mix)
    group, rng = Group(mix, 4, workers=workers, balance=balance), random.Random(0)
    for step, lost in enumerate([[], [2], [], [0, 1], [], [0], [], [], []]):
        group.begin()
        if lost:  # inside the step, before some ranks have read their first batch
            for loader in group.loaders:
                read(loader, rng.randrange(batches_of(loader)))
            group.lose(*lost)
            group.begin()
        assert Counter(group.step()) == expected[step]
        if step in (4, 6, 7):
            group.regain(1, place=rng.randrange(2))
    assert len(group.loaders) == 3


def test_a_resumed_run_goes_on_from_the_state_of_ranks_that_went_on(mix):
    expected = plan_of(mix)
    group = Group(mix, 4)
    group.lose(3)
    for step in range(4):
        group.begin()
        assert Counter(group.step()) == expected[step]
    again = new_loader(mix)
    again.load_state_dict(json.loads(json.dumps(group.loaders[0].state_dict())))
    assert Counter(read(again, 12)) == expected[4]
    assert again.batches_drawn == 60


@pytest.mark.parametrize("balance", [None, "attention"])
@pytest.mark.parametrize("batch", [1, 2])
def test_padding_completes_the_batches_of_ranks_that_do_not_divide_a_step(mix, batch, balance):
    expected = plan_of(mix, rows=8)
    group = Group(mix, 4, rows=8, batch=batch, balance=balance)
    ranks = [4, 4, 3, 3, 3, 2, 4, 4, 4]
    rounds = {1: [2, 2, 3, 3, 3, 4, 2, 2, 2], 2: [1, 1, 2, 2, 2, 2, 1, 1, 1]}[batch]
    for step in range(STEPS):
        if len(group.loaders) > ranks[step]:
            group.lose(0)
        group.regain(max(0, ranks[step] - len(group.loaders)))
        group.begin()
        assert len(group.loaders) == ranks[step]
        assert batches_of(group.loaders[0]) == rounds[step]
        rows = Counter(group.step())
        assert rows.pop(None, 0) == rounds[step] * ranks[step] * batch - 8
        assert rows == expected[step]
        assert group.loaders[0].state_dict()["read"] == 8 * (step + 1)


def test_the_batches_of_uneven_steps_are_counted_and_traced(mix):
    loader = new_loader(mix, rows=8)
    loader.continue_from(loader.mark(), rank=2, ranks=3)
    drawn = [loader.batches_drawn for _ in zip(range(7), loader)]
    assert drawn == [1, 2, 3, 4, 5, 6, 7]  # three of a step
    run = loader.dataset.run
    (step,) = [step for step, _ in zip(run.fork().draw_steps(), range(1))]
    traced = [*rows_of(step, run.topology, run.keys)]
    assert [row.rank for row in traced] == [0, 1, 2] * 3
    assert [row.micro_batch for row in traced] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [row.source is None for row in traced] == [False] * 8 + [True]


def test_other_batches_may_be_read_from_the_next_step_on(mix):
    expected = plan_of(mix, steps=2)
    group = Group(mix, 2)
    assert Counter(group.step()) == expected[0]
    group.begin(batch_rows=3)
    assert [*map(batches_of, group.loaders)] == [2, 2]
    assert Counter(group.step()) == expected[1]


def test_a_rank_that_is_there_already_keeps_what_it_has_read_ahead(mix):
    loader = new_loader(mix, workers=1)
    read(loader, 12)
    before = multiprocessing.active_children()
    loader.continue_from(loader.mark(), rank=0, ranks=1)
    assert multiprocessing.active_children() == before != []
    read(loader, 1)
    loader.continue_from(new_loader(mix).state_dict(), rank=0, ranks=1)
    assert Counter(read(loader, 12)) == plan_of(mix, steps=1)[0]
    assert not {*before} & {*multiprocessing.active_children()}


def test_a_rank_that_leaves_a_group_between_steps_ends_its_processes(mix):
    expected, loader = plan_of(mix), new_loader(mix, workers=1)
    assert Counter(read(loader, 12)) == expected[0]
    before = multiprocessing.active_children()
    loader.continue_from(loader.mark())
    assert before and not {*before} & {*multiprocessing.active_children()}
    assert Counter(read(loader, 12)) == expected[1]
    loader.close()


def test_ranks_that_come_and_go_are_not_waited_for(mix):
    def wait():
        raise AssertionError("it looks for other ranks, of which one may be dead")

    loader = new_loader(mix, ranks=4)
    loader.comparison.find_peers = wait
    loader.continue_from(loader.mark(), rank=0, ranks=4)  # nothing changes
    assert len(read(loader, 3)) == 3


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mark", "state"])
def test_a_place_inside_a_step_is_refused_and_changes_nothing(mix, kind):
    loader = new_loader(mix, ranks=4)
    read(loader, 1)
    inside = loader.mark() if kind == "mark" else loader.state_dict()
    error = (ConfigError, StateMismatchError)
    with pytest.raises(error, match="4 of the 12 rows of a step|saved inside a step"):
        loader.continue_from(inside, rank=0, ranks=3)
    with pytest.raises(ConfigError, match="continue_from: 4 of the 12 rows of a step were read"):
        loader.continue_from(inside, rank=0, ranks=4)
    assert loader.worker_config.world_size == 4
    assert batches_of(loader) == 3 and loader.batches_drawn == 1
    assert len(read(loader, 2)) == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 3, "ranks": 3}, "^continue_from: rank 3 of 3 ranks found; it must be below"),
        ({"rank": 1}, "^continue_from: rank 1 of 1 ranks found"),
        ({"rank": -1}, "^continue_from: rank: -1 found, an integer >= 0 is needed"),
        ({"rank": 0, "ranks": 0}, "^continue_from: ranks: 0 found, an integer >= 1 is needed"),
        ({"batch_rows": True}, "^continue_from: batch_rows: True found"),
    ],
)
def test_ranks_that_cannot_be_are_refused(mix, given, message):
    loader = new_loader(mix)
    with pytest.raises(ConfigError, match=message):
        loader.continue_from(loader.mark(), **given)


def test_a_rank_with_other_data_or_another_cost_is_refused(mix, tmp_path):
    state = new_loader(mix).state_dict()
    for name, documents in (("a", [[1, 2, 3]] * 50), ("b", [[4, 5]] * 50)):
        write_tokens(tmp_path / name, documents)
    (tmp_path / "mix.yaml").write_text(mix.read_text())
    other = new_loader(tmp_path / "mix.yaml")
    with pytest.raises((RankError, StateMismatchError)):
        other.continue_from(state, rank=1, ranks=2)
    assert other.worker_config.world_size == 1
    other = new_loader(mix, balance="attention")
    with pytest.raises(RankError, match="they differ in the cost of rows. Every rank plans"):
        other.continue_from(state, rank=1, ranks=2)


def written(mix, path, entry=(), **fields):
    """Write the mix with other fields of its own, or of its first entry."""
    content = json.loads(mix.read_text()) | fields
    for each in (blend := content["splits"]["train"]["blend"]):
        each["path"] = str(mix.parent / each["path"])
    blend[0].update(entry)
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("differs", ["ours", "theirs", "both"])
@pytest.mark.parametrize(
    ("fields", "options", "named"),
    [
        ({"skip": [[5, 7]]}, {}, "skip"),
        ({"entry": {"loss_weight": 0.5}}, {}, "loss_weight"),
        ({}, {"virtual_epoch_length": 24}, "virtual_epoch_length"),
        ({}, {"contexts": ContextOptions(budget=64, sizes=(1,), cost=COST)}, "contexts"),
    ],
    ids=["skip", "loss_weight", "virtual_epoch_length", "contexts"],
)
def test_a_rank_that_would_read_its_steps_in_another_way_is_refused(
    mix, tmp_path, fields, options, named, differs
):
    """Else it would read rows that other ranks read, too, or train them with other weights."""
    usual = written(mix, tmp_path / "usual.yaml"), {}
    other = written(mix, tmp_path / "other.yaml", **fields), options
    first, second = {"ours": (usual, other), "theirs": (other, usual), "both": (other, other)}[
        differs
    ]
    state = new_loader(first[0], **first[1]).state_dict()
    loader = new_loader(second[0], **second[1])
    if differs == "both":
        loader.continue_from(state, rank=1, ranks=2)
        return
    message = f"differ in (data or settings, )?{named}(, data or settings)?. Every rank"
    with pytest.raises(RankError, match=message):
        loader.continue_from(state, rank=1, ranks=2)
    assert loader.worker_config.world_size == 1


def test_a_closed_loader_does_not_go_on(mix):
    loader = new_loader(mix)
    loader.close()
    with pytest.raises(ConfigError, match="This loader was closed"):
        loader.continue_from(loader.mark())


def test_samples_without_padding_are_refused_where_ranks_do_not_divide_a_step(tmp_path):
    class Encoder(DynamicBlendMixin, DefaultTaskEncoder):
        rows_per_step = 8

    write_dataset(tmp_path / "texts", [f"text {n}" for n in range(40)])
    dataset = get_train_dataset(
        write_mix(tmp_path / "mix.yaml", [("texts", 1)]),
        worker_config=config(0, 0, 4),
        batch_size=1,
        task_encoder=Encoder(),
    )
    loader = loader_for(dataset)
    with pytest.raises(
        ConfigError, match="^rows_per_step: 8 found; 1 x 3 = batch_size x .* make_padding"
    ):
        loader.continue_from(loader.mark(), rank=0, ranks=3)
    loader.continue_from(loader.mark(), rank=0, ranks=2)
    assert len(take(loader, 4)) == 4
