# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Four gloo ranks run each document on one, two or four of them, like one rank each alone.

The processes start once and continue one run under several layouts; the tests compare what they
read and computed with the documents alone.
"""

import functools

import numpy as np
import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.megatron import (
    MegatronEnergonLoader,
    create_context_groups,
    data_parallel_worker_config,
    draw_step,
    follow_context_groups,
    forward_step,
    mean_losses,
    measure_context_times,
)
from energon_ext.plan.context_cost import ContextTime, MeasuredCost, load_context_times
from energon_ext.plan.layout import ContextOptions
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron.forced_routing import WHOLE_LAYERS, recompute_without_gpu
from tests.megatron.small_gpt import VOCABULARY, megatron, model_parallel, small_config, small_model
from tests.megatron.small_training import run_ranks
from tests.support import config, write_mix, write_tokens

pytestmark = pytest.mark.skipif(
    not hasattr(PackedSeqParams, "cp_group"), reason="megatron-core 0.15 takes no group of a batch"
)

SEQ_LEN, ROWS, BUDGET = 96, 3, 24
#: Virtual stages need three stages: with two, Megatron-core mixes up the lengths of neighbours.
VIRTUAL_STAGES = (
    "virtual stages",
    {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2},
    {"sizes": (1, 2), "budget": 48, "stages": 3, "multiple_of": 3, "count": 12},
    {},
    2,
)
MODEL = {
    "params_dtype": torch.float64,
    "pipeline_dtype": torch.float64,
    "variable_seq_lengths": True,
    "moe_token_dispatcher_type": "alltoall",  # the other one does not allow it
}

#: Every number of ranks costs the same in total, but a micro-batch costs something, too.
COST = MeasuredCost.fit(
    ContextTime(context_size=size, lengths=lengths, seconds=8 * size + work / size)
    for size in (1, 2, 4)
    for lengths in ([8], [24], [96], [12, 12])
    for work in [sum(n + n * n / 16 for n in lengths)]
)

#: Sizes, parallelism and options of the layout, one after another; each runs a step or two.
RUNS = [
    ("any size", {}, {"sizes": (1, 2, 4)}, {}, 1),
    ("tensor parallel", {"tensor_model_parallel_size": 2}, {"sizes": (2,), "budget": 48}, {}, 1),
    ("computed again", {}, {"sizes": (1, 4), "count": 8}, WHOLE_LAYERS, 1),
    (
        "pipeline",
        {"pipeline_model_parallel_size": 2},
        {"sizes": (1, 2), "budget": 48, "stages": 2},
        {},
        1,
    ),
]


def layers_of(sizes):
    """Return how many layers a model has: one or two on each (virtual) stage."""
    return 6 if "virtual_pipeline_model_parallel_size" in sizes else 2


def documents(source):
    random = np.random.default_rng(len(source) + 5)
    lengths = np.minimum(random.lognormal(2.7, 1.1, 80).astype(int) + 2, SEQ_LEN + 1)
    return [random.integers(3, VOCABULARY, length).tolist() for length in lengths]


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    pairs = [(write_tokens(root / name, documents(name)), 1) for name in ("web", "books")]
    return write_mix(root / "mix.yaml", pairs)


def open_run(mix, worker_config, contexts):
    encoder = PackedTaskEncoder(ByteTokenizer(), SEQ_LEN, contexts=contexts)
    encoder.rows_per_step = ROWS
    return get_train_dataset(mix, task_encoder=encoder, worker_config=worker_config, batch_size=1)


def build(model_config):
    """Return the model chunks of this rank, wrapped for training."""
    stages = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    chunks = []
    for stage in range(stages or 1):
        model = small_model(model_config, vp_stage=stage if stages else None)
        model.model_type = None
        follow_context_groups(model)
        chunks.append(
            DistributedDataParallel(model_config, DistributedDataParallelConfig(), model.double())
        )
    model_config.finalize_model_grads_func = finalize_model_grads
    return chunks


def run_step(chunks, batches, count):
    """Run a step; return its losses, and the gradient of each parameter by its number."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
    iterators = [iter(batches) if batches is not None else None for _ in chunks]
    reports = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=count,
        seq_length=SEQ_LEN,
        micro_batch_size=1,
        forward_only=False,
    )
    return mean_losses(reports), gradients(chunks)


