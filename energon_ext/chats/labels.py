# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Fields that describe a record or a message, and are neither its text nor say what is trained.

``docs/data/chats.md`` shows the table; a test compares both.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Labels:
    """Labels of a data set: fields of its records, of their messages, and of parts of contents."""

    record: tuple[str, ...] = ()
    message: tuple[str, ...] = ()
    part: tuple[str, ...] = ()


#: Of any data. Templates may write those of a message, but need not.
GENERAL = Labels(
    record=("id", "index", "type", "source", "subset", "split", "dataset", "category", "language"),
    message=(
        *("id", "name", "tool_call_id", "index", "created", "type"),
        *("created_at", "timestamp", "model", "source", "language", "uuid"),
    ),
    part=("id", "index", "signature", "cache_control", "citations", "annotations"),
)

#: Of well-known data sets: what it is called -> its labels.
DATA_SETS = {
    "Dolly": Labels(record=("category",)),
    "Magpie": Labels(
        record=(
            *("intent", "knowledge", "difficulty", "difficulty_generator", "input_quality"),
            *("quality_explanation", "quality_generator", "task_category", "other_task_category"),
            *("task_category_generator", "reward_model", "llama_guard_2"),
        )
    ),
    "NVIDIA Nemotron": Labels(
        record=("used_in_training", "category", "generator", "license", "version", "uuid")
    ),
    "WildChat, LMSYS-Chat": Labels(
        record=(
            *("conversation_hash", "conversation_id", "model", "timestamp", "country", "state"),
            *("hashed_ip", "header", "openai_moderation", "detoxify_moderation"),
        ),
        message=("country", "state", "hashed_ip", "header", "turn_identifier", "toxic", "redacted"),
    ),
}

#: Labels of a data set that other data gives to a text of the conversation. They are labels if
#: another label of the same data set is next to them.
TEXT_ELSEWHERE = ("knowledge", "country", "state", "header")


def labels_of_record(names: Collection[str]) -> set[str]:
    """Return those fields of a record that are labels of a well-known data set.

    Example:
        >>> sorted(labels_of_record(["messages", "knowledge", "used_in_training"]))
        ['used_in_training']
        >>> sorted(labels_of_record(["messages", "knowledge", "intent"]))
        ['intent', 'knowledge']
    """
    return _found(names, [labels.record for labels in DATA_SETS.values()])


def labels_of_message(names: Collection[str]) -> set[str]:
    """Return those fields of a message that are labels of a well-known data set."""
    return _found(names, [labels.message for labels in DATA_SETS.values()])


def _found(names: Collection[str], tables: list[tuple[str, ...]]) -> set[str]:
    given = [set(table) & set(names) for table in tables]
    return {name for each in given for name in each if len(each) > 1 or name not in TEXT_ELSEWHERE}
