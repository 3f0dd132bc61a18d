# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Text to packed batches, choosing last.

Each source is loaded, repeated, tokenized, shuffled and packed on its own; the blend then chooses
among finished rows. A weight that changes at batch 1500 therefore changes batch 1500, a weight is a
share of tokens, and every row has one source.
"""

from __future__ import annotations

import copy
from typing import Any, Sequence

from megatron.energon import Cooker, TaskEncoder, TextSample, WorkerConfig, stateless
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.metadataset.loader_interface import LoadedDataset
from megatron.energon.task_encoder.base import get_failure_tolerance, get_stateless
from megatron.energon.task_encoder.cooking import basic_sample_keys
from megatron.energon.wrappers.concat_dataset import ConcatDataset
from megatron.energon.wrappers.map_dataset import MapDataset
from megatron.energon.wrappers.shuffle_buffer_dataset import ShuffleBufferDataset

from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.rows import Row
from energon_ext.batch.slots import BatchSlots
from energon_ext.config.source_key import max_epochs_of
from energon_ext.documents.text import Document, PackedRows
from energon_ext.documents.token_file_factory import TokenFileFactory
from energon_ext.encoders.mixin import DynamicBlendMixin, collapse_sources
from energon_ext.encoders.tokenizers import Tokenizer
from energon_ext.errors import ConfigError, SampleError
from energon_ext.mixture.choice import ChoiceDataset, Source
from energon_ext.packing import (
    BinPacker,
    BinPlanner,
    Packer,
    Planner,
    SequentialPacker,
    SequentialPlanner,
)
from energon_ext.packing.packers import DEFAULT_CARRY

PACKINGS = ("bin", "sequential")

#: Documents of a token file that are packed together, unless ``packing_buffer_docs`` is more.
TOKEN_FILE_BUFFER_DOCS = 4096


@stateless
def cook_text(sample: dict) -> TextSample:
    """A crude JSONL or webdataset sample as text: ``json`` with a ``text`` field, or ``txt``."""
    content = sample.get("json", sample)
    text = content.get("text", sample.get("txt"))
    if not isinstance(text, str):
        raise SampleError(
            f"Sample {sample['__key__']}: no `text`; it has {sorted(k for k in content)}."
        )
    return TextSample(**basic_sample_keys(sample), text=text)


class PackedTaskEncoder(DynamicBlendMixin, TaskEncoder):
    """Pretraining on text: yields a :class:`~energon_ext.PackedBatch` of ``batch_size`` rows.

    Args:
        tokenizer: text to token ids.
        seq_len: T, positions of a row, at least 2.
        packing: ``bin`` (whole documents in full rows) or ``sequential`` (one stream, cut at T).
        packing_buffer_docs: documents that ``bin`` looks at together.
        packing_max_docs_per_bin: most documents in a row, None for no limit.
        packing_carry: share of that buffer that is left for the next rows, for fuller rows.
        alignment: every document begins at a multiple of so many positions; context parallelism
            needs ``2 * context_parallel_size``. The sequence length must be a multiple of it.
        mask_boundary_loss: weight 0 where input and label are of different documents; by default
            only with ``bin``.
        train_on_eos: False gives weight 0 to labels that are the end-of-document token.

    Energon's ``shuffle_buffer_size`` (documents, per source) and ``packing_buffer_size`` (in place
    of ``packing_buffer_docs``) keep their meaning.

    Raises:
        ConfigError: a sequence length below 2, an unknown packing, a buffer without documents, an
            alignment with ``sequential`` or of which ``seq_len`` is no multiple,
            ``train_on_eos=False`` with a tokenizer that has no such token.

    Example:
        >>> from energon_ext.encoders.tokenizers import ByteTokenizer
        >>> PackedTaskEncoder(ByteTokenizer(), seq_len=1)
        Traceback (most recent call last):
        energon_ext.errors.ConfigError: row_length (sequence length): 1 found, an integer >= 2 \