def gradients(chunks):
    """Return a sum and the norm of the gradients of each layer on this rank, by its number."""
    found = {}
    for chunk in chunks:
        inner = chunk.module
        for layer in inner.decoder.layers:
            own = [p.main_grad.flatten() for p in layer.parameters()]
            whole = torch.cat(own)
            signs = torch.arange(len(whole), dtype=whole.dtype).cos()
            found[str(layer.layer_number)] = [(whole @ signs).item(), whole.norm().item()]
    return found


def read_pieces(batches):
    """Return the tokens of all documents of batches, as they are trained: input and label."""
    found = []
    for batch in batches or ():
        ends = batch.cu_seqlens.tolist()
        for start, end, source in zip(ends, ends[1:], batch.source_ids.tolist()):
            if source < 0:
                continue
            trained = batch.token_weights[start:end] > 0
            labels = batch.labels[start:end][trained].tolist()
            found.append([batch.context_size, batch.tokens[start].item(), *labels])
    return found


def continue_run(mix, state, sizes, layout, recomputed, steps):
    """Continue the run; return what each step gave on this rank, and the state after it."""
    with model_parallel(**sizes):
        options = ContextOptions(**{"budget": BUDGET, "cost": COST, **layout})
        create_context_groups(options.sizes)
        chunks = build(small_config(**MODEL, **recomputed, **sizes, num_layers=layers_of(sizes)))
        loads = parallel_state.get_tensor_model_parallel_rank() == 0
        loader = None
        if loads:
            dataset = open_run(mix, data_parallel_worker_config(0), options)
            loader = MegatronEnergonLoader(dataset)
            if state is not None:
                loader.load_state_dict(state)
        results = []
        for _ in range(steps):
            batches, count = draw_step(loader)
            losses, grads = run_step(chunks, batches, count)
            state = loader.state_dict() if loads else None
            results.append(
                {"losses": losses, "gradients": grads, "count": count, "state": state}
                | {"pieces": read_pieces(batches)}
                | {"replica": parallel_state.get_data_parallel_rank(), "loads": loads}
            )
        states = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(states, state)
        return results, next(each for each in states if each is not None)


def measure(path):
    """Return the measured times, and what is left of gradients."""
    with model_parallel():
        create_context_groups((2,))
        model = small_model(small_config(moe_token_dispatcher_type="alltoall"))
        follow_context_groups(model)
        lengths = {1: [[5], [9], [4, 4]], 2: [[16], [30], [4, 4]]}
        times = measure_context_times(
            model, path, sizes=(1, 2), budget=16, micro_batches=lengths, repeats=1
        )
        gradients = [parameter.grad for parameter in model.parameters()]
    return {
        "times": [each.to_json() for each in times],
        "gradients": sum(each is not None for each in gradients),
    }


def run_all(mix, runs):
    found, state = {"measured": measure(mix.parent / f"times{len(runs)}.jsonl")}, None
    recompute_without_gpu()
    for name, sizes, layout, recomputed, steps in runs:
        found[name], state = continue_run(mix, state, sizes, layout, recomputed, steps)
    return found


@pytest.fixture(
    scope="module", params=["four", pytest.param("six", marks=pytest.mark.nightly)], ids=str
)
def steps(mix, request, tmp_path_factory):
    """``(name of the run, options of its layout, results of all ranks)`` of each step."""
    world_size, runs = {"four": (4, RUNS), "six": (6, [VIRTUAL_STAGES])}[request.param]
    folder = tmp_path_factory.mktemp(request.param)
    ranks = run_ranks(world_size, functools.partial(run_all, mix, runs), folder)
    measured = [rank["measured"] for rank in ranks]
    assert all(each == measured[0] for each in measured)
    times = load_context_times(mix.parent / f"times{len(runs)}.jsonl")
    assert measured[0] == {"times": [each.to_json() for each in times], "gradients": 0}
    assert [each.context_size for each in times] == [1, 1, 1, 2, 2, 2]
    assert MeasuredCost.fit(times).longest == {1: 9, 2: 32}  # 30, aligned to 4
    return [
        (name, layout, [rank[name][step] for rank in ranks])
        for name, _, layout, _, count in runs
        for step in range(count)
    ]


