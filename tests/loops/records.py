# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Records of two sources, their rows for a loop of others, and an independent reading of both."""

from megatron.energon import Cooker, Sample, TaskEncoder, stateless
from megatron.energon.edataclass import edataclass
from megatron.energon.task_encoder.cooking import basic_sample_keys

from energon_ext import DynamicBlendMixin, ExactDataLoader, get_train_dataset
from energon_ext.loader.map_style import MapStyleDataset
from tests.rl.prompts import write_sums
from tests.support import config

#: Prompts of a step, and of a run.
STEP, ROWS = 4, 40


@edataclass
class Record(Sample):
    content: dict


@stateless
def cook(sample):
    return Record(**basic_sample_keys(sample), content=sample["json"])


class Records(DynamicBlendMixin, TaskEncoder):
    cookers = [Cooker(cook)]

    @stateless
    def batch(self, records):
        return [record.content for record in records]


def record_dataset(mix, batch_size=1, num_workers=0, rank=0, ranks=1):
    return get_train_dataset(
        mix,
        worker_config=config(num_workers, rank, ranks),
        batch_size=batch_size,
        rows_per_step=STEP,
        task_encoder=Records(),
    )


class RecordRows(MapStyleDataset):
    """One record per row."""

    def __init__(self, mix, rows=ROWS):
        super().__init__(record_dataset(mix), rows=rows)

    def __getitem__(self, number):
        (record,) = super().__getitem__(number)
        return record


def offline(mix, rows=ROWS):
    """Return the prompts of a run in order, as our own loader reads them, a step at a time."""
    loader = ExactDataLoader(record_dataset(mix, STEP))
    batches = [batch for _, batch in zip(range(rows // STEP), loader)]
    return [record["prompt"] for batch in batches for record in batch]


__all__ = ["RecordRows", "Records", "offline", "record_dataset", "write_sums"]
