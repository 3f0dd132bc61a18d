# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A task with fields of its own in its rows and batches is written in one file: this one."""

from dataclasses import dataclass

import pytest
import torch

from energon_ext import (
    ExactDataLoader,
    PackedBatch,
    PackedTaskEncoder,
    get_train_dataset,
)
from energon_ext.encoders.document_task import DocumentTask
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.tokens.reader import DocumentReader
from tests.support import config, take, write_mix, write_tokens


@dataclass
class NumberedBatch:
    """A batch, and the number of the document in each segment, without padding."""

    packed: PackedBatch
    numbers: torch.Tensor


class NumberedReader(DocumentReader):
    def read(self, rows):
        return [(row, numbers) for row, (numbers, *_) in zip(super().read(rows), rows)]


@dataclass(frozen=True, kw_only=True, eq=False)
class NumberedTask(DocumentTask):
    def reader(self, entry, opened, spec):
        return NumberedReader(**vars(super().reader(entry, opened, spec)))

    def assemble(self, rows, context):
        packed = super().assemble([row for row, _ in rows], context)
        return NumberedBatch(packed, torch.tensor([n for _, numbers in rows for n in numbers]))

    def padding(self, read):
        return super().padding(read), []


class NumberedEncoder(PackedTaskEncoder):
    def task(self):
        return NumberedTask(**vars(super().task()))


def open_loader(path, workers):
    dataset = get_train_dataset(
        path,
        worker_config=config(workers),
        batch_size=2,
        rows_per_step=8,
        task_encoder=NumberedEncoder(ByteTokenizer(), 16),
    )
    return ExactDataLoader(dataset)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_fields_of_an_own_task_arrive_in_each_batch_and_after_a_resume(tmp_path, workers):
    # Document n consists of the token 10 + n.
    write_tokens(tmp_path / "a", [[10 + n] * (3 + n % 5) for n in range(40)])
    path = write_mix(tmp_path / "mix.yaml", [("a", 1)])
    path.write_text(path.read_text().replace('"weight": 1', '"weight": 1, "max_epochs": 1'))
    loader = open_loader(path, workers)
    seen, states = [], []
    for batch in loader:
        firsts = batch.packed.tokens[batch.packed.cu_seqlens[:-1].long()]
        assert (firsts[batch.packed.source_ids >= 0] - 10).tolist() == batch.numbers.tolist()
        seen.append(batch.numbers.tolist())
        states.append(loader.state_dict())
    assert sorted(sum(seen, [])) == [*range(40)]
    assert [len(numbers) > 0 for numbers in seen] == [True] * 6 + [False] * 2  # padding
    resumed = open_loader(path, 1 - workers)
    resumed.load_state_dict(states[2])
    assert [batch.numbers.tolist() for batch in take(resumed, 3)] == seen[3:6]
