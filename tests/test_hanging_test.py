# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A test that hangs ends the run, and its name is in the report."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HANGS = """
import time

def test_that_hangs():
    time.sleep(600)

def test_after_it():
    pass
"""


@pytest.mark.parametrize("options", [[], ["-n", "1", "--dist", "loadfile"]], ids=["alone", "xdist"])
def test_a_test_that_hangs_ends_the_run_with_its_name(options, tmp_path):
    """pytest-xdist would start another process up to nine times, and each would hang again."""
    (tmp_path / "test_it.py").write_text(HANGS)
    settings = ["-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-o", "testpaths="]
    settings += ["-o", "faulthandler_timeout=1", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *settings, *options, tmp_path / "test_it.py"]
    # Far below what a second process at the same test would take with the limit of the suite.
    done = subprocess.run(
        list(map(str, command)), cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "test_that_hangs" in done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("Timeout (0:00:01)!") == 1
