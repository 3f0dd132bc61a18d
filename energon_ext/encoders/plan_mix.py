# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A mix and a task become a run, and a dataset that reads it: the only place that plans sources.

The task of an encoder opens its data. Commands take the spec from a state, and their task needs
neither the encoder nor its tokenizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from megatron.energon import WorkerConfig

from energon_ext.arguments import choices
from energon_ext.batch.columns import merge_columns
from energon_ext.config.mix import Entry, Mix
from energon_ext.config.references import subset_of
from energon_ext.encoders.sources import check_omissions, read_live_weights, subset_size
from energon_ext.encoders.splicing import Splices, choose_splices, plan_frames
from energon_ext.encoders.task import Passes, Task
from energon_ext.errors import ConfigError
from energon_ext.loader.planned_dataset import PlannedDataset
from energon_ext.loader.reader import BatchReader
from energon_ext.mixture.checks import check_mixture
from energon_ext.mixture.tree import IN_ORDER, blend_of
from energon_ext.packing import Packer, load_packer
from energon_ext.plan.arrangement import LENGTH, Arrangement, sort_numbers
from energon_ext.plan.clock import Clock
from energon_ext.plan.order import EpochOrder
from energon_ext.plan.packed_rows import LoadPacker, PackedRows
from energon_ext.plan.progress import DescribedBatch
from energon_ext.plan.row_schedule import RowSchedule
from energon_ext.plan.rows import Rows
from energon_ext.plan.run import Run, RunOptions
from energon_ext.plan.source import PlannedSource, Reader, Source
from energon_ext.plan.spec import SAMPLES, KindSpec, Spec
from energon_ext.plan.topology import Topology
from energon_ext.samples.context import EncoderContext, encoder_context
from energon_ext.samples.one_each import OneEach
from energon_ext.samples.packers import OnePerRow, load_whole_packer, rebuild_packer
from energon_ext.tokens.cut import CutLengths
from energon_ext.tokens.documents import Documents, Lengths
from energon_ext.tokens.reader import open_others
from energon_ext.tokens.transformed import TransformedLengths, bind, columns_of, look_up
from energon_ext.weights import ConstantWeight, ScheduleAxis
from energon_ext.weights.axis import STEPS

#: Documents of planned sources that are packed together, unless ``packing_buffer_docs`` is more:
#: in total, and the minimum and maximum per source.
BUFFERS_DOCS, LEAST_BUFFER_DOCS, MAX_BUFFER_DOCS = 2**20, 1024, 4096

#: Documents of a block if they are stored in random order, and documents that are mixed.
SHUFFLED_BLOCK_DOCS, MIXED_DOCS = 256, 2**14


def plan_mix(
    mix: Mix,
    task: Task,
    topology: Topology,
    passes: Passes,
    worker_config: WorkerConfig,
    end: ScheduleAxis | None = None,
) -> PlannedDataset:
    """Plan the rows of a mix, and return a dataset that reads them.

    Args:
        end: of the schedules.

    Raises:
        ConfigError: the mix has what the spec does not support.
    """
    spec = replace(task.spec(mix.entries, worker_config.seed_offset), repeat=passes.repeat)
    splices = choose_splices(mix.entries, spec, are_all=not passes.validating)
    if task.contexts is not None:
        _check_layouts(mix, splices, passes)
    sources = _plan_sources(mix.entries, task, spec, splices, passes)
    if passes.validating:
        sources = [replace(source, loss_weight=None) for source in sources]
        tree = blend_of({source.key: ConstantWeight(1.0) for source in sources}, IN_ORDER)
        clock = Clock(mix.axis, topology, spec.row_tokens)
    else:
        tree = mix.tree
        rows = mix.run.rows
        check_row_schedule(rows, mix.axis, sources, spec)
        clock = Clock(mix.axis_with(end), topology, spec.row_tokens, mix.run.skip.ranges, rows)
        read_live_weights(mix)
        check_blend(mix, sources, clock, splices.by_key, {})
    options = RunOptions(
        spec=spec,
        cost=task.cost,
        contexts=task.contexts,
        pass_batches=passes.batches,
        repeats=passes.repeats_blend,
        restarts=not passes.repeat,
    )
    run = Run(sources, tree=tree, clock=clock, options=options)
    return PlannedDataset(run, _read(run, task, splices.pad_id), worker_config=worker_config)


