# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents at many positions, alone or in a blend with ordinary text.

The YAML says where documents come from, the configuration of the splice what becomes of them. A
spliced source yields rows like any other, so it can be weighted, scheduled and interleaved.
"""

import copy
import hashlib
from typing import Any, ClassVar, Mapping, Sequence

import numpy as np
from megatron.energon import WorkerConfig
from megatron.energon.flavors.base_dataset import SavableDataset
from megatron.energon.metadataset.loader_interface import LoadedDataset

from energon_ext.arguments import check_integer
from energon_ext.batch.rows import Row
from energon_ext.config.references import TokenFileFactory
from energon_ext.config.source_key import max_epochs_of, shuffle_key
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.sources import encoded_samples, load_source
from energon_ext.encoders.tokenizers import Tokenizer
from energon_ext.errors import ConfigError
from energon_ext.mixture.tree import Tree
from energon_ext.plan.dataset import BlendedDataset
from energon_ext.plan.source import RowSource, Source
from energon_ext.splice import MultiSpliceConfig, SpliceConfig, SpliceIndex, select_documents
from energon_ext.splice.config import SpliceFields
from energon_ext.splice.documents import DocumentStore, EnergonDocuments, TokenFileDocuments
from energon_ext.splice.index import ORDER
from energon_ext.splice.source import SpliceSource, log_plan
from energon_ext.splice.validation import GridIndex

#: Up to so many documents of a source, each is counted under a name of its own.
NAMED_DOCUMENTS = 64


class SpliceTaskEncoder(PackedTaskEncoder):
    """One document of each spliced source, at many positions; other sources are packed as ever.

    Batches call a document ``<key of its source>/doc<number>``, so losses, tokens and examples are
    told apart in the report as those of sources are.

    Validation shows a fixed grid of starts and offsets of the same documents.

    Args:
        tokenizer, seq_len: as for :class:`~energon_ext.PackedTaskEncoder`.
        splice: what to show where.
        spliced_subflavors: splice the sources whose entry in the YAML has all of these
            ``subflavors``; None for every source.
        named_documents: give documents names of their own; None for where they are at most 64.
        validation_starts, validation_offsets: of the validation grid.
        **options: as for :class:`~energon_ext.PackedTaskEncoder`; they say how sources that are not
            spliced are packed.

    Raises:
        ConfigError: a configuration of the other kind, or options that frames cannot keep.
    """

    config_class: ClassVar[type[SpliceFields]] = SpliceConfig

    def __init__(
        self,
        tokenizer: Tokenizer,
        seq_len: int,
        splice: SpliceFields | None = None,
        *,
        spliced_subflavors: Mapping[str, Any] | None = None,
        named_documents: bool | None = None,
        validation_starts: int = 4,
        validation_offsets: int = 8,
        **options: Any,
    ):
        super().__init__(tokenizer, seq_len, **options)
        self.splice = self.config_class() if splice is None else splice
        if not isinstance(self.splice, self.config_class):
            raise ConfigError(
                f"splice: a {type(self.splice).__name__} found, {type(self).__name__} takes a "
                f"{self.config_class.__name__}."
            )
        if self.alignment > 1:
            raise ConfigError(
                f"alignment: {self.alignment} found; frames begin at any offset, so they cannot be "
                f"aligned for context parallelism. Leave it 1."
            )
        if self.splice.pack_contents and not self.mask_boundary_loss:
            raise ConfigError(
                "pack_contents: true found with mask_boundary_loss=False; contents in a frame do "
                "not continue each other. Set mask_boundary_loss=True."
            )
        check_integer("validation_starts", validation_starts, 1)
        check_integer("validation_offsets", validation_offsets, 1)
        if not isinstance(spliced_subflavors or {}, Mapping):
            raise ConfigError(
                f"spliced_subflavors: {spliced_subflavors!r} found, a mapping like "
                f"{{'splice': True}} or None is needed."
            )
        self.spliced_subflavors = spliced_subflavors
        self.named_documents = named_documents
        self.validation_starts = validation_starts
        self.validation_offsets = validation_offsets
        self._validating = False
        if self.splice.pad_token_id is not None:
            self._assembler.pad_id = self.splice.pad_token_id

    # Energon's stages -----------------------------------------------------------------------

    def build_val_datasets(self, **kwargs: Any) -> SavableDataset:
        """Energon's method, with the grid in place of the random order."""
        bound = copy.copy(self)
        bound._validating = True
        return super(SpliceTaskEncoder, bound).build_val_datasets(**kwargs)

    def build_source(
        self, loaded: LoadedDataset, key: str, *, worker_config: WorkerConfig, repeat: bool
    ) -> SavableDataset[Row] | RowSource:
        """Splice one source, or pack it."""
        if not self.is_spliced(loaded, key):
            return super().build_source(loaded, key, worker_config=worker_config, repeat=repeat)
        store = self.open_documents(loaded, key, worker_config)
        numbers = select_documents(
            store.lengths,
            self.splice,
            seq_len=self.seq_len,
            keys=store.keys,
            source=shuffle_key(key, loaded.dataset),
        )
        documents = [store.tokens(number) for number in numbers.tolist()]
        # A view stays a view; ids are below 2^31, and int32 halves what the workers share.
        documents = [d if d.dtype.itemsize <= 4 else d.astype(np.int32) for d in documents]
        training = repeat and not self._validating
        return SpliceSource(
            self._examples(store.lengths[numbers], numbers, loaded, key, worker_config),
            documents,
            self._names(numbers, key),
            config=self.splice,
            seq_len=self.seq_len,
            fill_id=self._assembler.pad_id,
            epochs=max_epochs_of(loaded.dataset) if training else loaded.repetitions or 1,
            fingerprint={
                **self.splice.to_json(),
                "documents": _digest(store, numbers, documents),
                "order": ORDER,
            },
            metadata=[self.document_metadata(store, number) for number in numbers.tolist()],
        )

    def build_blend(self, sources: Sequence[Source], tree: Tree, **options: Any) -> BlendedDataset:
        """The draw among rows, spliced ones and others."""
        if not any(isinstance(source.rows, SpliceSource) for source in sources):
            raise ConfigError(
                f"No source to splice among {[source.key for source in sources]}: "
                f"spliced_subflavors is {self.spliced_subflavors}, dataset_name "
                f"{self.splice.dataset_name!r}. Name one of them, or leave both None."
            )
        return super().build_blend(sources, tree, **options)

    def names_in_batches(self, sources: Sequence[Source]) -> tuple[str, ...]:
        names: set[str] = set()
        for source in sources:
            rows = source.rows
            names.update(rows.names if isinstance(rows, SpliceSource) else [source.key])
        return tuple(sorted(names))

    # What a subclass may change -------------------------------------------------------------

    def is_spliced(self, loaded: LoadedDataset, key: str) -> bool:
        """Whether a source is spliced, by its subflavors and its name."""
        subflavors = getattr(loaded.dataset, "subflavors", None) or {}
        wanted = (self.spliced_subflavors or {}).items()
        name = self.splice.dataset_name
        path = key.partition(":")[0]
        return all(subflavors.get(field) == value for field, value in wanted) and (
            name is None or name in (key, path, path.rsplit("/", 1)[-1])
        )

    def open_documents(
        self, loaded: LoadedDataset, key: str, worker_config: WorkerConfig
    ) -> DocumentStore:
        """The documents of a source, all of them on every rank."""
        if isinstance(loaded.dataset, TokenFileFactory):
            files = loaded.dataset.files
            files.check_tokenizer(self.tokenizer.fingerprint(), self.tokenizer.vocab_size)
            return TokenFileDocuments(loaded.dataset)
        alone = WorkerConfig(
            rank=0, world_size=1, num_workers=0, seed_offset=worker_config.seed_offset
        )
        samples = load_source(self, loaded, key, alone)
        return EnergonDocuments(encoded_samples(self, samples, self.encode_document))

    def document_metadata(self, store: DocumentStore, number: int) -> dict[str, Any]:
        """What :meth:`SpliceSource.metadata_of` gives for a document."""
        key = {} if store.keys is None else {"key": store.keys[number]}
        return {"document": number, "tokens": int(store.lengths[number]), **key}

    def _examples(
        self,
        lengths: np.ndarray,
        numbers: np.ndarray,
        loaded: LoadedDataset,
        key: str,
        worker_config: WorkerConfig,
    ) -> SpliceIndex | GridIndex:
        if self._validating:
            shown = {"starts": self.validation_starts, "offsets": self.validation_offsets}
            return GridIndex(lengths, self.seq_len, self.splice, **shown)
        order = f"{shuffle_key(key, loaded.dataset)}/{worker_config.seed_offset}"
        index = SpliceIndex(lengths, self.seq_len, self.splice, key=order)
        log_plan(index, numbers, key)
        return index

    def _names(self, numbers: np.ndarray, key: str) -> list[str]:
        few = len(numbers) <= NAMED_DOCUMENTS
        named = few if self.named_documents is None else self.named_documents
        return [f"{key}/doc{number}" if named else key for number in numbers]


class MultiSpliceTaskEncoder(SpliceTaskEncoder):
    """Many documents of each spliced source, balanced, at many positions.

    Args, Raises: as :class:`SpliceTaskEncoder`, with a
        :class:`~energon_ext.splice.MultiSpliceConfig`.
    """

    config_class = MultiSpliceConfig


def _digest(store: DocumentStore, numbers: np.ndarray, documents: Sequence[np.ndarray]) -> str:
    if isinstance(store, TokenFileDocuments):
        return store.digest(numbers)
    digest = hashlib.sha256()
    for tokens in documents:
        digest.update(len(tokens).to_bytes(8, "little"))
        digest.update(tokens.tobytes())
    return digest.hexdigest()
