# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A batch on its way to the GPU: one piece of memory, one copy, and no thread of torch.

There is no GPU here. A fake of page-locked memory counts its pieces, and the copy goes to torch's
device ``meta``.
"""

import copy
import json
import os
import pickle
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.host_memory import bytes_of, take
from energon_ext.batch.rows import Row
from energon_ext.batch.transport import page_lock, tensors_of, values_of
from energon_ext.megatron import slice_for_context_parallel
from energon_ext.megatron.loss import check_loss_inputs
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron.processes import finish, start
from tests.support import config, write_dataset

SEQ_LEN, ROWS = 8192, 8  # torch uses several threads from 32 768 numbers on


class PageLocking(TorchFunctionMode):
    """Counts the pieces of page-locked memory that this process asks for, and their copies."""

    def __init__(self):
        super().__init__()
        self.pieces, self.sent = [], []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.is_pinned:
            return storage_of(args[0]) in map(storage_of, self.pieces)
        is_locked = kwargs.pop("pin_memory", False)
        if func is torch.Tensor.to and args[1] == "meta":
            self.sent.append(args[0])
        found = func(*args, **kwargs)
        if is_locked:
            self.pieces.append(found)
        return found


@pytest.fixture
def page_locking(monkeypatch):
    own = os.getpid()  # a forked process does not use the GPU of its parent
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: os.getpid() == own)
    with PageLocking() as found:
        yield found


def storage_of(tensor):
    return tensor.untyped_storage().data_ptr()


def tensors_in(batch):
    return tensors_of(values_of(batch))


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    return write_texts(tmp_path_factory.mktemp("texts") / "d")


def write_texts(folder):
    return write_dataset(folder, [f"Document {n}. " * 100 for n in range(400)])


def loader_of(folder, workers=0):
    dataset = get_train_dataset(
        folder,
        worker_config=config(num_workers=workers),
        batch_size=ROWS,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN, packing_buffer_docs=64),
        shuffle_buffer_size=None,
    )
    return ExactDataLoader(dataset)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_is_written_to_page_locked_memory_once_and_copied_from_there(
    texts, workers, page_locking
):
    batches = iter(loader_of(texts, workers))
    for number in range(1, 3):
        batch = next(batches)
        there = batch.to("meta")
        assert {storage_of(each) for each in tensors_in(batch)} == {
            storage_of(page_locking.pieces[-1])
        }
        assert len(page_locking.pieces) == len(page_locking.sent) == number
        assert page_locking.sent[-1].data_ptr() == page_locking.pieces[-1].data_ptr()
        assert page_locking.sent[-1].nbytes <= page_locking.pieces[-1].nbytes
        assert [x.shape for x in tensors_in(there)] == [x.shape for x in tensors_in(batch)]


def test_nothing_is_page_locked_before_the_process_uses_a_gpu(texts, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with PageLocking() as found:
        next(iter(loader_of(texts)))
    assert found.pieces == []


def small_batch():
    row = Row([np.arange(5), np.arange(3)], source="web", documents=2)
    return BatchAssembler(8)([row, row], ["web"])


def test_page_locking_a_batch_that_lies_there_makes_no_copy(page_locking):
    batch = small_batch()
    again = page_lock(batch)
    assert len(page_locking.pieces) == 1
    assert [x.data_ptr() for x in tensors_in(again)] == [x.data_ptr() for x in tensors_in(batch)]


def test_a_batch_from_before_is_copied_into_one_page_locked_piece(monkeypatch):
    batch = small_batch()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with PageLocking() as found:
        batch.to("meta")
    assert len(found.pieces) == 1
    assert found.pieces[0].nbytes == sum(each.nbytes for each in tensors_in(batch))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_can_be_saved_and_takes_no_more_than_its_tensors(texts, tmp_path, workers):
    """Megatron-LM saves the batches of a step that it reruns in another process."""
    batch = next(iter(loader_of(texts, workers)))
    torch.save([batch], tmp_path / "saved.pt")
    (found,) = torch.load(tmp_path / "saved.pt", weights_only=False)
    assert type(found) is type(batch) and found.sources == batch.sources
    assert len(tensors_in(found)) == len(tensors_in(batch)) > 6
    assert all(map(torch.equal, tensors_in(found), tensors_in(batch)))
    content = sum(each.nbytes for each in tensors_in(batch))
    assert content < (tmp_path / "saved.pt").stat().st_size < content + 20_000
    assert content < len(pickle.dumps(batch)) < content + 20_000


def test_a_shallow_copy_of_a_batch_stays_in_its_memory():
    batch = small_batch()
    found = copy.copy(batch)
    assert found is not batch
    assert [x.data_ptr() for x in tensors_in(found)] == [x.data_ptr() for x in tensors_in(batch)]
    assert copy.deepcopy(batch).tokens.data_ptr() != batch.tokens.data_ptr()


def test_a_part_of_a_large_tensor_is_copied_alone():
    everything = torch.arange(1000.0)
    batch = small_batch()
    batch.columns = {"few": everything[500:516]}
    values = tensors_in(batch.pin_memory())
    assert values[-1].tolist() == list(range(500, 516))
    assert values[-1].untyped_storage().nbytes() < everything.nbytes


def test_batches_of_other_types_are_page_locked_too(page_locking):
    batch = {"a": [torch.arange(3)], "b": (torch.ones(2), "name"), "c": np.arange(2)}
    found = page_lock(batch)
    assert found["a"][0].tolist() == [0, 1, 2] and found["b"][1] == "name"
    assert found["c"] is batch["c"]
    assert found["a"][0].is_pinned() and found["b"][0].is_pinned()
    assert len(page_locking.pieces) == 1
    assert page_lock("nothing to move") == "nothing to move"
    trained = [torch.zeros(2, requires_grad=True)]
    assert page_lock(trained) is trained


STRIDED = {
    "bfloat16": torch.arange(6).view(2, 3).bfloat16().T,
    "bool": (torch.arange(6) > 2).view(2, 3).T,
    "complex": torch.randn(2, 3, dtype=torch.complex128).T,
    "every second": torch.arange(10)[::2],
}


@pytest.mark.parametrize("name", STRIDED)
def test_tensors_that_are_not_contiguous_keep_their_values(name):
    tensor = STRIDED[name]
    (found,) = bytes_of([tensor])
    back = torch.from_numpy(found.copy()).view(tensor.dtype).reshape(tensor.shape)
    assert back.equal(tensor)
    assert take(tensor, np.array([2, 0])).equal(tensor[[2, 0]])


def count_threads_of_torch(folder):
    """Write how many threads torch started in the path of a batch, and in one operation."""
    torch.set_num_threads(16)
    before = threads()
    found = {}
    for workers in (0, 1):
        loader = loader_of(folder, workers)
        batches = iter(loader)
        for _ in range(3):
            batch = next(batches)
            check_loss_inputs(batch, "weights", 1, None, None)
            batch.to("meta")
            batch.pin_memory()
        found[f"{workers} workers"] = threads() - before
        loader.close()
    aligned = BatchAssembler(SEQ_LEN, alignment=4, masked_label=7)
    rows = [Row([np.arange(SEQ_LEN)], source="web", documents=1)] * ROWS
    slice_for_context_parallel(aligned(rows, ["web"]), 2, 0).to("meta")
    found["context parallel"] = threads() - before
    torch.cat([batch.tokens.view(torch.uint8)] * 2)
    found["torch.cat"] = threads() - before
    Path(folder, "threads.json").write_text(json.dumps(found))


def threads():
    """Return the threads of this process that Python did not start."""
    return len(os.listdir("/proc/self/task")) - threading.active_count()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux")
def test_no_thread_of_torch_is_started_on_the_way_of_a_batch(tmp_path):
    write_texts(tmp_path / "d")
    child = start(count_threads_of_torch, [str(tmp_path / "d")], tmp_path / "stderr")
    assert finish([child]) == [0], (tmp_path / "stderr").read_text()
    found = json.loads((tmp_path / "d" / "threads.json").read_text())
    assert found == {"0 workers": 0, "1 workers": 0, "context parallel": 0, "torch.cat": 15}
