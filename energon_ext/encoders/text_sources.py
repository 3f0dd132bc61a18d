# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The text of Energon datasets: their samples and their cached tokens."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from energon_ext.batch.columns import check_values
from energon_ext.config.mix import Entry, sample_entries
from energon_ext.encoders.cached_samples import (
    cached_samples,
    cached_source,
    open_cached,
    stored_source,
    use_sample,
)
from energon_ext.encoders.repeatable import check_repeatable
from energon_ext.encoders.text import TextEncoder
from energon_ext.errors import ConfigError, SampleError
from energon_ext.prepare.cache import BYTES_PER_SECOND, SPLIT, Cached, ensure_prepared
from energon_ext.prepare.documents import InputDocument
from energon_ext.prepare.job import Arrays, Encoded
from energon_ext.prepare.samples import SampleSource, sample_units
from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.samples.bad_samples import BadSamples
from energon_ext.samples.numbered import as_worker
from energon_ext.samples.stored_files import parts_of
from energon_ext.tokens.file_set import TokenFiles, open_token_files
from energon_ext.tokens.index import CHECKSUMS

#: Advice if no sample of a source is text.
_NOT_TEXT = (
    "Give the field that has the text as `key` of the entry. Samples that are not text need your "
    "own TaskEncoder; pass it to commands with --encoder."
)


def encode_all(
    encoder: TextEncoder, bad: BadSamples, documents: Sequence[InputDocument]
) -> list[Encoded | SampleError]:
    """Encode each document as tokens and weights, or return why it cannot be used."""
    results: list[Any] = [_unused(document) for document in documents]
    left = [place for place, result in enumerate(results) if result is None]
    encoded = encoder.encode_many([documents[place] for place in left]) if left else ()
    for place, result in zip(left, encoded):
        results[place] = result
        if result is not None and encoder.columns:
            raise ConfigError(
                f"{type(encoder).__name__}.columns: {sorted(encoder.columns)} found, but its "
                f"encode_document returns none; override it, and give them to the Document."
            )
    with as_worker():
        return [
            _encode(encoder, bad, document) if result is None else result
            for document, result in zip(documents, results)
        ]


def _unused(document: InputDocument) -> Encoded | SampleError | None:
    """Return the result for a document that is not encoded; None for all others."""
    if document.sample is None and not document.text:  # excluded by the split
        return Encoded([(np.zeros(0, np.int64), None)])
    return document.sample if isinstance(document.sample, SampleError) else None


def _encode(
    encoder: TextEncoder, bad: BadSamples, document: InputDocument
) -> Encoded | SampleError:
    def encode(sample: Any) -> Arrays:
        encoded = encoder.encode_document(sample)
        tokens = np.asarray(encoded.tokens)
        columns = _columns_of(encoder, encoded.columns, len(tokens), document.origin)
        return tokens, encoded.label_weights, columns

    arrays = use_sample(bad, document, encode)
    return arrays if isinstance(arrays, SampleError) else Encoded([arrays])


def _columns_of(
    encoder: TextEncoder, found: Mapping[str, Any], tokens: int, origin: str
) -> dict[str, np.ndarray]:
    """Return the columns of a document in their types; SampleError if they are not the declared."""
    if found.keys() != encoder.columns.keys():
        raise SampleError(
            f"Sample {origin}: has the columns {sorted(found)}, but the `columns` of the encoder "
            f"are {sorted(encoder.columns)}; give None for one that a document lacks."
        )
    return {
        name: check_values(name, column, found[name], tokens, f"Sample {origin}")
        for name, column in encoder.columns.items()
    }


# The cache of text ------------------------------------------------------------------------------


def ensure_tokenized(encoder: TextEncoder, entries: Sequence[Entry]) -> dict[str, TokenFiles]:
    """Return the token files of all text sources, by source key."""
    cached = {entry.key: cached_text(encoder, entry) for entry in sample_entries(entries)}
    ensure_prepared(list(cached.values()))
    return {key: item.open() for key, item in cached.items()}


