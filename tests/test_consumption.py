# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import json
from collections import Counter

import numpy as np
import pytest
import torch.distributed as dist
from megatron.energon import TaskEncoder, stateless

from energon_ext import DynamicBlendMixin, PackedTaskEncoder, get_train_dataset
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.errors import StateFormatError
from energon_ext.plan.lookup import find_blend
from energon_ext.state.consumption import Consumption
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron import processes
from tests.support import config, drawn_of, loader_for, take, write_dataset, write_mix, write_tokens


def test_the_state_lists_current_sources_before_removed_ones():
    consumed = Consumption({"b": 2, "z": 1}, {"b": 30, "z": 5, "old": 9})
    state = json.loads(json.dumps(consumed.to_json(current=["b", "a"])))
    assert state == {
        "version": 1,
        "datasets": [
            {"spec": "b", "row_offset": 2, "token_offset": 30},
            {"spec": "a", "row_offset": 0, "token_offset": 0},
            {"spec": "old", "row_offset": 0, "token_offset": 9},
            {"spec": "z", "row_offset": 1, "token_offset": 5},
        ],
    }
    again = Consumption.from_json(state)
    again.add("a", rows=1, tokens=10)
    later = again.to_json(current=["a"])["datasets"]
    assert [entry["spec"] for entry in later] == ["a", "b", "old", "z"]
    assert later[2] == {"spec": "old", "row_offset": 0, "token_offset": 9}


def test_older_state_files_load():
    old = {"datasets": [{"spec": "web", "row_offset": 123}]}
    assert Consumption.from_json(old).tokens["web"] == 0
    assert Consumption.from_json(old).rows["web"] == 123


@pytest.mark.parametrize(
    "state",
    [
        None,
        [],
        {},
        {"datasets": {}},
        {"datasets": [3]},
        {"datasets": [{"row_offset": 1}]},
        {"datasets": [{"spec": "a", "row_offset": -1}]},
        {"datasets": [{"spec": "a", "token_offset": 1.5}]},
        {"version": 2, "datasets": []},
    ],
)
def test_a_damaged_state_is_refused(state):
    with pytest.raises(StateFormatError):
        Consumption.from_json(state)


def test_epochs_and_shares():
    consumed = Consumption({"a": 30, "b": 5}, {"a": 100, "b": 300})
    assert consumed.epochs({"a": 20, "b": 10}) == {"a": 1.5, "b": 0.5}
    tokens = consumed.tokens["a"]
    assert consumed.epochs({"a": 20, "b": 10}, {"a": 4 * tokens}) == {"a": 0.25, "b": 0.5}
    assert consumed.shares() == {"a": 0.25, "b": 0.75}
    assert Consumption().shares() == {}
    alone = consumed.reduce()
    alone.add("a", rows=1, tokens=7)
    assert (alone.rows, alone.tokens) == ({"a": 31, "b": 5}, {"a": 107, "b": 300})
    assert (consumed.rows, consumed.tokens) == ({"a": 30, "b": 5}, {"a": 100, "b": 300})


def test_a_moved_source_keeps_counting_under_its_new_key(tmp_path):
    for source in "ab":
        write_tokens(tmp_path / source, [[7] * (3 + n % 20) for n in range(40)])
    (tmp_path / "deep").mkdir()
    here = write_mix(tmp_path / "mix.yaml", [("a", 2), ("b", 1)])
    there = write_mix(tmp_path / "deep" / "mix.yaml", [("../a", 2), ("../b", 1)])
    consumed, loader = Consumption(), loader_for(build(here))
    for batch in take(loader, 8):
        consumed.add_batch(batch)
    moved = loader_for(build(there))
    moved.load_state_dict(loader.state_dict())
    saved = json.loads(json.dumps(consumed.to_json(["a", "b"])))
    continued = Consumption.from_json(saved, moved.changes)
    assert continued.tokens == {f"../{key}": count for key, count in consumed.tokens.items()}
    for batch in take(moved, 4):
        continued.add_batch(batch)
    drawn = drawn_of(find_blend(moved))
    assert {key: continued.tokens[key] for key in drawn} == {k: n for k, (_, n) in drawn.items()}


