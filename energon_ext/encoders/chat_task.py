# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Conversations as documents, of which only the answers are trained."""

from __future__ import annotations

from dataclasses import dataclass

from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.config.mix import Entry
from energon_ext.encoders.document_task import DocumentTask
from energon_ext.errors import ConfigError
from energon_ext.tokenizers.protocol import UnknownTokenizer
from energon_ext.tokens.documents import Documents


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatTask(DocumentTask):
    """Fine-tuning: documents are cut and never spliced, and have label weights.

    Attributes:
        conversations: encodes them.
    """

    conversations: ConversationEncoder

    def check(self, documents: Documents, entry: Entry) -> None:
        super().check(documents, entry)
        self._check_template_of(documents)
        if prefix := documents.unweighted:
            raise ConfigError(
                f"{entry.key}: {prefix} has no label weights, so questions would be trained "
                f"like answers; write it with `energon-ext prepare --chat`, or use a "
                f"PackedTaskEncoder."
            )
        if documents.names_tokenizer:  # or nothing says how it was written
            self._check_answers_of(documents)

    def _check_template_of(self, documents: Documents) -> None:
        """Raise ConfigError if the files were written with another template, if it is known."""
        if not isinstance(self.encoder.tokenizer, UnknownTokenizer):
            template = self.conversations.template
            name = template.name or "this encoder's own"
            documents.check_written("chat template", name, template.fingerprint())

    def _check_answers_of(self, documents: Documents) -> None:
        """Raise ConfigError if the files were written with other answers than asked for."""
        for name, value in self.conversations.options().items():
            prefix, written = documents.written_with(name)
            if name != "chat_template" and value is not None and value != written:
                file = prefix or documents.origin(0).file
                raise ConfigError(
                    f"{name}: {value!r} found, but {file} was written with "
                    f"{written!r}; prepare it again, or leave the option out."
                )
