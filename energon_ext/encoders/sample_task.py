# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of any TaskEncoder by number, if the encoder and its sources allow it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from energon_ext.batch.rows import Row
from energon_ext.config.mix import Entry, sample_entries, token_entries
from energon_ext.encoders.document_task import read_documents
from energon_ext.encoders.measured import ensure_measured
from energon_ext.encoders.plan_mix import MAX_BUFFER_DOCS, shuffles_over_epochs
from energon_ext.encoders.sources import numbers_of, open_alone
from energon_ext.encoders.splicing import refuse_splices
from energon_ext.encoders.task import EncoderTask, Passes
from energon_ext.encoders.text_key import check_text_keys
from energon_ext.errors import ConfigError, log_of
from energon_ext.packing import BestFitPacker
from energon_ext.plan.cost import cost_to_json
from energon_ext.plan.layout import ContextOptions
from energon_ext.plan.source import Reader
from energon_ext.plan.spec import DOCUMENTS, SAMPLES, KindSpec, Spec
from energon_ext.samples.context import encoder_context
from energon_ext.samples.methods import SampleMethods
from energon_ext.samples.numbered import NumberedSamples
from energon_ext.samples.one_each import OneEach
from energon_ext.samples.reader import SampleReader
from energon_ext.samples.stored_files import fingerprint_files, num_samples
from energon_ext.tokenizers.protocol import check_tokenizer, check_written
from energon_ext.tokens.documents import Lengths

