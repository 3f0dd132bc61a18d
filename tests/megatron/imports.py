# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What takes seconds to import; loaded once by the server that forks test processes."""

import gc
import warnings

import tests.fast  # noqa: F401

warnings.simplefilter("ignore")
gc.disable()

import hypothesis  # noqa: E402, F401
import megatron.core.optimizer  # noqa: E402, F401
import pytest  # noqa: E402, F401

import energon_ext.megatron  # noqa: E402, F401
from tests.garbage import keep_in_large_pages, leave_imports_alone  # noqa: E402
from tests.gloo import share_one_device  # noqa: E402

gc.enable()
share_one_device()
leave_imports_alone()
keep_in_large_pages()
