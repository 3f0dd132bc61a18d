# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import warnings

import pytest

from energon_ext import ConfigError, PackedTaskEncoder, get_train_dataset
from energon_ext.encoders.tokenizers import ByteTokenizer
from energon_ext.mixture.checks import BlendWarning
from energon_ext.weights import ScheduleAxis
from tests.support import config, write_dataset, write_mix


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for source, count in (("web", 40), ("code", 40), ("tiny", 1)):
        write_dataset(root / source, [f"{source} {number}" for number in range(count)])
    return root


def load(data, entries, *, axis=None, num_workers=0):
    encoder = PackedTaskEncoder(ByteTokenizer(), 16, packing_buffer_docs=4)
    encoder.schedule_axis = axis or ScheduleAxis()
    return get_train_dataset(
        write_mix(data / "mix.yaml", entries),
        worker_config=config(num_workers),
        batch_size=2,
        task_encoder=encoder,
    )


def warnings_of(data, entries, **options):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(data, entries, **options)
    return [str(w.message) for w in caught if issubclass(w.category, BlendWarning)]


def test_a_blend_as_it_is_meant_raises_no_eyebrow(data):
    entries = [("web", {"linear": {0: 3, 100: 1}}), ("code", 2)]
    assert warnings_of(data, entries, axis=ScheduleAxis(end=101)) == []


def test_a_knot_after_the_end_of_the_run_is_reported_in_the_units_of_the_run(data):
    entries = [("web", {"linear": {0: 3, 100: 1}}), ("code", 2)]
    (message,) = warnings_of(data, entries, axis=ScheduleAxis.steps(4, end=100))
    assert message.startswith("web:train: the schedule")
    assert "batch index 400, but the run ends at 400 (100 optimizer steps)" in message


def test_a_constant_that_drowns_beside_a_schedule_is_reported(data):
    entries = [("web", {"step": {0: 1, 50: 5000}}), ("code", 1)]
    (message,) = warnings_of(data, entries)
    assert message.startswith("code:train: a constant weight that is 2.0e-04")
    assert "batch index 50" in message
    # Small constants among constants are somebody's decision.
    assert warnings_of(data, [("web", 5000), ("code", 1)]) == []


def test_the_same_source_listed_twice_is_reported(data):
    (message,) = warnings_of(data, [("web", 1), ("web", 2)])
    assert message.startswith("web:train#2: the same source is listed more than once")


def test_a_worker_without_a_source_to_draw_from_is_found(data):
    """One document feeds one worker; the other has nothing once the web is over."""
    entries = [("tiny", 1), ("web", {"step": {0: 1, 30: 0}})]
    load(data, entries, num_workers=1)
    with pytest.raises(ConfigError, match=r"0 at batch index 30 for worker \d of rank 0"):
        load(data, entries, num_workers=2)
