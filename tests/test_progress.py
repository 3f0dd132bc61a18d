# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Progress bars never disturb the work that they show."""

import io
import sys

import pytest

from energon_ext.progress import passing_bar, progress_bar


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed()])
def test_work_goes_on_without_standard_error(monkeypatch, stream):
    monkeypatch.setattr(sys, "stderr", stream)
    with progress_bar("checking", 3) as bar:
        bar.update(3)
    assert [*passing_bar("planning", 3, range(3), unit="step")] == [0, 1, 2]


def test_a_passing_bar_writes_nothing_into_a_log(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr("energon_ext.progress._QUIET_SECONDS", 0.0)
    assert [*passing_bar("planning", 3, range(3), unit="step")] == [0, 1, 2]
    assert not sys.stderr.getvalue()
