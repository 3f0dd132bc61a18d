# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Learning from the most probable words of a teacher, which the columns of a batch hold.

For each label a batch has ``k`` words and their log-probabilities under the teacher. All other
words are one more outcome, the rest. The student's probability of the rest needs only the
log-sum-exp of its other logits, which tensor-parallel ranks compute together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from energon_ext.arguments import check_kind, check_number
from energon_ext.errors import ConfigError, SampleError
from energon_ext.losses.documents import document_mean
from energon_ext.losses.unified import check_loss_inputs, weighted_mean

if TYPE_CHECKING:
    from energon_ext.batch.packed_batch import PackedBatch

#: Largest sum of the probabilities of words, which half precision may round above 1.
MOST_PROBABILITY = 1.05


@dataclass(frozen=True)
class Distillation:
    """How a student learns from a teacher.

    A label loses ``(1 - alpha) * nll + alpha * T**2 * KL(teacher || student)``, and one without a
    teacher its ``nll``. Both distributions are over the ``k`` words of the teacher and the rest; a
    temperature ``T`` takes them to the power ``1 / T``.

    Attributes:
        alpha: share of the divergence, from 0 to 1.
        temperature: > 0.
        rest: whether the other words are an outcome. If not, the teacher's probabilities are scaled
            to add up to 1, and the student's probability of any other word is an error.
        name: of the teacher: its columns are ``<name>_ids`` and ``<name>_log_probs``.

    Raises:
        ConfigError: a number is out of range.
    """

    alpha: float = 0.5
    temperature: float = 1.0
    rest: bool = True
    name: str = "teacher"

    def __post_init__(self) -> None:
        check_kind("rest", self.rest, bool)
        check_kind("name", self.name, str)
        check_number("alpha", self.alpha, most=1)
        check_number("temperature", self.temperature, above_zero=True)

    def columns_of(self, batch: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the teacher's ids [N, k], -1 for none, and log-probabilities [N, k]."""
        names = names_of(self.name)
        missing = [name for name in names if name not in batch.columns]
        if missing:
            raise ConfigError(
                f"distillation: the batch has the columns {[*batch.columns]}, {missing[0]} is "
                f"needed; write it with write_teacher, and name its folder in the columns of an "
                f"entry."
            )
        ids, log_probs = (batch.columns[name] for name in names)
        is_integer = ids.dtype.is_signed and not ids.is_floating_point()  # -1 is no word
        if ids.dim() != 2 or ids.shape != log_probs.shape or not is_integer:
            raise SampleError(
                f"distillation: {names[0]} {ids.dtype} {list(ids.shape)} and {names[1]} "
                f"{list(log_probs.shape)} found; integers with a sign [N, k] and numbers [N, k] "
                f"are needed."
            )
        return ids, log_probs

    def check(self, batch: PackedBatch, words: int | None) -> None:
        """Raise the errors of a batch; this waits for the GPU if the batch is on one.

        Args:
            words: size of the student's vocabulary, None if unknown.
        """
        # NumPy, as torch would wake all its threads in every micro-batch.
        ids, log_probs = (each.cpu().numpy() for each in self.columns_of(batch))
        largest = int(ids.max(initial=-1))
        if words is not None and largest >= words:
            raise SampleError(
                f"distillation: the teacher's word {largest} found, but the student has {words} "
                f"words; both must have the same tokenizer."
            )
        if (repeated := find_repeated(ids)).any():
            found = ids[repeated.argmax()].tolist()
            raise SampleError(
                f"distillation: the teacher's words {found} found for one label, which the loss "
                f"would count twice; different ones are needed, and -1 for none."
            )
        said = np.where(ids >= 0, log_probs, -np.inf)
        with np.errstate(over="ignore"):
            most = float(np.exp(said, dtype=np.float32).sum(1).max(initial=0))
        if not most <= MOST_PROBABILITY:  # also NaN
            raise SampleError(
                f"distillation: the probabilities of the teacher's words for one label add up to "
                f"{most:.3g}; log-probabilities of different words are needed."
            )

    def losses_of(
        self, batch: PackedBatch, nll: torch.Tensor, divergences: torch.Tensor
    ) -> torch.Tensor:
        """Return what each label loses, [N], from the results of :func:`teacher_divergences`."""
        mixed = (1 - self.alpha) * nll + self.alpha * divergences
        return torch.where(self.is_taught(batch), mixed, nll)

    def is_taught(self, batch: PackedBatch) -> torch.Tensor:
        """Return True for labels with a teacher: bool [N]."""
        return (batch.columns[names_of(self.name)[0]] >= 0).any(1)


def find_repeated(ids: np.ndarray) -> np.ndarray:
    """Return True for labels with a word that is there twice, bool [n]; -1 is none."""
    ordered = np.sort(ids, axis=1)
    repeated: np.ndarray = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).any(1)
    return repeated


def names_of(teacher: str) -> tuple[str, str]:
    """Return the names of a teacher's columns."""
    return f"{teacher}_ids", f"{teacher}_log_probs"


