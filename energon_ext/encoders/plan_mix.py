# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A mix and a spec become a run: the only place that plans sources.

An encoder supplies the spec and opens the data. Commands take the spec from a state, and need
neither the encoder nor its tokenizer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from energon_ext.config.mix import Entry, Mix
from energon_ext.encoders.planning import (
    blocks_of,
    check_shuffling,
    check_whole,
    count_buffer_docs,
    document_range,
    epochs_of,
    name_source,
)
from energon_ext.encoders.sources import check_omissions, open_live_weights
from energon_ext.encoders.splicing import choose_splice, find_pad_id, plan_splice
from energon_ext.errors import ConfigError
from energon_ext.mixture.checks import check_mixture
from energon_ext.mixture.tree import IN_ORDER, Tree, blend_of
from energon_ext.packing import Packer, load_packer
from energon_ext.plan.clock import Clock
from energon_ext.plan.cost import Cost
from energon_ext.plan.order import EpochOrder
from energon_ext.plan.packed_rows import LoadPacker, PackedRows
from energon_ext.plan.run import Run, RunOptions
from energon_ext.plan.source import PlannedSource, Reader
from energon_ext.plan.spec import SAMPLES, KindSpec, Spec
from energon_ext.plan.topology import Topology
from energon_ext.samples.packers import OnePerRow, load_whole_packer, rebuild_packer
from energon_ext.splice.frames import Frames
from energon_ext.tokens.cut import CutLengths
from energon_ext.tokens.documents import Documents, Lengths
from energon_ext.tokens.reader import DocumentReader
from energon_ext.weights import ConstantWeight, ScheduleAxis

#: Opens what reads the rows of a source, given its lengths.
OpenReader = Callable[[Entry, Lengths], Reader]


@dataclass(frozen=True, kw_only=True)
class Live:
    """The live objects of an encoder behind its spec, which may be code of the user's.

    Attributes:
        packers: by kind of source.
        cost: of rows.
        open_reader: for sources that are not spliced.
    """

    packers: Mapping[str, Packer] = field(default_factory=dict)
    cost: Cost | None = None
    open_reader: OpenReader


@dataclass(frozen=True, kw_only=True)
class Passes:
    """How often sources are read.

    Attributes:
        repeat: whether the dataset is read again and again.
        as_whole: whether the blend then repeats as a whole, and not each source by itself.
        validating: whether each document is read once, in order.
        batches: batches per rank in one pass; 0 for all.
    """

    repeat: bool = True
    as_whole: bool = False
    validating: bool = False
    batches: int = 0

    @property
    def repeats_sources(self) -> bool:
        """True if each source is read again by itself."""
        return self.repeat and not self.as_whole


def plan_mix(
    mix: Mix,
    spec: Spec,
    topology: Topology,
    columns: Mapping[str, Lengths],
    live: Live,
    passes: Passes,
    end: ScheduleAxis | None = None,
) -> Run:
    """Plan the rows of a mix.

    Args:
        columns: lengths of each source, by key; of documents, the documents.
        end: of the schedules.

    Raises:
        ConfigError: the mix has what the spec does not support.
    """
    sources = plan_sources(mix.entries, spec, columns, live, passes)
    if passes.validating:
        sources = [replace(source, loss_weight=None) for source in sources]
        tree = blend_of({source.key: ConstantWeight(1.0) for source in sources}, IN_ORDER)
        clock = Clock(mix.axis, topology, spec.row_tokens)
        return _run(sources, tree, clock, spec, live, passes)
    clock = Clock(mix.axis_with(end), topology, spec.row_tokens, mix.run.skip.ranges)
    check_blend(mix, sources, clock)
    return _run(sources, mix.tree, clock, spec, live, passes)


