# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Megatron-core on machines without a GPU: tests, laptops, continuous integration.

Megatron-core hard-codes the device ``"cuda"``, although its models, schedules, data-parallel
wrapper and optimizer need nothing from CUDA. The shim patches torch, not Megatron.
"""

from typing import Any, Callable, Sequence

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


def enable_cpu() -> bool:
    """Redirect ``torch.cuda`` to the CPU if there is no GPU; return True if redirected.

    Call it before building a Megatron model; calling it again changes nothing. Seed Megatron with
    ``model_parallel_cuda_manual_seed(seed, inference_rng_tracker=True)`` and train without dropout:
    the random states of a GPU are not emulated.

    Example:
        >>> if enable_cpu():
        ...     assert torch.zeros(2, device="cuda").device.type == "cpu"
    """
    if torch.cuda.is_available():
        return False
    cuda: Any = torch.cuda  # the replacements have other types
    if cuda.Stream is not _Stream:
        cuda.current_device = lambda: _CPU
        cuda.synchronize = torch.cpu.synchronize
        cuda.Stream, cuda.stream = _Stream, torch.cpu.stream
        cuda.current_stream = cuda.default_stream = torch.cpu.current_stream
        _CudaMeansCpu().__enter__()
    # The router of megatron-core 0.16 reads te_general_gemm even if its import failed.
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    return True


class _CudaMeansCpu(TorchFunctionMode):
    """Rewrites ``device="cuda"``, ``.cuda()``, ``.to("cuda")`` and ``.type()`` in torch calls."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if _is_cuda(kwargs.get("device")):
            kwargs = {**kwargs, "device": _CPU}
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        result = func(*args, **kwargs)
        # Megatron's optimizers classify parameters and check gradients by this string.
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.", 1)
        return result


class _Stream(torch.cpu.Stream):
    """A CPU stream, on which everything runs in order, with ``torch.cuda.Stream``'s arguments."""

    def __init__(self, *args: object, **kwargs: object):
        super().__init__()


def _is_cuda(device: object) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"
