# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A teacher's words, and a student's loss and gradient, on two processes.

The expected values come from a model that reads each document alone on one rank, and from the
definition of the loss, one position and one word at a time.
"""

import dataclasses
import functools

import numpy as np
import pytest
import torch

from energon_ext.errors import ConfigError, SampleError
from energon_ext.losses import Distillation
from energon_ext.megatron import forward_step, write_teacher_of
from energon_ext.tokens.column_folder import ColumnFolder
from tests.megatron.small_gpt import (
    VOCABULARY,
    documents_of,
    megatron,
    model_parallel,
    small_config,
    small_model,
    synthetic_batch,
)
from tests.megatron.small_training import run_ranks
from tests.megatron.split_gradients import LAYOUTS, assert_equal_steps, expected_of, step_of
from tests.megatron.test_context_parallel import LENGTHS, aligned_batch
from tests.support import write_tokens
from tests.test_distillation_losses import dense_losses

K = 5
DISTILLATION = Distillation(alpha=0.7, temperature=2.0)

#: Name -> options of forward_step
CASES = {
    "whole logits": {"denominator": "tokens"},
    "in chunks": {"denominator": "tokens", "loss_chunk": 5},
}


def taught_batch(index, batch=None):
    """Return micro-batch ``index``; its second half has no teacher."""
    batch = synthetic_batch(index) if batch is None else batch
    random = torch.Generator().manual_seed(index)
    log_probs, ids = (
        torch.randn(batch.num_tokens, VOCABULARY, generator=random).mul(2).log_softmax(1).topk(K)
    )
    ids[batch.num_tokens // 2 :] = -1
    columns = {"teacher_ids": ids.int(), "teacher_log_probs": log_probs}
    return dataclasses.replace(batch, columns=columns)


BATCHES = [taught_batch(index) for index in range(4)]
CONTEXT_PARALLEL = [taught_batch(4, aligned_batch(LENGTHS, 2))]


def expected_step(batches):
    def loss_of(read):
        total, count = 0.0, 0
        for batch in batches:
            found = torch.zeros(batch.num_tokens, VOCABULARY)
            for place in documents_of(batch):
                tokens = batch.tokens[place]
                found[place] = read(torch.cat([tokens, tokens[:1]]))
            losses = dense_losses(found, batch, *dataclasses.astuple(DISTILLATION)[:3])
            total = total + (batch.token_weights * losses).sum()
            count += int((batch.token_weights != 0).sum())
        return total / count

    return expected_of(loss_of, all_words=True)


# The teacher ------------------------------------------------------------------------------------

CONTEXT = 16


def texts():
    random = np.random.default_rng(3)
    return [random.integers(VOCABULARY, size=size) for size in (9, 1, 16, 30, 3, 4, 5, 17)]


def written_words(folder, name, sizes, config):
    """Write the words of a split model; return them."""
    model = small_model(small_config(**sizes, **config))
    model.train()
    write_teacher_of(
        model,
        folder / "web",
        folder / name,
        k=K,
        made_by="small",
        context=CONTEXT,
        dtype="float32",
        unit_documents=3,
    )
    assert model.training
    numbers, lengths = range(len(texts())), [len(text) for text in texts()]
    columns = ColumnFolder.open(folder / name)
    read = [
        columns.read(f"teacher_{each}", numbers, [0] * len(lengths), lengths)
        for each in ("ids", "log_probs")
    ]
    return [[each.tolist() for each in values] for values in read]


def expected_words():
    """Return the words of each label, of a model that reads one window at a time."""
    ids, log_probs = [], []
    with megatron(), torch.no_grad():
        model = small_model(small_config())
        for text in map(torch.from_numpy, texts()):
            said = torch.zeros(len(text), VOCABULARY)
            for label in range(1, len(text)):
                # The window before which half a context has been read.
                start = max(0, -(-(label - CONTEXT) // (CONTEXT // 2)) * (CONTEXT // 2))
                tokens = text[start:label]
                logits = model(tokens[None], torch.arange(len(tokens))[None], None)[0]
                said[label] = logits[-1].log_softmax(0)
            found = said.topk(K)
            ids.append(found.indices)
            log_probs.append(found.values)
    return ids, log_probs


def refusals(folder):
    model = small_model(small_config(**LAYOUTS["tensor parallel"]))
    with pytest.raises(ConfigError, match="k: 65 found, small has 64 words"):
        write_teacher_of(model, folder / "web", folder / "refused", k=65, made_by="small")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    # The rank that writes fails; the other one ends as well.
    with pytest.raises(ConfigError, match="small has a log-probability of nan"):
        write_teacher_of(model, folder / "web", folder / "refused", k=4, made_by="small")


def all_results(folder, layouts):
    results = {}
    sequence = {"sequence_parallel": True}
    for layout in layouts:
        sizes = LAYOUTS[layout]
        with model_parallel(**sizes):
            results[layout] = {
                "words": written_words(folder, layout, sizes, {}),
                **{
                    case: step_of(BATCHES, sizes, distillation=DISTILLATION, **options)
                    for case, options in CASES.items()
                },
            }
            if layout == "tensor parallel":
                own = {**sizes, **sequence}
                results[layout]["in chunks, sequence parallel"] = step_of(
                    BATCHES, own, distillation=DISTILLATION, **CASES["in chunks"]
                )
                refusals(folder)
    if "data parallel" in layouts:
        sizes = {"context_parallel_size": 2}
        with model_parallel(**sizes):
            results["context parallel"] = {
                case: step_of(CONTEXT_PARALLEL, sizes, distillation=DISTILLATION, **options)
                for case, options in CASES.items()
            }
    return results


OTHERS = ["data parallel", "pipeline parallel"]


@pytest.fixture(
    scope="module",
    params=[["tensor parallel"], pytest.param(OTHERS, marks=pytest.mark.nightly)],
    ids=["tensor parallel", "others"],
)
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    write_tokens(folder / "web", texts())
    return run_ranks(2, functools.partial(all_results, folder, request.param), folder)


def test_loss_and_gradient_of_a_student_are_those_of_documents_alone(ranks):
    expected = expected_step(BATCHES)
    for layout, results in ranks[0].items():
        if layout == "context parallel":
            expected = expected_step(CONTEXT_PARALLEL)
        cases = [case for case in results if case != "words"]
        assert len(cases) == 2 + (layout == "tensor parallel")
        for case in cases:
            assert_equal_steps([rank[layout][case] for rank in ranks], expected)


def test_the_divergence_is_reported_over_the_labels_that_have_a_teacher(ranks):
    taught, layout = [], [*ranks[0]][0]
    with megatron(), torch.no_grad():
        model = small_model(small_config())
        for batch in BATCHES:
            logits = torch.zeros(batch.num_tokens, VOCABULARY)
            for place in documents_of(batch):
                tokens = batch.tokens[place]
                logits[place] = model(tokens[None], torch.arange(len(tokens))[None], None)[0]
            losses = dense_losses(logits, batch, 1, DISTILLATION.temperature, True)
            is_taught = batch.columns["teacher_ids"][:, 0] >= 0
            taught += losses[is_taught & (batch.token_weights != 0)].tolist()
    reported = ranks[0][layout]["whole logits"]["teacher_kl"]
    assert reported == pytest.approx(sum(taught) / len(taught), rel=1e-5)


def test_words_of_a_split_teacher_are_those_of_documents_alone(ranks):
    ids, log_probs = expected_words()
    for results in (each for rank in ranks for each in rank.values() if "words" in each):
        found_ids, found_log_probs = results["words"]
        for text, *values in zip(texts(), ids, log_probs, found_ids, found_log_probs):
            assert values[2][0] == [-1] * K
            assert values[2][1:] == values[0][1:].tolist()
            found = torch.tensor(values[3])[1:]
            assert torch.allclose(found, values[1][1:], atol=1e-5) and len(found) == len(text) - 1


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        (
            {"mtp_num_layers": 1},
            {},
            "mtp_num_layers: the teacher's words are those of the next token only",
        ),
        ({}, {"position_losses": len}, "position_losses replace the loss"),
    ],
)
def test_other_losses_are_refused_by_name(config, options, message):
    with megatron():
        model = small_model(small_config())
        vars(model.config).update(config)
        with pytest.raises(ConfigError, match=f"distillation: {message}"):
            forward_step(iter(BATCHES), model, distillation=DISTILLATION, **options)


def test_a_teacher_with_more_words_than_the_model_is_refused():
    batch = taught_batch(0)
    batch.columns["teacher_ids"][3, 2] = VOCABULARY
    with megatron(), pytest.raises(SampleError, match="word 64 found, but the student has 64"):
        forward_step(iter([batch]), small_model(small_config()), distillation=DISTILLATION)


def test_documents_without_a_teacher_are_evaluated_on_their_labels_and_refused_in_training():
    batch = synthetic_batch(0)
    with megatron():
        model = small_model(small_config())
        with torch.no_grad():
            plain, _ = forward_step(iter([batch]), model)
            output, loss_func = forward_step(iter([batch]), model, distillation=DISTILLATION)
        assert torch.equal(output, plain) and "teacher_kl" not in loss_func(output)[2]
        with pytest.raises(ConfigError, match=r"the columns \[\], teacher_ids is needed"):
            forward_step(iter([batch]), model, distillation=DISTILLATION)