def test_samples_that_are_not_packed_are_counted_as_documents(mix):
    """A plan counts each as one token, but its batches count real ones."""

    class Words(DynamicBlendMixin, TaskEncoder):
        @stateless
        def encode_sample(self, sample):
            return sample

        @stateless
        def batch(self, samples):
            keys = ["a:train", "b:train"]
            rows = [
                Row([np.arange(9)], source=f"{each.text[0]}:train", documents=1) for each in samples
            ]
            return BatchAssembler(16)(rows, keys)

    dataset = get_train_dataset(mix, worker_config=config(), batch_size=4, task_encoder=Words())
    consumed, loader = Consumption(), loader_for(dataset)
    for batch in take(loader, 30):
        consumed.add_batch(batch)
    blend = find_blend(loader)
    assert blend.documents == {"a:train": 50, "b:train": 30} and blend.epoch_tokens == {}
    epochs = consumed.epochs(blend.documents, blend.epoch_tokens)
    assert {key: count * blend.documents[key] for key, count in epochs.items()} == consumed.rows
    assert sum(consumed.rows.values()) == 120


def test_a_source_without_known_documents_has_no_epochs():
    """Regression: a division by zero."""
    consumed = Consumption({"a": 30, "b": 5}, {"a": 100, "b": 300})
    assert consumed.epochs({"a": 20, "b": 0}) == {"a": 1.5, "b": 0.0}


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for source, count in (("a", 50), ("b", 30)):
        write_dataset(root / source, [f"{source}{n} " * (n % 9 + 1) for n in range(count)])
    return write_mix(root / "mix.yaml", [("a", 2), ("b", 1)])


def build(mix, rank=0, world_size=1):
    encoder = PackedTaskEncoder(ByteTokenizer(), 24, packing_buffer_docs=6)
    return get_train_dataset(
        mix, worker_config=config(0, rank, world_size), batch_size=3, task_encoder=encoder
    )


def test_drawn_counts_in_the_state_match_the_batches(mix):
    dataset = build(mix)
    loader = loader_for(dataset)
    tokens, rows = Counter(), Counter()
    for batch in take(loader, 40):
        tokens.update(batch.tokens_per_source())
        rows.update(batch.documents_per_source())
    drawn = drawn_of(find_blend(dataset))
    assert drawn == {key: (rows[key], tokens[key]) for key in ("a:train", "b:train")}
    resumed = build(mix)
    other = loader_for(resumed)
    other.restore_state_rank(loader.save_state_rank())
    assert drawn_of(find_blend(resumed)) == drawn


def test_each_rank_knows_the_global_counts_of_a_shared_plan(tmp_path):
    """Each of two ranks knows the draws of both; a resume on three continues the counts."""
    for source, count in (("a", 50), ("b", 30)):
        write_tokens(tmp_path / source, [[7] * (3 + n % 20) for n in range(count)])
    tokens_mix = write_mix(tmp_path / "mix.yaml", [("a", 2), ("b", 1)])
    rows, tokens, state = Counter(), Counter(), None
    for ranks, batches in ((2, 9), (3, 4)):
        loaders = [loader_for(build(tokens_mix, rank, ranks)) for rank in range(ranks)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
            for batch in take(loader, batches):
                rows.update(batch.documents_per_source())
                tokens.update(batch.tokens_per_source())
        expected = {key: (rows[key], tokens[key]) for key in "ab"}
        assert [drawn_of(find_blend(loader)) for loader in loaders] == [expected] * ranks
        state = loaders[-1].state_dict()


def train_rank(rank, world_size, mix, store, folder):
    """Train three hops on one of several ranks; each hop restores the save of the previous one."""
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    consumed, state, independent = Consumption(), None, Counter()
    for hop in range(3):
        loader = loader_for(build(mix, rank, world_size))
        loader.restore_state_rank(state)
        for batch in take(loader, 4 + hop):
            consumed.add_batch(batch)
            weights = Counter(batch.segment_sources().tolist())
            independent.update({batch.sources[s]: n for s, n in weights.items() if s >= 0})
            if hop == 1:
                consumed.reduce()  # logging must not change what is saved
        state = loader.save_state_rank()
        saved = json.loads(json.dumps(consumed.to_json(find_blend(loader).keys)))
        consumed = Consumption.from_json(saved)
    total = consumed.reduce()
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump({"global": total.tokens, "local": consumed.tokens, "recount": independent}, file)
    dist.destroy_process_group()


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_global_counts_match_a_recount_of_all_batches(mix, tmp_path, world_size):
    arguments = (world_size, mix, str(tmp_path / "store"), str(tmp_path))
    started = [
        processes.start(train_rank, (rank, *arguments), tmp_path / f"stderr{rank}")
        for rank in range(world_size)
    ]
    assert processes.finish(started) == [0] * world_size
    ranks = [json.loads((tmp_path / f"rank{r}.json").read_text()) for r in range(world_size)]
    recount = sum((Counter(rank["recount"]) for rank in ranks), Counter())
    for rank in ranks:
        assert rank["local"] == rank["recount"]
        assert rank["global"] == recount
