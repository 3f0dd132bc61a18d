# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which conversations are refused although ``transformers`` renders them, and why that is right."""

from tests.chats.conversations import CONVERSATIONS
from tests.chats.templates import FAMILIES, ODD, TAGS
from tests.chats.tool_templates import REASONS, TOOLS

TEMPLATES = {**FAMILIES, **TAGS, **ODD, **TOOLS, **REASONS}

_ALL = set(CONVERSATIONS)
_CALLS = {name for name, record in CONVERSATIONS.items() if "tools" in record}
_THOUGHTS = {"reasoning", "reasoning in two turns", "reasoning before a call"}
_OPEN_BLOCKS = {"QwQ", "DeepSeek R1"}

#: (templates, conversations, a part of the message, why the refusal is right)
_TABLE = [
    (
        {*FAMILIES, *TAGS, *ODD, "drops calls"},
        _CALLS,
        "does not write `tool_calls`",
        "an answer that calls a tool would be trained as an empty one",
    ),
    (
        {"writes the first call only"},
        {"several calls"},
        "does not write `tool_calls`",
        "the second call would not be trained",
    ),
    ({"drops tools"}, _CALLS, "does not write `tools`", "the model would not see its tools"),
    (
        {"escapes"},
        {"reasoning", "reasoning in two turns"},
        "does not write `reasoning_content`",
        "it would change the tags, too",
    ),
    (
        {"Llama 3.1", "Mistral v0.3", "Mistral Nemo"},
        {"reasoning before a call"},
        "does not write `reasoning_content`",
        "it writes no content beside a call",
    ),
    (
        _OPEN_BLOCKS,
        _ALL - _THOUGHTS - {"reasoning within the text"},
        "has no reasoning, but the generation prompt opens a block of it",
        "the model would learn to answer within a block of reasoning",
    ),
    (
        {"Llama 3.1", "Mistral v0.3", "Mistral Nemo", "gpt-oss"},
        {"text beside a call"},
        "does not write `content` of role assistant",
        "the text beside the call would not be trained",
    ),
    (
        {"drops a system message that is not first", "Qwen 3 Coder", "drops calls", "prints None"}
        | {"writes Python's dict", "writes the first call only", *REASONS}
        - {"GLM", "DeepSeek V3", "DeepSeek V3.1", "DeepSeek R1", "Magistral"},
        {"a system message in the middle"},
        "does not write `content` of role system",
        "the instruction would be missing",
    ),
    (
        {"OLMo", "an end after the last answer only", "tags around rewritten answers"},
        {"two answers in a row"},
        "does not continue its own generation prompt",
        "the first of the two is shown differently once the second follows",
    ),
    (
        {"tags without the end"},
        _ALL,
        "its generation tags exclude that",
        "the end is written, but not trained",
    ),
]


def reasons_to_refuse(template, conversation):
    """Return the messages with which a conversation may be refused; none if it is accepted."""
    return [
        message
        for templates, conversations, message, _ in _TABLE
        if template in templates and conversation in conversations
    ]
