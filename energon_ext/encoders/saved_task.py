# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Plan a saved run again from its metadataset and the spec in its state, without its encoder."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from energon_ext.config.mix import Entry, Mix, sample_entries, token_entries
from energon_ext.encoders.document_task import check_weighted, read_documents
from energon_ext.encoders.measured import find_measured
from energon_ext.encoders.plan_mix import find_kind, plan_mix
from energon_ext.encoders.sample_task import count_samples
from energon_ext.encoders.sources import numbers_of, open_stored
from energon_ext.encoders.task import Passes, Task
from energon_ext.encoders.text_sources import find_text
from energon_ext.plan.cost import load_cost
from energon_ext.plan.layout import ContextOptions
from energon_ext.plan.run import Run
from energon_ext.plan.source import Reader
from energon_ext.plan.spec import DOCUMENTS, Spec
from energon_ext.plan.topology import Topology
from energon_ext.samples.context import EncoderContext
from energon_ext.samples.methods import SampleMethods, refuse_to_encode
from energon_ext.samples.numbered import ALONE, NumberedSamples
from energon_ext.samples.packers import OnePerRow
from energon_ext.samples.reader import SampleReader
from energon_ext.tokens.documents import Documents, Lengths


def plan_saved(mix: Mix, spec: Spec, topology: Topology, as_whole: bool) -> Run:
    """Plan a mix as the run with this spec does.

    Args:
        as_whole: whether the blend repeats as a whole.

    Raises:
        EncoderNeededError: something is not cached, or was planned by code of the user's.
    """
    contexts = None if spec.contexts is None else ContextOptions.from_json(spec.contexts)
    task = SavedTask(saved=spec, cost=load_cost(spec.cost), contexts=contexts)
    passes = Passes(repeat=spec.repeat, as_whole=as_whole)
    return plan_mix(mix, task, topology, passes, ALONE).run


@dataclass(frozen=True, kw_only=True, eq=False)
class SavedTask(Task):
    """The task of a run whose encoder is not there: its rows are planned, but not read.

    What is cached of text and samples is found by the encoding that the spec names, and is never
    made here.
    """

    saved: Spec

    def spec(self, entries: Sequence[Entry], seed: int) -> Spec:
        return self.saved

    def open_sources(self, entries: Sequence[Entry]) -> dict[str, Lengths]:
        found = {entry.key: self._find(entry) for entry in sample_entries(entries)}
        for entry, documents in token_entries(entries):
            self._check(documents, entry)
            found[entry.key] = documents
        return found

    def _find(self, entry: Entry) -> Lengths:
        name, kind = find_kind(entry, self.saved)
        if name == DOCUMENTS:
            return find_text(entry, kind.encoding)
        if kind.packer is None:
            return count_samples(entry)
        return find_measured(entry, kind.encoding, self.saved.row_tokens)

    def _check(self, documents: Documents, entry: Entry) -> None:
        _, kind = find_kind(entry, self.saved)
        if kind.cut is not None:
            check_weighted(documents, entry)
        if tokenizer := self.saved.own.get("tokenizer"):
            documents.check_written("tokenizer", "that of the run", tokenizer)

    def reader(self, entry: Entry, opened: Lengths, spec: Spec) -> Reader:
        """Open what says where documents and samples come from; samples cannot be encoded."""
        if find_kind(entry, spec)[0] == DOCUMENTS:
            return read_documents(entry, opened, spec, None)
        numbers = numbers_of(entry, opened)
        samples = NumberedSamples(open_stored(entry), str(entry.dataset.paths[0]))
        methods = SampleMethods(name="the run's encoder", packer=OnePerRow())
        return SampleReader(methods, entry.key, spec.seed, numbers, frozenset(), samples)

    def assemble(self, rows: list[Any], context: EncoderContext) -> Any:
        return refuse_to_encode()

    def padding(self, read: Callable[[], Any]) -> Any:
        return refuse_to_encode()
