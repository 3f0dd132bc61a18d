# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The rows of a step are the same on any ranks, workers and micro-batch size."""

import json

import numpy as np
import pytest

from energon_ext import (
    ConfigError,
    PackedTaskEncoder,
    SFTTaskEncoder,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.encoders.splice import MultiSpliceTaskEncoder
from energon_ext.splice import MultiSpliceConfig
from tests.plan.runs import SEQ_LEN, Run, numbered_documents, rows_of, tokens_of, write_numbered
from tests.support import LargeTokenizer, config, loader_for, write_weights

STEPS = 12
ROWS = 16


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("topology")
    write_numbered(folder / "a", 150, 100, seed=1)
    write_numbered(folder / "b", 110, 10_000, seed=2)
    write_numbered(folder / "c", 40, 20_000, seed=3, longest=200)  # longer than a row
    return folder


def yaml(folder, name, node):
    path = folder / f"{name}.yaml"
    head = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path.write_text(json.dumps({**head, "splits": {"train": node}}))
    return path


def entry(path, weight=1, **fields):
    return {"path": path, "weight": weight, **fields}


def blend(folder):
    falling = {"linear": {0: 3, 8: 0}}
    return yaml(folder, "blend", {"blend": [entry("a", falling), entry("b"), entry("c", 0.5)]})


def interleave(folder):
    rising = {"cosine": {0: 0, 10: 2}}
    return yaml(folder, "interleave", {"interleave": [entry("a"), entry("b", rising), entry("c")]})


def nested(folder):
    yaml(folder, "inner", {"blend": [entry("b", 2), entry("c")]})
    return yaml(folder, "nested", {"interleave": [entry("a"), entry("inner.yaml", 2)]})


def limited(folder):
    limits = [entry("a", max_epochs=1), entry("b", 2, max_epochs=2)]
    return yaml(folder, "limited", {"interleave": limits})


MIXES = {"blend": blend, "interleave": interleave, "nested": nested, "limited": limited}
IN_PROCESS = [(r, 0, b) for r in (1, 2, 4, 8) for b in (1, 2, 4, 8) if r * b <= ROWS]
#: Of those; test_random_configurations resumes others on all that there are.
SOME = [(1, 0, 8), (2, 0, 4), (4, 0, 1), (8, 0, 2)]
WITH_WORKERS = [(1, 3, 2), (2, 2, 1), (4, 1, 4)]
ALL_WORKERS = [(r, w, b) for r, _, b in IN_PROCESS for w in (1, 2, 3)]


def check_equal_everywhere(mix, encoder, topologies):
    reference = Run(mix, encoder=encoder, rows=ROWS)
    steps, states = [], []
    for _ in range(STEPS):
        steps.append(reference.step())
        states.append(reference.state())
    for ranks, workers, batch in topologies:
        run = Run(mix, ranks=ranks, workers=workers, batch=batch, encoder=encoder, rows=ROWS)
        for number in range(STEPS):
            where = f"step {number} on {ranks} ranks x {workers} workers, {batch} rows a batch"
            assert run.step() == steps[number], where
            assert run.state() == states[number], where
        run.close()


@pytest.mark.parametrize("packing", ["bin", "sequential"])
@pytest.mark.parametrize("mix", MIXES)
def test_steps_and_states_are_equal_on_other_ranks_and_batch_sizes(data, mix, packing):
    encoder = PackedTaskEncoder(LargeTokenizer(), SEQ_LEN, packing=packing)
    check_equal_everywhere(MIXES[mix](data), encoder, SOME)


def test_steps_and_states_are_equal_with_worker_processes(data):
    encoder = PackedTaskEncoder(LargeTokenizer(), SEQ_LEN)
    check_equal_everywhere(nested(data), encoder, WITH_WORKERS)


@pytest.mark.nightly
@pytest.mark.parametrize("packing", ["bin", "sequential"])
@pytest.mark.parametrize("mix", MIXES)
def test_steps_and_states_are_equal_in_the_whole_matrix(data, mix, packing):
    encoder = PackedTaskEncoder(LargeTokenizer(), SEQ_LEN, packing=packing)
    check_equal_everywhere(MIXES[mix](data), encoder, [*IN_PROCESS[1:], *ALL_WORKERS])


@pytest.mark.parametrize("pack_contents", [False, True])
def test_spliced_rows_are_equal_on_all_topologies(data, pack_contents):
    splice = MultiSpliceConfig(num_docs=8, content_length=11, pack_contents=pack_contents)
    mix = yaml(data, "splice", {"blend": [entry("a"), entry("b", subflavors={"splice": True})]})
    encoder = MultiSpliceTaskEncoder(
        LargeTokenizer(), SEQ_LEN, splice, spliced_subflavors={"splice": True}
    )
    check_equal_everywhere(mix, encoder, [(2, 0, 4), (4, 0, 1), (2, 2, 2)])


def test_conversations_are_equal_on_all_topologies(data):
    rng = np.random.default_rng(0)
    for name, first in ("chat", 100), ("letters", 10_000):
        documents = numbered_documents(80, first)
        write_numbered(data / name, 80, first)
        weights = [[0, *rng.integers(0, 2, len(ids) - 2), 1] for ids in documents]
        write_weights(data / name, weights, tokenizer=LargeTokenizer())
    mix = yaml(data, "chat", {"interleave": [entry("chat"), entry("letters", 2)]})
    encoder = SFTTaskEncoder(LargeTokenizer(), SEQ_LEN)
    check_equal_everywhere(mix, encoder, [(2, 0, 4), (8, 0, 1), (2, 2, 2)])


@pytest.mark.parametrize("packing", ["bin", pytest.param("sequential", marks=pytest.mark.nightly)])
def test_a_validation_reads_every_row_once_on_all_topologies(data, packing):
    encoder = PackedTaskEncoder(LargeTokenizer(), SEQ_LEN, packing=packing)
    path = yaml(data, "val", {"blend": [entry("a"), entry("c")]})
    path.write_text(path.read_text().replace("train", "val"))

    def rows_of_source(number, ranks, workers, batch):
        """The rows that train something, of all ranks; those that complete a batch do not."""
        found = []
        for rank in range(ranks):
            datasets = get_val_datasets(
                path,
                worker_config=config(workers, rank, ranks),
                batch_size=batch,
                task_encoder=encoder,
            )
            for each in loader_for(datasets[number][0]):
                found += [row for row in rows_of(each) if any(row[2])]
        return sorted(found)

    for number in range(2):
        alone = rows_of_source(number, 1, 0, 1)
        assert len(alone) > 20
        for ranks, workers, batch in [(1, 0, 4), (8, 0, 1), (2, 2, 2)]:
            assert rows_of_source(number, ranks, workers, batch) == alone


def test_a_run_with_limits_reads_every_document_max_epochs_times_and_ends_on_all_ranks(data):
    """Documents of 3 to 59 tokens are never cut, so all but their last tokens are inputs."""
    mix = limited(data)
    for ranks, workers, batch in [(1, 0, 1), (4, 0, 2), (2, 2, 4)]:
        run = Run(mix, ranks=ranks, workers=workers, batch=batch, rows=ROWS)
        steps = []
        while (step := run.step()) is not None:
            steps.append(step)
        assert run.step() is None
        counts = tokens_of(steps)
        of_a = [(ids, 1) for ids in numbered_documents(150, 100, seed=1)]
        of_b = [(ids, 2) for ids in numbered_documents(110, 10_000, seed=2)]
        documents = [(ids[:-1], epochs) for ids, epochs in of_a + of_b]
        expected = {token: epochs for tokens, epochs in documents for token in tokens}
        assert counts == expected
        run.close()


#: One mix goes on to the end; test_random_configurations has many more, for a step each.
@pytest.mark.parametrize(
    "mix",
    [name if name == "nested" else pytest.param(name, marks=pytest.mark.nightly) for name in MIXES],
)
def test_a_state_of_any_step_continues_on_any_other_topology(data, mix):
    path = MIXES[mix](data)
    reference = Run(path, rows=ROWS)
    steps, states = [], []
    for _ in range(10):
        states.append(reference.state())
        steps.append(reference.step())
    rng = np.random.default_rng(0)
    for number, state in enumerate(states):
        ranks, _, batch = IN_PROCESS[rng.integers(len(IN_PROCESS))]
        workers = 2 if number == 5 else 0
        run = Run(path, ranks=ranks, workers=workers, batch=batch, rows=ROWS).resume(state)
        assert run.state() == state, "a restored state is the state"
        assert run.steps(10 - number) == steps[number:]
        run.close()


def test_another_global_batch_goes_on_from_the_row_the_run_stands_at(data):
    """64 rows in steps of 16 and then of 32 are the rows of a run in steps of 16, set by set."""
    path = yaml(data, "constant", {"interleave": [entry("a"), entry("b", 3)]})
    run = Run(path, rows=16)
    run.steps(4)
    state = run.state()
    smaller = Run(path, rows=16).resume(state).steps(4)
    larger = Run(path, rows=32, ranks=2, batch=4).resume(state).steps(2)
    assert [sorted(smaller[0] + smaller[1]), sorted(smaller[2] + smaller[3])] == larger


def test_a_plan_of_a_thousand_steps_does_not_depend_on_how_many_rows_are_asked_for(data):
    """The n-th row is a function of n: constant weights, steps of 1 and of 16 rows."""
    path = yaml(data, "constant", {"blend": [entry("a"), entry("b", 3)]})
    one_by_one = Run(path, rows=1).steps(32)
    at_once = Run(path, rows=16).steps(2)
    assert sorted(row for step in one_by_one[:16] for row in step) == at_once[0]
    assert sorted(row for step in one_by_one[16:] for row in step) == at_once[1]


@pytest.mark.parametrize(
    ("ranks", "batch", "rows"), [(2, 3, 16), (1, 1, 0), (4, 8, 16), (1, 1, 2.5), (1, 1, True)]
)
def test_rows_of_a_step_that_do_not_divide_are_refused(data, ranks, batch, rows):
    with pytest.raises(ConfigError, match="rows_per_step"):
        get_train_dataset(
            blend(data),
            worker_config=config(0, 0, ranks),
            batch_size=batch,
            rows_per_step=rows,
            task_encoder=PackedTaskEncoder(LargeTokenizer(), SEQ_LEN),
        )
