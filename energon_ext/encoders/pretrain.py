# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Turns text into packed batches; the draw comes after packing.

Each source is packed separately, and the blend then draws among finished rows. A weight that
changes at step 1500 therefore takes effect at step 1500, a weight is a share of tokens, and every
row has one source.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from megatron.energon import Cooker, TextSample, stateless

from energon_ext.arguments import check_integer
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.rows import Row
from energon_ext.config.mix import Entry
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.planning import Planning, count_buffer_docs
from energon_ext.encoders.splicing import check_names, check_splices, names_of, plan_splice
from energon_ext.encoders.text import Document, TextDecoder, TextEncoder, cook_text, is_text
from energon_ext.encoders.text_key import check_text_keys
from energon_ext.encoders.text_sources import encoding_of, ensure_tokenized, has_same_tokens
from energon_ext.errors import ConfigError, SampleError, log_of
from energon_ext.packing import Packer, make_packer, saved_packer
from energon_ext.plan.cost import AttentionCost, Cost
from energon_ext.plan.source import PlannedSource
from energon_ext.samples.context import current_context
from energon_ext.splice.config import SpliceFields
from energon_ext.tokenizers.protocol import (
    Tokenizer,
    check_tokenizer,
    check_written,
    saved_tokenizer,
)
from energon_ext.tokenizers.tokenizers import load_tokenizer
from energon_ext.tokens.documents import Documents, Lengths
from energon_ext.tokens.reader import DocumentReader

logger = log_of(__name__)


