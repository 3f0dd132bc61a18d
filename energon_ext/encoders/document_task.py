# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Token files, and text that is tokenized once, in packed rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from energon_ext.arguments import choices
from energon_ext.batch.rows import Row
from energon_ext.config.mix import Entry, sample_entries, token_entries
from energon_ext.encoders.task import EncoderTask
from energon_ext.encoders.text import TextEncoder
from energon_ext.encoders.text_key import check_text_keys
from energon_ext.encoders.text_sources import encoding_of, ensure_tokenized
from energon_ext.errors import ConfigError, EncoderNeededError
from energon_ext.plan.cost import cost_to_json
from energon_ext.plan.source import Reader
from energon_ext.plan.spec import DOCUMENTS, Cut, KindSpec, Spec, SpliceSpec
from energon_ext.tokenizers.protocol import Tokenizer, check_written
from energon_ext.tokens.documents import Documents, Lengths
from energon_ext.tokens.reader import DocumentReader
from energon_ext.tokens.transformed import Changes, bind


@dataclass(frozen=True, kw_only=True, eq=False)
class DocumentTask(EncoderTask):
    """Pretraining on documents.

    Attributes:
        encoder: tokenizes text, and batches rows.
        buffer_docs, loss, splice, cut: see :class:`~energon_ext.plan.spec.Spec` and
            :class:`~energon_ext.plan.spec.KindSpec`.
        counts_parts, untrained, numbers_documents: see
            :class:`~energon_ext.tokens.reader.DocumentReader`.
    """

    encoder: TextEncoder
    buffer_docs: int
    loss: Mapping[str, Any]
    splice: SpliceSpec | None = None
    cut: Cut | None = None
    counts_parts: bool = False
    untrained: int | None = None
    numbers_documents: bool = False

    def spec(self, entries: Sequence[Entry], seed: int) -> Spec:
        documents = KindSpec(
            packer=self.packers[DOCUMENTS].to_json(),
            encoding=encoding_of(self.encoder) if sample_entries(entries) else None,
            cut=self.cut,
            splice=self.splice,
        )
        return Spec(
            row_tokens=self.encoder.seq_len,
            kinds={DOCUMENTS: documents},
            seed=seed,
            buffer_docs=self.buffer_docs,
            cost=cost_to_json(self.cost),
            contexts=None if self.contexts is None else self.contexts.to_json(),
            loss=self.loss,
            own=self.fingerprint(),
        )

    def open_sources(self, entries: Sequence[Entry]) -> dict[str, Lengths]:
        check_text_keys(self.encoder, entries)
        if self.numbers_documents:
            self._refuse_splices(entries)
        found: dict[str, Lengths] = {**ensure_tokenized(self.encoder, entries)}
        for entry, documents in token_entries(entries):
            self.check(documents, entry)
            found[entry.key] = documents
        return found

    def _refuse_splices(self, entries: Sequence[Entry]) -> None:
        """Raise ConfigError for splices, whose segments are not documents of a plan."""
        own = self.splice is not None and self.splice.config is not None
        places = [entry.splice_where for entry in entries if entry.splice is not None]
        for where in [*places, *(["splice of the encoder"] if own else [])]:
            raise ConfigError(
                f"{where}: document_numbers cannot number spliced documents, which have losses of "
                f"their own with named_documents; leave one of the two out."
            )

    def check(self, documents: Documents, entry: Entry) -> None:
        """Raise ConfigError for token files that the encoder cannot read."""
        check_written(documents, self.encoder.tokenizer)

    def reader(self, entry: Entry, opened: Lengths, spec: Spec) -> Reader:
        # What is left of a document that is cut to the length of a row counts as the whole.
        options = {
            "counts_parts": self.counts_parts and self.cut is None,
            "untrained": self.untrained,
            "numbers_documents": self.numbers_documents,
        }
        return read_documents(entry, opened, spec, self.encoder.tokenizer, **options)

    def padding(self, read: Callable[[], Any]) -> Row:
        return Row([], slice_sources=[])


def read_documents(
    entry: Entry,
    opened: Lengths,
    spec: Spec,
    tokenizer: Tokenizer | None,
    **options: Any,
) -> Reader:
    """Open what reads the rows of documents.

    Args:
        tokenizer: knows the ids of tokens that a transform names; None if there is none.
        **options: further fields of :class:`~energon_ext.tokens.reader.DocumentReader`.
    """
    assert isinstance(opened, Documents), "a source of documents has some"
    changes = None
    if entry.transform is not None:
        if options.get("counts_parts"):
            raise ConfigError(
                f"{entry.where}.transform: document_means needs documents as they are stored; "
                f"remove one of the two."
            )
        transform = bind(entry.transform, opened, entry.others, f"{entry.where}.transform")
        key = f"{spec.seed}/{entry.names.shuffle_key}"
        vocab_size = 2**31 if tokenizer is None else tokenizer.vocab_size
        token_id = functools.partial(_token_id, entry, tokenizer)
        changes = Changes(transform, key, token_id, vocab_size)
    fields = {"others": entry.others, "changes": changes, **options}
    return DocumentReader(opened, entry.key, spec.row_tokens, **fields)


def _token_id(entry: Entry, tokenizer: Tokenizer | None, name: str) -> int:
    """Return the id of an added token by its name; ConfigError if the tokenizer has no such one."""
    if tokenizer is None:
        raise EncoderNeededError(
            f"{entry.where}.transform: the id of {name!r} needs the tokenizer of the run; give "
            f"--encoder, or write the id into the metadataset."
        )
    known = tokenizer.added_tokens()
    if name not in known:
        raise ConfigError(
            f"{entry.where}.transform: the tokenizer has no token {name!r}; it has "
            f"{choices(name, known)} An id is allowed, too."
        )
    return known[name]


def check_weighted(documents: Documents, entry: Entry) -> None:
    """Raise ConfigError for token files without label weights, in which no answer is marked."""
    if prefix := documents.unweighted:
        raise ConfigError(
            f"{entry.key}: {prefix} has no label weights, so questions would be trained like "
            f"answers; write it with `energon-ext prepare --chat`, or use a PackedTaskEncoder."
        )