def check_blend(
    mix: Mix, sources: Sequence[Any], clock: Clock, absent: Mapping[str, Any] | None = None
) -> None:
    """Check what the metadataset says of its sources together, and open live weights.

    Args:
        absent: streamed sources without samples for a worker, by worker.
    """
    check_omissions(mix, sources)
    open_live_weights(mix, sources)
    rows = {source.key: getattr(source, "first_rows", None) for source in sources}
    check_mixture(
        mix.tree,
        clock.axis,
        {source.key: source.max_epochs for source in sources},
        dict(absent or {}),
        {key: each.config for key, each in rows.items() if isinstance(each, Frames)},
        clock.end,
    )


def _run(
    sources: Sequence[PlannedSource],
    tree: Tree,
    clock: Clock,
    spec: Spec,
    live: Live,
    passes: Passes,
) -> Run:
    options = RunOptions(
        spec=spec,
        cost=live.cost,
        pass_batches=passes.batches,
        repeats=passes.repeat and passes.as_whole,
        restarts=not passes.repeat,
    )
    return Run(sources, tree=tree, clock=clock, options=options)


def plan_sources(
    entries: Sequence[Entry],
    spec: Spec,
    columns: Mapping[str, Lengths],
    live: Live,
    passes: Passes,
) -> list[PlannedSource]:
    """Plan the rows of each source."""
    fill_id = find_pad_id(entries, spec)
    # With few sources each packs more documents together.
    spec = replace(spec, buffer_docs=max(spec.buffer_docs, count_buffer_docs(len(entries))))
    return [
        _plan_source(entry, spec, columns[entry.key], live, passes, fill_id) for entry in entries
    ]


def find_kind(entry: Entry, spec: Spec) -> tuple[str, KindSpec]:
    """Return the kind of a source; ConfigError if the run has no such sources."""
    name = spec.kind_of(entry.documents is not None)
    if name not in spec.kinds:
        raise ConfigError(
            f"{entry.key}: has token files, but the encoder of the run reads only samples; give "
            f"it length_of and pack_tokens, or remove the source."
        )
    return name, spec.kinds[name]


def _plan_source(
    entry: Entry, spec: Spec, found: Lengths, live: Live, passes: Passes, fill_id: int | None
) -> PlannedSource:
    name, kind = find_kind(entry, spec)
    check_shuffling(entry)
    splice = choose_splice(entry, kind.splice)
    epochs = epochs_of(entry, passes.repeats_sources)
    if splice is not None:
        assert kind.splice is not None and fill_id is not None, "only such kinds are spliced"
        assert isinstance(found, Documents), "samples are not spliced"
        return plan_splice(
            splice,
            found,
            entry,
            spec,
            kind.splice,
            epochs=epochs,
            validating=passes.validating,
            fill_id=fill_id,
        )
    first, stop = document_range(entry, len(found))
    lengths = _cut(found, entry, kind, spec)
    packer = live.packers.get(name) or _load_packer(name, kind, spec)
    excluded = None if passes.validating else entry.excluded
    load: LoadPacker | None = load_packer
    if name == SAMPLES:
        load = functools.partial(
            rebuild_packer,
            lengths=lengths,
            numbers=range(first, stop),
            excluded=excluded,
            key=entry.key,
        )
    if lengths is not found or kind.packer is None:
        load = None
    block = blocks_of(entry) if name != SAMPLES else {"block": kind.block}
    order = EpochOrder(
        stop - first,
        f"{spec.seed}/{entry.names.shuffle_key}",
        epochs=check_whole(entry, epochs),
        shuffled=not passes.validating,
        **block,
    )
    rows = PackedRows(
        lengths,
        source=entry.key,
        packer=packer,
        order=order,
        buffer_docs=spec.buffer_docs,
        first=first,
        excluded=excluded,
        kind=name,
        load_packer=load,
    )
    return name_source(entry, rows, live.open_reader(entry, found), stop - first)


def _cut(found: Lengths, entry: Entry, kind: KindSpec, spec: Spec) -> Lengths:
    """Return the lengths of documents as they are packed."""
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


def read_documents(entry: Entry, found: Lengths, row_tokens: int, **options: Any) -> Reader:
    """Open what reads the rows of documents."""
    assert isinstance(found, Documents), "a source of documents has some"
    return DocumentReader(found, entry.key, row_tokens, **options)
