# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import signal
import sys
import warnings

import pytest
from hypothesis import settings

from tests.garbage import leave_imports_alone
from tests.megatron.processes import SERVER, fork_server
from tests.support import close_loaders

warnings.filterwarnings("ignore", message=".*pin_memory.*|.*worker processes in total.*")


# How long an example takes says nothing about whether it is right.
settings.register_profile("suite", deadline=None, max_examples=40)
settings.register_profile("nightly", deadline=None, max_examples=400)


def pytest_configure(config):
    is_suite = "not nightly" in config.option.markexpr
    settings.load_profile("suite" if is_suite else "nightly")


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage():
    leave_imports_alone()


@pytest.fixture(autouse=True)
def _no_workers_left():
    yield
    close_loaders()


@pytest.fixture(scope="session")
def processes():
    """Fresh processes that start at once: forked from a server that has imported everything."""
    return SERVER


# A shell starts background jobs with Ctrl-C ignored, and programs hand that down to their tests.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


#: Files whose tests are few and take long: begun last, one process would be left with them.
SLOW_FILES = (
    "test_random_chains.py",
    "test_example.py",
    "test_task_examples.py",
    "test_energons_loader.py",
    "test_starved_workers.py",
    "test_killed_rank.py",
    "test_yaml_spy.py",
    "test_documentation.py",
    "test_packed_samples.py",
    "test_lockstep.py",
    "test_parallel_training.py",
    "test_random_configurations.py",
)


def pytest_collection_finish():
    """Fork the server that starts processes, if this process has done most of its imports."""
    if "megatron.core" in sys.modules:
        fork_server()


def pytest_collection_modifyitems(items):
    """Begin with the slow files."""
    items.sort(key=lambda item: item.path.name not in SLOW_FILES)