logger = log_of(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleTask(EncoderTask):
    """One row per sample, or samples packed by their lengths, together with token files.

    Attributes:
        methods: the encoder's, by which samples are planned, measured and read.
        row_tokens: positions that a row counts as if samples are not packed.
        block: samples that a plan keeps close together.
        make_padding: makes padding of a row that was read; None if the last step is dropped.
        streamed: why samples are streamed whatever the sources are; None if they are not.
        planned: what the samples are, if an encoder refuses to stream them.
    """

    methods: SampleMethods
    row_tokens: int = 0
    block: int = 1
    make_padding: Callable[[Any], Any] | None = None
    streamed: str | None = None
    planned: str | None = None

    @property
    def _row_tokens(self) -> int:
        return self.methods.packer.seq_len if self.methods.are_packed else self.row_tokens

    def spec(self, entries: Sequence[Entry], seed: int) -> Spec:
        methods = self.methods
        packer = methods.packer.to_json() if methods.are_packed else None
        kinds = {SAMPLES: KindSpec(packer=packer, encoding=methods.identity, block=self.block)}
        if methods.reads_tokens:
            kinds[DOCUMENTS] = KindSpec(packer=BestFitPacker(methods.packer.seq_len).to_json())
        return Spec(
            row_tokens=self._row_tokens,
            kinds=kinds,
            seed=seed,
            buffer_docs=MAX_BUFFER_DOCS,
            pads=self.make_padding is not None,
            cost=cost_to_json(self.cost),
            own=self.fingerprint(),
        )

    def open_sources(self, entries: Sequence[Entry]) -> dict[str, Lengths]:
        methods, samples = self.methods, sample_entries(entries)
        found: dict[str, Lengths] = (
            {**ensure_measured(self.encoder, methods, samples)}
            if methods.are_packed
            else {entry.key: count_samples(entry) for entry in samples}
        )
        for entry, documents in token_entries(entries):
            check_tokenizer(methods.tokenizer)
            check_written(documents, methods.tokenizer)
            found[entry.key] = documents
        return found

    def reader(self, entry: Entry, opened: Lengths, spec: Spec) -> Reader:
        methods = self.methods
        if not entry.has_samples:
            convert = functools.partial(_pack_tokens, methods, entry.key)
            return read_documents(entry, opened, spec, methods.tokenizer, convert=convert)
        return self.read_samples(methods, entry, opened, spec)

    def read_samples(
        self, methods: SampleMethods, entry: Entry, opened: Lengths, spec: Spec
    ) -> SampleReader:
        """Open what reads the rows of samples with some methods."""
        numbers = numbers_of(entry, opened)
        excluded = frozenset(() if entry.excluded is None else entry.excluded.tolist())
        samples = NumberedSamples(open_alone(self.encoder, entry), str(entry.dataset.paths[0]))
        table = opened if methods.are_packed else None
        return SampleReader(methods, entry.key, spec.seed, numbers, excluded, samples, table)

    def padding(self, read: Callable[[], Any]) -> Any:
        assert self.make_padding is not None, "the spec pads"
        return self.make_padding(read())

    def is_streamed(
        self, entries: Sequence[Entry], stages: Mapping[str, Any], passes: Passes
    ) -> bool:
        check_text_keys(self.encoder, entries)
        refuse_splices(entries, self.methods.name)
        _refuse_fields_of_documents(entries, self.methods.name)
        reason = self._find_reason(entries, stages, passes)
        if self.cost is not None and (reason is not None or not self._row_tokens):
            raise ConfigError(
                f"{self.methods.name}.cost: needs planned rows of samples with lengths; "
                f"{reason or 'the encoder has no length_of'}."
            )
        if reason is None:
            return False
        for entry in entries:
            if entry.order is not None:
                raise ConfigError(
                    f"{entry.where}.order: samples are streamed in Energon's own order, since "
                    f"{reason}; change that, or remove it."
                )
            if entry.budget is not None:
                raise ConfigError(
                    f"{entry.budget.where}.{entry.budget.unit}: samples are streamed, which reads "
                    f"ranges only, since {reason}; change that, or give a `range`."
                )
        if self.planned is not None:
            raise ConfigError(
                f"{self.methods.name}: {self.planned} are planned by number, but {reason}. Change "
                f"that, or copy them into local JSON Lines."
            )
        logger.info("Samples are streamed, which fixes the ranks x workers: %s.", reason)
        return True

    def _find_reason(
        self, entries: Sequence[Entry], stages: Mapping[str, Any], passes: Passes
    ) -> str | None:
        methods = self.methods
        if reason := self.streamed or methods.unplanned:
            return reason
        # Packed samples are validated without padding, too, unless some rows are left over.
        is_complete = passes.repeat or (passes.validating and methods.are_packed)
        if not is_complete and self.make_padding is None:
            return "every sample is read once, and without make_padding the last batch may be short"
        if stages.get("batch_size") is None:
            return "without a batch_size there are no batches"
        if stages.get("packing_buffer_size") is not None and not methods.are_packed:
            return (
                "packing_buffer_size packs samples whose lengths are known only after reading them"
            )
        for entry, _ in token_entries(entries):
            if not methods.reads_tokens:
                return f"{entry.key} has token files; the encoder lacks length_of or pack_tokens"
        return next(filter(None, map(_reason_of_source, sample_entries(entries))), None)


def _reason_of_source(entry: Entry) -> str | None:
    """Return why the samples of a source must be streamed, if they must."""
    if shuffles_over_epochs(entry):
        return f"{entry.key} has a shuffle_over_epochs_multiplier"
    if entry.repetitions != int(entry.repetitions):
        return f"{entry.key} is repeated {entry.repetitions} times"
    return None


def count_samples(entry: Entry) -> OneEach:
    """Return the lengths of samples that are not packed."""
    return OneEach(num_samples(entry.dataset), fingerprint_files(entry.dataset))


def _refuse_fields_of_documents(entries: Sequence[Entry], encoder: str) -> None:
    """Raise ConfigError for samples with a field of an entry that is for tokenized documents."""
    for entry in sample_entries(entries):
        fields = {"columns": entry.columns, "transform": entry.transform}
        for name in (name for name, value in fields.items() if value):
            raise ConfigError(
                f"{entry.where}.{name}: {encoder} reads samples, and this field is for tokenized "
                f"documents; let the encoder do it itself."
            )


def _pack_tokens(methods: SampleMethods, key: str, row: Row) -> Any:
    """Call the ``pack_tokens`` of an encoder, which then knows the source of the row."""
    assert methods.pack_tokens is not None, "the encoder reads token files"
    with encoder_context(source_key=key):
        return methods.pack_tokens(row)


def refuse_contexts(encoder: Any, contexts: Any) -> None:
    """Raise ConfigError if an encoder of samples is to read its steps in layouts."""
    if isinstance(contexts, ContextOptions):
        raise ConfigError(
            f"contexts: {type(encoder).__name__} packs samples into rows, and only the lengths of "
            f"whole samples are known, so a layout cannot take its rows apart; leave it out, or "
            f"lay out units of your own with energon_ext.plan.layout.lay_out."
        )
