# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""How batches leave a worker process: through memory that both sides have from the beginning.

PyTorch hands a tensor over in a shared-memory file of its own: the worker makes the file and fills
fresh pages, the receiver asks the worker for its handle over a socket. For a batch of a megabyte
that is a millisecond, several times what it takes to make the batch. Here a few slots are mapped
before the workers are forked. A worker copies a batch into a free slot and sends the number of the
slot; the receiver copies it out and frees the slot. Nothing is created, so nothing can be left over
when a process dies.

A batch that finds no free slot, or is larger than one, goes PyTorch's way.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info

from energon_ext.batch.buffer import BatchSizes, as_buffer
from energon_ext.batch.packed_batch import PackedBatch

#: Energon's loader lets each worker be two batches ahead; one more is being sent, one received.
SLOTS_PER_WORKER = 4

#: Memory is taken only for what is written, so this is a bound and no cost.
SLOT_BYTES = 32 * 2**20

_FREE, _TAKEN = 0, 1

#: In the main process, which has to find the slots that a message speaks of.
_slots_by_name: weakref.WeakValueDictionary[int, "BatchSlots"] = weakref.WeakValueDictionary()


class BatchSlots:
    """Shared memory for the batches of the workers of one loader.

    Make it in the main process before the workers start. Each worker has slots of its own, which
    it alone takes and the main process alone frees. Where two loaders read one dataset, the workers
    that come first have them.

    Args:
        num_workers: of the loader; 0 for no slots.
    """

    def __init__(self, num_workers: int):
        count = num_workers * SLOTS_PER_WORKER if hasattr(os, "memfd_create") else 0
        self._slots = np.zeros((0, SLOT_BYTES), np.uint8)
        if count:
            self._file = os.fdopen(os.memfd_create("energon_ext_batches"), "r+b")
            self._file.truncate(count * SLOT_BYTES)
            memory = mmap.mmap(self._file.fileno(), count * SLOT_BYTES)
            self._slots = np.frombuffer(memory, np.uint8).reshape(count, SLOT_BYTES)
        self._taken = self._slots[:, -1]  # the last byte of each slot says so
        _slots_by_name[id(self)] = self

    def carry(self, batch: PackedBatch) -> PackedBatch:
        """The batch itself, which will leave this process through a slot."""
        if len(self._slots):
            batch.slots = self
        return batch

    def put(self, buffer: torch.Tensor) -> int | None:
        """Copy bytes into a free slot of this worker; None where there is none."""
        worker = get_worker_info()
        if worker is None or buffer.numel() >= SLOT_BYTES or not self._belong_to(worker.id):
            return None
        for slot in range(worker.id * SLOTS_PER_WORKER, (worker.id + 1) * SLOTS_PER_WORKER):
            if self._taken[slot] == _FREE:
                self._taken[slot] = _TAKEN
                self._slots[slot, : buffer.numel()] = buffer.numpy()
                return slot
        return None

    def take(self, slot: int, num_bytes: int) -> torch.Tensor:
        """The bytes of a slot, copied; the slot is free again."""
        buffer = torch.from_numpy(self._slots[slot, :num_bytes].copy())
        self._taken[slot] = _FREE
        return buffer

    def _belong_to(self, worker: int) -> bool:
        """Whether this process has the slots of a worker; it keeps them as long as it lives."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, worker)
        except OSError:  # another process has them
            return False
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process than a forked one shares nothing with this one.
        return BatchSlots, (0,)


def _send(batch: PackedBatch) -> tuple[Any, ...]:
    """How a queue between processes pickles a batch."""
    if batch.slots is None or (slot := batch.slots.put(as_buffer(batch))) is None:
        return batch.__reduce__()
    name = id(batch.slots)
    return _receive, (name, slot, BatchSizes.of(batch), batch.sources, batch.max_seqlen)


def _receive(
    name: int, slot: int, sizes: BatchSizes, sources: tuple[str, ...], max_seqlen: int
) -> PackedBatch:
    buffer = _slots_by_name[name].take(slot, sizes.num_bytes)
    return PackedBatch.from_buffer(buffer, sizes, sources, max_seqlen)


ForkingPickler.register(PackedBatch, _send)
