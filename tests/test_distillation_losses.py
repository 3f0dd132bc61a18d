# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The loss of a student, against distributions over all words in double precision."""

from types import SimpleNamespace

import pytest
import torch

from energon_ext.errors import ConfigError, SampleError
from energon_ext.losses import Distillation, distillation_loss, document_mean
from energon_ext.losses.distillation import teacher_divergences

POSITIONS, WORDS = 13, 11


def inputs(k, seed=0):
    """Return a student's logits, and a batch with the k most probable words of a teacher."""
    random = torch.Generator().manual_seed(seed)
    logits, teacher = torch.randn(2, POSITIONS, WORDS, generator=random) * 2
    log_probs, ids = teacher.double().log_softmax(1).topk(k)
    batch = SimpleNamespace(
        labels=torch.randint(WORDS, (POSITIONS,), generator=random),
        # masked, raised and lowered positions, and fractions
        token_weights=torch.randn(POSITIONS, generator=random) * (torch.arange(POSITIONS) % 4 != 1),
        columns={"teacher_ids": ids.int(), "teacher_log_probs": log_probs.float()},
    )
    forget(batch, 5, range(k))
    return logits, teacher.double(), batch


def forget(batch, position, places):
    """Let the teacher say nothing of some words."""
    for place in places:
        batch.columns["teacher_ids"][position, place] = -1
        batch.columns["teacher_log_probs"][position, place] = -1e4


def dense_losses(logits, batch, alpha, temperature, rest):
    """The definition: one position and one word at a time."""
    losses = []
    for position, (label, ids, log_probs) in enumerate(zip(batch.labels, *batch.columns.values())):
        student = logits[position].double().softmax(0)
        nll = -student[label].log()
        words = [int(each) for each in ids if each >= 0]
        if not words:
            losses.append(nll)
            continue
        known = [float(each.double().exp()) for each, word in zip(log_probs, ids) if word >= 0]
        others = [word for word in range(len(student)) if word not in words]
        mine = [student[word] for word in words]
        theirs = [*known]
        if others:
            mine.append(student[others].sum())
            theirs.append(1 - sum(known) if rest else 0.0)
        mine = torch.stack(mine) ** (1 / temperature)
        mine = mine / mine.sum()
        theirs = torch.tensor(theirs, dtype=torch.float64) ** (1 / temperature)
        theirs = theirs / theirs.sum()
        kl = sum(p * (p.log() - q.log()) for p, q in zip(theirs, mine) if p > 0)
        losses.append((1 - alpha) * nll + alpha * temperature**2 * kl)
    return torch.stack(losses)


