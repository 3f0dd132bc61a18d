# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ``key`` of an entry, which names the field of its samples that contains the text."""

import copy
from collections.abc import Sequence

from megatron.energon import Cooker, CrudeSample, TaskEncoder

from energon_ext.config.mix import Entry, sample_entries, token_entries
from energon_ext.encoders.text import TextEncoder, cook_text, cook_text_under
from energon_ext.errors import ConfigError


def with_text_key(encoder: TaskEncoder, entry: Entry) -> TaskEncoder:
    """Return the encoder as it reads the text of samples, from the field that the entry names.

    ConfigError if they have no such field, or the encoder does not read text by our cooker.
    """
    if entry.text_key is None:
        return encoder
    if reason := _why_unused(encoder, entry):
        raise _unused_key(entry, reason)
    bound = copy.copy(encoder)
    bound.cookers = [Cooker(cook_text_under(entry.text_key))]
    return bound


def check_text_keys(encoder: TaskEncoder, entries: Sequence[Entry]) -> None:
    """Raise ConfigError for a ``key`` that has no effect on a source."""
    for entry in sample_entries(entries):
        with_text_key(encoder, entry)
    for entry, documents in token_entries(entries):
        if entry.text_key is not None and documents.of_field("") is None:
            path = entry.dataset.paths[0]
            raise _unused_key(entry, f"{path} are token files, which have no fields; remove it")


def _unused_key(entry: Entry, reason: str) -> ConfigError:
    return ConfigError(f"{entry.text_key_where}: {entry.text_key!r} found, but {reason}.")


def _why_unused(encoder: TaskEncoder, entry: Entry) -> str | None:
    factory, path = entry.dataset, entry.dataset.paths[0]
    if hasattr(factory, "join_index"):
        return "the samples of a join are made by its joiner; remove it"
    if factory.__sample_type__ is not CrudeSample:
        kind = getattr(factory.__sample_type__, "__name__", "samples")
        return f"the dataset.yaml of {path} says where the fields of a {kind} are; remove it"
    cooks = [cooker.cook for cooker in encoder.cookers]
    if cooks != [cook_text] or not isinstance(encoder, TextEncoder):
        return f"{type(encoder).__name__} reads samples in its own way; remove it"
    return None
