# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import warnings

import pytest

from tests.support import close_loaders

warnings.filterwarnings("ignore", message=".*pin_memory.*|.*worker processes in total.*")


@pytest.fixture(autouse=True)
def _no_workers_left():
    yield
    close_loaders()
