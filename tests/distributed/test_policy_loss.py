# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Advantages, masks and columns on two processes: loss and gradient of packed rows.

The expected values come from a model that reads each answer alone, and from loops over the fields
of the answers, without packing, and without Megatron's schedules, wrappers and counts.
"""

import dataclasses
import functools

import pytest
import torch

from energon_ext.batch.collate import BatchAssembler
from energon_ext.losses import clipped_ratio_losses, reference_kl
from energon_ext.losses.unified import column_of
from energon_ext.rl import ScoredGroup
from energon_ext.rl.group_rows import WaitingGroup, arrange, build_row
from energon_ext.rl.scoring import Scoring
from tests.megatron.small_gpt import model_parallel, synthetic_batch
from tests.megatron.small_training import run_ranks
from tests.megatron.split_gradients import (
    LAYOUTS,
    assert_equal_parts,
    assert_equal_steps,
    context_parallel_part,
    expected_of,
    log_probs_of,
    read_alone,
    step_of,
)

MICRO_BATCHES = 4

# Weights of any kind, on documents -------------------------------------------------------------

SCALE = {"weight_scale": 1 << 14}
TOKENS = {"denominator": "tokens"}

#: Name -> (factors of the weights, options of forward_step)
CASES = {
    "advantages by weight": ([-0.7, 0.9, 1.3, -0.25], SCALE),
    "advantages by token": ([-0.7, 0.9, 1.3, -0.25], TOKENS),
    "only negative": ([-0.5], SCALE),
    "one micro-batch without a trained token": ([0.0, 0.9, 1.3, -0.25], SCALE),
    "nothing to train": ([0.0], SCALE),
    "nothing to train, by token": ([0.0], TOKENS),
    "advantages by weight, in chunks": ([-0.7, 0.9, 1.3, -0.25], {**SCALE, "loss_chunk": 5}),
}


def weighted_batch(case, index):
    """Return micro-batch ``index``; its weights change from one position to the next."""
    factors, _ = CASES[case]
    plain = synthetic_batch(index)
    if index == 1 and case.startswith("one micro-batch"):
        return dataclasses.replace(plain, token_weights=torch.zeros(plain.num_tokens))
    # Micro-batches also differ in size, so that a mean of means would be wrong.
    pattern = torch.tensor(factors) * (1 + index)
    weights = pattern.repeat(plain.num_tokens // len(factors) + 1)[: plain.num_tokens]
    return dataclasses.replace(plain, token_weights=plain.token_weights * weights)


def weighted_batches(case):
    return [weighted_batch(case, index) for index in range(MICRO_BATCHES)]


def expected_of_weights(case):
    """Return loss and gradient of the weighted mean over all positions."""
    batches = weighted_batches(case)

    def loss_of(read):
        total = sum((each.token_weights * -read_alone(read, each)).sum() for each in batches)
        weights = torch.cat([each.token_weights for each in batches])
        counted = (weights != 0).float() if CASES[case][1] is TOKENS else weights.abs()
        return total / max(1, counted.sum())

    return expected_of(loss_of)


# Fields of answers -----------------------------------------------------------------------------


def group_of(seed):
    """Return three answers of two to six tokens, with all optional fields."""
    random = torch.Generator().manual_seed(seed)
    prompts, lengths = torch.tensor([2, 3, 2]), torch.tensor([6, 2, 4])
    per_token = [torch.rand(3, 6, generator=random) for _ in range(6)]
    log_probs, reference, old, values, mask, advantages = per_token
    return ScoredGroup(
        tokens=torch.randint(4, 60, (3, 8), generator=random),
        log_probs=log_probs - 4.5,
        rewards=torch.rand(3, generator=random),
        prompt_len=prompts,
        response_lens=lengths,
        response_mask=mask > 0.3,
        advantages=advantages - 0.5,
        sample_weights=torch.tensor([1.0, 0.5, 0.0 if seed % 2 else 0.25]),
        columns={
            "ref_log_probs": reference - 4.5,
            "old_log_probs": old - 4.5,
            "values": values - 4.5,
        },
    )


GROUPS = [group_of(seed) for seed in range(2 * MICRO_BATCHES)]


def batch_of_answers(index, alignment=1):
    """Return the six answers of two groups, packed into two rows."""
    waiting = [WaitingGroup(n, f"p{n}", "web", GROUPS[n], 0, 0) for n in (2 * index, 2 * index + 1)]
    weights = Scoring().weigh([each.group for each in waiting])
    members = arrange(waiting, 2, 32, alignment)
    assert sorted(map(len, members)) == [3, 3]
    rows = [build_row(waiting, weights, each) for each in members]
    return BatchAssembler(32, alignment=alignment, document_means=True)(
        rows, sources=["web"]
    ).validate()


def ppo_with_columns(batch, log_probs):
    """Clipped ratios to one column, a divergence from another, and a loss of the third."""
    old, values = (column_of(batch, name, "test") for name in ("old_log_probs", "values"))
    squares = batch.columns["response_mask"] * (log_probs - values) ** 2
    ratios = clipped_ratio_losses(batch, log_probs, 0.2, old_log_probs=old)
    return ratios + 0.5 * reference_kl(batch, log_probs) + 0.25 * squares


#: Name -> options of forward_step
FIELDS = {
    "masks": TOKENS,
    "answers": {"denominator": "documents"},
    "columns": {"position_losses": ppo_with_columns, "denominator": "responses"},
}


def loss_of_token(fields, log_prob, weight, columns):
    """Return the loss of one token by the formula."""
    if fields != "columns":
        return -weight * log_prob
    ratio = (log_prob - columns["old_log_probs"]).exp()
    inside = min(max(ratio, torch.tensor(0.8)), torch.tensor(1.2))
    distance = columns["ref_log_probs"] - log_prob
    divergence = distance.exp() - 1 - distance
    squares = (log_prob - columns["values"]) ** 2
    return -min(weight * ratio, weight * inside) + 0.5 * divergence + 0.25 * squares


def losses_of_answer(fields, group, sample, log_probs):
    """Return the losses of the tokens to train on, by their log-probabilities ``tokens[1:]``."""
    losses, begin = [], int(group.prompt_len[sample])
    for place in range(int(group.response_lens[sample])):
        scale = float(group.sample_weights[sample])
        if not group.response_mask[sample, place] or not scale:
            continue
        weight = scale * float(group.advantages[sample, place])
        columns = {name: float(each[sample, place]) for name, each in group.columns.items()}
        losses.append(loss_of_token(fields, log_probs[begin - 1 + place], weight, columns))
    return losses


def counted_of(fields, losses):
    """Return the losses that are counted: those of tokens, or the mean of an answer."""
    is_whole = fields == "answers" and losses
    return [sum(losses) / len(losses)] if is_whole else losses


def expected_of_answers(fields):
    """Return loss and gradient of the mean over the tokens to train on, or over the answers."""

    def loss_of(read):
        losses = []
        for group in GROUPS:
            for sample in range(3):
                end = int(group.prompt_len[sample] + group.response_lens[sample])
                log_probs = read(group.tokens[sample, :end])
                of_answer = losses_of_answer(fields, group, sample, log_probs)
                losses += counted_of(fields, of_answer)
        return sum(losses) / len(losses)

    return expected_of(loss_of)


# On two ranks ----------------------------------------------------------------------------------


def all_steps():
    results = {}
    for layout, sizes in LAYOUTS.items():
        with model_parallel(**sizes):
            steps = {
                case: step_of(weighted_batches(case), sizes, **options)
                for case, (_, options) in CASES.items()
            }
            answers = [batch_of_answers(index) for index in range(MICRO_BATCHES)]
            for fields, options in FIELDS.items():
                steps[fields] = step_of(answers, sizes, **options)
            results[layout] = steps
    with model_parallel(context_parallel_size=2):
        results["context parallel"] = {
            fields: context_parallel_part(batch_of_answers(0, alignment=4), **options)
            for fields, options in FIELDS.items()
        }
    return results


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(2, all_steps, tmp_path_factory.mktemp("ranks"))


@functools.cache
def expected(case):
    return expected_of_answers(case) if case in FIELDS else expected_of_weights(case)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", [*CASES, *FIELDS])
def test_packed_rows_on_two_ranks_train_like_answers_read_alone(case, layout, ranks):
    assert_equal_steps([rank[layout][case] for rank in ranks], expected(case))


@pytest.mark.parametrize("fields", FIELDS)
def test_fields_cut_by_context_parallelism_add_up(fields, ranks):
    batch = batch_of_answers(0, alignment=4)
    log_probs, losses = log_probs_of(batch), []
    # Each answer by its tokens, in whichever row and place it is.
    ends = batch.cu_seqlens.tolist()
    answers = {
        tuple(group.tokens[sample, :end].tolist()): (group, sample)
        for group in GROUPS[:2]
        for sample, end in enumerate(group.sample_lengths())
    }
    for begin, end in zip(ends, ends[1:]):
        if (found := answers.pop(tuple(batch.tokens[begin:end].tolist()), None)) is not None:
            of_answer = losses_of_answer(fields, *found, log_probs[begin:end])
            losses += counted_of(fields, of_answer)
    assert not answers
    parts = [rank["context parallel"][fields] for rank in ranks]
    if fields == "answers":  # Megatron counts them in parts
        parts = [[n / 4096, m / 4096, [g / 4096 for g in each]] for n, m, each in parts]
    assert_equal_parts(parts, losses, log_probs)


def test_the_cases_differ():
    assert expected("nothing to train")[0] == 0.0
    assert not any(each.any() for each in expected("nothing to train")[1].values())
    assert expected("only negative")[0] < -1
    losses = [expected(case)[0] for case in [*list(CASES)[:4], *FIELDS]]
    assert min(abs(a - b) for i, a in enumerate(losses) for b in losses[:i]) > 1e-3
