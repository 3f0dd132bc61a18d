# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""On one GPU, in three minutes: what the data costs a step, and what packing and losses cost.

    python benchmarks/run.py gpu

A step is a forward pass, a backward pass and AdamW, in bfloat16. All contenders run in one process
and take turns, and each feeds its tokens to the same model with the same segments, so that only the
data differs. "Resident" is a batch that lies on the GPU already. Steps of matrix products alone
leave the host free; those that wait for the GPU have nothing to hide a draw behind.
"""

import contextlib
import dataclasses
import functools
import math
import sys
import tempfile
import time
from pathlib import Path

import token_source
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_config import TransformerConfig
from timing import markdown

from energon_ext import ExactDataLoader
from energon_ext.losses import unified_loss
from energon_ext.losses.chunked import chunked_loss
from energon_ext.megatron import build_packed_seq_params, enable_cpu, gpt_layer_spec
from energon_ext.megatron.attention import SegmentAttention

SEQ_LEN, ROWS = token_source.SEQ_LEN, token_source.BATCH_ROWS
DOCUMENTS = 4000  # of each source

#: Model -> (layers, hidden size, rows of the batch, steps a round)
MODELS = {"tiny": (2, 256, 1, 40), "small": (4, 512, 8, 15), "0.9 B": (16, 2048, 8, 3)}
#: Matrix products of about 10 ms on an H200, which leave the host free.
PRODUCTS, PRODUCT_SIZE, PRODUCT_STEPS = 7, 8192, 40
ROUNDS = 3

OURS = {f"ours, {count} workers": count for count in range(3)}


def run():
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a GPU; the other benchmarks run on CPUs.")
    return measure(torch.device("cuda", 0), torch.bfloat16)


def measure(device, dtype):
    """Return all tables; on CPUs this is a check that the script runs."""
    enable_cpu()
    with tempfile.TemporaryDirectory() as folder, _megatron():
        token_source.DOCUMENTS = DOCUMENTS
        token_source.prepare(Path(folder))
        threads = torch.get_num_threads()
        tables = [steps(Path(folder), device, dtype, f"{threads} torch threads")]
        torch.set_num_threads(1)
        tables.append(steps(Path(folder), device, dtype, "1 torch thread"))
        torch.set_num_threads(threads)
        tables += [packing(Path(folder), device, dtype), groups(device, dtype)]
    tables.append(losses(device, dtype))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"Device: {name}.\n\n" + "\n".join(tables)


@contextlib.contextmanager
def _megatron():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1, inference_rng_tracker=not torch.cuda.is_available())
    yield
    dist.destroy_process_group()


# Loaders ------------------------------------------------------------------------------------------


def steps(folder, device, dtype, threads):
    """Return a table of steps with each loader, relative to steps with a resident batch."""
    sources = {"stock Energon": token_source.stock(folder)}
    sources["Megatron `GPTDataset`"] = token_source.megatron_masked(folder)
    for name, workers in OURS.items():
        sources[name] = ExactDataLoader(token_source.our_dataset(folder, workers))
    iterators = {name: iter(source) for name, source in sources.items()}
    batch = next(iterators["ours, 0 workers"]).to(device)
    resident = fields_of(batch, device)
    contenders = {"resident": lambda: resident}
    for name, iterator in iterators.items():
        contenders[name] = lambda each=iterator: fields_of(next(each), device)
    steps_of = {
        f"{PRODUCTS} products": (lambda: multiplier(device, dtype, waits=False), PRODUCT_STEPS),
        "waiting for each step": (lambda: multiplier(device, dtype, waits=True), PRODUCT_STEPS),
    }
    for name, (layers, hidden, rows, count) in MODELS.items():
        rows = first_rows(batch, rows)
        new = functools.partial(trainer, layers, hidden, rows, device, dtype)
        steps_of[name] = new, count
    found = {name: {} for name in contenders}
    for step_name, (new, count) in steps_of.items():
        train = new()
        for name, times in in_turns(contenders, train, count, device).items():
            found[name][step_name] = times
        del train
        clear(device)
    for name in OURS:
        sources[name].close()
    header = ["loader", *(f"{name}: wall, processor" for name in steps_of)]
    table = []
    for name, by_model in found.items():
        cells = []
        for model_name, (wall, processor) in by_model.items():
            of_resident = wall / found["resident"][model_name][0]
            shown = f"{wall * 1e3:.1f} ms" if name == "resident" else f"{of_resident:.3f}"
            cells.append(f"{shown}, {processor * 1e3:.1f} ms")
        table.append((name, *cells))
    return markdown(f"Steps, {threads}", header, table)


def fields_of(batch, device):
    """Return tokens, labels, weights and positions of any loader's batch on a device."""
    if isinstance(batch, dict):
        weights = batch["token_weights" if "token_weights" in batch else "loss_mask"]
        fields = batch["tokens"], batch["labels"], weights, batch["position_ids"]
        return [each.to(device, non_blocking=True).flatten() for each in fields]
    batch = batch.to(device)
    return [batch.tokens, batch.labels, batch.token_weights, batch.position_ids]