def distillation_loss(
    batch: PackedBatch,
    logits: torch.Tensor,
    distillation: Distillation = Distillation(),  # noqa: B008 (frozen)
    denominator: str = "weights",
) -> torch.Tensor:
    """Return the weighted mean of what labels lose as students of a teacher: float32 scalar.

    Args:
        logits: float [N, V] of the student.
        distillation: how it learns.
        denominator: ``weights`` or ``tokens``, as of :func:`energon_ext.unified_loss`, or
            ``documents``, as of :func:`energon_ext.losses.document_mean`.

    Raises:
        ConfigError: an unknown denominator, or a column is missing.
        SampleError: the teacher knows words that the student does not, or the same one twice; its
            probabilities add up to more than 1; shapes do not match; a label is out of range.

    Example:
        >>> from types import SimpleNamespace
        >>> columns = {
        ...     "teacher_ids": torch.tensor([[3, 1], [-1, -1]]),
        ...     "teacher_log_probs": torch.tensor([[0.5, 0.25], [0.0, 0.0]]).log()}
        >>> batch = SimpleNamespace(
        ...     labels=torch.tensor([3, 0]), token_weights=torch.ones(2), columns=columns)
        >>> round(distillation_loss(batch, torch.zeros(2, 4), Distillation(alpha=1)).item(), 4)
        0.7798
    """
    words = logits.shape[1] if logits.dim() == 2 else None
    check_loss_inputs(logits, batch.labels, batch.token_weights, words)
    distillation.check(batch, words)
    trained = batch.token_weights != 0
    ids, log_probs = (values[trained] for values in distillation.columns_of(batch))
    found = teacher_divergences(
        logits[trained], batch.labels[trained], ids, log_probs, distillation
    )
    each = torch.zeros(len(trained), device=logits.device)
    nll, divergences = (each.masked_scatter(trained, values) for values in found)
    losses = distillation.losses_of(batch, nll, divergences)
    if denominator == "documents":
        return document_mean(batch, -losses)
    return weighted_mean(losses[trained], batch.token_weights[trained], denominator, None, None)


def teacher_divergences(
    logits: torch.Tensor,
    labels: torch.Tensor,
    ids: torch.Tensor,
    log_probs: torch.Tensor,
    distillation: Distillation,
    group: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the negative log-likelihood and the divergence of each label: float32 [N], [N].

    The divergence is multiplied by the square of the temperature. It is 0 for labels without a
    teacher.

    Args:
        logits: float [N, V]; with a group, this rank's part of the words, [N, V / ranks].
        labels: int64 [N].
        ids, log_probs: [N, k] of the teacher; ids differ from each other, -1 for none.
        group: tensor-parallel ranks that have the parts of the words, in their order.
    """
    ids, known = ids.long(), ids >= 0
    values, rest = _Outcomes.apply(logits, ids, labels, group)
    student = torch.cat([values[:, :-1].masked_fill(~known, -torch.inf), rest[:, None]], 1)
    nll = student.logsumexp(1) - values[:, -1]
    teacher = log_probs.float().masked_fill(~known, -torch.inf)
    outside = _rest_of(teacher, known, rest.detach(), distillation.rest)
    temperature = distillation.temperature
    target = torch.cat([teacher, outside[:, None]], 1).div(temperature).softmax(1)
    # What has no probability under the teacher may have an infinite logarithm under the student.
    log_student = student.div(temperature).log_softmax(1).masked_fill(target == 0, 0)
    divergences = (torch.xlogy(target, target) - target * log_student).sum(1)
    return nll, divergences * temperature**2


def _rest_of(
    teacher: torch.Tensor, known: torch.Tensor, student_rest: torch.Tensor, has_rest: bool
) -> torch.Tensor:
    """Return the teacher's log-probability of the rest; all of it if no word is known."""
    # In double precision, as a high temperature makes a small rest large.
    mass = teacher.double().exp().sum(1).clamp(max=1)
    # The rest of a teacher who knows all words is rounding, of which the student has none.
    rest = torch.where(student_rest > -torch.inf, (-mass).log1p().float(), -torch.inf)
    if not has_rest:
        rest = torch.full_like(rest, -torch.inf)
    return torch.where(known.any(1), rest, 0.0)


class _Outcomes(torch.autograd.Function):
    """The logits of some words and of the label, and the log-sum-exp of all words but the former.

    All ranks of a group get the same values, and must return the same gradients of them.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, ids: torch.Tensor, labels: torch.Tensor, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = 0 if group is None else dist.get_rank(group) * logits.shape[1]
        places = torch.cat([ids, labels[:, None]], 1) - first
        own = (places >= 0) & (places < logits.shape[1]) & (places >= -first)
        places = torch.where(own, places, 0)
        values = torch.where(own, logits.gather(1, places).float(), 0.0)
        others = _without(logits, places[:, :-1], own[:, :-1])
        largest = others.amax(1)
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
            dist.all_reduce(values, group=group)
        largest = torch.where(largest > -torch.inf, largest, 0.0)
        total = others.sub_(largest[:, None]).exp_().sum(1)
        if group is not None:
            dist.all_reduce(total, group=group)
        rest = total.log() + largest
        ctx.save_for_backward(logits, places, own, rest)
        return values, rest

    @staticmethod
    def backward(
        ctx: Any, values_gradient: torch.Tensor, rest_gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None, None, None]:
        logits, places, own, rest = ctx.saved_tensors
        rest = torch.where(rest > -torch.inf, rest, 0.0)
        gradient = _without(logits, places[:, :-1], own[:, :-1]).sub_(rest[:, None]).exp_()
        gradient.mul_(rest_gradient[:, None])
        gradient.scatter_add_(1, places, torch.where(own, values_gradient, 0.0))
        return gradient.to(logits.dtype), None, None, None


def _without(logits: torch.Tensor, places: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return a copy of logits in float32, -inf at those of the places that are own."""
    limits = torch.where(own, -torch.inf, torch.inf).float()
    return logits.to(torch.float32, copy=True).scatter_reduce_(1, places, limits, "amin")
