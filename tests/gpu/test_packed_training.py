# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""On one GPU: a packed batch equals its documents, and the cost of getting it there.

    python -m pytest -m gpu -n 0 -s tests/gpu

Prints one table; asserts correctness, never speed.
"""

import time

import pytest
import torch

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.loader.slots import Slots
from energon_ext.megatron import (
    MegatronEnergonLoader,
    forward_step,
    mean_losses,
)
from energon_ext.megatron.attention import SegmentAttention, _has_varlen_kernel
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests import support
from tests.megatron.places import GPU_BFLOAT16
from tests.megatron.small_gpt import (
    documents_of,
    megatron,
    run_packed,
    small_config,
    synthetic_batch,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SEQ_LEN, ROWS, STEPS = 4096, 4, 50


@pytest.fixture(scope="module")
def one_gpu():
    with megatron():
        yield torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def table():
    rows = []
    yield rows
    print("\n| what | found |\n| --- | --- |")
    for what, found in rows:
        print(f"| {what} | {found} |")


def packed_and_alone(model, batch):
    """Return logits and gradients, packed and with each document run alone."""
    parts = documents_of(batch)
    packed = run_packed(model, batch)
    alone = [
        model(batch.tokens[None, part], batch.position_ids[None, part], None)[0] for part in parts
    ]
    found = []
    for logits in (torch.cat([packed[part] for part in parts]), torch.cat(alone)):
        model.zero_grad()
        logits.float().square().mean().backward()
        gradients = torch.cat([p.grad.flatten().float() for p in model.parameters()])
        found.append((logits.detach().float(), gradients))
    return found


def difference(found, expected):
    return float((found - expected).norm() / expected.norm())


def test_packed_equals_unpacked_in_bfloat16(one_gpu, table):
    batch = synthetic_batch(1).to(one_gpu)
    model = GPU_BFLOAT16.model()
    attention = model.decoder.layers[0].self_attention.core_attention
    kernel = type(attention).__name__
    if isinstance(attention, SegmentAttention):
        query = torch.empty(1, device=one_gpu, dtype=torch.bfloat16)
        kernel += ", one kernel" if _has_varlen_kernel(query) else ", a call per segment"
    (packed, packed_gradients), (alone, alone_gradients) = packed_and_alone(model, batch)
    logits = difference(packed, alone)
    gradients = difference(packed_gradients, alone_gradients)
    table.append(("device, attention", f"{torch.cuda.get_device_name()}, {kernel}"))
    table.append(("packed against alone, logits, relative", f"{logits:.1e}"))
    table.append(("packed against alone, gradients, relative", f"{gradients:.1e}"))
    assert logits < GPU_BFLOAT16.rounding
    assert gradients < GPU_BFLOAT16.rounding


@pytest.fixture(scope="module")
def loader(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    support.write_dataset(folder / "text", [f"Document {n}. " * 100 for n in range(2000)])
    dataset = get_train_dataset(
        folder / "text",
        worker_config=support.config(num_workers=2),
        batch_size=ROWS,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), SEQ_LEN, packing_buffer_docs=64),
        shuffle_buffer_size=100,
    )
    loader = MegatronEnergonLoader(dataset)
    yield loader
    loader.close()


def tokens_per_second(device, step, steps=STEPS):
    for _ in range(3):
        step()
    _wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    _wait(device)
    return f"{steps * ROWS * SEQ_LEN / (time.perf_counter() - began) / 1e6:.2f} M tokens/s"


def _wait(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(device, loader, model, steps=STEPS):
    """Yield rows of the table: the loader, the copy, the step, and all three together."""
    batch = next(loader)
    pinned = batch.pin_memory() if device.type == "cuda" else batch
    there = batch.to(device)

    def train(iterator):
        output, loss_func = forward_step(iterator, model)
        loss_func(output)[0].backward()

    def measured(step):
        return tokens_per_second(device, step, steps)

    yield "loader alone", measured(lambda: next(loader))
    yield "copy, pageable", measured(lambda: batch.to(device))
    yield "copy, pinned", measured(lambda: pinned.to(device))
    yield "step, batch already there", measured(lambda: train(iter([there])))
    # The workers run while the GPU computes; the copy is one operation of its stream.
    yield "step, loader to GPU", measured(lambda: train(loader))


def test_batches_arrive_pinned_and_equal(one_gpu, loader):
    batch = next(loader)
    assert batch.tokens.is_pinned()
    there = batch.to(one_gpu)
    torch.cuda.synchronize()
    assert torch.equal(there.tokens.cpu(), batch.tokens)
    assert torch.equal(there.cu_seqlens.cpu(), batch.cu_seqlens)


def test_a_copy_of_a_users_step_reads_its_own_batch_though_later_ones_arrive(one_gpu):
    """The copy waits on the GPU while its batch is released and later batches are written."""
    ring = Slots(2)

    def taken(number):
        values = {"before": torch.zeros(9), "tokens": torch.full((1 << 20,), number)}
        return ring.take(ring.put(number, values))

    batch = taken(0)
    assert batch["tokens"].is_pinned()
    torch.cuda._sleep(1 << 30)  # about half a second
    copied = batch["tokens"].to(one_gpu, non_blocking=True)
    del batch
    for number in range(1, 5):
        taken(number)
    torch.cuda.synchronize()
    assert copied.unique().tolist() == [0]


class PositionLosses(torch.nn.Module):
    """A model that never waits, so that only the data path is measured."""

    pre_process = True
    config = small_config(num_moe_experts=None)

    def forward(self, tokens, position_ids, mask, labels, packed_seq_params, **_):
        return labels.float() * 0.01


def test_no_micro_batch_waits_for_the_gpu(one_gpu, loader):
    model, reports = PositionLosses(), []
    forward_step(loader, model)  # allocates and pins memory once
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(4):
            output, loss_func = forward_step(loader, model)
            reports.append(loss_func(output)[2])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert mean_losses(reports)["loss"] > 0


def test_loader_to_gpu(one_gpu, loader, table):
    model = GPU_BFLOAT16.model(
        vocabulary=ByteTokenizer().padded_vocab_size(128),
        num_layers=4,
        hidden_size=512,
        num_attention_heads=8,
        ffn_hidden_size=2048,
    )
    table.extend(measure(one_gpu, loader, model))
