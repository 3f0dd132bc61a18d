# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Batches as text: their segments with marks of what is trained on, and the shapes of the rest."""

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.rows import Row
from energon_ext.encoders.prompts import Prompt

#: Source, summary and text, with « and » around text that is not trained on.
ShownSegment = tuple[str, str, str]

#: Names of the ids and of the weights of labels in batches that are no PackedBatch.
_TOKENS, _WEIGHTS = ("tokens", "input_ids"), ("token_weights", "loss_mask")

#: Most shapes shown for a list of tensors, and values of a column.
_MAX_SHAPES, _MAX_VALUES = 8, 8


def describe_batch(batch: Any, tokenizer: Any, source: str = "") -> tuple[str, list[ShownSegment]]:
    """Return a summary of a batch and its segments; none if its tokens cannot be found.

    Args:
        batch: a PackedBatch, prompts, or the batch of a user's encoder: a mapping or an object with
            ``tokens`` or ``input_ids``, and ``loss_mask`` or ``token_weights``, each [rows, n].
        tokenizer: decodes the ids; None to show them as numbers.
        source: source of all its rows, which only a PackedBatch and prompts name themselves.
    """
    if isinstance(batch, PackedBatch):
        trained = int((batch.token_weights != 0).sum())
        filled = sum(batch.tokens_per_source().values())
        summary = f"{filled} of {batch.num_tokens} positions, {trained} trained"
        return summary, list(_segments(batch, tokenizer))
    if isinstance(batch, list) and batch and isinstance(batch[0], Prompt):
        return f"{len(batch)} prompt", list(_prompts(batch, tokenizer))
    fields = _fields(batch)
    tokens = next((fields[name] for name in _TOKENS if _is_tensor(fields.get(name))), None)
    if tokens is None:
        return f"batch of type {type(batch).__name__}", []
    weights = next((fields[name] for name in _WEIGHTS if _is_tensor(fields.get(name))), None)
    ids = np.atleast_2d(np.asarray(tokens))
    masks = np.ones_like(ids) if weights is None else np.asarray(weights).reshape(ids.shape)
    labels = np.roll(ids, -1, 1)
    if _is_tensor(fields.get("labels")):
        labels = np.asarray(fields["labels"]).reshape(ids.shape)
    segments = [
        (source, *_mark(row, row_labels, mask != 0, tokenizer, weights is not None))
        for row, row_labels, mask in zip(ids, labels, masks)
    ]
    return f"{ids.size} positions", segments


def describe_answers(
    batches: Iterable[PackedBatch], tokenizer: Any, most: int = 8
) -> list[dict[str, Any]]:
    """Return the first answers in the batches of an RLDataset, with their prompts.

    Text between « and » is not trained on: prompts, the output of tools, and answers of weight 0.

    Args:
        most: largest number of answers.

    Returns:
        ``source``, ``reward`` and ``text`` of each.
    """
    answers = []
    for batch in batches:
        assert batch.rewards is not None, "an RLDataset sets the rewards"
        rewards = batch.rewards.tolist()
        for (source, _, text), reward in zip(_segments(batch, tokenizer), rewards):
            if source:
                answers.append({"source": source, "reward": reward, "text": text})
    return answers[:most]


def describe_tensors(value: Any) -> str:
    """Return the shapes of the tensors of a batch or row that are no per-token values."""
    own = (*dataclasses.fields(PackedBatch), *dataclasses.fields(Row))
    known = {field.name for field in own} | {*_TOKENS, *_WEIGHTS}
    fields = {name: field for name, field in _fields(value).items() if name not in known}
    shown = {name: _shapes(field) for name, field in fields.items()}
    return "; ".join(f"{name} {shapes}" for name, shapes in shown.items() if shapes)


def decode(ids: Sequence[int], tokenizer: Any) -> str:
    """Return the text of token ids with special tokens; ids outside the vocabulary stay numbers.

    Encoders use ids of their own as placeholders, such as for the patches of an image.
    """
    if tokenizer is None:
        return " ".join(map(str, ids))
    size = len(tokenizer) if hasattr(tokenizer, "__len__") else tokenizer.vocab_size
    show = getattr(tokenizer, "show", tokenizer.decode)  # a user's encoder may have another kind
    text = ""
    for number, run in itertools.groupby(ids, key=lambda id_: None if 0 <= id_ < size else id_):
        same = list(run)
        text += show(same) if number is None else f"[{number} x {len(same)}]"
    return text


