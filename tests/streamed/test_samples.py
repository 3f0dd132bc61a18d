# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One streamed source: its end, limit and state, and unreadable samples."""

import dataclasses
import json
import tarfile

import pytest
from megatron.energon.errors import ErrorContext, FatalSampleError

from energon_ext import ConfigError
from energon_ext.errors import SampleError
from energon_ext.state.schema import check_shape
from energon_ext.streamed.samples import SAMPLES, StreamedSamples, num_tokens_of
from tests.streamed.numbers import Numbers, source


class Broken(Numbers):
    """Raises its error, if any, for the third sample."""

    error = None

    def restore_sample(self, restore_key):
        if self.error is not None and restore_key == (3,):
            raise self.error
        return super().restore_sample(restore_key)


def samples_of(count=4, epochs=None, endless=True, **options):
    samples = StreamedSamples(source("web", count, tokens=5, epochs=epochs, endless=endless))
    samples.open()
    return samples


def numbers(samples, count=None):
    """Return the next numbers, by default up to the end, as a blend requests them."""
    found = []
    while not samples.ended and len(found) != count:
        if (sample := samples.next()) is not None:
            found.append(sample.number)
    return found


def test_samples_are_counted_up_to_the_end():
    samples = samples_of(endless=False)
    assert numbers(samples, 3) == [1, 2, 3]
    assert (samples.documents, samples.tokens, samples.ended) == (3, 15, False)
    assert numbers(samples) == [4]
    assert (samples.documents, samples.tokens, samples.ended) == (4, 20, True)


def test_a_sample_counts_its_tokens_and_documents_or_one():
    class Row:
        num_tokens, documents = 12, 3

    assert (num_tokens_of(Row()), num_tokens_of(object())) == (12, 1)
    rows = Numbers("web", 2)
    rows.restore_sample = lambda key: Row() if key == (1,) else object()
    short = dataclasses.replace(source("web", 2, endless=False), rows=rows)
    samples = StreamedSamples(short, lambda sample: 1.75 * getattr(sample, "num_tokens", 2))
    samples.open()
    assert samples.next() and samples.next()
    assert (samples.documents, samples.tokens) == (3 + 1, 21 + 4)  # 3.5 is rounded to 4


def test_a_source_without_a_sample_for_this_worker_has_ended():
    assert samples_of(0, endless=False).ended
    assert not samples_of(1, endless=False).ended


@pytest.mark.parametrize("first", [None, 1, 2, 3])
@pytest.mark.parametrize(
    "later", [(None,), (1,), (3,), (1, 3), (1, None), (3, 1, 2), (2, None, 1, 3)]
)
def test_each_epoch_is_read_once_across_limit_changes(first, later):
    """Four numbers, saved anywhere, including between the last number and the end, and after it.

    With a limit of n epochs, a source continues until 4 n numbers have been read in total.
    """
    for read in range(14):
        read_across_limit_changes(read, first, later)


def read_across_limit_changes(read, first, later):
    """Save after so many numbers, and then after every three."""
    samples, total = samples_of(epochs=first), 0
    for step, limit in enumerate((first, *later)):
        if step:
            state = json.loads(json.dumps(samples.save_state()))
            check_shape(state, SAMPLES, "state")
            samples = samples_of(epochs=limit)
            samples.restore_state(state)
            samples.open()
        left = 10**6 if limit is None else max(0, 4 * limit - total)
        found = numbers(samples, read if step == 0 else 3)
        assert found == [(total + n) % 4 + 1 for n in range(min(left, read if step == 0 else 3))]
        total += len(found)
        assert samples.documents == total


# Unreadable samples -------------------------------------------------------------------------------


def broken(error):
    samples = samples_of()
    rows = Broken("web", 4)
    rows.error = error
    samples.dataset = rows
    return samples


@pytest.mark.parametrize(
    "error", [OSError("gone\naway"), tarfile.ReadError("cut"), ValueError("x"), AssertionError()]
)
def test_an_unreadable_file_is_an_error_naming_its_source(error):
    reason = " ".join(str(error).split())
    with pytest.raises(SampleError) as found:
        numbers(broken(error))
    expected = f"web: cannot be read further ({type(error).__name__}: {reason}); copy its files"
    assert str(found.value) == f"{expected} again and resume."


def fatal(reason, times):
    """Return the error with which Energon gives up after some failures in a row."""
    context = ErrorContext("encode", handler=None, tolerance=times)
    try:
        for _ in range(times):
            with context.handle_errors({"__key__": "7"}):
                raise reason
    except FatalSampleError as error:
        return error


@pytest.mark.parametrize(
    ("reason", "times", "words"),
    [
        (SampleError("No text."), 3, "3 samples in a row cannot be used, the last: No text."),
        (KeyError("k"), 20, "20 samples in a row cannot be used, the last: KeyError: 'k'"),
        (NameError("no x"), 20, "failed: NameError: no x"),  # a mistake in code: no second try
    ],
)
def test_unusable_samples_are_reported_with_their_number_and_reason(reason, times, words):
    with pytest.raises(SampleError) as found:
        numbers(broken(fatal(reason, times)))
    assert str(found.value) == f"web: {words}"
    # The text of a SampleError says all; the traceback of another error is kept.
    assert found.value.__cause__ is (None if isinstance(reason, SampleError) else reason)


def test_a_config_error_passes_through():
    with pytest.raises(ConfigError) as found:
        numbers(broken(error := ConfigError("c")))
    assert found.value is error
