# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes the most probable words of a teacher for each label of documents, as columns."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from energon_ext.arguments import check_choice, check_integer
from energon_ext.batch.columns import Column
from energon_ext.errors import ConfigError
from energon_ext.losses.distillation import MOST_PROBABILITY, find_repeated, names_of
from energon_ext.prepare.columns import UNIT_DOCUMENTS, write_columns
from energon_ext.storage.claim import Part
from energon_ext.tokens.documents import Documents

#: Positions of which logits exist in float32 at any time.
_CHUNK = 1024

#: Log-probability of a word that is none, or has no probability.
NO_PROBABILITY = -1e4

#: After each token of a text, ids [n, k] and log-probabilities [n, k] of the next word.
NextWords = tuple[np.ndarray, np.ndarray]


class Teacher(Protocol):
    """A model that says which words are probable after each token of a text."""

    @property
    def context(self) -> int | None:
        """Tokens of the longest text that it reads; None for any."""

    @property
    def words(self) -> int:
        """Size of its vocabulary."""

    def next_words(self, texts: Sequence[np.ndarray], k: int) -> Sequence[NextWords]:
        """Return the ``k`` most probable next words after each token.

        Args:
            texts: token ids, int64 [n] each.
            k: words of each token.

        Returns:
            For each text integers [n, k], which differ from each other, and their
            log-probabilities [n, k].
        """


def teacher_columns(k: int, *, dtype: str = "float16", name: str = "teacher") -> dict[str, Column]:
    """Describe the columns of a teacher: ``<name>_ids`` and ``<name>_log_probs``, [k] per label.

    Args:
        k: words of each label.
        dtype: of the log-probabilities: float16 or float32.

    Example:
        >>> {name: column.item for name, column in teacher_columns(8).items()}
        {'teacher_ids': (8,), 'teacher_log_probs': (8,)}
    """
    check_integer("k", k, 1)
    check_choice("dtype", dtype, ("float16", "float32"))
    ids, log_probs = names_of(name)
    return {
        ids: Column("int32", (k,), fill=-1),  # type: ignore[arg-type]
        log_probs: Column(dtype, (k,), fill=NO_PROBABILITY),  # type: ignore[arg-type]
    }


def write_teacher(
    documents: Documents | str | Path,
    folder: str | Path,
    teacher: Teacher,
    *,
    k: int,
    made_by: str,
    context: int | None = None,
    dtype: str = "float16",
    name: str = "teacher",
    part: Part | None = None,
    unit_documents: int = UNIT_DOCUMENTS,
) -> None:
    """Write the ``k`` most probable words of a teacher for each label of documents.

    The first token of a document has none. A document that is longer than the context is read in
    windows that overlap by half, so that every label has at least half a context before it, or all
    that there is.

    Args:
        documents, folder, part, unit_documents: see
            :func:`energon_ext.prepare.columns.write_columns`.
        teacher: such as :class:`CausalLM`; for models of Megatron-core see
            :func:`energon_ext.megatron.write_teacher_of`.
        made_by: name of the teacher; a folder that was begun with another one, or another ``k`` or
            ``context``, is refused.
        context: tokens that the teacher reads at once; by default those of the teacher.
        dtype, name: see :func:`teacher_columns`.

    Raises:
        ConfigError: as for ``write_columns``, or the teacher returns other shapes, or values that
            are not log-probabilities.
    """
    columns = teacher_columns(k, dtype=dtype, name=name)
    context = teacher.context if context is None else context
    if k > teacher.words:
        raise ConfigError(f"k: {k} found, {made_by} has {teacher.words} words.")
    if context is not None:
        check_integer("context", context, 2)
        if teacher.context is not None and context > teacher.context:
            raise ConfigError(
                f"context: {context} found, {made_by} reads {teacher.context} tokens."
            )
    write_columns(
        documents,
        folder,
        columns,
        functools.partial(_produce, teacher, k, context, made_by, list(columns)),
        made_by=f"{made_by}, {k} words, context {context}",
        part=part,
        unit_documents=unit_documents,
    )


