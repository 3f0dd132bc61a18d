# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Turns text into packed batches; the draw comes after packing.

Each source is packed separately, and the blend then draws among finished rows. A weight that
changes at step 1500 therefore takes effect at step 1500, a weight is a share of tokens, and every
row has one source.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

from megatron.energon import Cooker, TextSample, stateless

from energon_ext.arguments import check_integer
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.columns import columns_to_json
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.rows import Row, join_rows
from energon_ext.encoders.document_task import DocumentTask
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.text import Document, TextDecoder, TextEncoder, cook_text, is_text
from energon_ext.encoders.text_sources import has_same_tokens
from energon_ext.errors import ConfigError, SampleError
from energon_ext.packing import Packer, make_packer
from energon_ext.plan.context_cost import MeasuredCost
from energon_ext.plan.cost import AttentionCost, Cost
from energon_ext.plan.layout import ContextOptions
from energon_ext.plan.spec import DOCUMENTS, SpliceSpec
from energon_ext.prepare.documents import InputDocument
from energon_ext.prepare.job import Encoded
from energon_ext.samples.context import current_context
from energon_ext.splice.config import SpliceFields
from energon_ext.tokenizers.protocol import Tokenizer, check_tokenizer
from energon_ext.tokenizers.tokenizers import load_tokenizer