is needed; a shorter row has no transition to train.
    """

    cookers = [Cooker(cook_text)]

    def __init__(
        self,
        tokenizer: Tokenizer,
        seq_len: int,
        *,
        packing: str = "bin",
        packing_buffer_docs: int = 512,
        packing_max_docs_per_bin: int | None = None,
        packing_carry: float = DEFAULT_CARRY,
        alignment: int = 1,
        mask_boundary_loss: bool | None = None,
        train_on_eos: bool = True,
    ):
        if packing not in PACKINGS:
            raise ConfigError(f"packing: {packing!r} found, {' or '.join(PACKINGS)} is allowed.")
        if alignment > 1 and packing == "sequential":
            raise ConfigError(
                "alignment needs packing='bin': in a sequential stream the documents of a row meet "
                "anywhere."
            )
        if not train_on_eos and tokenizer.eos_id is None:
            raise ConfigError("train_on_eos=False, but the tokenizer has no EOS; leave it True.")
        self.tokenizer = tokenizer
        self.seq_len = self.tokens_per_sample = seq_len
        self.packing = packing
        self.packing_buffer_docs = packing_buffer_docs
        self.packing_max_docs_per_bin = packing_max_docs_per_bin
        self.packing_carry = packing_carry
        self.alignment = alignment
        self.mask_boundary_loss = (
            packing == "bin" if mask_boundary_loss is None else mask_boundary_loss
        )
        self.train_on_eos = train_on_eos
        self._shuffle_buffer_docs = 0
        self._sources: tuple[str, ...] = ()
        self._slots = BatchSlots(0)
        self._assembler = BatchAssembler(
            seq_len,
            pad_id=tokenizer.pad_id,
            mask_boundary_loss=self.mask_boundary_loss,
            masked_label=None if train_on_eos else tokenizer.eos_id,
            alignment=alignment,
        )
        self._new_packer()  # refuses bad sizes now, in the main process

    # What a subclass may change -------------------------------------------------------------

    @stateless
    def encode_document(self, sample: TextSample) -> Document:
        """One sample as a document; override to read other samples or to weight labels."""
        return Document.derive_from(sample, tokens=self.tokenizer.encode_array(sample.text))

    def state_fingerprint(self) -> dict[str, Any]:
        return {
            **super().state_fingerprint(),
            "tokenizer": self.tokenizer.fingerprint(),
            "seq_len": self.seq_len,
            "packing": self.packing,
            "packing_buffer_docs": self.packing_buffer_docs if self.packing == "bin" else None,
            "packing_max_docs_per_bin": self.packing_max_docs_per_bin,
            "packing_carry": self.packing_carry if self.packing == "bin" else None,
            "alignment": self.alignment,
            "mask_boundary_loss": self.mask_boundary_loss,
            "train_on_eos": self.train_on_eos,
            "shuffle_buffer_docs": self._shuffle_buffer_docs,
        }

    # Energon's stages -----------------------------------------------------------------------

    def build_train_datasets(
        self,
        *,
        shuffle_buffer_size: int | None = None,
        packing_buffer_size: int | None = None,
        **kwargs: Any,
    ) -> SavableDataset:
        """Energon's method; shuffling and packing move in front of the choice."""
        bound = self._bound_to(shuffle_buffer_size, packing_buffer_size)
        return super(PackedTaskEncoder, bound).build_train_datasets(**kwargs)

    def build_val_datasets(
        self,
        *,
        datasets: list[LoadedDataset],
        worker_config: WorkerConfig,
        packing_buffer_size: int | None = None,
        **kwargs: Any,
    ) -> SavableDataset:
        """Energon's method: every document once, in order, packed per source."""
        bound = self._bound_to(None, packing_buffer_size)
        rows = collapse_sources(
            datasets,
            lambda loaded, key: bound.build_source(
                loaded, key, worker_config=worker_config, repeat=False
            ),
            bound.build_concatenation,
            worker_config=worker_config,
        )
        return super(PackedTaskEncoder, bound).build_val_datasets(
            datasets=[rows], worker_config=worker_config, **kwargs
        )

    def build_source(
        self, loaded: LoadedDataset, key: str, *, worker_config: WorkerConfig, repeat: bool
    ) -> SavableDataset[Row]:
        """Load, repeat, encode, shuffle and pack one source; a token file packs itself."""
        if isinstance(loaded.dataset, TokenFileFactory):
            return self._token_rows(loaded, key, worker_config=worker_config, repeat=repeat)
        documents = super().build_source(loaded, key, worker_config=worker_config, repeat=repeat)
        own_config = documents.worker_config
        documents = MapDataset(
            documents,
            self.encode_document,
            worker_config=own_config,
            stateless_map_fn=get_stateless(self.encode_document),
            failure_tolerance=get_failure_tolerance(
                self.encode_document, self.__default_failure_tolerance__
            ),
        )
        if self._shuffle_buffer_docs > 1:
            documents = ShuffleBufferDataset(
                documents, self._shuffle_buffer_docs, worker_config=own_config
            )
        return PackedRows(
            documents,
            source=key,
            packer=self._new_packer(),
            worker_config=worker_config,
        )

    def build_blend(
        self, sources: Sequence[Source], *, worker_config: WorkerConfig
    ) -> ChoiceDataset:
        """The choice among rows."""
        self._prepare_batches(sources, worker_config)
        return super().build_blend(sources, worker_config=worker_config)

    def build_concatenation(
        self, sources: Sequence[Source], *, worker_config: WorkerConfig
    ) -> SavableDataset[Row]:
        """Source after source, for validation."""
        self._prepare_batches(sources, worker_config)
        return ConcatDataset(*(s.dataset for s in sources), worker_config=worker_config)

    @stateless
    def batch(self, rows: list[Row]) -> PackedBatch:
        """Write rows into a batch."""
        return self._slots.carry(self._assembler(rows, self._sources))

    def _prepare_batches(self, sources: Sequence[Source], worker_config: WorkerConfig) -> None:
        """What :meth:`batch` needs to know; the workers are forked after this."""
        self._sources = tuple(sorted(source.key for source in sources))
        self._slots = BatchSlots(worker_config.num_workers)

    def _bound_to(
        self, shuffle_buffer_size: int | None, packing_buffer_size: int | None
    ) -> "PackedTaskEncoder":
        """A copy for one dataset; training and validation may share an encoder."""
        bound = copy.copy(self)
        bound._shuffle_buffer_docs = shuffle_buffer_size or 0
        if packing_buffer_size is not None:
            bound.packing_buffer_docs = packing_buffer_size
        return bound

    def _token_rows(
        self, loaded: LoadedDataset, key: str, *, worker_config: WorkerConfig, repeat: bool
    ) -> SavableDataset[Row]:
        cap = max_epochs_of(loaded.dataset)
        epochs = cap if repeat else (loaded.repetitions or 1)
        if epochs is not None and epochs != int(epochs):
            raise ConfigError(f"{key}: {epochs} repetitions; a token file is read in whole epochs.")
        factory = loaded.dataset
        factory.worker_config = worker_config
        factory.file.check_tokenizer(self.tokenizer.fingerprint(), self.tokenizer.vocab_size)
        return factory.rows(
            source=key,
            planner=self._new_planner(),
            epochs=None if epochs is None else int(epochs),
            # A source that has reached its cap stays at its end.
            restarts=not repeat,
        )

    def _new_planner(self) -> Planner:
        # Documents of a token file cost next to nothing to look at: a large buffer is the default.
        buffer_docs = max(self.packing_buffer_docs, TOKEN_FILE_BUFFER_DOCS)
        if self.packing == "sequential":
            return SequentialPlanner(self.seq_len, buffer_docs)
        return BinPlanner(
            self.seq_len,
            buffer_docs,
            self.packing_max_docs_per_bin,
            carry=self.packing_carry,
            alignment=self.alignment,
        )

    def _new_packer(self) -> Packer:
        if self.packing == "sequential":
            return SequentialPacker(self.seq_len)
        return BinPacker(
            self.seq_len,
            self.packing_buffer_docs,
            self.packing_max_docs_per_bin,
            carry=self.packing_carry,
            alignment=self.alignment,
        )