class PackedTaskEncoder(DynamicBlendMixin, TextEncoder):
    """Pretraining on text; yields a :class:`~energon_ext.PackedBatch` of ``batch_size`` rows.

    Args:
        tokenizer: text to token ids.
        seq_len: T, positions of a row, at least 2.
        packing: ``bin`` (whole documents in full rows), ``sequential`` (one stream, cut at T), or
            a :class:`~energon_ext.packing.Packer`.
        packing_buffer_docs: documents that ``bin`` packs together.
        packing_max_docs_per_bin: maximum number of documents per row; None for no limit.
        packing_carry: share of the rows that is carried over to the next buffer, for fuller rows;
            None for the packer's default.
        alignment: every document begins at a multiple of this many positions; context parallelism
            needs ``2 * context_parallel_size``. It must divide ``seq_len``.
        mask_boundary_loss: weight 0 where input and label belong to different documents; by
            default only with ``bin``.
        train_on_eos: False gives weight 0 to labels that are the end-of-document token.
        balance: ``attention`` balances the rows of a planned step over ranks and micro-batches.
        cost: cost of a document by its length; by default
            :class:`~energon_ext.plan.cost.AttentionCost`.

    A source whose YAML entry has a ``splice:`` is shown at many positions instead of being packed.
    Text is tokenized on first use, into cached token files. Energon's ``shuffle_buffer_size`` and
    ``packing_buffer_size`` have no effect.

    Attributes:
        encoding_fingerprint: JSON values that change whenever the tokens of any sample change;
            required for a subclass with its own ``encode_document`` or cookers.
        named_documents, validation_starts, validation_offsets: options of spliced sources; see
            :class:`~energon_ext.SpliceTaskEncoder`.

    Raises:
        ConfigError: an option is out of range or does not apply to this packing, or the tokenizer
            is not a :class:`~energon_ext.tokenizers.protocol.Tokenizer`.

    Example:
        >>> from energon_ext.tokenizers.tokenizers import ByteTokenizer
        >>> PackedTaskEncoder(ByteTokenizer(), seq_len=1)
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: seq_len: 1 found, an integer >= 2 is needed; shorter rows \
have no transition to train.
    """

    cookers = [Cooker(cook_text)]
    decoder = TextDecoder()
    named_documents: bool | None = None
    validation_starts: int = 4
    validation_offsets: int = 8

    def __init__(
        self,
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        packing: str | Packer = "bin",
        packing_buffer_docs: int = 512,
        packing_max_docs_per_bin: int | None = None,
        packing_carry: float | None = None,
        alignment: int = 1,
        mask_boundary_loss: bool | None = None,
        train_on_eos: bool = True,
        balance: str | None = None,
        cost: Cost | None = None,
    ):
        check_tokenizer(tokenizer)
        check_integer("packing_buffer_docs", packing_buffer_docs, 1)
        if balance not in (None, "attention"):
            raise ConfigError(f"balance: {balance!r} found, 'attention' or None is needed.")
        if cost is not None and balance is None:
            raise ConfigError("cost: has no effect without balance='attention'; give both.")
        if not train_on_eos and tokenizer.eos_id is None:
            raise ConfigError("train_on_eos: False found, but the tokenizer has no EOS; remove it.")
        self.tokenizer = tokenizer
        self.seq_len = self.tokens_per_sample = seq_len
        self.packing_buffer_docs = packing_buffer_docs
        self.alignment = alignment
        self._packer = make_packer(
            packing,
            seq_len,
            max_docs_per_bin=packing_max_docs_per_bin,
            carry=packing_carry,
            alignment=None if alignment == 1 else alignment,
        )
        self.mask_boundary_loss = (
            not self._packer.cuts_documents if mask_boundary_loss is None else mask_boundary_loss
        )
        self.train_on_eos = train_on_eos
        self.cost = (cost or AttentionCost()) if balance else None
        self._assembler = BatchAssembler(
            seq_len,
            pad_id=tokenizer.pad_id,
            mask_boundary_loss=self.mask_boundary_loss,
            masked_label=None if train_on_eos else tokenizer.eos_id,
            alignment=alignment,
        )

    # Methods that a subclass may override ---------------------------------------------------

    @stateless
    def encode_document(self, sample: TextSample) -> Document:
        """Encode a sample as a document; override to read other samples or to weight labels."""
        if not is_text(sample.text):
            raise SampleError(
                f"Sample {sample.__key__}: text is {sample.text!r:.40}; Unicode text is needed."
            )
        return Document.derive_from(sample, tokens=self.tokenizer.encode_array(sample.text))

    def command_options(self) -> list[str] | None:
        name = self.tokenizer.name
        if name is None or not has_same_tokens(self, lambda: self._rebuilt_by_command(name)):
            return None
        return ["--tokenizer", name]

    def _rebuilt_by_command(self, tokenizer: str) -> TextEncoder:
        return PackedTaskEncoder(load_tokenizer(tokenizer), self.seq_len)

    def lengths_of(self, files: Documents, key: str) -> Lengths:
        """Return the lengths of the documents of token files as they are packed."""
        return files

    def token_file_meta(self) -> dict[str, Any]:
        """Return the content of the ``.meta.json`` next to token files of this encoder."""
        return {"tokenizer": self.tokenizer.fingerprint(), "vocab_size": self.tokenizer.vocab_size}

    def splice_of(self, entry: Entry) -> SpliceFields | None:
        """Return the splice of a source, from its entry; None to pack it as usual."""
        splice = entry.splice
        is_named = splice is not None and splice.dataset_name in (None, *names_of(entry.key))
        return splice if is_named else None

    def state_fingerprint(self) -> dict[str, Any]:
        return {
            **super().state_fingerprint(),
            "tokenizer": self.tokenizer.fingerprint(),
            **self._row_options(),
        }

    def _row_options(self) -> dict[str, Any]:
        """Return what a state depends on in addition to the tokenizer."""
        packing = {**self._packer.to_json(), "alignment": None}
        return {
            "seq_len": self.seq_len,
            "packing": packing.pop("name"),
            **{f"packing_{name}": value for name, value in packing.items() if value is not None},
            "alignment": self.alignment,
            "mask_boundary_loss": self.mask_boundary_loss,
            "train_on_eos": self.train_on_eos,
        }

    def saved_options(self) -> dict[str, Any]:
        """Return the arguments that rebuild the encoder as JSON values, except a custom cost."""
        cost = self.cost if isinstance(self.cost, AttentionCost) else None
        return {
            **self._row_options(),
            "packing_buffer_docs": self.packing_buffer_docs,
            "balance": None if self.cost is None else "attention",
            "cost": None if cost is None else vars(cost),
        }

    # The planned dataset --------------------------------------------------------------------

    def build_source(self, entry: Entry, planning: Planning) -> PlannedSource:
        """Plan the rows of one source, which are frames if it is spliced."""
        splice, files = self.splice_of(entry), self.token_files(entry, planning)
        if splice is not None:
            return plan_splice(self, splice, files, entry, planning)
        lengths = self.lengths_of(files, entry.key)
        return planning.pack(
            entry,
            lengths,
            DocumentReader(files, entry.key, self.seq_len),
            self._packer,
            former_packer=saved_packer if lengths is files else None,
        )

    def token_files(self, entry: Entry, planning: Planning) -> Documents:
        """Return the token files of a source: its own, or those tokenized from its text."""
        files = entry.documents
        if files is None:
            return planning.token_files[entry.key]
        check_written(files, self.tokenizer)
        return files

    @stateless
    def batch(self, rows: list[Row]) -> PackedBatch:
        """Assemble a batch from rows."""
        pad_id = current_context().pad_id
        assembler = self._assembler
        if pad_id is not None and pad_id != assembler.pad_id:
            assembler = dataclasses.replace(assembler, pad_id=pad_id)
        return assembler(rows, self.source_keys)

    def _padding(self) -> Callable[[Callable[[], Any]], Any]:
        return lambda read: Row([], slice_sources=[])

    def describe(self, planning: Planning) -> dict[str, Any]:
        """Return the tokenizer, the options and the nearest class of this package, as JSON."""
        classes = (c for c in type(self).__mro__ if c.__module__.startswith("energon_ext."))
        return {
            "class": next(classes).__name__,
            "tokenizer": saved_tokenizer(self.tokenizer),
            "options": self.saved_options(),
            "encoding": encoding_of(self) if planning.token_files else None,
        }

    def _reason_to_stream(self, *arguments: Any) -> None:
        """Return None: text is always planned."""

    def make_planning(
        self, entries: Sequence[Entry], seed: int, *, repeat: bool, validating: bool = False
    ) -> Planning:
        """Check the entries, and tokenize the text among them if necessary."""
        if not validating:  # validation builds one dataset per source
            self._check_chosen(entries)
        check_text_keys(self, entries)
        return Planning(
            seed=seed,
            repeat=repeat,
            validating=validating,
            row_tokens=self.seq_len,
            buffer_docs=max(self.packing_buffer_docs, count_buffer_docs(len(entries))),
            pad_id=check_splices(self, entries),
            token_files=ensure_tokenized(self, entries),
        )

    def _check_entries(self, entries: Sequence[Entry]) -> None:
        """Accept splices, which :meth:`make_planning` checks."""

    def _check_chosen(self, entries: Sequence[Entry]) -> None:
        """Raise ConfigError for a splice whose ``dataset_name`` is not a source of the run."""
        check_names(entries)
