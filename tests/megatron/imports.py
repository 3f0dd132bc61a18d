# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What takes seconds to import; loaded once by the server that forks test processes."""

import gc
import warnings

import tests.fast  # noqa: F401

gc.disable()
with warnings.catch_warnings():
    warnings.simplefilter("ignore")

    import hypothesis  # noqa: F401
    import megatron.core.optimizer  # noqa: F401
    import pytest  # noqa: F401

    import energon_ext.megatron  # noqa: F401
    import tests.megatron.small_training  # noqa: F401
    from tests.garbage import keep_in_large_pages, leave_imports_alone
    from tests.gloo import share_one_device

gc.enable()
share_one_device()
leave_imports_alone()
keep_in_large_pages()
