# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import pytest

from energon_ext.errors import ConfigError
from energon_ext.plan.clock import Clock
from energon_ext.plan.topology import Topology
from energon_ext.weights import ScheduleAxis


def positions(axis, *, batch_rows=2, ranks=1):
    """Positions of the first steps of eight rows of 100 tokens."""
    clock = Clock(axis, Topology(8, batch_rows, ranks), 100)
    return [clock.at(step, 8 * step) for step in range(4)]


def test_breakpoints_count_steps_by_default():
    assert positions(ScheduleAxis()) == positions(ScheduleAxis("steps")) == [0, 1, 2, 3]


def test_breakpoints_may_count_tokens_samples_or_batches():
    assert positions(ScheduleAxis("tokens")) == [0, 800, 1600, 2400]
    assert positions(ScheduleAxis("samples"), ranks=2) == [0, 8, 16, 24]
    # Eight rows are four batches of two on one rank, two on each of two ranks.
    assert positions(ScheduleAxis("batches")) == [0, 4, 8, 12]
    assert positions(ScheduleAxis("batches"), ranks=2) == [0, 2, 4, 6]


def test_the_third_batch_of_the_second_of_two_workers_is_position_five():
    """Conformance: with two workers, worker 1 makes batches 1, 3, 5 of its rank."""
    third_of_worker_one = [batch for batch in range(6) if batch % 2 == 1][2]
    clock = Clock(ScheduleAxis("batches"), Topology(rows_per_step=4, batch_rows=4, workers=2))
    assert clock.at(step=99, row=4 * third_of_worker_one) == 5


def test_a_run_may_end_at_its_first_step():
    assert ScheduleAxis(end=0).end == 0


def test_tokens_cannot_be_counted_without_a_fixed_row_length():
    message = (
        "schedule_axis: rows have no fixed length, so tokens cannot be counted; count steps or "
        "samples, or set `tokens_per_sample` on the TaskEncoder."
    )
    with pytest.raises(ConfigError) as error:
        Clock(ScheduleAxis("tokens"), Topology(8)).at(step=1, row=8)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unit": "epochs"}, "ScheduleAxis.unit: 'epochs' found, one of steps, tokens"),
        ({"end": -1}, "ScheduleAxis.end: -1"),
        ({"end": True}, "ScheduleAxis.end: True"),
    ],
)
def test_an_invalid_axis_is_refused(options, message):
    with pytest.raises(ConfigError) as error:
        ScheduleAxis(**options)
    assert str(error.value).startswith(message)
