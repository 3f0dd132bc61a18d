# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Each reader is told of its later rows once and in time."""

import pytest

from energon_ext.loader.ahead import with_later_rows
from energon_ext.plan.progress import DescribedBatch


@pytest.mark.parametrize(
    "batches, readers, ahead", [(40, 1, 9), (41, 3, 12), (7, 2, 64), (9, 2, 0)]
)
def test_each_reader_learns_of_its_later_batches_once_and_in_time(batches, readers, ahead):
    items = list(
        with_later_rows(((n, DescribedBatch([n])) for n in range(batches)), readers, ahead)
    )
    assert [number for number, _, _ in items] == list(range(batches))
    for reader in range(readers):
        of_reader = items[reader::readers]
        announced = [row for _, _, later in of_reader for row in later]
        expected = list(range(reader + readers, batches, readers))
        assert announced == (expected if ahead else [])
        for number, _, later in of_reader:
            assert all(row > number for row in later)


def test_look_ahead_grows_with_every_batch_up_to_its_limit():
    planned = []

    def rounds():
        for number in range(100):
            planned.append(number)
            yield number, DescribedBatch([number])

    items = with_later_rows(rounds(), 2, 20)
    seen = []
    for _ in range(8):
        next(items)
        seen.append(len(planned))
    # Each of the two readers plans its own batch and 4 more, then 8, then 10.
    assert seen == [9, 10, 19, 20, 25, 26, 27, 28]
