# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import pytest
import torch

from tests.megatron.places import PLACES
from tests.megatron.small_gpt import megatron


@pytest.fixture(scope="module")
def one_rank():
    """Megatron with one process."""
    with megatron():
        yield


@pytest.fixture(params=PLACES)
def place(request):
    """The CPU; with ``-m gpu`` a GPU, in float32 and in bfloat16."""
    if request.param.device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return request.param