_Task = TypeVar("_Task", bound=DocumentTask)


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
        document_means: give batches what ``denominator="documents"`` needs: the number of trained
            labels in each document, also if it is cut. Needs ``mask_boundary_loss``.
        document_numbers: give batches the ``document`` and the ``visit`` of each segment, for
            losses per document. Needs ``mask_boundary_loss``; spliced sources have none.
        balance: ``attention`` balances the rows of a planned step over ranks and micro-batches.
        cost: cost of a document by its length; by default
            :class:`~energon_ext.plan.cost.AttentionCost`.
        contexts: put the documents of each step into micro-batches of several context-parallel
            sizes; see :class:`~energon_ext.plan.layout.ContextOptions`. Needs
            ``mask_boundary_loss``, and neither ``balance`` nor ``alignment``.

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
        document_means: bool = False,
        document_numbers: bool = False,
        balance: str | None = None,
        cost: Cost | None = None,
        contexts: ContextOptions | None = None,
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
        if document_numbers and not self.mask_boundary_loss:
            raise ConfigError(
                "document_numbers: the first token of a document would be a label of the one "
                "before; set mask_boundary_loss=True."
            )
        self.document_numbers = document_numbers
        self.contexts = contexts
        if contexts is not None:
            self._check_contexts(contexts, balance)
        self.train_on_eos = train_on_eos
        self.cost = (cost or AttentionCost()) if balance else None
        self._assembler = BatchAssembler(
            seq_len,
            pad_id=tokenizer.pad_id,
            mask_boundary_loss=self.mask_boundary_loss,
            masked_label=None if train_on_eos else tokenizer.eos_id,
            alignment=alignment,
            document_means=document_means,
        )

    def _check_contexts(self, contexts: ContextOptions, balance: str | None) -> None:
        """Raise ConfigError for options that do not go with layouts."""
        if not isinstance(contexts.cost, MeasuredCost):
            raise ConfigError(
                f"contexts: cost is a {type(contexts.cost).__name__}; a MeasuredCost is needed, "
                f"which states contain."
            )
        if not self.mask_boundary_loss:
            raise ConfigError(
                "contexts: the first token of a document would be a label of the one before, which "
                "may run elsewhere; set mask_boundary_loss=True."
            )
        for name, found, allowed in (("balance", balance, None), ("alignment", self.alignment, 1)):
            if found != allowed:
                raise ConfigError(
                    f"{name}: {found!r} found, but contexts balance and align micro-batches "
                    f"themselves; leave it out."
                )
        contexts.check_rows(self.seq_len)

    # Methods that a subclass may override ---------------------------------------------------

    @stateless
    def encode_document(self, sample: TextSample) -> Document:
        """Encode a sample as a document; override to read other samples or to weight labels."""
        if not is_text(sample.text):
            raise SampleError(
                f"Sample {sample.__key__}: text is {sample.text!r:.40}; Unicode text is needed."
            )
        return Document.derive_from(sample, tokens=self.tokenizer.encode_array(sample.text))

    def encode_many(
        self, documents: Sequence[InputDocument]
    ) -> Sequence[Encoded | SampleError | None]:
        if type(self).encode_document is not PackedTaskEncoder.encode_document:
            return super().encode_many(documents)
        found: list[Any] = [each.text or getattr(each.sample, "text", None) for each in documents]
        texts = {place: text for place, text in enumerate(found) if is_text(text)}
        encoded = self.tokenizer.encode_batch([*texts.values()]) if texts else ()
        results: list[Encoded | None] = [None] * len(documents)
        for place, tokens in zip(texts, encoded):
            results[place] = Encoded([(tokens, None)])
        return results

    def command_options(self) -> list[str] | None:
        name = self.tokenizer.name
        if name is None or not has_same_tokens(self, lambda: self._rebuilt_by_command(name)):
            return None
        return ["--tokenizer", name]

    def _rebuilt_by_command(self, tokenizer: str) -> TextEncoder:
        return PackedTaskEncoder(load_tokenizer(tokenizer), self.seq_len)

    def token_file_meta(self) -> dict[str, Any]:
        """Return the content of the ``.meta.json`` next to token files of this encoder."""
        return {
            "tokenizer": self.tokenizer.fingerprint(),
            "vocab_size": self.tokenizer.vocab_size,
            **columns_to_json(self.columns),
        }

    def state_fingerprint(self) -> dict[str, Any]:
        return {**super().state_fingerprint(), "tokenizer": self.tokenizer.fingerprint()}

    # The planned dataset --------------------------------------------------------------------

    def task(self) -> DocumentTask:
        return self._document_task(DocumentTask, splice=self._splice_spec())

    def _document_task(self, task_class: type[_Task], **options: Any) -> _Task:
        return task_class(
            encoder=self,
            fingerprint=self.state_fingerprint,
            packers={DOCUMENTS: self._packer},
            cost=self.cost,
            contexts=self.contexts,
            buffer_docs=self.packing_buffer_docs,
            loss=self._loss(),
            counts_parts=self._assembler.document_means,
            untrained=self._assembler.masked_label,
            numbers_documents=self.document_numbers,
            **options,
        )

    def _loss(self) -> dict[str, Any]:
        """Return what batches say of the loss."""
        return {
            "alignment": self.alignment,
            "mask_boundary_loss": self.mask_boundary_loss,
            "train_on_eos": self.train_on_eos,
        }

    def _splice_spec(self, splice: SpliceFields | None = None, **options: Any) -> SpliceSpec:
        """Return how documents are spliced: by their entries, or by a splice of the encoder."""
        return SpliceSpec(
            config=None if splice is None else splice.to_json(),
            named_documents=self.named_documents,
            starts=self.validation_starts,
            offsets=self.validation_offsets,
            pad_id=self.tokenizer.pad_id,
            vocab_size=self.tokenizer.vocab_size,
            **options,
        )

    @stateless
    def batch(self, rows: list[Row]) -> PackedBatch:
        """Assemble a batch from rows."""
        context, assembler = current_context(), self._assembler
        if context.pad_id is not None and context.pad_id != assembler.pad_id:
            assembler = dataclasses.replace(assembler, pad_id=context.pad_id)
        if context.row_tokens is not None:
            assembler = dataclasses.replace(assembler, seq_len=context.row_tokens)
        if context.context_size is None:
            return assembler(rows, self.source_keys, context.columns)
        assert self.contexts is not None, "only layouts have batches of a size"
        alignment = self.contexts.segment_alignment(context.context_size)
        row, assembler = join_rows(rows), dataclasses.replace(assembler, alignment=alignment)
        batch = assembler.fitting(row)([row], self.source_keys, context.columns)
        return dataclasses.replace(batch, context_size=context.context_size)