def planned_pieces(mix, count):
    """Return the tokens of all pieces of each step, from the plan and the documents alone."""
    run, steps = open_run(mix, config(), None).run, []
    by_key = {key: documents(key.rsplit("/", 1)[-1]) for key in run.keys}
    for step, _ in zip(run.fork().draw_steps(), range(count)):
        pieces = []
        for number in range(ROWS):
            taken, index, source = step.row(number)
            key = run.keys[source]
            pieces += [
                (key, by_key[key][document][start:stop])
                for document, start, stop in taken.contents(index)
            ]
        steps.append(pieces)
    return steps


@pytest.fixture(scope="module")
def alone(mix, steps):
    """Losses, gradients and pieces of each step, with every document alone on one rank."""
    planned = planned_pieces(mix, len(steps))
    keys = sorted({key for pieces in planned for key, _ in pieces})
    layers = len({layer for *_, found in steps for rank in found for layer in rank["gradients"]})
    with megatron():
        chunks = build(small_config(**MODEL, num_layers=layers))
        results = []
        for pieces in planned:
            batches = [
                BatchAssembler(max(1, len(tokens) - 1))([Row([np.array(tokens)], key)], keys)
                for key, tokens in pieces
            ]
            losses, grads = run_step(chunks, batches, len(batches))
            trained = [tokens for _, tokens in pieces]
            results.append({"losses": losses, "gradients": grads, "pieces": trained})
        return results


def test_every_document_is_read_once_on_equally_many_ranks_as_its_micro_batch_has(steps, alone):
    used = set()
    for (_, _, found), expected in zip(steps, alone):
        by_replica = {each["replica"]: each["pieces"] for each in found if each["loads"]}
        counts = {}
        for pieces in by_replica.values():
            for size, *tokens in pieces:
                used.add(size)
                key = (size, *tokens)
                counts[key] = counts.get(key, 0) + 1
        read = [list(tokens) for (size, *tokens), n in counts.items() for _ in range(n // size)]
        assert all(n % size == 0 for (size, *_), n in counts.items())
        assert sorted(read) == sorted(tokens for tokens in expected["pieces"] if len(tokens) > 1)
    assert used == {size for _, layout, _ in steps for size in layout["sizes"]}


def test_losses_and_gradients_are_those_of_each_document_alone(steps, alone):
    compared = set()
    for (name, _, found), expected in zip(steps, alone):
        with_loss = [each["losses"] for each in found if each["losses"]]
        assert with_loss
        for losses in with_loss:
            assert losses["loss"] == pytest.approx(expected["losses"]["loss"], rel=1e-6)
            assert losses["loss_by_source"] == pytest.approx(
                expected["losses"]["loss_by_source"], rel=1e-6
            )
        if name == "tensor parallel":  # each rank has a part of every layer
            continue
        for each in found:
            for layer, (total, norm) in each["gradients"].items():
                compared.add((name, layer))
                assert norm == pytest.approx(expected["gradients"][layer][1], rel=1e-8)
                assert total == pytest.approx(expected["gradients"][layer][0], abs=1e-8 * norm)
    names = {name for name, *_ in steps} - {"tensor parallel"}
    assert len(compared) == len(names) * len(alone[0]["gradients"])


def test_all_ranks_run_equally_many_micro_batches_and_a_given_count_is_kept(steps):
    for _, layout, found in steps:
        assert len({each["count"] for each in found}) == 1
        assert layout.get("count") in (None, found[0]["count"])


def test_states_are_equal_on_all_ranks_and_know_nothing_of_the_sizes(steps, mix):
    plain = ExactDataLoader(open_run(mix, config(), None))
    batches = iter(plain)
    for _, _, found in steps:
        states = [each["state"] for each in found if each["loads"]]
        for _ in range(ROWS):
            next(batches)
        expected = plain.state_dict()
        for state in states:
            assert state["plan"] == expected["plan"]
            assert (state["done"], state["read"]) == (0, expected["read"])
