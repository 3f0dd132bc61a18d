# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Encoders with a default splice for sources whose YAML entry has none."""

from typing import Any, ClassVar, Mapping

from energon_ext.arguments import check_integer
from energon_ext.encoders.document_task import DocumentTask
from energon_ext.encoders.pretrain import PackedTaskEncoder
from energon_ext.encoders.splicing import check_splice
from energon_ext.errors import ConfigError
from energon_ext.splice import MultiSpliceConfig, SpliceConfig
from energon_ext.splice.config import SpliceFields
from energon_ext.tokenizers.protocol import Tokenizer


class SpliceTaskEncoder(PackedTaskEncoder):
    """One document of each spliced source at many positions; other sources are packed as usual.

    A ``splice:`` on a YAML entry overrides ``splice``; any :class:`~energon_ext.PackedTaskEncoder`
    reads it. Batches name a document ``<source key>/doc<number>``, so that reports distinguish
    documents as they do sources. Validation shows a fixed grid of starts and offsets of the same
    documents.

    Args:
        tokenizer, seq_len: see :class:`~energon_ext.PackedTaskEncoder`.
        splice: which content to show at which positions.
        spliced_subflavors: splice the sources whose YAML entry has all of these ``subflavors``;
            None for every source.
        named_documents: count each document under its own name; by default if at most 64.
        validation_starts, validation_offsets: size of the validation grid.
        **options: options of :class:`~energon_ext.PackedTaskEncoder`, which packs the sources that
            are not spliced.

    Raises:
        ConfigError: ``splice`` is not a ``config_class``, or an option does not support frames.
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
                f"splice: a {type(self.splice).__name__} found, {type(self).__name__} needs a "
                f"{self.config_class.__name__}."
            )
        check_integer("validation_starts", validation_starts, 1)
        check_integer("validation_offsets", validation_offsets, 1)
        if not isinstance(spliced_subflavors or {}, Mapping):
            raise ConfigError(
                f"spliced_subflavors: {spliced_subflavors!r} found, a mapping or None is needed."
            )
        self.spliced_subflavors = spliced_subflavors
        self.named_documents = named_documents
        self.validation_starts = validation_starts
        self.validation_offsets = validation_offsets
        check_splice(self._splice_spec(), self._loss(), self.splice)

    def task(self) -> DocumentTask:
        subflavors = dict(self.spliced_subflavors or {})
        splice = self._splice_spec(self.splice, subflavors=subflavors)
        return self._document_task(DocumentTask, splice=splice)


class MultiSpliceTaskEncoder(SpliceTaskEncoder):
    """Many documents of each spliced source, balanced, at many positions.

    Args: see :class:`SpliceTaskEncoder`; ``splice`` is a
        :class:`~energon_ext.splice.MultiSpliceConfig`.
    """

    config_class = MultiSpliceConfig
