# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Sources whose documents are spliced, in any encoder of packed batches.

What becomes of them stands on the entry of the YAML (``splice:``) or comes from the encoder. A
spliced source yields rows like any other, so it can be weighted, scheduled and interleaved.
"""

import dataclasses
import hashlib
from types import MappingProxyType
from typing import Any, Mapping, Sequence

import numpy as np
from megatron.energon import WorkerConfig

from energon_ext.batch.collate import BatchAssembler
from energon_ext.config.mix import Entry
from energon_ext.config.references import TokenFileFactory
from energon_ext.documents.file_set import TokenFiles
from energon_ext.encoders.mixin import DynamicBlendMixin
from energon_ext.encoders.splice_documents import DocumentStore, TokenFileDocuments
from energon_ext.encoders.tokenizers import Tokenizer
from energon_ext.errors import ConfigError
from energon_ext.plan.source import Source
from energon_ext.splice import SpliceIndex, select_documents
from energon_ext.splice.config import SpliceFields
from energon_ext.splice.index import ORDER
from energon_ext.splice.source import SpliceSource, log_plan
from energon_ext.splice.validation import GridIndex

#: Up to so many documents of a source, each is counted under a name of its own.
NAMED_DOCUMENTS = 64


class SplicingMixin(DynamicBlendMixin):
    """Builds the sources that are spliced.

    Attributes:
        named_documents: give documents names of their own; None for where they are at most 64.
        validation_starts, validation_offsets: of the grid that validation shows.
    """

    tokenizer: Tokenizer
    seq_len: int
    alignment: int
    mask_boundary_loss: bool
    encode_document: Any
    named_documents: bool | None = None
    validation_starts: int = 4
    validation_offsets: int = 8
    _assembler: BatchAssembler
    _validating: bool = False
    _tokenized: Mapping[str, TokenFiles] = MappingProxyType({})

    # What a subclass may change -------------------------------------------------------------

    def splice_of(self, entry: Entry) -> SpliceFields | None:
        """What is spliced of a source: what its entry says; None to pack it as ever."""
        splice = entry.splice
        return splice if splice is not None and is_named(entry.key, splice.dataset_name) else None

    def open_documents(self, entry: Entry, worker_config: WorkerConfig) -> DocumentStore:
        """The documents of a source, all of them on every rank."""
        files = self.token_files(entry)
        is_text = not isinstance(entry.dataset, TokenFileFactory)
        first, stop = document_range(entry.dataset, len(files))
        return TokenFileDocuments(files, first, stop, has_keys=is_text)

    def token_files(self, entry: Entry) -> TokenFiles:
        """The token files of a source: its own, or those that were made of its text."""
        if not isinstance(entry.dataset, TokenFileFactory):
            return self._tokenized[entry.key]
        files = entry.dataset.files
        files.check_tokenizer(self.tokenizer.fingerprint(), self.tokenizer.vocab_size)
        return files

    def document_metadata(self, store: DocumentStore, number: int) -> dict[str, Any]:
        """What :meth:`SpliceSource.metadata_of` gives for a document."""
        key = {} if store.keys is None else {"key": store.keys[number]}
        return {"document": number, "tokens": int(store.lengths[number]), **key}

    def names_in_batches(self, sources: Sequence[Source]) -> tuple[str, ...]:
        """What the batches of a run may call their sources."""
        return tuple(sorted({name for source in sources for name in source.part_shares}))

    # For the encoder ------------------------------------------------------------------------

    def _take_splices(self, entries: Sequence[Entry]) -> None:
        """Refuse what rows cannot keep; take the filler that the splices ask for, if one does."""
        pads: dict[int, str] = {}
        named: dict[tuple[str, str], list[str]] = {}
        for entry in entries:
            where = ""
            if entry.splice is not None:
                where = f"{entry.splice_where}: "
                name = entry.splice.dataset_name
                if name is not None:
                    named.setdefault((where, name), []).append(entry.key)
            splice = self.splice_of(entry)
            if splice is not None:
                self._check_splice(splice, where)
                if splice.pad_token_id is not None:
                    pads[splice.pad_token_id] = entry.key
        for (where, name), own in named.items():
            if not any(is_named(key, name) for key in own):
                raise ConfigError(
                    f"{where}dataset_name: {name!r} found, the sources there are {', '.join(own)}."
                )
        if len(pads) > 1:
            (one, key), (other, other_key), *_ = pads.items()
            raise ConfigError(
                f"pad_token_id: {one} of {key} and {other} of {other_key}; all rows of a batch "
                f"have one filler. Give all of them the same."
            )
        for pad_id in pads:  # one at most
            self._assembler = dataclasses.replace(self._assembler, pad_id=pad_id)

    def _check_splice(self, splice: SpliceFields, where: str) -> None:
        if self.alignment > 1:
            raise ConfigError(
                f"{where}alignment: {self.alignment} found; frames begin at any offset, so they "
                f"cannot be aligned for context parallelism. Leave it 1."
            )
        for field in ("pad_token_id", "eos_token_id"):
            token = getattr(splice, field)
            if token is not None and token >= self.tokenizer.vocab_size:
                raise ConfigError(
                    f"{where}{field}: {token} found, the tokenizer has ids below "
                    f"{self.tokenizer.vocab_size}."
                )
        if splice.pack_contents and not self.mask_boundary_loss:
            raise ConfigError(
                f"{where}pack_contents: True found with mask_boundary_loss=False; contents in a "
                f"frame do not continue each other. Set mask_boundary_loss=True."
            )

    def _spliced(
        self,
        splice: SpliceFields,
        entry: Entry,
        worker_config: WorkerConfig,
        repeat: bool,
    ) -> SpliceSource:
        """The frames of one source."""
        key, shuffle_key = entry.key, entry.names.shuffle_key
        store = self.open_documents(entry, worker_config)
        numbers = select_documents(
            store.lengths,
            splice,
            seq_len=self.seq_len,
            keys=store.keys,
            source=shuffle_key,
        )
        documents = [store.tokens(number) for number in numbers.tolist()]
        # A view stays a view; ids are below 2^31, and int32 halves what the workers share.
        documents = [d if d.dtype.itemsize <= 4 else d.astype(np.int32) for d in documents]
        few = len(numbers) <= NAMED_DOCUMENTS
        named = few if self.named_documents is None else self.named_documents
        lengths = store.lengths[numbers]
        examples: SpliceIndex | GridIndex
        try:
            if self._validating:
                shown = {"starts": self.validation_starts, "offsets": self.validation_offsets}
                examples = GridIndex(lengths, self.seq_len, splice, **shown)
            else:
                order = f"{shuffle_key}/{worker_config.seed_offset}"
                examples = SpliceIndex(lengths, self.seq_len, splice, key=order)
                log_plan(examples, numbers, key)
        except ConfigError as error:
            raise ConfigError(f"Source {key}: {error}") from error
        training = repeat and not self._validating
        return SpliceSource(
            examples,
            documents,
            [f"{key}/doc{number}" if named else key for number in numbers],
            key=key,
            config=splice,
            seq_len=self.seq_len,
            fill_id=self._assembler.pad_id if splice.pad_token_id is None else splice.pad_token_id,
            epochs=entry.max_epochs if training else entry.loaded.repetitions or 1,
            fingerprint={
                **splice.to_json(),
                "documents": _digest(store, numbers, documents),
                "order": ORDER,
            },
            metadata=[self.document_metadata(store, number) for number in numbers.tolist()],
        )


def document_range(factory: Any, total: int) -> tuple[int, int]:
    """First document of a source and the one after the last, of all that its files hold."""
    if getattr(factory, "shuffle_over_epochs", 1) not in (1, None, -1):
        raise ConfigError(
            f"{factory.paths[0]}: shuffle_over_epochs_multiplier is of samples that are streamed; "
            f"every epoch of text has an order of its own."
        )
    subset = getattr(factory, "subset", None)
    return (0, total) if subset is None else subset.compute_subset(total)


def is_named(key: str, name: str | None) -> bool:
    """Whether a source is what ``dataset_name`` says: its key, its path or its folder."""
    path = key.partition(":")[0]
    return name is None or name in (key, path, path.rsplit("/", 1)[-1])


def _digest(store: DocumentStore, numbers: np.ndarray, documents: Sequence[np.ndarray]) -> str:
    if isinstance(store, TokenFileDocuments):
        return store.digest(numbers)
    digest = hashlib.sha256()
    for tokens in documents:
        digest.update(len(tokens).to_bytes(8, "little"))
        digest.update(tokens.tobytes())
    return digest.hexdigest()