def first_rows(batch, rows):
    """Return the segments of the first rows of a batch."""
    ends = batch.cu_seqlens[batch.cu_seqlens <= rows * SEQ_LEN]
    return dataclasses.replace(batch, cu_seqlens=ends)


def in_turns(contenders, train, count, device):
    """Return wall and processor seconds of a step by contender, the best of some rounds."""
    best = dict.fromkeys(contenders, (math.inf, math.inf))
    for draw in contenders.values():
        train(draw())  # warms up
    for _ in range(ROUNDS):
        for name, draw in contenders.items():
            synchronize(device)
            wall, processor = time.perf_counter(), time.process_time()
            for _ in range(count):
                train(draw())
            synchronize(device)
            times = time.perf_counter() - wall, time.process_time() - processor
            best[name] = tuple(min(old, new / count) for old, new in zip(best[name], times))
    return best


# Models -------------------------------------------------------------------------------------------


def trainer(layers, hidden, segments, device, dtype, attention=SegmentAttention):
    """Return a function that trains a step on fields; rows beyond those of ``segments`` are cut."""
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=max(2, hidden // 128),
        num_query_groups=max(1, hidden // 512),
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=False,
    )
    spec = gpt_layer_spec(config)
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = attention
    model = GPTModel(
        config, spec, token_source.VOCAB_SIZE, SEQ_LEN, position_embedding_type="rope"
    ).to(device, dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    packed = segments and build_packed_seq_params(segments)
    positions = int(segments.cu_seqlens[-1]) if segments else 0

    def train(fields):
        # A row of the batch each without segments, else one sequence of all.
        shape = (1, positions) if segments else (-1, SEQ_LEN)
        tokens, labels, weights, ids = (each[: positions or None].view(shape) for each in fields)
        losses = model(tokens, ids, None, labels=labels, packed_seq_params=packed)
        (losses.float() * weights).sum().div(losses.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return train


def multiplier(device, dtype, waits):
    """Return a step of matrix products alone, which waits for the GPU or not."""
    matrix = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device, dtype=dtype)

    def multiply(fields):
        sum(each.sum() for each in fields)
        for _ in range(PRODUCTS):
            matrix @ matrix
        if waits:
            synchronize(device)

    return multiply


def packing(folder, device, dtype):
    """Return a table of packed rows against one causal mask a row, with peak memory."""
    loader = ExactDataLoader(token_source.our_dataset(folder))
    batch = next(iter(loader)).to(device)
    loader.close()
    rows = torch.arange(0, batch.num_tokens + 1, SEQ_LEN, dtype=torch.int32, device=device)
    unpacked = dataclasses.replace(batch, cu_seqlens=rows, max_seqlen=SEQ_LEN)
    contenders = {
        "packed, no attention across documents": (batch, SegmentAttention),
        "one causal mask a row, the same kernel": (unpacked, SegmentAttention),
        "one causal mask a row, Megatron's local attention": (None, DotProductAttention),
    }
    table = []
    for name, (segments, attention) in contenders.items():
        cells = []
        for layers, hidden, count in (MODELS["small"][:2] + (10,), MODELS["0.9 B"][:2] + (3,)):
            cells.append(step_and_peak(layers, hidden, segments, attention, batch, count, dtype))
        table.append((name, *cells))
    return markdown("Packed or not", ("8 rows of 4096", "small", "0.9 B"), table)


def step_and_peak(layers, hidden, segments, attention, batch, count, dtype):
    """Return milliseconds a step and peak GiB, or that the memory is too small."""
    device = batch.tokens.device
    clear(device)
    try:
        train = trainer(layers, hidden, segments, device, dtype, attention)
        fields = fields_of(batch, device)
        found = in_turns({"it": lambda: fields}, train, count, device)
    except torch.OutOfMemoryError:
        return "out of memory"
    return f"{found['it'][0] * 1e3:.1f} ms, {peak_gib(device):.1f} GiB"


def groups(device, dtype):
    """Return a table of attention with keys and values as they are and repeated."""
    positions, documents, heads, count = 4 * SEQ_LEN, 17, 32, 8
    ends = torch.linspace(0, positions, documents + 1).int().to(device)
    longest = int(ends.diff().max())
    inputs = [
        torch.randn(positions, n, 128, device=device, dtype=dtype, requires_grad=True)
        for n in (heads, count, count)
    ]
    config = TransformerConfig(
        num_layers=1, hidden_size=heads * 128, num_attention_heads=heads, attention_dropout=0.0
    )
    attention = SegmentAttention(config, 1, None, "self")
    params = PackedSeqParams("thd", ends, ends, max_seqlen_q=longest, max_seqlen_kv=longest)

    def attend(repeats):
        query, key, value = inputs
        if repeats > 1:
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        attention(query, key, value, packed_seq_params=params).sum().backward()

    contenders = {"repeated": lambda: heads // count, "as they are": lambda: 1}
    found = in_turns(contenders, attend, 20, device)
    table = [(name, f"{wall * 1e3:.2f}") for name, (wall, _) in found.items()]
    title = f"Attention, {heads} heads and {count} groups of 128, {positions} positions"
    return markdown(title, ("keys and values", "ms, forward and backward"), table)


# Losses -------------------------------------------------------------------------------------------


def losses(device, dtype, positions=16_384, words=150_000, hidden=2048):
    """Return a table of the loss of whole logits and of chunks, with the peak of their memory."""
    states, weight = (
        torch.randn(n, hidden, device=device, dtype=dtype).mul_(hidden**-0.5).requires_grad_()
        for n in (positions, words)
    )
    labels = torch.randint(words, (positions,), device=device)
    weights = torch.ones(positions, device=device)
    ways = {"whole logits": lambda: unified_loss(states @ weight.T, labels, weights)}
    for chunk in (4096, 1024, 256):
        name = f"chunks of {chunk:,} positions"
        ways[name] = lambda chunk=chunk: chunked_loss(states, weight, labels, weights, chunk=chunk)
    table = []
    for name, way in ways.items():
        clear(device)
        found = in_turns({"it": lambda: None}, lambda _, way=way: way().backward(), 5, device)
        table.append((name, f"{found['it'][0] * 1e3:.1f}", f"{peak_gib(device):.1f}"))
    title = f"A loss over {words:,} words and {positions:,} positions, hidden size {hidden}"
    return markdown(title, ("", "ms, forward and backward", "peak GiB"), table)


def peak_gib(device):
    return torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else 0


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def clear(device):
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
