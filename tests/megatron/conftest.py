# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import pytest

from tests.megatron.small_gpt import megatron


@pytest.fixture(scope="module")
def one_rank():
    """Megatron with one process."""
    with megatron():
        yield
