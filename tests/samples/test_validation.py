# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Validation of samples reads each one exactly once, in equally many batches on all ranks."""

import re

import pytest
from megatron.energon import get_savable_loader

from energon_ext import ExactDataLoader, get_train_dataset, get_val_datasets
from energon_ext.errors import ConfigError
from tests.cli.command import energon_ext
from tests.samples.test_planned_samples import dataset_of, write
from tests.samples.test_tokens_beside_samples import CaptionsAndText, mix
from tests.samples.vision import PackedCaptions, PlannedCaptions
from tests.saves import save_cursor
from tests.support import config, loader_for, stock_loader_for, take

PADDING = "padding"


class Complete(CaptionsAndText):
    """Rows of padding keep their shape, but have no sample."""

    def make_padding(self, row):
        row.samples = PADDING
        return row


class CompleteOneByOne(PlannedCaptions):
    """One sample per row; padding has no number."""

    def make_padding(self, row):
        row.number = PADDING
        return row


def validation(path, ranks, rank, encoder, workers=0, batch_size=2, **options):
    found = get_val_datasets(
        path,
        worker_config=config(workers, rank, ranks),
        batch_size=batch_size,
        task_encoder=encoder,
        split_part="train",
        **options,
    )
    return [dataset for dataset, _ in found]


def rows_of(path, ranks, encoder, workers=0):
    """Return the rows of each source in planned order; check that ranks have equal batches."""
    by_rank = [
        [list(loader_for(dataset)) for dataset in validation(path, ranks, rank, encoder, workers)]
        for rank in range(ranks)
    ]
    sources = []
    for passes in zip(*by_rank):
        assert len(set(map(len, passes))) == 1 and passes[0]
        sources.append([row for batches in zip(*passes) for batch in batches for row in batch])
    return sources


@pytest.fixture(scope="module")
def read_by_one_rank(data):
    return rows_of(mix(data), 1, Complete())


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (3, 0), (8, 0), (2, 2)])
def test_packed_samples_and_text_are_read_once_on_any_ranks_with_padding_at_the_end(
    data, ranks, workers, read_by_one_rank
):
    """50 and 30 samples of 5 to 25 tokens and 60 texts, in rows of 40."""
    found = rows_of(mix(data), ranks, Complete(), workers)
    packed = [[samples for _, samples in rows] for rows in found]
    numbers = [*range(50)], [*range(30)], [number for number in range(80) if number % 4]
    for rows, expected in zip(packed, numbers):
        num_padding = rows.count(PADDING)
        assert rows[len(rows) - num_padding :] == [PADDING] * num_padding
        assert num_padding < 2 * ranks
        read = [sample[0] for samples in rows if samples != PADDING for sample in samples]
        if isinstance(read[0], str):  # pieces of texts
            read = [int(piece.split()[1]) for piece in read if piece.startswith("Text")]
        assert sorted(read) == expected
    alone = [[samples for _, samples in rows] for rows in read_by_one_rank]
    for rows, expected in zip(packed, alone):
        assert [row for row in rows if row != PADDING] == [
            row for row in expected if row != PADDING
        ]


@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (7, 0), (2, 2)])
def test_unpacked_samples_are_planned_if_there_is_padding(data, ranks, workers):
    path = write(data / "photos.yaml", {"path": "photos"})
    (rows,) = rows_of(path, ranks, CompleteOneByOne(), workers)
    numbers = [number for _, number, *_ in rows]
    per_step = 2 * ranks
    assert numbers == [*range(50), *[PADDING] * (-50 % per_step)]


def test_samples_are_read_once_by_training_without_repeat(data):
    path = write(data / "photos.yaml", {"path": "photos"})
    dataset = get_train_dataset(
        path,
        worker_config=config(),
        batch_size=4,
        task_encoder=CompleteOneByOne(),
        repeat=False,
    )
    numbers = [number for batch in loader_for(dataset) for _, number, *_ in batch]
    assert sorted(numbers[:50]) == list(range(50)) and numbers[50:] == [PADDING] * 2


def test_rows_that_no_batch_would_read_are_refused_with_what_to_do(data):
    """Rows of one source: 50 samples of 5 to 25 tokens, 749 in all, in rows of 40."""
    path = write(data / "packed.yaml", {"path": "photos"})
    (dataset,) = validation(path, 1, 0, PackedCaptions(), batch_size=1)
    count = len(list(loader_for(dataset)))
    batch = next(size for size in range(2, count) if count % size)
    with pytest.raises(ConfigError) as error:
        validation(path, 1, 0, PackedCaptions(), batch_size=batch)
    left = count % batch
    message = str(error.value)
    assert f": {count} rows in batches of {batch} on 1 rank(s) leave {left} over. " in message
    assert "Give PackedCaptions a method make_padding(row)" in message
    assert message.endswith(f"or pass limit={count // batch} to leave them out.")
    options = {"batch_size": batch, "limit": count // batch}
    (dataset,) = validation(path, 1, 0, PackedCaptions(), **options)
    assert len(list(loader_for(dataset))) == count // batch
    with pytest.raises(ConfigError, match=f"{count} rows in batches of 2 on 32 .* smaller batches"):
        validation(path, 32, 31, PackedCaptions())


def test_a_limit_ends_validation(data):
    for dataset in validation(mix(data), 1, 0, CaptionsAndText(), limit=2):
        assert len(list(loader_for(dataset))) == len(dataset) == 2


def test_unpacked_samples_without_padding_are_validated_by_energon(data):
    path = write(data / "photos.yaml", {"path": "photos"})
    (dataset,) = validation(path, 1, 0, PlannedCaptions(), batch_size=4)
    read = [sample[1] for batch in stock_loader_for(dataset) for sample in batch]
    assert sorted(read) == list(range(50))
    with pytest.raises(ConfigError) as error:
        ExactDataLoader(dataset)
    advice = "Validation whose samples are streamed, .*; read it by megatron.energon.get_savable_lo"
    assert re.match(advice, str(error.value)) and "Mixin" not in str(error.value)
    assert take(get_savable_loader(dataset), 1)


def test_trace_lists_the_last_step_that_padding_completes_without_user_code(data):
    """50 samples in steps of 4: the 13th step has two samples."""
    path = write(data / "limited.yaml", {"blend": [{"path": "photos", "max_epochs": 1}]})
    loader = loader_for(dataset_of(path, encoder=CompleteOneByOne(), batch_size=4, rows_per_step=4))
    assert len(loader) == 13
    save_cursor(data / "run", 0, loader.state_dict())
    result = energon_ext("trace", data / "run", path, "--step", 12)
    numbers = [number for _, number, *_ in [*loader][-1]]
    assert numbers[2:] == [PADDING] * 2 and result.exit_code == 0, result.output
    assert result.output.count("padding") == 2
    assert all(f"{number:06d}" in result.output for number in numbers[:2])
