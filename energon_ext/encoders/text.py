# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Text as stored, as a sample and as an encoded document."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np
from megatron.energon import Sample, SampleDecoder, TaskEncoder, TextSample, stateless
from megatron.energon.edataclass import edataclass
from megatron.energon.task_encoder.cooking import basic_sample_keys

from energon_ext.batch.columns import NO_COLUMNS, Column
from energon_ext.data_files import parse_record
from energon_ext.errors import SampleError
from energon_ext.prepare.documents import InputDocument
from energon_ext.prepare.job import Encoded
from energon_ext.tokenizers.protocol import Tokenizer


@edataclass
class Document(Sample):
    """An encoded document.

    Attributes:
        tokens: int64 [n], including special tokens.
        label_weights: float32 [n], weight of the loss on each token; None for 1 everywhere.
        columns: values of the encoder's :attr:`~TextEncoder.columns` by name, ``[n, *item]``, or
            ``[*item]`` of a column per document.
    """

    tokens: np.ndarray
    label_weights: np.ndarray | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)


class TextEncoder(TaskEncoder):
    """Base class of encoders whose samples become token files.

    Attributes:
        encoding_fingerprint: JSON values that change whenever the tokens of any sample change.
        columns: further columns of the documents that ``encode_document`` returns, by name.
    """

    columns: Mapping[str, Column] = NO_COLUMNS
    tokenizer: Tokenizer
    seq_len: int
    encoding_fingerprint: Any = None

    def encode_document(self, sample: Any) -> Document:
        """Encode a sample as a document."""
        raise NotImplementedError

    def encode_many(
        self, documents: Sequence[InputDocument]
    ) -> Sequence[Encoded | SampleError | None]:
        """Encode documents together, which is faster; None for those left to `encode_document`."""
        return [None] * len(documents)

    def token_file_meta(self) -> dict[str, Any]:
        """Return the content of the ``.meta.json`` next to token files of this encoder."""
        raise NotImplementedError

    def command_options(self) -> list[str] | None:
        """Return the options by which commands build an encoder with the same tokens, or None."""
        return None


@stateless
def cook_text(sample: dict[str, Any]) -> TextSample:
    """Cook a crude JSONL or webdataset sample: ``json`` with a ``text`` field, or ``txt``."""
    return _text_of(sample, "text", "txt")


def cook_text_under(key: str) -> Callable[[dict[str, Any]], TextSample]:
    """Return a function that cooks text under another key of ``json``, or in another member."""

    @stateless
    def cook(sample: dict[str, Any]) -> TextSample:
        return _text_of(sample, key, key)

    return cook


def _text_of(sample: dict[str, Any], key: str, member: str) -> TextSample:
    content = sample.get("json", sample)
    if not isinstance(content, dict):
        found = f"its `json` is a {type(content).__name__}, an object with `{key}` is needed"
        raise SampleError(f"Sample {sample['__key__']}: {found}.")
    text = content.get(key, sample.get(member))
    if not isinstance(text, str):
        found = f"no `{key}`; it has {sorted(content)}"
        if key in content:
            kind = "null" if text is None else f"of type {type(text).__name__}"
            found = f"`{key}` is {kind}; text is needed"
        raise SampleError(f"Sample {sample['__key__']}: {found}.")
    return TextSample(**basic_sample_keys(sample), text=text)


def is_text(value: Any) -> bool:
    """Return True if a value is text that a tokenizer accepts: without lone surrogates."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


class TextDecoder(SampleDecoder):
    """Decodes ``json`` and ``txt`` and leaves all else as bytes; Energon's unpickles ``pyd``.

    Example:
        >>> TextDecoder()({"__key__": "7", "txt": b"hi", "json": b"[1]", "pyd": b"..."})
        {'__key__': '7', 'txt': 'hi', 'json': [1], 'pyd': b'...'}
    """

    def __init__(self) -> None:
        pass  # the base class would create decoders of images and audio

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {name: _decode(name, value) for name, value in sample.items()}

    def config(self) -> dict[str, Any]:
        return {"decoded": ["json", "txt"]}


def _decode(name: str, value: Any) -> Any:
    suffix = name.rpartition(".")[2].lower()
    if not isinstance(value, bytes) or name.startswith("__") or suffix not in ("json", "txt"):
        return value
    return parse_record(value) if suffix == "json" else value.decode("utf-8")
