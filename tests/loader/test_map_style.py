# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Rows by number, compared with the batches of our own loader."""

import json
import pickle
import random

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from energon_ext import (
    ConfigError,
    ExactDataLoader,
    PackedTaskEncoder,
    StateMismatchError,
    get_train_dataset,
)
from energon_ext.errors import StateFormatError
from energon_ext.loader.map_style import MapStyleDataset
from energon_ext.plan import numbered_rows
from energon_ext.plan.context_cost import ContextTime, MeasuredCost
from energon_ext.plan.layout import ContextOptions
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.loops.records import RecordRows, record_dataset
from tests.rl.prompts import write_sums
from tests.support import config, write_tokens

SEQ_LEN, STEP, STEPS = 24, 4, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for source in "xyz":
        lengths = np.random.default_rng(ord(source)).integers(1, 60, 90)
        write_tokens(folder / source, [[ord(source) + n % 50] * n for n in lengths.tolist()])
    return folder


def mix(folder, weights, rule="blend", **fields):
    """Write a metadataset in which weights may be entries with further fields."""
    entries = [
        {"path": name, **(weight if "weight" in weight else {"weight": weight})}
        if isinstance(weight, dict)
        else {"path": name, "weight": weight}
        for name, weight in weights.items()
    ]
    content = {
        "__module__": "energon_ext",
        "__class__": "ScheduledMetadataset",
        "splits": {"train": {rule: entries}},
        **fields,
    }
    path = folder / f"mix{len(list(folder.glob('mix*')))}.yaml"
    path.write_text(json.dumps(content))
    return path


MOVING = {"x": {"linear": {0: 3, 10: 1}}, "y": 1}


def planned(
    path, rank=0, ranks=1, batch=1, step=STEP, workers=0, packing="bin", cost=None, **options
):
    encoder = PackedTaskEncoder(
        ByteTokenizer(), SEQ_LEN, packing=packing, packing_buffer_docs=6, **options
    )
    encoder.cost = cost
    return get_train_dataset(
        path,
        worker_config=config(workers, rank, ranks),
        batch_size=batch,
        rows_per_step=step,
        task_encoder=encoder,
    )


def numbered(path, rows=STEP * STEPS, **options):
    return MapStyleDataset(planned(path, **options), rows=rows)


def tokens(rows, numbers):
    return [rows[number].tokens.tolist() for number in numbers]