def assert_close(found, expected):
    assert (found.double() - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("denominator", ["weights", "tokens"])
@pytest.mark.parametrize("rest", [True, False])
@pytest.mark.parametrize(("alpha", "temperature"), [(1, 1.0), (0.3, 2.0), (0.8, 0.5), (0, 3.0)])
def test_loss_and_gradient_equal_the_definition_in_double_precision(
    alpha, temperature, rest, denominator
):
    logits, _, batch = inputs(k=4)
    forget(batch, 7, [1, 3])  # a teacher of two words
    wide = logits.double().requires_grad_()
    weights = batch.token_weights.double()
    losses = weights * dense_losses(wide, batch, alpha, temperature, rest)
    counted = weights.abs() if denominator == "weights" else weights != 0
    expected = losses.sum() / counted.sum()
    expected.backward()
    logits.requires_grad_()
    distillation = Distillation(alpha, temperature, rest)
    loss = distillation_loss(batch, logits, distillation, denominator)
    loss.backward()
    assert_close(loss.detach(), expected.detach())
    assert_close(logits.grad, wide.grad)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
@pytest.mark.parametrize("rest", [True, False])
def test_a_teacher_of_all_words_gives_the_divergence_of_whole_distributions(temperature, rest):
    logits, teacher, batch = inputs(k=WORDS)
    wide = logits.double().requires_grad_()
    target, mine = (each.div(temperature).softmax(1) for each in (teacher, wide))
    expected = temperature**2 * (target * (target / mine).log()).sum(1)
    expected[5] = -wide[5].log_softmax(0)[batch.labels[5]]  # without a teacher
    batch.token_weights.fill_(1)
    expected.mean().backward()
    logits.requires_grad_()
    loss = distillation_loss(batch, logits, Distillation(1, temperature, rest))
    loss.backward()
    assert_close(loss.detach(), expected.mean().detach())
    assert_close(logits.grad, wide.grad)


def test_labels_without_a_teacher_have_cross_entropy_and_no_divergence():
    logits, _, batch = inputs(k=3)
    for position in range(POSITIONS):
        forget(batch, position, range(3))
    given = logits, batch.labels, *batch.columns.values()
    nll, divergences = teacher_divergences(*given, Distillation(1, 2.0))
    assert_close(nll, -logits.double().log_softmax(1).gather(1, batch.labels[:, None])[:, 0])
    assert divergences.tolist() == [0.0] * POSITIONS
    batch.token_weights.zero_()
    logits[0] = torch.nan  # where nothing is trained, logits do not matter
    assert distillation_loss(batch, logits).item() == 0


def test_the_mean_over_documents_counts_each_once():
    logits, _, batch = inputs(k=2)
    batch.token_weights.fill_(1)
    shares = torch.tensor([1 / 3] * 3 + [1 / 10] * 10)  # documents of three and ten labels
    parts = torch.zeros(POSITIONS)
    parts[[0, 3]] = 1
    losses = dense_losses(logits, batch, 0.5, 1.0, True)
    batch.columns |= {"document_share": shares, "document_parts": parts}
    loss = distillation_loss(batch, logits, denominator="documents")
    assert_close(loss, (losses[:3].mean() + losses[3:].mean()) / 2)
    assert document_mean(batch, -losses) == pytest.approx(loss.item())


def test_gradients_of_half_precision_have_its_type():
    logits, _, batch = inputs(k=3)
    logits = logits.bfloat16().requires_grad_()
    distillation_loss(batch, logits).backward()
    assert logits.grad.dtype == torch.bfloat16 and logits.grad.isfinite().all()


# Refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, "alpha: 1.5 found, a number >= 0 and <= 1 is needed"),
        ({"temperature": 0}, "temperature: 0 found, a finite number > 0 is needed"),
        ({"rest": "no"}, "rest: 'no' found, true or false is needed"),
        ({"name": 3}, "name: 3 found, text is needed"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Distillation(**options)


def test_a_batch_without_the_teacher_is_refused_with_the_names_of_columns():
    logits, _, batch = inputs(k=3)
    with pytest.raises(ConfigError, match=r"\['teacher_ids', 'teacher_log_probs'\], other_ids is"):
        distillation_loss(batch, logits, Distillation(name="other"))


def test_words_that_the_student_does_not_have_are_refused():
    logits, _, batch = inputs(k=3)
    batch.columns["teacher_ids"][2, 1] = WORDS
    with pytest.raises(SampleError, match="the teacher's word 11 found, but the student has 11"):
        distillation_loss(batch, logits)


def test_a_word_that_is_there_twice_is_refused_as_the_loss_would_count_it_twice():
    logits, _, batch = inputs(k=3)
    batch.columns["teacher_ids"][2] = torch.tensor([7, 4, 7])
    batch.columns["teacher_log_probs"][2] = torch.tensor([-0.1, -3.0, -1e4])
    with pytest.raises(SampleError, match=r"the teacher's words \[7, 4, 7\] found for one label"):
        distillation_loss(batch, logits, Distillation(alpha=0))


@pytest.mark.parametrize(("value", "total"), [(0.7, "2.*"), (torch.nan, "nan")])
def test_values_that_are_not_log_probabilities_are_refused(value, total):
    logits, _, batch = inputs(k=3)
    batch.columns["teacher_log_probs"][2, 1] = value
    with pytest.raises(SampleError, match=f"words for one label add up to {total};"):
        distillation_loss(batch, logits)


@pytest.mark.parametrize("label", [-100, WORDS])
def test_a_trained_label_that_is_no_word_is_refused(label):
    logits, _, batch = inputs(k=3)
    batch.labels[1] = label
    assert batch.token_weights[1] == 0
    assert distillation_loss(batch, logits).isfinite()
    batch.labels[2] = label
    with pytest.raises(SampleError, match=r"labels must be in \[0, 11\) where the weight is not 0"):
        distillation_loss(batch, logits)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.bool])
def test_ids_that_cannot_say_that_there_is_no_word_are_refused(dtype):
    logits, _, batch = inputs(k=3)
    batch.columns["teacher_ids"] = batch.columns["teacher_ids"].clamp(min=0).to(dtype)
    with pytest.raises(
        SampleError, match=r"teacher_ids torch.u?\w+ \[13, 3\].*integers with a sign"
    ):
        distillation_loss(batch, logits)


def test_a_small_rest_is_exact_at_a_high_temperature():
    """The root of a rest of 2e-7, of which single precision would know one digit."""
    known = torch.tensor([[0.75, 0.25 - 2e-7]]).log()
    logits = torch.zeros(1, 3)
    batch = SimpleNamespace(
        labels=torch.tensor([0]),
        token_weights=torch.ones(1),
        columns={"teacher_ids": torch.tensor([[0, 1]]), "teacher_log_probs": known},
    )
    loss = distillation_loss(batch, logits, Distillation(1, 5.0))
    expected = dense_losses(logits, batch, 1, 5.0, True)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


def test_columns_of_other_shapes_are_refused():
    logits, _, batch = inputs(k=3)
    batch.columns["teacher_log_probs"] = batch.columns["teacher_log_probs"][:, :2]
    with pytest.raises(SampleError, match=r"teacher_log_probs \[13, 2\] found; integers with"):
        distillation_loss(batch, logits)