def _produce(
    teacher: Teacher,
    k: int,
    context: int | None,
    made_by: str,
    names: Sequence[str],
    texts: Sequence[np.ndarray],
) -> Mapping[str, Sequence[np.ndarray]]:
    """Return the words of each label of some documents."""
    largest = max(int(text.max(initial=0)) for text in texts)
    if largest >= teacher.words:
        raise ConfigError(
            f"write_teacher: token {largest} found, {made_by} has {teacher.words} words; both must "
            f"have the same tokenizer."
        )
    windows = [
        (number, *window)
        for number, text in enumerate(texts)
        for window in _windows_of(len(text), context)
    ]
    read = [texts[number][start:stop] for number, start, stop, _ in windows]
    found = teacher.next_words(read, k) if read else []  # documents without labels have none
    ids = [np.full((len(text), k), -1, np.int32) for text in texts]
    log_probs = [np.full((len(text), k), NO_PROBABILITY, np.float32) for text in texts]
    for (number, start, stop, first), said in zip(windows, found, strict=True):
        _check(said, stop - start, k, teacher.words, made_by)
        # The words after a token belong to the label at the next one.
        labels = slice(first, min(stop + 1, len(texts[number])))
        places = slice(labels.start - 1 - start, labels.stop - 1 - start)
        ids[number][labels] = _without_repeats(said[0][places], said[1][places])
        log_probs[number][labels] = np.maximum(said[1][places], NO_PROBABILITY)
    return dict(zip(names, (ids, log_probs), strict=True))


def _windows_of(length: int, context: int | None) -> Iterator[tuple[int, int, int]]:
    """Yield start and stop of each window, and the first label that its words are used for."""
    size, start, first = context or length, 0, 1
    while first < length:
        stop = min(start + size, length)
        yield start, stop, first
        first, start = stop + 1, start + size - size // 2


def _check(said: NextWords, tokens: int, k: int, words: int, made_by: str) -> None:
    shapes = [list(values.shape) for values in said]
    if shapes != [[tokens, k]] * 2:
        raise ConfigError(
            f"write_teacher: {made_by} returned {shapes[0]} ids and {shapes[1]} log-probabilities "
            f"for {tokens} tokens, {[tokens, k]} of each are needed."
        )
    is_wrong = ~(said[1] <= 1e-3)  # also NaN
    if is_wrong.any():
        raise ConfigError(
            f"write_teacher: {made_by} has a log-probability of {said[1][is_wrong][0]}; is the "
            f"model loaded?"
        )
    total = np.exp(said[1], dtype=np.float64).sum(1).max(initial=0)
    if total > MOST_PROBABILITY:
        raise ConfigError(
            f"write_teacher: the probabilities of {k} words of {made_by} add up to {total:.3g}; "
            f"log-probabilities of different words, at temperature 1, are needed."
        )
    if fault := _find_wrong_words(*said, words):
        raise ConfigError(
            f"write_teacher: {made_by} returned the words {fault} for one label; different "
            f"integers from 0 to {words - 1} are needed."
        )


def _without_repeats(ids: np.ndarray, log_probs: np.ndarray) -> np.ndarray:
    """Return ids with -1 in place of words without probability where a word is there twice."""
    is_left_out = find_repeated(ids)[:, None] & (log_probs <= NO_PROBABILITY)
    return np.where(is_left_out, -1, ids)


def _find_wrong_words(ids: np.ndarray, log_probs: np.ndarray, words: int) -> list[Any] | None:
    """Return words that are not different ids of a vocabulary; -1 may have no probability."""
    is_used = log_probs > NO_PROBABILITY
    is_wrong = (ids < np.where(is_used, 0, -1)) | (ids >= words)
    # Words without probability do not matter, so they become different numbers below all ids.
    compared = np.sort(np.where(is_used, ids, -2 - np.arange(ids.shape[1])), axis=1)
    is_wrong = is_wrong.any(1) | (np.diff(compared, axis=1) == 0).any(1)
    if ids.dtype.kind in "iu" and not is_wrong.any():
        return None
    found: list[Any] = ids[int(is_wrong.argmax())].tolist()
    return found