def _read(run: Run, task: Task, pad_id: int | None) -> BatchReader:
    """Return what reads the batches of a run."""
    keys = tuple(sorted({key for source in run.sources.values() for key in source.parts}))
    columns = merge_columns({key: each.reader.columns for key, each in run.sources.items()})
    context = EncoderContext(source_keys=keys, pad_id=pad_id, columns=columns)
    return BatchReader(
        readers=[source.reader for source in run.sources.values()],
        assemble=functools.partial(_assemble, task, context),
        padding=functools.partial(_pad, task, run.keys) if run.spec.pads else None,
        parts=[tuple(each.parts) for each in run.sources.values()] if run.loss_weights else (),
    )


def _check_layouts(mix: Mix, splices: Splices, passes: Passes) -> None:
    """Raise ConfigError for what cannot be read in layouts."""
    for key in splices.by_key:
        raise ConfigError(
            f"{key}: is spliced, but a spliced row is one piece, which layouts cannot take apart; "
            f"remove its splice, or leave contexts out."
        )
    if mix.run.rows is not None and not passes.validating:
        raise ConfigError(
            f"{mix.run.rows.where}: row_tokens: a schedule found, but a layout takes pieces "
            f"of rows of one length; give one length, or leave contexts out."
        )
    if passes.batches:
        raise ConfigError(
            f"contexts: passes of {passes.batches} batches found, but steps differ in their "
            f"numbers of micro-batches; leave virtual_epoch_length and limit out."
        )
    if mix.axis.unit == "batches":
        raise ConfigError(
            "contexts: schedule_axis is batches, but steps differ in their numbers of "
            "micro-batches; count steps."
        )


def _assemble(
    task: Task, context: EncoderContext, rows: list[Any], described: DescribedBatch
) -> Any:
    size, row_tokens = described.context_size, described.row_tokens
    return task.assemble(rows, replace(context, context_size=size, row_tokens=row_tokens))


def _pad(task: Task, keys: Sequence[str], source: int, read: Callable[[], Any]) -> Any:
    """Make padding of a row of a source, given by its number."""
    with encoder_context(source_key=keys[source]):
        return task.padding(read)


def check_blend(
    mix: Mix,
    sources: Sequence[Source],
    clock: Clock,
    splices: Mapping[str, Any],
    absent: Mapping[str, Any],
) -> None:
    """Check what the metadataset says of its sources together.

    Args:
        splices: of spliced sources, by key.
        absent: streamed sources without samples for a worker, by worker.
    """
    check_omissions(mix, sources)
    limits = {source.key: source.max_epochs for source in sources}
    check_mixture(mix.tree, clock.axis, limits, absent, splices, clock.end)


def check_row_schedule(
    rows: RowSchedule | None, axis: ScheduleAxis, sources: Sequence[PlannedSource], spec: Spec
) -> None:
    """Raise ConfigError if the length of rows has a schedule that this run cannot follow."""
    if rows is None:
        return
    where = f"{rows.where}: row_tokens"
    if SAMPLES in spec.kinds:
        raise ConfigError(
            f"{where}: the encoder packs samples, which may not fit in shorter rows; it is for "
            f"text and token files of a PackedTaskEncoder."
        )
    for source in sources:
        if not source.first_rows.may_be_repacked:
            raise ConfigError(
                f"{where}: {source.key} is cut or spliced to the length of a row, so its rows can "
                f"have only one; it is for text and token files of a PackedTaskEncoder."
            )
    if axis.counted not in (STEPS, "tokens"):
        raise ConfigError(
            f"{where}: breakpoints count {axis.counted}, of which longer rows need fewer; set "
            f"`schedule_axis` to steps or tokens."
        )
    if rows.longest != spec.row_tokens:
        raise ConfigError(
            f"{where}: the longest rows have {rows.longest:,} positions, but the seq_len of the "
            f"encoder is {spec.row_tokens:,}; they must be the same (--seq-length {rows.longest})."
        )
    alignment = spec.loss.get("alignment", 1)
    if (shortest := rows.lengths[0]) % alignment:
        raise ConfigError(
            f"{where}: rows of {shortest:,} positions found; a multiple of {alignment} is needed, "
            f"at which documents begin."
        )


# The rows of a source ---------------------------------------------------------------------------


