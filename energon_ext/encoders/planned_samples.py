# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Plans the samples of any TaskEncoder by number, if the encoder and its sources allow it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.energon import DefaultTaskEncoder, TaskEncoder
from megatron.energon.task_encoder.base import get_stateless

from energon_ext.arguments import check_integer
from energon_ext.config.mix import Entry
from energon_ext.encoders.sources import (
    MAX_PLANNED_BUFFER_DOCS,
    document_range,
    names_of_source,
    open_alone,
    planned_options,
    shuffles_over_epochs,
)
from energon_ext.errors import ConfigError
from energon_ext.packing import BestFitPacker, Packer
from energon_ext.plan.cost import AttentionCost
from energon_ext.plan.packed_rows import PackedRows
from energon_ext.plan.source import PlannedSource
from energon_ext.samples.numbered import NumberedSamples
from energon_ext.samples.one_each import OneEach
from energon_ext.samples.packers import OnePerRow, OwnPacker, WholePacker, rebuild_packer
from energon_ext.samples.reader import SampleReader
from energon_ext.samples.stored_files import can_be_read_by_number, fingerprint_files, num_samples
from energon_ext.tokenizers.protocol import check_tokenizer, check_written, saved_tokenizer
from energon_ext.tokens.documents import Lengths
from energon_ext.tokens.reader import DocumentReader

#: Methods that build stages, which a plan does not have.
_STAGES = ("build_encode_sample", "build_batch", "build_cook_crude_sample", "_load_dataset")


def reason_to_stream(
    encoder: Any, entries: Sequence[Entry], stages: Mapping[str, Any], is_complete: bool
) -> str | None:
    """Return why samples must be streamed; None if they can be planned.

    Args:
        is_complete: the last batch is never short.
    """
    if not is_complete:
        return "every sample is read once, and without make_padding the last batch may be short"
    if stages.get("batch_size") is None:
        return "without a batch_size there are no batches"
    if stages.get("packing_buffer_size") is not None and not packs_samples(encoder):
        return "packing_buffer_size packs samples whose lengths are known only after reading them"
    for name in _STAGES:
        if getattr(type(encoder), name) is not getattr(TaskEncoder, name):
            return f"{name} builds its own stages"
    if _overrides(encoder, "batch_group_criterion"):
        return "batch_group_criterion groups samples only after they are read"
    for name in ("encode_sample", "preencode_sample", "postencode_sample"):
        if not get_stateless(getattr(encoder, name)):
            return f"{name} is not marked @stateless"
    for entry in entries:
        if entry.documents is not None:
            if not packs_samples(encoder) or not hasattr(encoder, "pack_tokens"):
                return f"{entry.key} has token files; the encoder lacks length_of or pack_tokens"
            continue
        if not can_be_read_by_number(entry.dataset):
            return f"the files of {entry.key} are neither local nor tars in an object store"
        if shuffles_over_epochs(entry):
            return f"{entry.key} has a shuffle_over_epochs_multiplier"
        if int(entry.loaded.repetitions or 1) != (entry.loaded.repetitions or 1):
            return f"{entry.key} is repeated {entry.loaded.repetitions} times"
    return None


def _overrides(encoder: Any, name: str) -> bool:
    """Return True if an encoder overrides a method of Energon's own encoders."""
    originals = [getattr(c, name, None) for c in (TaskEncoder, DefaultTaskEncoder)]
    return getattr(type(encoder), name) not in originals


def plan_sample_source(encoder: Any, entry: Entry, *, seed: int, repeat: bool) -> PlannedSource:
    """Plan the rows of one source: one sample each, or samples packed by their lengths."""
    factory, table = entry.dataset, encoder._tables.get(entry.key)
    count, packer = num_samples(factory), packer_of(encoder)
    numbers = range(*document_range(entry, count))
    excluded = frozenset(() if entry.excluded is None else entry.excluded.tolist())
    samples = NumberedSamples(open_alone(encoder, entry), str(factory.paths[0]))
    lengths: Lengths = OneEach(count, fingerprint_files(factory)) if table is None else table

    def rebuild(packing: Mapping[str, Any]) -> Packer:
        read = [number for number in numbers if number not in excluded]
        return rebuild_packer(packing, current=packer, lengths=lengths, numbers=read, key=entry.key)

    rows = PackedRows(
        lengths,
        packer=packer,
        buffer_docs=MAX_PLANNED_BUFFER_DOCS,
        kind="samples",
        former_packer=None if table is None else rebuild,
        **planned_options(encoder, entry, count, repeat, seed=seed, block=encoder.sample_block),
    )
    reader = SampleReader(encoder, entry.key, seed, numbers, excluded, samples, table)
    return PlannedSource(entry.key, rows, reader, **names_of_source(entry, len(numbers)))