@dataclass(frozen=True)
class CausalLM:
    """A causal language model of ``transformers``, or one with the same interface, as a teacher.

    Attributes:
        model: is called with ``input_ids`` and ``attention_mask`` [texts, tokens], and returns
            ``logits`` [texts, tokens, words].
        tokens_at_once: positions of a call, with padding; a longer text is read alone.
    """

    model: Any
    tokens_at_once: int = 8192

    @property
    def context(self) -> int | None:
        """Positions of the model's configuration."""
        found: int | None = getattr(self._config, "max_position_embeddings", None)
        return found

    @property
    def words(self) -> int:
        """Words of the model's configuration."""
        return int(self._config.vocab_size)

    @property
    def _config(self) -> Any:
        config = self.model.config
        # Models that also read images keep these numbers one level below.
        return config.get_text_config() if hasattr(config, "get_text_config") else config

    def next_words(self, texts: Sequence[np.ndarray], k: int) -> list[NextWords]:
        """Return the most probable next words after each token."""
        found: dict[int, NextWords] = {}
        was_training = self.model.training
        self.model.eval()
        try:
            for places in self._groups(texts):
                lengths = [len(texts[place]) for place in places]
                ids = np.zeros((len(places), max(lengths)), np.int64)
                for row, place in zip(ids, places):
                    row[: len(texts[place])] = texts[place]
                mask = np.arange(ids.shape[1]) < np.array(lengths)[:, None]
                given = (
                    torch.from_numpy(each).to(self._device) for each in (ids, mask.astype(int))
                )
                for place, logits in zip(places, self._logits(*given)):
                    found[place] = most_probable(logits[: len(texts[place])], k)
        finally:
            self.model.train(was_training)
        return [found[place] for place in range(len(texts))]

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device

    @torch.no_grad()
    def _logits(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(input_ids=ids, attention_mask=mask).logits
        return logits

    def _groups(self, texts: Sequence[np.ndarray]) -> Iterator[list[int]]:
        """Yield places of texts of similar lengths, to be read together."""
        group: list[int] = []
        for place in sorted(range(len(texts)), key=lambda place: -len(texts[place])):
            if group and (len(group) + 1) * len(texts[group[0]]) > self.tokens_at_once:
                yield group
                group = []
            group.append(place)
        if group:
            yield group


@torch.no_grad()
def most_probable(logits: torch.Tensor, k: int, group: Any = None) -> NextWords:
    """Return ids and log-probabilities of the most probable words, int32 and float32 [n, k].

    Args:
        logits: float [n, V]; with a group, this rank's part of the words, [n, V / ranks].
        k: words, at most as many as there are.
        group: tensor-parallel ranks that have the parts of the words, in their order; all of them
            call this together.

    Example:
        >>> ids, log_probs = most_probable(torch.tensor([[0.0, 1.0, 0.0, 2.0]]), 2)
        >>> ids.tolist(), [round(float(value), 4) for value in log_probs[0]]
        ([[3, 1]], [-0.4938, -1.4938])
    """
    first = 0 if group is None else dist.get_rank(group) * logits.shape[1]
    parts = [_most_probable_of(part.float(), k, first, group) for part in logits.split(_CHUNK)]
    ids, log_probs = (torch.cat(each).cpu() for each in zip(*parts))
    return ids.int().numpy(), log_probs.numpy()


def _most_probable_of(
    logits: torch.Tensor, k: int, first: int, group: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    values, ids = logits.topk(min(k, logits.shape[1]))
    total, ids = logits.logsumexp(1, keepdim=True), ids + first
    if group is not None:
        values, ids, total = (_gather(each, group) for each in (values, ids, total))
        values, places = values.topk(k)
        ids, total = ids.gather(1, places), total.logsumexp(1, keepdim=True)
    return ids, values - total


def _gather(values: torch.Tensor, group: Any) -> torch.Tensor:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.contiguous(), group=group)
    return torch.cat(parts, 1)