def _plan_sources(
    entries: Sequence[Entry], task: Task, spec: Spec, splices: Splices, passes: Passes
) -> list[PlannedSource]:
    """Open all sources, and plan the rows of each."""
    opened = task.open_sources(entries)
    # With few sources each packs more documents together.
    spec = replace(spec, buffer_docs=max(spec.buffer_docs, count_buffer_docs(len(entries))))
    return [
        _plan_source(entry, opened[entry.key], task, spec, splices, passes) for entry in entries
    ]


def _plan_source(
    entry: Entry, found: Lengths, task: Task, spec: Spec, splices: Splices, passes: Passes
) -> PlannedSource:
    check_shuffling(entry)
    if isinstance(found, Documents):
        others = open_others(entry.columns, found, f"{entry.where}.columns")
        entry = replace(entry, others=others) if others else entry
    documents = subset_of(entry.dataset, len(found))
    epochs = entry.max_epochs if passes.repeats_sources else entry.repetitions
    rows: Rows
    reader: Reader
    if (splice := splices.by_key.get(entry.key)) is None:
        rows = _plan_packed(entry, found, task, spec, documents, check_whole(entry, epochs), passes)
        reader = task.reader(entry, found, spec)
    else:
        rows, reader = plan_frames(
            splice,
            found,
            entry,
            spec,
            documents,
            epochs=epochs,
            validating=passes.validating,
            fill_id=splices.pad_id,
        )
    count = len(documents) if rows.subset is None else rows.subset[0]
    return PlannedSource(entry.key, rows, reader, documents=count, **entry.naming)


def _plan_packed(
    entry: Entry,
    found: Lengths,
    task: Task,
    spec: Spec,
    documents: range,
    epochs: int | None,
    passes: Passes,
) -> PackedRows:
    name, kind = find_kind(entry, spec)
    lengths = _cut(found, entry, kind, spec)
    excluded = None if passes.validating else entry.excluded
    load: LoadPacker | None = load_packer
    if name == SAMPLES:
        load = functools.partial(
            rebuild_packer, lengths=lengths, numbers=documents, excluded=excluded, key=entry.key
        )
    if kind.cut is not None or kind.packer is None:
        load = None
    order = EpochOrder(
        len(documents),
        f"{spec.seed}/{entry.names.shuffle_key}",
        epochs=epochs,
        shuffled=not passes.validating,
        arrangement=_arrangement_of(entry),
        rank=functools.partial(_rank, entry, found, lengths, documents),
        subset=subset_size(entry, found),
        **_blocks_of(entry, found, kind),
    )
    return PackedRows(
        lengths,
        source=entry.key,
        packer=task.packers.get(name) or _load_packer(name, kind, spec),
        order=order,
        buffer_docs=spec.buffer_docs,
        first=documents.start,
        excluded=excluded,
        kind=name,
        load_packer=load,
    )


def find_kind(entry: Entry, spec: Spec) -> tuple[str, KindSpec]:
    """Return the kind of a source; ConfigError if the run has no such sources."""
    name = spec.kind_of(not entry.has_samples)
    if name not in spec.kinds:
        raise ConfigError(
            f"{entry.key}: has token files, but the encoder of the run reads only samples; give "
            f"it length_of and pack_tokens, or remove the source."
        )
    return name, spec.kinds[name]


def _cut(found: Lengths, entry: Entry, kind: KindSpec, spec: Spec) -> Lengths:
    """Return the lengths of documents as they are packed."""
    if entry.transform is not None:
        where = f"{entry.where}.transform"
        if kind.cut is not None:
            raise ConfigError(
                f"{where}: conversations are read as they are; remove it, or give {entry.key} to "
                f"an encoder of texts."
            )
        assert isinstance(found, Documents), "a task of samples refuses transforms"
        return TransformedLengths(found, bind(entry.transform, found, entry.others, where))
    if kind.cut is None:
        return found
    assert isinstance(found, Documents), "only documents are cut"
    return CutLengths(
        found,
        source=entry.key,
        max_tokens=spec.row_tokens + 1,
        over_long=kind.cut.over_long,
        untrained=kind.cut.untrained,
    )


