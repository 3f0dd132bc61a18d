# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Counts what would make the host wait for a GPU, on a machine without one.

A tensor that is copied to ``cuda`` becomes an :class:`OnGpu`: its content lies on the CPU, and
:class:`PretendGpu` sees every operation on it. It counts those for which the host would wait:
reading a number, a shape that depends on values, a copy to the host. It also counts collectives and
copies to the GPU.
"""

import contextlib
from collections import Counter
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_any, tree_map_only

GPU = torch.device("cuda", 0)

#: Operations whose result has a shape, or is a number, that only the device knows.
READ_BY_THE_HOST = {
    "aten::_local_scalar_dense",
    "aten::item",
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique_consecutive",
    "aten::_unique2",
    "aten::equal",
    "aten::is_nonzero",
}


class OnGpu(torch.Tensor):
    """A tensor that says it lies on the GPU."""

    @staticmethod
    def __new__(cls, content):
        return torch.Tensor._make_wrapper_subclass(
            cls, content.shape, content.stride(), content.storage_offset(), dtype=content.dtype
        )

    def __init__(self, content):
        self.content = content

    @property
    def device(self):
        return GPU

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*tree_map_only(OnGpu, content_of, args), **(kwargs or {}))


def content_of(tensor):
    return tensor.content


class PretendGpu(TorchDispatchMode):
    """Attributes: syncs, collectives, copies: by name, how often."""

    def __init__(self):
        super().__init__()
        self.syncs, self.collectives, self.copies = Counter(), Counter(), Counter()

    def found(self):
        return {name: dict(getattr(self, name)) for name in ("syncs", "collectives", "copies")}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func._schema.name
        if name.startswith("c10d::"):
            self.collectives[name] += 1
        on_gpu = tree_any(lambda x: isinstance(x, OnGpu), (args, kwargs))
        if on_gpu and self._is_read(func, name, args, kwargs):
            self.syncs[str(func)] += 1
        to = kwargs.get("device")
        if name == "aten::copy_" and isinstance(args[0], OnGpu) != isinstance(args[1], OnGpu):
            self.syncs[str(func)] += 1
        if to is not None and torch.device(to).type == "cuda":
            kwargs["device"] = "cpu"
        args, kwargs = tree_map_only(OnGpu, content_of, (args, kwargs))
        found = func(*args, **kwargs)
        if on_gpu and not name.startswith("c10d::"):
            return tree_map_only(torch.Tensor, OnGpu, found)
        return found

    def _is_read(self, func, name, args, kwargs):
        if name in READ_BY_THE_HOST:
            return True
        if name == "aten::repeat_interleave":
            return kwargs.get("output_size") is None
        if name in ("aten::index", "aten::index_put_"):
            indices = [index for index in args[1] if index is not None]
            return any(index.dtype == torch.bool for index in indices)
        return False


class _ToTheGpu(TorchFunctionMode):
    """Turns what is made on, or copied to, ``cuda`` into an :class:`OnGpu`."""

    def __init__(self, counts):
        super().__init__()
        self.counts = counts

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)  # without a GPU there is no page-locked memory
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func in (torch.Tensor.cpu, torch.Tensor.tolist, torch.Tensor.numpy):
            if isinstance(args[0], OnGpu):
                self.counts.syncs[func.__name__] += 1
                args = (args[0].content, *args[1:])
            return func(*args, **kwargs)
        device = kwargs.get("device")
        if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], (torch.device, str)):
            device = args[1]
        if func is torch.Tensor.cuda:
            device = GPU
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        if func in (torch.Tensor.to, torch.Tensor.cuda):
            if isinstance(args[0], OnGpu):
                return args[0]
            waits = not kwargs.get("non_blocking")
            self.counts.copies["waiting" if waits else "in the background"] += 1
            return OnGpu(args[0].detach().clone())
        found = func(*args, **{**kwargs, "device": "cpu"})
        if func is torch.tensor or func is torch.as_tensor:
            self.counts.syncs["values of the host, made on the GPU"] += 1
        return OnGpu(found) if isinstance(found, torch.Tensor) else found


@contextlib.contextmanager
def pretend_gpu():
    """Within it there seems to be a GPU; gives the counts."""
    counts = PretendGpu()
    with (
        mock.patch("torch.cuda.is_available", lambda: True),
        mock.patch("torch.cuda.current_device", lambda: 0),
        counts,
        _ToTheGpu(counts),
    ):
        yield counts
