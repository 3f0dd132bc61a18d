# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Records with ``messages``, or ``prompt`` and ``response``, as documents."""

import json
from typing import Any

from energon_ext.cli.documents import Document, check_object
from energon_ext.encoders.sft import Dialogue, PromptResponse, cook_dialogue
from energon_ext.errors import ConfigError, SampleError


def read_conversation(row: Any, origin: str, num_bytes: int) -> Document:
    """A JSON object as a document; ConfigError where it holds no conversation.

    Example:
        >>> record = {"prompt": "2 + 2", "response": "4", "id": 17}
        >>> read_conversation(record, "chat.jsonl:1", 50).text
        '["2 + 2", "4"]'
    """
    check_object(row, origin)
    crude = {"__key__": origin, "__restore_key__": (), "json": row}
    try:
        return conversation_document(cook_dialogue(crude), origin, num_bytes)
    except SampleError as error:
        raise ConfigError(str(error)) from error


def conversation_document(
    sample: Dialogue | PromptResponse, origin: str, num_bytes: int = 0
) -> Document:
    """A conversation as a document; equal conversations have equal texts."""
    is_dialogue = isinstance(sample, Dialogue)
    content = sample.messages if is_dialogue else [sample.prompt, sample.response]
    text = json.dumps(content, ensure_ascii=False, sort_keys=True, default=str)
    return Document(text, origin, num_bytes, conversation=sample)
