# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A run of stock Energon that continues here in the middle of a pass, as its page describes."""

import json
from collections import Counter

import megatron.energon
import pytest
from megatron.energon import Cooker, DefaultTaskEncoder, TextSample, basic_sample_keys, stateless

from energon_ext import DynamicBlendMixin, get_train_dataset
from tests.support import config, loader_for, stock_loader_for, take, write_dataset

COUNTS = {"web": 61, "code": 34}
RANKS, WORKERS, BATCH = 2, 2, 3


@stateless
def cook(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["txt"])


class Texts(DefaultTaskEncoder):
    cookers = [Cooker(cook)]


class PlannedTexts(DynamicBlendMixin, Texts):
    pass


@pytest.fixture
def folder(tmp_path):
    for source, count in COUNTS.items():
        write_dataset(tmp_path / source, [f"{source} {number}" for number in range(count)])
    return tmp_path


def write(folder, name, module="megatron.energon", class_="MetadatasetV2", epochs=None, **fields):
    entries = [{"path": "web", "weight": 2}, {"path": "code", "weight": 1}]
    if epochs is not None:
        entries = [{**entry, "max_epochs": epochs} for entry in entries]
    head = {"__module__": module, "__class__": class_, **fields}
    path = folder / name
    path.write_text(json.dumps({**head, "splits": {"train": {"blend": entries}}}))
    return path


def stock_loader(folder, rank):
    """A loader with which nothing of this package has to do."""
    dataset = megatron.energon.get_train_dataset(
        write(folder, f"stock{rank}.yaml"),
        worker_config=config(WORKERS, rank, RANKS),
        batch_size=BATCH,
        task_encoder=Texts(),
        shuffle_buffer_size=10,
        max_samples_per_sequence=None,
    )
    return stock_loader_for(dataset)


def read_by_stock(folder, parts, restores=True):
    """Read batches on all ranks, in parts; count texts and the lines of the log."""
    texts, lines = Counter(), Counter()
    for rank in range(RANKS):
        loader = stock_loader(folder, rank)
        for number, batches in enumerate(parts):
            if number and restores:
                state = loader.save_state_rank()
                loader = stock_loader(folder, rank)
                loader.restore_state_rank(state)
            for batch in take(loader, batches):
                texts.update(batch.text)
                lines.update(f"{s.dataset_path.name}:train:{s.index}" for (s,) in batch.__sources__)
    return texts, lines


def read_here(folder, lines):
    (folder / "read.txt").write_text("".join(f"{line}\n" for line in lines))
    path = write(
        *(folder, "mix.yaml", "energon_ext", "ScheduledMetadataset"), epochs=1, exclude="read.txt"
    )
    dataset = get_train_dataset(
        path, worker_config=config(), batch_size=1, task_encoder=PlannedTexts()
    )
    return Counter(text for batch in loader_for(dataset) for text in batch.text)


def every_text(times=1):
    return Counter({f"{s} {n}": times for s, count in COUNTS.items() for n in range(count)})


def test_every_sample_is_read_once_over_a_stock_run_and_one_here(folder):
    """2 ranks x 2 workers x 3 samples; 5 + 3 batches a rank, of 95 samples."""
    texts, lines = read_by_stock(folder, [5, 3])
    assert texts.total() == 48 and max(texts.values()) == 1
    assert texts + read_here(folder, lines) == every_text()


def test_a_replay_finds_what_the_resumed_stock_run_read(folder):
    _, lines = read_by_stock(folder, [5, 3])
    _, replayed = read_by_stock(folder, [8])
    assert replayed == lines


def test_samples_that_were_read_more_often_are_left_out_of_an_unfinished_pass(folder):
    """After 30 batches a rank code is in its second pass and more; each pass is completed."""
    texts, lines = read_by_stock(folder, [30])
    least = {
        source: min(texts[f"{source} {number}"] for number in range(count))
        for source, count in COUNTS.items()
    }
    assert max(least.values()) >= 1
    ahead = [line for line, times in lines.items() if times > least[line.split(":")[0]]]
    total = texts + read_here(folder, ahead)
    for source, count in COUNTS.items():
        times = {
            total[f"{source} {number}"] - texts[f"{source} {number}"] for number in range(count)
        }
        assert times == {0, 1}
        assert min(total[f"{source} {number}"] for number in range(count)) == least[source] + 1
