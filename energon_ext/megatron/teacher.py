# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A teacher that several ranks may hold together writes its words for documents."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core import parallel_state

from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.errors import ConfigError
from energon_ext.megatron.moe import padding_mask_for, unwrap
from energon_ext.megatron.packed_params import build_packed_seq_params
from energon_ext.megatron.replica import KEPT, Ask, ask_replicas
from energon_ext.megatron.step import get_batch
from energon_ext.packing.bins import best_fit_decreasing
from energon_ext.prepare.columns import UNIT_DOCUMENTS
from energon_ext.prepare.teacher import NextWords, most_probable, write_teacher
from energon_ext.tokens.documents import Documents


def write_teacher_of(
    model: torch.nn.Module,
    documents: Documents | str | Path,
    folder: str | Path,
    *,
    k: int,
    made_by: str,
    context: int | None = None,
    dtype: str = "float16",
    name: str = "teacher",
    unit_documents: int = UNIT_DOCUMENTS,
) -> None:
    """Write the ``k`` most probable words of a Megatron model for each label of documents.

    All ranks call this together; ranks of different replicas must share a file system. Tensor- and
    pipeline-parallel ranks work together, and replicas share the work. See
    :func:`energon_ext.prepare.teacher.write_teacher`.

    Args:
        model: the teacher, a ``GPTModel`` or a hybrid model, wrapped or not.
        documents, folder, k, made_by, dtype, name, unit_documents: see ``write_teacher``.
        context: tokens of a row, in which several short documents are read together; by default the
            model's ``max_sequence_length``.

    Raises:
        ConfigError: as for ``write_teacher``, or the model is context-parallel or predicts several
            tokens.
    """
    inner: Any = unwrap(model)
    if inner.config.mtp_num_layers:
        raise ConfigError(
            "write_teacher_of: mtp_num_layers: the logits of later tokens are not used; build the "
            "teacher with None."
        )
    context = context or int(inner.max_sequence_length)
    write = partial(
        write_teacher,
        documents,
        folder,
        k=k,
        made_by=made_by,
        dtype=dtype,
        name=name,
        unit_documents=unit_documents,
    )
    ask_replicas(
        model,
        partial(_keep_most_probable, k=k),
        lambda ask, part: write(_Asked(ask, context, int(inner.vocab_size)), part=part),
        caller="write_teacher_of",
    )


@dataclass(frozen=True)
class _Asked:
    """A teacher that reads packed rows."""

    ask: Ask
    context: int
    words: int

    def next_words(self, texts: Sequence[np.ndarray], k: int) -> Sequence[NextWords]:
        rows = best_fit_decreasing([len(text) for text in texts], self.context)
        assemble = BatchAssembler(self.context)
        batches = [assemble([Row([texts[place] for place in row])], sources=[""]) for row in rows]
        found: list[Any] = [None] * len(texts)
        for row, (ids, log_probs) in zip(rows, self.ask(batches), strict=True):
            ends = np.cumsum([len(texts[place]) for place in row])
            for place, end in zip(row, ends.tolist()):
                part = slice(end - len(texts[place]), end)
                found[place] = ids[part], log_probs[part]
        return found


def _keep_most_probable(
    data_iterator: Any, model: torch.nn.Module, k: int
) -> tuple[torch.Tensor, Any]:
    batch = get_batch(data_iterator)
    logits = model(
        batch.tokens[None],
        batch.position_ids[None],
        None,  # no attention mask: the segments replace it
        packed_seq_params=build_packed_seq_params(batch),
        **padding_mask_for(model, batch),
    )

    def keep(logits: torch.Tensor) -> tuple[torch.Tensor, dict[str, NextWords]]:
        is_split = logits.shape[-1] < unwrap(model).vocab_size
        group = parallel_state.get_tensor_model_parallel_group() if is_split else None
        return logits.sum(), {KEPT: most_probable(logits[0], k, group)}

    return logits, keep
