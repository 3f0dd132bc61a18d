# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The tokenizer that the token files of a metadataset were written with."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from energon_ext.config.mix import Entry, sample_entries, token_entries
from energon_ext.encoders.load import load_split
from energon_ext.errors import ConfigError, log_of
from energon_ext.tokenizers.protocol import Tokenizer, UnknownTokenizer
from energon_ext.tokenizers.tokenizers import load_tokenizer

logger = log_of(__name__)

#: Field of a ``.meta.json`` with the arguments of :func:`load_tokenizer`.
FIELD = "tokenizer_arguments"
_ARGUMENTS = ("name_or_path", "eos_token", "bos_token")


def tokenizer_arguments(
    name_or_path: str, eos_token: str | None, bos_token: str | None
) -> dict[str, str]:
    """Return the tokenizer's arguments for a ``.meta.json``, valid in any working folder."""
    path = Path(name_or_path)
    name = str(path.resolve()) if path.exists() else name_or_path
    values = zip(_ARGUMENTS, (name, eos_token, bos_token))
    return {argument: value for argument, value in values if value is not None}


def written_tokenizer(
    metadataset: str | Path, split_part: str = "train", trusted_modules: Iterable[str] = ()
) -> Tokenizer:
    """Load the tokenizer of the first token files that name one, or bytes if none does.

    Args:
        metadataset: metadataset YAML, prepared folder or JSONL file.
        split_part: split whose sources are searched.
        trusted_modules: modules whose classes and functions a YAML file may name.

    Raises:
        ConfigError: the metadataset is invalid, or its tokenizer cannot be loaded.
    """
    return _of_entries(load_split(metadataset, split_part, None, trusted_modules))


def tokenizer_of_plan(
    metadataset: str | Path, split_part: str, trusted_modules: Iterable[str] = ()
) -> Tokenizer:
    """Return the tokenizer with which a metadataset is planned.

    It is the one of :func:`written_tokenizer` if there is text, of which it decides the lengths.
    Token files have lengths, so no tokenizer is loaded for them.
    """
    entries = load_split(metadataset, split_part, None, trusted_modules)
    if not sample_entries(entries):
        return UnknownTokenizer()
    return _of_entries(entries)


def _of_entries(entries: Sequence[Entry]) -> Tokenizer:
    for _, documents in token_entries(entries):
        prefix, arguments = documents.written_with(FIELD)
        if arguments is not None:
            return _load(prefix, arguments)
    return load_tokenizer("bytes")


def _load(prefix: str, arguments: Any) -> Tokenizer:
    is_mapping = isinstance(arguments, dict) and set(arguments) <= set(_ARGUMENTS)
    if not is_mapping or not all(isinstance(value, str) for value in arguments.values()):
        raise ConfigError(
            f"{prefix}.meta.json: {FIELD}: {arguments!r:.80} found, names are needed."
        )
    name = arguments.get("name_or_path", "bytes")
    logger.info("Using tokenizer %s, named in %s.meta.json.", name, prefix)
    try:
        return load_tokenizer(**{"name_or_path": name, **arguments})
    except ConfigError as error:
        raise ConfigError(
            f"{prefix}.meta.json names the tokenizer {name}: {error} Give the one it was "
            f"written with as --tokenizer."
        ) from error
