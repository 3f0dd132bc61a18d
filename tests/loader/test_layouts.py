# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs whose steps are read in layouts: the same documents, in micro-batches of several sizes."""

import json
from collections import Counter

import numpy as np
import pytest
from megatron.energon import DefaultTaskEncoder

from energon_ext import (
    ConfigError,
    DynamicBlendMixin,
    ExactDataLoader,
    PackedTaskEncoder,
    PreferenceTaskEncoder,
    SFTTaskEncoder,
    StateMismatchError,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.encoders.load import load_mix
from energon_ext.encoders.saved_task import plan_saved
from energon_ext.plan.context_cost import ContextTime, MeasuredCost
from energon_ext.plan.layout import ContextOptions
from energon_ext.plan.spec import Spec
from energon_ext.plan.topology import Topology
from energon_ext.plan.trace import trace_step
from tests.cli.command import energon_ext
from tests.saves import save_cursor
from tests.support import LargeTokenizer, config, trained_transitions, write_mix, write_tokens

SEQ_LEN, ROWS = 64, 3

COST = MeasuredCost.fit(
    ContextTime(context_size=size, lengths=lengths, seconds=8 * size + work / size)
    for size in (1, 2, 4)
    for lengths in ([8], [24], [96], [12, 12])
    for work in [sum(n + n * n / 16 for n in lengths)]
)


def contexts(sizes=(1, 2, 4), budget=16, **options):
    return ContextOptions(sizes=sizes, budget=budget, cost=COST, **options)


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    """Documents up to twice as long as a row, and of 13 tokens; every token occurs once.

    In a stream of the latter, the second row begins with the last token of a document.
    """
    root, random, first, pairs = tmp_path_factory.mktemp("data"), np.random.default_rng(0), 0, []
    for name in ("web", "books"):
        found = []
        lengths = np.minimum(random.lognormal(2.5, 1.0, 90).astype(int) + 1, 2 * SEQ_LEN)
        for length in lengths if name == "web" else [13] * 90:
            found.append(list(range(first, first + length)))
            first += length + 1
        pairs.append((write_tokens(root / name, found), 1))
    return write_mix(root / "mix.yaml", pairs)


def open_loader(mix, own=None, rank=0, ranks=1, workers=0, batch_size=1, **options):
    options = {"mask_boundary_loss": True, **options}
    encoder = PackedTaskEncoder(LargeTokenizer(), SEQ_LEN, contexts=own, **options)
    encoder.rows_per_step = ROWS
    worker = config(workers, rank, ranks)
    dataset = get_train_dataset(
        mix, task_encoder=encoder, worker_config=worker, batch_size=batch_size
    )
    return ExactDataLoader(dataset)


class Ranks:
    """The loaders of all ranks of a run."""

    def __init__(self, mix, own, ranks, state=None, **options):
        self.loaders = [open_loader(mix, own, rank, ranks, **options) for rank in range(ranks)]
        for loader in self.loaders if state is not None else ():
            loader.load_state_dict(state)
        self.batches = [iter(loader) for loader in self.loaders]

    def read_round(self):
        """Return each micro-batch once, after a look at those of all ranks that share it."""
        found = [next(batches).validate() for batches in self.batches]
        for rank, batch in enumerate(found):
            first = rank - rank % batch.context_size
            assert batch.context_size == found[first].context_size
            assert batch.tokens.equal(found[first].tokens)
            assert batch.num_tokens % (2 * batch.context_size if batch.context_size > 1 else 1) == 0
        return [batch for rank, batch in enumerate(found) if rank % batch.context_size == 0]

    def read_step(self):
        found = []
        while not (found and self.loaders[0].ends_step):
            found += self.read_round()
        return found

    def state(self):
        states = [loader.state_dict() for loader in self.loaders]
        assert all(state == states[0] for state in states)
        return states[0]

    def close(self):
        for loader in self.loaders:
            loader.close()


def count(batches):
    documents = Counter()
    for batch in batches:
        documents.update(batch.documents_per_source())
    return trained_transitions(batches), documents


def expected_steps(mix, steps, **options):
    """Return what each step reads without layouts."""
    batches = iter(open_loader(mix, **options))
    return [count([next(batches) for _ in range(ROWS)]) for _ in range(steps)]


#: Layouts of one run, one after another: options, ranks and workers.
HOPS = [
    (contexts(), 4, 0),
    (contexts((1, 4), 32), 8, 0),
    (contexts((2,), 32, alignment=2), 2, 1),
    (contexts((1, 2), 32, stages=2, multiple_of=2), 4, 0),
    (contexts((1,), 64), 3, 0),
    (contexts(count=12), 4, 1),
]


@pytest.mark.parametrize("packing", ["bin", "sequential"])
def test_each_document_is_read_once_over_changes_of_sizes_and_ranks(mix, packing):
    expected = expected_steps(mix, 2 * len(HOPS), packing=packing)
    state, sizes = None, set()
    for own, ranks, workers in HOPS:
        run = Ranks(mix, own, ranks, state, workers=workers, packing=packing)
        for _ in range(2):
            found = run.read_step()
            sizes |= {batch.context_size for batch in found}
            assert count(found) == expected.pop(0)
            assert len(found[0].sources) == 2
        state = run.state()
        run.close()
    assert sizes == {1, 2, 4}
    assert state["done"] == 0 and state["read"] == ROWS * 2 * len(HOPS)


def test_a_run_continues_without_layouts_where_one_with_them_ended(mix):
    run = Ranks(mix, contexts(), 4)
    run.read_step()
    plain = open_loader(mix)
    plain.load_state_dict(run.state())
    batches = iter(plain)
    found = count([next(batches) for _ in range(ROWS)])
    assert found == expected_steps(mix, 2)[1]


def test_a_state_saved_inside_a_step_continues_there_with_the_same_layout_only(mix):
    whole = Ranks(mix, contexts(), 4)
    rounds = [whole.read_round() for _ in range(5)]
    run = Ranks(mix, contexts(), 4)
    run.read_round(), run.read_round()
    assert not run.loaders[0].ends_step
    state = run.state()
    again = Ranks(mix, contexts(), 4, state)
    for expected in rounds[2:]:
        found = again.read_round()
        assert [batch.tokens.tolist() for batch in found] == [
            batch.tokens.tolist() for batch in expected
        ]
    for own, ranks, name in ((contexts((1, 4)), 4, "contexts"), (contexts(), 8, "ranks")):
        with pytest.raises(StateMismatchError, match=name):
            open_loader(mix, own, 0, ranks).load_state_dict(state)


def test_the_last_step_of_a_pass_is_read_as_it_is(mix):
    def read(own, ranks):
        encoder = PackedTaskEncoder(LargeTokenizer(), SEQ_LEN, contexts=own)
        encoder.rows_per_step = 7
        loaders = [
            ExactDataLoader(
                get_train_dataset(
                    mix,
                    task_encoder=encoder,
                    worker_config=config(0, rank, ranks),
                    batch_size=1,
                    repeat=False,
                )
            )
            for rank in range(ranks)
        ]
        found = [list(loader) for loader in loaders]
        assert len({len(batches) for batches in found}) == 1
        return [
            batch
            for rank, batches in enumerate(found)
            for batch in batches
            if rank % (batch.context_size or 1) == 0
        ], loaders[0]

    found, loader = read(contexts(), 4)
    expected, _ = read(None, 1)
    assert count(found) == count(expected)
    with pytest.raises(TypeError, match="different numbers of batches"):
        len(loader)


def test_validation_reads_each_document_once(mix, tmp_path):
    pairs = [(mix.parent / name, 1) for name in ("web", "books")]
    val = write_mix(tmp_path / "val.yaml", pairs, split="val")

    def read(own, ranks):
        found = []
        for rank in range(ranks):
            encoder = PackedTaskEncoder(LargeTokenizer(), SEQ_LEN, contexts=own)
            worker = config(0, rank, ranks)
            datasets = get_val_datasets(
                val, task_encoder=encoder, worker_config=worker, batch_size=1
            )
            batches = [batch for dataset, _ in datasets for batch in ExactDataLoader(dataset)]
            found += [batch for batch in batches if rank % (batch.context_size or 1) == 0]
        return count(found)

    assert read(contexts(), 4) == read(None, 1)


def test_a_state_plans_the_layout_again_without_the_encoder(mix):
    run = Ranks(mix, contexts(), 4)
    spec = Spec.from_json(run.state()["spec"])
    parsed, as_whole = load_mix(mix, split_part="train", trusted_modules=())
    topology = Topology(ROWS, ranks=4, in_layouts=True)
    again = plan_saved(parsed, spec, topology, as_whole)
    step = next(iter(again.draw_steps()))
    own = next(iter(run.loaders[0].dataset.run.fork().draw_steps()))
    assert again.lay_out(step) == run.loaders[0].dataset.run.lay_out(own)


def test_a_trace_names_the_ranks_and_the_micro_batch_of_each_document(mix):
    run = Ranks(mix, contexts(), 4)
    blend = run.loaders[0].dataset.run
    traced = list(trace_step(next(iter(blend.fork().draw_steps())), blend))
    rounds = []
    while not (rounds and run.loaders[0].ends_step):
        rounds.append([next(batches) for batches in run.batches])
    for row in traced:
        for rank in row.ranks:
            batch = rounds[row.micro_batch][rank]
            assert batch.context_size == row.context_size == len(row.ranks)
            for _, start, stop in row.contents:
                assert stop - start - 1 <= batch.max_seqlen
            assert row.source in batch.tokens_per_source()
    pieces = [(row.row, piece) for row in traced for piece in row.contents]
    plain = open_loader(mix).dataset.run
    expected = [
        (row.row, piece)
        for row in trace_step(next(iter(plain.fork().draw_steps())), plain)
        for piece in row.contents
    ]
    assert sorted(pieces) == sorted(expected)


def test_commands_follow_a_run_in_layouts(mix, tmp_path):
    run = Ranks(mix, contexts(), 4)
    first = run.read_step()
    save_cursor(tmp_path / "run", 1, run.state())
    arguments = (tmp_path / "run", mix, "--step", 0, "--world-size", 4, "--json")
    rows = [json.loads(line) for line in energon_ext("trace", *arguments).stdout.splitlines()]
    assert {row["context_size"] for row in rows} == {batch.context_size for batch in first}
    on_last = energon_ext("trace", *arguments, "--rank", 3).stdout.splitlines()
    expected = [row for row in rows if row["rank"] + row["context_size"] > 3 >= row["rank"]]
    assert [json.loads(line) for line in on_last] == expected != rows
    forecast = energon_ext("checkpoint", "forecast", tmp_path / "run", mix, "--steps", 3)
    assert forecast.exit_code == 0, forecast.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"own": contexts((1, 2))},
            "a document of 65 tokens, .* does not fit on 2 ranks",
        ),
        ({"own": contexts(), "ranks": 6}, "blocks of 4 ranks do not divide 6 ranks"),
        ({"own": contexts(), "mask_boundary_loss": False}, "set mask_boundary_loss=True"),
        ({"own": contexts(), "balance": "attention"}, "balance: 'attention' found, but contexts"),
        ({"own": contexts(), "alignment": 8}, "alignment: 8 found, but contexts"),
    ],
)
def test_what_layouts_cannot_be_made_of_is_refused(mix, options, message):
    with pytest.raises(ConfigError, match=message):
        open_loader(mix, **options)


def test_a_cost_that_no_state_could_contain_is_refused(mix):
    own = ContextOptions(sizes=(1,), budget=64, cost=lambda lengths, size: lengths)
    with pytest.raises(ConfigError, match="contexts: cost is a function; a MeasuredCost is needed"):
        open_loader(mix, own)


def test_samples_are_not_read_in_layouts(mix):
    """Pairs have the argument, others the attribute of a task encoder of texts."""
    message = "contexts: {} packs samples into rows, and only the lengths of whole samples are know"
    with pytest.raises(ConfigError, match=message.format("PreferenceTaskEncoder")):
        PreferenceTaskEncoder(LargeTokenizer(), SEQ_LEN, contexts=contexts())

    class Own(DynamicBlendMixin, DefaultTaskEncoder):
        contexts = contexts()

    with pytest.raises(ConfigError, match=message.format("Own")):
        Own().task()
    Own.contexts = ["an attribute of the user"]
    Own().task()


def test_fine_tuning_takes_layouts_too():
    encoder = SFTTaskEncoder(LargeTokenizer(), SEQ_LEN, contexts=contexts())
    assert encoder.task().contexts == contexts()