def cached_text(encoder: TextEncoder, entry: Entry) -> Cached:
    """Return the cache entry for the token files of a text source, which may not exist yet."""
    source = cached_source(encoder, entry)
    num_bytes = source.version.get("bytes")
    bad = BadSamples(source.path, encoder.decoder)
    return cached_samples(
        entry,
        source,
        _files_of_text(entry, source),
        encoding=encoding_of(encoder),
        encode=functools.partial(encode_all, encoder, bad),
        check=functools.partial(_check_own_code, encoder, source),
        writer=functools.partial(
            TokenWriter, vocab_size=encoder.tokenizer.vocab_size, columns=encoder.columns
        ),
        meta={**encoder.token_file_meta(), CHECKSUMS: True},
        units=sample_units(source),
        seconds=None if num_bytes is None else num_bytes / BYTES_PER_SECOND,
        open_folder=_open_text,
        verb="tokenized",
        command=functools.partial(_command, encoder, entry),
        advice=_NOT_TEXT,
        judges=(source.bad, bad),
    )


def find_text(entry: Entry, encoding: Any) -> TokenFiles:
    """Return the tokens of a text source that some encoder has cached.

    Args:
        encoding: names the tokens, see :func:`encoding_of`.

    Raises:
        EncoderNeededError: there are none.
    """
    source = stored_source(entry)
    cached = cached_samples(
        entry,
        source,
        _files_of_text(entry, source),
        encoding=encoding,
        units=sample_units(source),
        open_folder=_open_text,
        verb="tokenized",
        command=lambda: f"energon-ext tokenize {_path_of(entry)} --tokenizer NAME",
    )
    files: TokenFiles = open_cached(cached)
    return files


def _files_of_text(entry: Entry, source: SampleSource) -> dict[str, Any]:
    """Return what the cached tokens of a text source depend on in its files."""
    split = [getattr(part, "split_part_files", None) for part in parts_of(entry.dataset)]
    return {"files": dict(source.version), "split": split}


def _open_text(folder: Path) -> TokenFiles:
    return open_token_files(folder / SPLIT)


def encoding_of(encoder: TextEncoder) -> dict[str, Any]:
    """Return JSON values that change whenever the tokens of any sample change."""
    fingerprint, custom = encoder.encoding_fingerprint, _custom_code(encoder)
    if custom and fingerprint is None:
        raise ConfigError(
            f"{type(encoder).__name__}: {custom[0]} is custom code; set encoding_fingerprint of "
            f"the class to JSON values such as {{'version': 1}} and change it whenever the tokens "
            f"of a sample change, because it identifies cached tokens."
        )
    return {
        **encoder.token_file_meta(),
        "encode_document": _code_of(encoder)[0],
        "cookers": _code_of(encoder)[1:],
        "decoder": type(encoder.decoder).__qualname__,
        "own": fingerprint,
    }


def _check_own_code(encoder: TextEncoder, source: SampleSource) -> None:
    """Raise ConfigError if code of the user encodes samples at random."""
    if custom := _custom_code(encoder):
        bad = BadSamples(source.path, encoder.decoder, has_worked=True)
        check_repeatable(custom[0], source, functools.partial(encode_all, encoder, bad))


def _code_of(encoder: TextEncoder) -> list[str]:
    """Return the full names of ``encode_document`` and the cookers."""
    functions = [type(encoder).encode_document, *(cooker.cook for cooker in encoder.cookers)]
    functions = [getattr(function, "func", function) for function in functions]
    return [f"{f.__module__}.{getattr(f, '__qualname__', type(f).__name__)}" for f in functions]


def _custom_code(encoder: TextEncoder) -> list[str]:
    """Return those functions of :func:`_code_of` that are not from this package."""
    return [name for name in _code_of(encoder) if not name.startswith("energon_ext.")]


def _command(encoder: TextEncoder, entry: Entry) -> str:
    """Return the command that tokenizes the text of a source before a run."""
    options = encoder.command_options() or ["--encoder", "MODULE:FUNCTION"]
    return " ".join(["energon-ext", "tokenize", _path_of(entry), *options])


def _path_of(entry: Entry) -> str:
    """Return the path by which a command finds a source."""
    return str(entry.metadataset or entry.dataset.paths[0])


def has_same_tokens(encoder: TextEncoder, make: Callable[[], TextEncoder]) -> bool:
    """Return True if an encoder that a command makes gives the same tokens as another one."""
    if _custom_code(encoder):
        return False
    try:
        return encoding_of(make()) == encoding_of(encoder)
    except ConfigError:  # a name cannot be loaded from this folder
        return False
