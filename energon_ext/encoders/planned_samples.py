# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Plans the samples of any TaskEncoder by number, if the encoder and its sources allow it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.energon import TaskEncoder
from megatron.energon.task_encoder.base import get_stateless

from energon_ext.batch.rows import Row
from energon_ext.config.mix import Entry
from energon_ext.encoders.plan_mix import read_documents
from energon_ext.encoders.planning import document_range, shuffles_over_epochs
from energon_ext.encoders.sources import open_alone
from energon_ext.plan.source import Reader
from energon_ext.plan.spec import Spec
from energon_ext.prepare.lengths import LengthTable
from energon_ext.samples.context import encoder_context
from energon_ext.samples.methods import SampleMethods, can_pack, find, overrides
from energon_ext.samples.numbered import NumberedSamples
from energon_ext.samples.one_each import OneEach
from energon_ext.samples.reader import SampleReader
from energon_ext.samples.stored_files import fingerprint_files, num_samples
from energon_ext.tokenizers.protocol import check_tokenizer, check_written
from energon_ext.tokens.documents import Lengths

#: Methods that build stages, which a plan does not have.
_STAGES = ("build_encode_sample", "build_batch", "build_cook_crude_sample", "_load_dataset")


def reason_to_stream(
    encoder: TaskEncoder, entries: Sequence[Entry], stages: Mapping[str, Any], is_complete: bool
) -> str | None:
    """Return why samples must be streamed; None if they can be planned.

    Args:
        is_complete: the last batch is never short.
    """
    if not is_complete:
        return "every sample is read once, and without make_padding the last batch may be short"
    if stages.get("batch_size") is None:
        return "without a batch_size there are no batches"
    if stages.get("packing_buffer_size") is not None and not can_pack(encoder):
        return "packing_buffer_size packs samples whose lengths are known only after reading them"
    for name in _STAGES:
        if overrides(encoder, name):
            return f"{name} builds its own stages"
    if overrides(encoder, "batch_group_criterion"):
        return "batch_group_criterion groups samples only after they are read"
    for method in (encoder.encode_sample, encoder.preencode_sample, encoder.postencode_sample):
        if not get_stateless(method):
            return f"{method.__name__} is not marked @stateless"
    for entry in entries:
        if entry.documents is not None:
            if not can_pack(encoder) or find(encoder, "pack_tokens") is None:
                return f"{entry.key} has token files; the encoder lacks length_of or pack_tokens"
            continue
        if shuffles_over_epochs(entry):
            return f"{entry.key} has a shuffle_over_epochs_multiplier"
        if int(entry.loaded.repetitions or 1) != (entry.loaded.repetitions or 1):
            return f"{entry.key} is repeated {entry.loaded.repetitions} times"
    return None


def open_lengths(entry: Entry, table: LengthTable | None, methods: SampleMethods) -> Lengths:
    """Return the lengths of one source: its documents, a table, or one for each sample."""
    if entry.documents is not None:
        check_tokenizer(methods.tokenizer)
        check_written(entry.documents, methods.tokenizer)
        return entry.documents
    if table is not None:
        return table
    return OneEach(num_samples(entry.dataset), fingerprint_files(entry.dataset))


def open_sample_reader(
    encoder: TaskEncoder, methods: SampleMethods, spec: Spec, entry: Entry, lengths: Lengths
) -> Reader:
    """Open what reads the rows of one source: samples, or documents by ``pack_tokens``."""
    if entry.documents is not None:
        pack = _pack_with(methods, entry.key)
        return read_documents(entry, entry.documents, spec.row_tokens, pack)
    numbers = range(*document_range(entry, len(lengths)))
    excluded = frozenset(() if entry.excluded is None else entry.excluded.tolist())
    samples = NumberedSamples(open_alone(encoder, entry), str(entry.dataset.paths[0]))
    table = lengths if isinstance(lengths, LengthTable) else None
    return SampleReader(methods, entry.key, spec.seed, numbers, excluded, samples, table)


def _pack_with(methods: SampleMethods, key: str) -> Callable[[Row], Any]:
    """Return the ``pack_tokens`` of an encoder, which then knows the source of the row."""
    pack = methods.pack_tokens
    assert pack is not None, "reason_to_stream requires it"

    def pack_tokens(row: Row) -> Any:
        with encoder_context(source_key=key):
            return pack(row)

    return pack_tokens
