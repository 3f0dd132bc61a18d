# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Plan a saved run again from its metadataset and the spec in its state, without its encoder.

Documents are their own columns. What is cached of text and samples is found by the encoding that
the spec names, and is never made here.
"""

import functools

from energon_ext.config.mix import Entry, Mix
from energon_ext.encoders.measured import find_measured
from energon_ext.encoders.plan_mix import Live, Passes, find_kind, plan_mix, read_documents
from energon_ext.encoders.planning import document_range
from energon_ext.encoders.sources import open_stored
from energon_ext.encoders.text_sources import find_text
from energon_ext.errors import ConfigError
from energon_ext.plan.cost import load_cost
from energon_ext.plan.run import Run
from energon_ext.plan.source import Reader
from energon_ext.plan.spec import DOCUMENTS, Spec
from energon_ext.plan.topology import Topology
from energon_ext.samples.methods import SampleMethods
from energon_ext.samples.numbered import NumberedSamples
from energon_ext.samples.one_each import OneEach
from energon_ext.samples.packers import OnePerRow
from energon_ext.samples.reader import SampleReader
from energon_ext.samples.stored_files import fingerprint_files, num_samples
from energon_ext.tokens.documents import Lengths


def plan_saved(mix: Mix, spec: Spec, topology: Topology, as_whole: bool) -> Run:
    """Plan a mix as the run with this spec does.

    Args:
        as_whole: whether the blend repeats as a whole.

    Raises:
        EncoderNeededError: something is not cached, or was planned by code of the user's.
    """
    columns = {entry.key: _find(entry, spec) for entry in mix.entries}
    open_reader = functools.partial(_open_reader, spec)
    live = Live(cost=load_cost(spec.cost), open_reader=open_reader)
    return plan_mix(
        mix, spec, topology, columns, live, Passes(repeat=spec.repeat, as_whole=as_whole)
    )


def _find(entry: Entry, spec: Spec) -> Lengths:
    name, kind = find_kind(entry, spec)
    if entry.documents is not None:
        if kind.cut is not None and (prefix := entry.documents.unweighted):
            raise ConfigError(
                f"{entry.key}: {prefix} has no label weights, so questions would be trained like "
                f"answers; write it with `energon-ext prepare --chat`."
            )
        if tokenizer := spec.own.get("tokenizer"):
            entry.documents.check_written("tokenizer", "that of the run", tokenizer)
        return entry.documents
    if name == DOCUMENTS:
        return find_text(entry, kind.encoding)
    if kind.packer is None:
        return OneEach(num_samples(entry.dataset), fingerprint_files(entry.dataset))
    return find_measured(entry, kind.encoding, spec.row_tokens)


def _open_reader(spec: Spec, entry: Entry, lengths: Lengths) -> Reader:
    """Open what says where documents and samples come from; samples cannot be encoded."""
    if spec.kind_of(entry.documents is not None) == DOCUMENTS:
        return read_documents(entry, lengths, spec.row_tokens)
    numbers = range(*document_range(entry, len(lengths)))
    samples = NumberedSamples(open_stored(entry), str(entry.dataset.paths[0]))
    methods = SampleMethods(name="the run's encoder", packer=OnePerRow())
    return SampleReader(methods, entry.key, spec.seed, numbers, frozenset(), samples)