def _segments(batch: PackedBatch, tokenizer: Any) -> Iterator[ShownSegment]:
    """Yield the segments of a row; padding has no text."""
    ends = batch.cu_seqlens.tolist()
    sources, pairs = batch.source_ids.tolist(), [-1] * len(batch.source_ids)
    if batch.pair_ids is not None:
        pairs = batch.pair_ids.tolist()
    for number, (first, end, source, pair) in enumerate(zip(ends, ends[1:], sources, pairs)):
        if source < 0:
            yield "", f"{end - first} positions", ""
            continue
        part = slice(first, end)
        is_trained = batch.token_weights[part].numpy() != 0
        ids, labels = batch.tokens[part].numpy(), batch.labels[part].numpy()
        about, content = _mark(ids, labels, is_trained, tokenizer)
        if pair >= 0:
            is_chosen = bool(batch.token_weights[part].sum() > 0)
            about = f"pair {pair}, {'chosen' if is_chosen else 'rejected'}: {about}"
        of_segment = {name: values[part] for name, values in batch.columns.items()}
        of_segment |= {name: values[number] for name, values in batch.segments.items()}
        about += "".join(f"; {name} {_show_values(each)}" for name, each in of_segment.items())
        yield batch.sources[source], about, content


def _show_values(values: torch.Tensor) -> str:
    """Return a few values, or the shape and the range of many."""
    if values.numel() <= _MAX_VALUES:
        return json.dumps(values.tolist())
    # NumPy, as torch compares no unsigned integers of more than 8 bits, and NumPy has no bfloat16.
    found = (values.double() if values.is_floating_point() else values).numpy()
    low, high = (f"{each.item():.6g}" for each in (found.min(), found.max()))
    return f"{list(values.shape)} from {low} to {high}"


def _mark(
    ids: np.ndarray, labels: np.ndarray, is_trained: np.ndarray, tokenizer: Any, marks: bool = True
) -> tuple[str, str]:
    """Return a summary of consecutive positions, and their text."""
    about = f"{len(ids)} tokens" + (f", {is_trained.sum()} trained" if marks else "")
    # A label is the next token; the last one may belong to another document.
    shown, trained = [int(ids[0]), *labels.tolist()], [False, *is_trained.tolist()]
    kept = list(zip(trained, shown))[: None if trained[-1] and marks else -1]
    if not marks:
        return about, decode([token for _, token in kept], tokenizer)
    content = ""
    for trained_on, run in itertools.groupby(kept, key=lambda pair: pair[0]):
        piece = decode([token for _, token in run], tokenizer)
        content += piece if trained_on or not piece else f"«{piece}»"
    return about, content


def _prompts(prompts: list[Prompt], tokenizer: Any) -> Iterator[ShownSegment]:
    for prompt in prompts:
        about = f"{len(prompt.tokens)} tokens; metadata {sorted(prompt.metadata)}"
        yield prompt.source, about, decode(prompt.tokens.tolist(), tokenizer)


def _fields(value: Any) -> Mapping[str, Any]:
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return value if isinstance(value, Mapping) else getattr(value, "__dict__", {})


def _is_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _shapes(value: Any) -> str:
    """Return the type and shape of a tensor, or of each in a list; empty for other values."""
    if _is_tensor(value):
        return f"{value.dtype} {list(value.shape)}".removeprefix("torch.")
    if not isinstance(value, (list, tuple)) or not value or not all(map(_is_tensor, value)):
        return ""
    runs = [(shape, len([*run])) for shape, run in itertools.groupby(map(_shapes, value))]
    shown = [f"{count} x {shape}" for shape, count in runs[:_MAX_SHAPES]]
    return ", ".join([*shown, "..."] if len(runs) > _MAX_SHAPES else shown)