def plan_token_source(encoder: Any, entry: Entry, *, seed: int, repeat: bool) -> PlannedSource:
    """Plan the rows of token files, which the encoder's ``pack_tokens`` builds."""
    files, packer = entry.documents, BestFitPacker(encoder.seq_len)
    check_tokenizer(getattr(encoder, "tokenizer", None))
    check_written(files, encoder.tokenizer)
    rows = PackedRows(
        files,
        packer=packer,
        buffer_docs=MAX_PLANNED_BUFFER_DOCS,
        former_packer=lambda packing: dataclasses.replace(packer, seq_len=packing["seq_len"]),
        **planned_options(encoder, entry, len(files), repeat, seed=seed),
    )
    reader = DocumentReader(files, entry.key, encoder.seq_len, encoder.pack_tokens)
    documents = len(range(*document_range(entry, len(files))))
    return PlannedSource(entry.key, rows, reader, **names_of_source(entry, documents))


def packs_samples(encoder: Any) -> bool:
    """Return True if an encoder has sample lengths, so that several samples can share a row."""
    return hasattr(encoder, "length_of")


def packer_of(encoder: Any) -> Packer:
    """Return the packer of an encoder's samples: its own method, or best fit."""
    if getattr(encoder, "saved_packer", None) is not None:
        return encoder.saved_packer
    if not packs_samples(encoder):
        return OnePerRow()
    for name in ("seq_len", "pack_selected_samples"):
        if not hasattr(encoder, name) or (name != "seq_len" and not _overrides(encoder, name)):
            raise ConfigError(
                f"{type(encoder).__qualname__}: has length_of but no {name}; samples are packed "
                f"into rows of `seq_len` positions, which `pack_selected_samples` builds."
            )
    check_integer(f"{type(encoder).__qualname__}.seq_len", encoder.seq_len, 2)
    if _overrides(encoder, "select_samples_to_pack"):
        return OwnPacker(encoder.seq_len, encoder=encoder)
    return WholePacker(encoder.seq_len)


def saved_samples(encoder: Any) -> dict[str, Any]:
    """Return JSON values from which the same rows can be planned without the user's code."""
    is_packing = packs_samples(encoder)
    cost = encoder.cost if isinstance(encoder.cost, AttentionCost) else None
    packer = {**packer_of(encoder).to_json(), "seq_len": encoder.seq_len} if is_packing else None
    has_tokens = hasattr(encoder, "pack_tokens")
    return {
        "class": "samples",
        "cost": None if cost is None else vars(cost),
        "fingerprint": encoder.state_fingerprint(),
        "has_padding": encoder.make_padding is not None,
        "lengths": identity_of_lengths(encoder) if is_packing else None,
        "packer": packer,
        "tokenizer": saved_tokenizer(encoder.tokenizer) if has_tokens else None,
    }


def identity_of_lengths(encoder: Any) -> dict[str, Any]:
    """Return JSON values that identify the cached lengths of an encoder."""
    if getattr(encoder, "saved_lengths", None) is not None:
        return encoder.saved_lengths
    name, fingerprint = type(encoder).__qualname__, getattr(encoder, "encoding_fingerprint", None)
    if fingerprint is None:
        raise ConfigError(
            f"{name}: has length_of but no encoding_fingerprint; set it to JSON values such as "
            f"{{'version': 1}} and change it whenever the length of a sample changes, because it "
            f"identifies cached lengths."
        )
    return {"class": name, "own": fingerprint}