def in_steps(path, state=None, steps=STEPS, step=STEP):
    """Return the rows of some steps, as our own loader reads them on two ranks."""
    loaders = [ExactDataLoader(planned(path, rank, 2, step // 2, step)) for rank in range(2)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    each = zip(range(steps), *loaders)
    return [
        row.tolist()
        for _, *parts in each
        for part in parts
        for row in part.tokens.view(-1, SEQ_LEN)
    ]


@pytest.mark.parametrize("rule", ["blend", "interleave"])
def test_row_n_is_the_nth_row_that_the_loader_reads_in_whatever_order_it_is_asked_for(folder, rule):
    path = mix(folder, MOVING, rule, skip=[[3, 5]])
    expected = in_steps(path)
    numbers = [*range(STEP * STEPS)]
    assert tokens(numbered(path), numbers) == expected
    random.Random(1).shuffle(numbers)
    assert tokens(numbered(path), numbers) == [expected[n] for n in numbers]


def test_a_long_run_keeps_few_states_of_the_plan(folder, monkeypatch):
    monkeypatch.setattr(numbered_rows, "MAX_MARKS", 4)
    monkeypatch.setattr(numbered_rows, "MAX_STEPS", 2)
    path = mix(folder, MOVING)
    rows, expected = numbered(path), in_steps(path)
    numbers = [*range(STEP * STEPS), *random.Random(2).choices(range(STEP * STEPS), k=40)]
    assert tokens(rows, numbers) == [expected[n] for n in numbers]
    assert len(rows._rows._marks) <= 4
    assert len(rows._rows._steps) <= 2


@pytest.mark.parametrize("read", [0, 1, 4, 13, 20, 21])
def test_a_state_is_saved_after_any_row(folder, read):
    path = mix(folder, MOVING, "interleave", skip=[[3, 5]])
    rows, expected = numbered(path), in_steps(path)
    tokens(rows, range(read))
    state = json.loads(json.dumps(rows.state_dict()))
    assert state["read"] == read
    again = numbered(path)
    again.load_state_dict(state)
    assert again.state_dict() == state
    assert tokens(again, range(read, STEP * STEPS)) == expected[read:]
    # The mix is the same, so a loop that shuffles may ask for earlier rows.
    assert tokens(again, range(read)) == expected[:read]


def test_a_run_moves_between_loaders_at_the_end_of_a_step(folder):
    path = mix(folder, MOVING)
    expected = in_steps(path)
    loader = ExactDataLoader(planned(path, batch=2))
    for _ in zip(range(6), loader):
        pass
    rows = numbered(path)
    rows.load_state_dict(loader.state_dict())
    assert tokens(rows, range(12, 20)) == expected[12:20]
    assert in_steps(path, rows.state_dict(), steps=7) == expected[20:]


def test_a_resume_with_another_mix_goes_on_from_the_state(folder):
    before, after = mix(folder, MOVING), mix(folder, {"z": 1, "x": 2}, skip=[[4, 6]])
    rows = numbered(before)
    tokens(rows, range(12))
    state = rows.state_dict()
    expected = in_steps(after, state, steps=6)
    changed = numbered(after)
    changed.load_state_dict(state)
    assert [each.change for each in changed.changes] == ["kept", "new", "retained"]
    assert tokens(changed, range(12, 36)) == expected
    assert "retained" not in changed.state_dict() and "y" in changed.state_dict()["plan"]["sources"]
    with pytest.raises(IndexError, match="Row 11 was read before the mix changed; rows from 12"):
        changed[11]


def test_earlier_rows_have_other_numbers_if_earlier_steps_are_skipped_now(folder):
    before, after = mix(folder, MOVING), mix(folder, MOVING, skip=[[1, 3]])
    rows = numbered(before)
    tokens(rows, range(20))
    changed = numbered(after)
    changed.load_state_dict(rows.state_dict())
    assert tokens(changed, range(20, 30)) == in_steps(before)[20:30]
    with pytest.raises(IndexError, match="Row 19 was read before the mix changed"):
        changed[19]


def test_a_resume_may_change_the_rows_of_a_step_between_two_steps(folder):
    path = mix(folder, {"x": 2, "y": 1})
    rows = numbered(path)
    tokens(rows, range(12))
    expected = in_steps(path, rows.state_dict(), steps=3, step=6)
    larger = numbered(path, step=6)
    larger.load_state_dict(rows.state_dict())
    assert tokens(larger, range(12, 30)) == expected
    tokens(rows, [13])
    with pytest.raises(StateMismatchError, match="rows_per_step: saved 4, now 6"):
        numbered(path, step=6).load_state_dict(rows.state_dict())


class WithState(Dataset):
    """Gives the state of a worker with each row."""

    def __init__(self, rows):
        self.rows = rows

    def __getitem__(self, number):
        return self.rows[number].tokens.tolist(), self.rows.state_dict()


class Restored(Dataset):
    """Restores a state in a worker, and gives its rows."""

    def __init__(self, rows, state):
        self.rows, self.state = rows, state

    def __getitem__(self, number):
        self.rows.load_state_dict(self.state)
        return self.rows[number].tokens.tolist()


def items(dataset, numbers, workers):
    return [*DataLoader(dataset, None, sampler=numbers, num_workers=workers, collate_fn=as_is)]


def as_is(item):
    return item


def test_a_state_of_several_workers_goes_on_with_the_same_mix_alone(folder):
    """Each worker is at another row, so that each would continue another plan."""
    path, other = mix(folder, MOVING), mix(folder, MOVING, skip=[[7, 9]])
    expected = in_steps(path)
    found = items(WithState(numbered(path)), range(16), 2)
    assert [row for row, _ in found] == expected[:16]
    state = found[-2][1]
    assert items(Restored(numbered(path), state), range(15, 25), 3) == expected[15:25]
    with pytest.raises(StateMismatchError, match=r"skip: saved \[\], now \[\[7, 9\]\]"):
        numbered(other).load_state_dict(state)
    ((_, alone),) = items(WithState(numbered(path)), [15], 1)
    numbered(other).load_state_dict(alone)


def test_the_rows_of_a_run_that_ends_are_counted_without_padding(folder, tmp_path):
    """19 prompts make four whole steps, and one of three prompts."""
    write_sums(tmp_path)
    path = tmp_path / "mix.yaml"
    content = path.read_text()
    text = json.loads(content)
    for entry in text["splits"]["train"]["blend"]:
        entry["max_epochs"] = 1
    path.write_text(json.dumps(text))
    rows = RecordRows(path, rows=None)
    assert len(rows) == 19
    prompts = [rows[n]["prompt"] for n in range(19)]
    assert sorted(prompts) == sorted([f"e{n}?" for n in range(12)] + [f"h{n}?" for n in range(7)])
    for read in (16, 17, 18, 19):
        part = RecordRows(path, rows=None)
        for number in range(read):
            part[number]
        again = RecordRows(path, rows=None)
        again.load_state_dict(part.state_dict())
        assert len(again) == 19
        assert [again[n]["prompt"] for n in range(read, 19)] == prompts[read:]
    with pytest.raises(IndexError, match="Row 19 does not exist; there are 19"):
        rows[19]


def test_a_copy_in_another_process_gives_the_same_rows(tmp_path):
    """As when a loop sends its loader to an actor."""
    rows = RecordRows(write_sums(tmp_path))
    first = rows[5]
    copy = pickle.loads(pickle.dumps(rows))
    assert copy[5] == first
    assert copy[30] == rows[30]


def test_a_cost_does_not_change_the_order_of_rows(folder):
    from energon_ext.plan.cost import AttentionCost

    path = mix(folder, MOVING)
    rows = numbered(path, cost=AttentionCost(1.0))
    assert tokens(rows, range(8)) == in_steps(path)[:8]


def test_what_has_no_numbers_is_refused(folder):
    path = mix(folder, MOVING)
    with pytest.raises(ConfigError, match="the run is endless; pass `rows`"):
        MapStyleDataset(planned(path))
    with pytest.raises(ConfigError, match="a list found, whose rows have no numbers"):
        MapStyleDataset([])
    with pytest.raises(ConfigError, match="schedule_axis: batches found"):
        numbered(mix(folder, MOVING, schedule_axis="batches"))
    with pytest.raises(ConfigError, match="row_tokens: a schedule found"):
        numbered(mix(folder, MOVING, row_tokens={"step": {0: SEQ_LEN // 2, 4: SEQ_LEN}}))
    cost = MeasuredCost.fit(
        ContextTime(context_size=1, lengths=[n], seconds=float(n)) for n in (8, 16, 32)
    )
    with pytest.raises(ConfigError, match="contexts: the loop makes its own batches"):
        numbered(path, contexts=ContextOptions(budget=SEQ_LEN, sizes=(1,), cost=cost))
    read = planned(path)
    next(iter(read))
    with pytest.raises(ConfigError, match="the dataset was already read"):
        MapStyleDataset(read, rows=4)
    with pytest.raises(StateFormatError, match="a dict|digest|not a data state"):
        numbered(path).load_state_dict({})


def test_another_number_of_workers_is_refused_in_a_sentence(folder):
    path = mix(folder, MOVING)
    with pytest.raises(
        ConfigError, match=r"the loader has 2, but .* WorkerConfig\(num_workers=0\)"
    ):
        list(DataLoader(planned(path), None, num_workers=2))
    with pytest.raises(
        ConfigError, match=r"the loader has 0, but .* WorkerConfig\(num_workers=2\)"
    ):
        next(iter(planned(path, workers=2)))
    first, second = items(numbered(path), [0, 1], 2)
    assert tokens([first, second], [0, 1]) == tokens(numbered(path), [0, 1])


def test_records_are_the_same_for_any_batch_of_ours(tmp_path):
    path = write_sums(tmp_path)
    loader = ExactDataLoader(record_dataset(path, 2, rank=0, ranks=1))
    records = [record for _, batch in zip(range(10), loader) for record in batch]
    rows = RecordRows(path)
    assert [rows[n] for n in range(20)] == records