def _load_packer(name: str, kind: KindSpec, spec: Spec) -> Packer:
    """Build the packer of a kind of source from its JSON."""
    if kind.packer is None:
        return OnePerRow()
    whole = load_whole_packer(kind.packer, spec.row_tokens) if name == SAMPLES else None
    return whole or load_packer(kind.packer, spec.row_tokens)


def _arrangement_of(entry: Entry) -> Arrangement | None:
    """Return the order that is not random, as an entry or Energon's own field asks."""
    order = entry.order
    if order is None and _shuffle_over_epochs(entry) is None:
        order = Arrangement()
    if order is None or order.is_random:
        return None
    if (entry.block_docs or 1) > 1:
        raise ConfigError(
            f"{entry.where}.block_docs: {entry.block_docs} found, but blocks are for a random "
            f"order; remove one of the two."
        )
    return order


def _rank(
    entry: Entry, found: Lengths, lengths: Lengths, documents: range, by: Arrangement
) -> np.ndarray:
    """Return the documents of a source in an order, counted from its first one.

    Raises:
        ConfigError: they have no such value.
    """
    where, numbers = f"{entry.where}.order", np.arange(documents.start, documents.stop)
    assert by.by is not None, "documents are sorted by a value"
    columns: list[str] = []
    if isinstance(found, Documents):
        described = columns_of(found, entry.others)
        columns = [name for name, column in described.items() if column.per == "document"]
    if by.by in columns:
        assert isinstance(found, Documents), "samples have no columns"
        values = look_up(found, entry.others, by.by, numbers)
    elif by.by == LENGTH and not isinstance(found, OneEach):
        values = lengths.lengths(numbers)
    else:
        has = choices(by.by, columns if isinstance(found, OneEach) else [*columns, LENGTH])
        raise ConfigError(
            f"{where}: {entry.key} has no {by.by!r} of each document to sort by; it has {has}"
        )
    if values.ndim != 1:
        raise ConfigError(
            f"{where}: the column {by.by} has {list(values.shape[1:])} values of each document; "
            f"one number of each is needed."
        )
    if len(bad := np.flatnonzero(~np.isfinite(values))):
        raise ConfigError(
            f"{where}: the column {by.by} is {values[bad[0]]} for document {numbers[bad[0]]} of "
            f"{entry.key}; a finite number of each is needed, also of those that are not read."
        )
    ranked = sort_numbers(values, by.descending)
    return ranked.astype(np.uint32) if len(ranked) < 1 << 32 else ranked


def _blocks_of(entry: Entry, found: Lengths, kind: KindSpec) -> dict[str, Any]:
    """Return the arguments ``block`` and ``mixed`` of the order of a source."""
    if not isinstance(found, Documents):
        return {"block": kind.block}
    block = entry.block_docs or (SHUFFLED_BLOCK_DOCS if found.is_shuffled else 1)
    return {"block": block, "mixed": max(1, MIXED_DOCS // block)}


def count_buffer_docs(sources: int) -> int:
    """Return how many documents each source packs together; a plan reads only their lengths."""
    shared = BUFFERS_DOCS // max(1, sources)
    return min(MAX_BUFFER_DOCS, max(LEAST_BUFFER_DOCS, shared))


def check_whole(entry: Entry, epochs: float | None) -> int | None:
    """Raise ConfigError if some documents would be read once more than others; return epochs."""
    if epochs is not None and epochs != int(epochs):
        raise ConfigError(f"{entry.key}: {epochs} repetitions; sources are read in whole epochs.")
    return None if epochs is None else int(epochs)


def check_shuffling(entry: Entry) -> None:
    """Raise ConfigError for a source that asks not to shuffle each epoch separately."""
    if shuffles_over_epochs(entry):
        raise ConfigError(
            f"{entry.dataset.paths[0]}: shuffle_over_epochs_multiplier is only for streamed "
            f"samples; planned sources shuffle each epoch separately."
        )


def shuffles_over_epochs(entry: Entry) -> bool:
    """Return True if training asks to shuffle over epochs or with replacement, as no plan does."""
    return _shuffle_over_epochs(entry) not in (None, 1)


def _shuffle_over_epochs(entry: Entry) -> int | None:
    """Return Energon's multiplier: 1 to shuffle each epoch, None for the stored order."""
    dataset = entry.dataset
    if not getattr(dataset, "training", True):
        return 1
    found: int | None = getattr(dataset, "shuffle_over_epochs", 1)
    return found
