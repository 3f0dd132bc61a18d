# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Plans the samples of any TaskEncoder by number, if the encoder and its sources allow it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron.energon import TaskEncoder
from megatron.energon.task_encoder.base import get_stateless

from energon_ext.batch.rows import Row
from energon_ext.config.mix import Entry
from energon_ext.encoders.planning import Planning, document_range, shuffles_over_epochs
from energon_ext.encoders.sources import open_alone
from energon_ext.packing import BestFitPacker, Packer
from energon_ext.plan.cost import AttentionCost, Cost
from energon_ext.plan.source import PlannedSource
from energon_ext.samples.context import encoder_context
from energon_ext.samples.methods import SampleMethods, can_pack, find, overrides
from energon_ext.samples.numbered import NumberedSamples
from energon_ext.samples.one_each import OneEach
from energon_ext.samples.packers import rebuild_packer
from energon_ext.samples.reader import SampleReader
from energon_ext.samples.stored_files import fingerprint_files, num_samples
from energon_ext.tokenizers.protocol import check_tokenizer, check_written, saved_tokenizer
from energon_ext.tokens.documents import Lengths
from energon_ext.tokens.reader import DocumentReader

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


def plan_samples_of(encoder: TaskEncoder, entry: Entry, planning: Planning) -> PlannedSource:
    """Plan the rows of one source: one sample each, or samples packed by their lengths."""
    methods, table = planning.methods, planning.lengths.get(entry.key)
    assert methods is not None, "the planning of samples has the encoder's methods"
    factory, packer = entry.dataset, methods.packer
    count = num_samples(factory)
    numbers = range(*document_range(entry, count))
    excluded = frozenset(() if entry.excluded is None else entry.excluded.tolist())
    lengths: Lengths = OneEach(count, fingerprint_files(factory)) if table is None else table

    def rebuild(packing: Mapping[str, Any]) -> Packer:
        read = [number for number in numbers if number not in excluded]
        return rebuild_packer(packing, current=packer, lengths=lengths, numbers=read, key=entry.key)

    samples = NumberedSamples(open_alone(encoder, entry), str(factory.paths[0]))
    reader = SampleReader(methods, entry.key, planning.seed, numbers, excluded, samples, table)
    return planning.pack(
        entry,
        lengths,
        reader,
        packer,
        block=planning.block,
        kind="samples",
        former_packer=None if table is None else rebuild,
    )


def plan_tokens_of(entry: Entry, planning: Planning) -> PlannedSource:
    """Plan the rows of token files, which the encoder's ``pack_tokens`` builds."""
    methods, documents = planning.methods, entry.documents
    assert methods is not None, "the planning of samples has the encoder's methods"
    assert documents is not None, "a source of samples has no tokens to plan"
    check_tokenizer(methods.tokenizer)
    check_written(documents, methods.tokenizer)
    packer = BestFitPacker(methods.packer.seq_len)
    return planning.pack(
        entry,
        documents,
        DocumentReader(documents, entry.key, packer.seq_len, _pack_with(methods, entry.key)),
        packer,
        former_packer=lambda packing: dataclasses.replace(packer, seq_len=packing["seq_len"]),
    )


def _pack_with(methods: SampleMethods, key: str) -> Callable[[Row], Any]:
    """Return the ``pack_tokens`` of an encoder, which then knows the source of the row."""
    pack = methods.pack_tokens
    assert pack is not None, "reason_to_stream requires it"

    def pack_tokens(row: Row) -> Any:
        with encoder_context(source_key=key):
            return pack(row)

    return pack_tokens


def describe_samples(
    methods: SampleMethods, fingerprint: Mapping[str, Any], cost: Cost | None, has_padding: bool
) -> dict[str, Any]:
    """Return JSON values from which the same rows can be planned without the user's code."""
    packer = {**methods.packer.to_json(), "seq_len": methods.packer.seq_len}
    has_tokens = methods.pack_tokens is not None
    return {
        "class": "samples",
        "cost": vars(cost) if isinstance(cost, AttentionCost) else None,
        "fingerprint": fingerprint,
        "has_padding": has_padding,
        "lengths": methods.identity,
        "packer": packer if methods.are_packed else None,
        "tokenizer": saved_tokenizer(methods.tokenizer) if has_tokens else None,
    }
