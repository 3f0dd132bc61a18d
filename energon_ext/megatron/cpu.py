# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The device of a process: its GPU, or the CPU on machines without one.

Megatron-core hard-codes the device ``"cuda"``, although its models, schedules, data-parallel
wrapper and optimizer need nothing from CUDA. The shim patches torch, not Megatron.
"""

import os
from typing import Any, Callable, Sequence

import torch
from torch.overrides import TorchFunctionMode

from energon_ext.errors import ConfigError

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


def select_gpu() -> None:
    """Use the GPU with the number of this process on its node, ``LOCAL_RANK`` under torchrun.

    Raises:
        ConfigError: the node has fewer GPUs.
    """
    rank, gpus = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if rank >= gpus:
        processes = os.environ.get("LOCAL_WORLD_SIZE", rank + 1)
        raise ConfigError(
            f"{processes} processes found on a node with {gpus} GPU(s); start at most {gpus} "
            f"(--nproc-per-node {gpus}), or set CUDA_VISIBLE_DEVICES= to run on CPUs."
        )
    torch.cuda.set_device(rank)


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
