# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import signal
import warnings

import pytest
from hypothesis import settings

from tests.support import close_loaders

warnings.filterwarnings("ignore", message=".*pin_memory.*|.*worker processes in total.*")


# How long an example takes says nothing about whether it is right.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _no_workers_left():
    yield
    close_loaders()


# A shell starts background jobs with Ctrl-C ignored, and programs hand that down to their tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
