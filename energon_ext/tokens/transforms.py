# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Changes of documents at the time they are read, with lengths that can be planned.

Whether a document is changed is a hash of its number, so its length is found without reading it.
How it is changed is new in every epoch: it depends on the seed of the run, the source, the number
and the visit, and so is the same on every cluster and after a resume.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_ext.arguments import check_integer, choices
from energon_ext.batch.columns import LABEL_WEIGHTS, TOKENS, Column
from energon_ext.errors import ConfigError
from energon_ext.keyed import keyed_bits, sha256
from energon_ext.registry import Registry

#: ``(name, numbers) -> values`` of a column per document, [n, *item].
DocumentValues = Callable[[str, np.ndarray], np.ndarray]


class DocumentColumns(dict[str, Any]):
    """The columns of one document: arrays ``[n, *item]``, ``[*item]`` per document, or None.

    Attributes:
        described: the columns beside ``tokens`` and ``label_weights``.
    """

    def __init__(self, values: Mapping[str, Any], described: Mapping[str, Column]):
        super().__init__(values)
        self.described = described

    def move(
        self, places: np.ndarray, tokens: np.ndarray, label_weight: float = 1.0
    ) -> DocumentColumns:
        """Return the columns of a changed document, whose values stay with their tokens.

        Args:
            places: for each new token its place in the document before, or -1 if it had none.
            tokens: the new tokens, [len(places)].
            label_weight: of tokens that had no place; their other values are fill values.

        Example:
            >>> before = DocumentColumns({"tokens": np.array([5, 6]), "label_weights": None}, {})
            >>> after = before.move(np.array([-1, 1, 0]), np.array([9, 6, 5]), label_weight=0)
            >>> after["tokens"].tolist(), after["label_weights"].tolist()
            ([9, 6, 5], [0.0, 1.0, 1.0])
        """
        is_new = places < 0
        moved = DocumentColumns(self, self.described)
        moved[TOKENS] = tokens
        weights = self[LABEL_WEIGHTS]
        if weights is not None or (label_weight != 1.0 and is_new.any()):
            before = np.ones(len(self[TOKENS]), np.float32) if weights is None else weights
            moved[LABEL_WEIGHTS] = np.where(is_new, np.float32(label_weight), before[places])
        for name, column in self.described.items():
            if column.per == "token" and self[name] is not None:
                moved[name] = self[name][places]
                moved[name][is_new] = column.fill
        return moved


class DocumentTransform(ABC):
    """A change of documents at the time they are read; see the module.

    Subclasses take their options as keyword arguments, and are registered by name in
    :data:`TRANSFORMS`.
    """

    def bind(self, values: DocumentValues) -> DocumentTransform:
        """Return the transform for the documents of a source, whose columns it may look up."""
        return self

    def resolve(self, token_id: Callable[[str], int]) -> DocumentTransform:
        """Return the transform with tokens in place of their names, before it is applied."""
        return self

    def fingerprint(self, numbers: np.ndarray) -> dict[str, Any]:
        """Return JSON values that reveal a change of what it looks up for some documents."""
        return {}

    @abstractmethod
    def lengths(self, numbers: np.ndarray, stored: np.ndarray) -> np.ndarray:
        """Return the tokens of documents after the change, int64 [n].

        Args:
            numbers: of the documents; they and the lengths decide the result.
            stored: tokens of the documents before it, int64 [n].
        """

    @abstractmethod
    def apply(
        self, number: int, columns: DocumentColumns, rng: np.random.Generator
    ) -> Mapping[str, Any]:
        """Return the columns of a document after the change, of the length that is planned.

        Args:
            number: of the document.
            columns: of the whole document; :meth:`DocumentColumns.move` moves all of them.
            rng: random numbers of this visit.
        """

    @abstractmethod
    def to_json(self) -> dict[str, Any]:
        """Return the options, as JSON values; the name under which it is registered is added."""


def chosen(numbers: np.ndarray, key: str, rate: float) -> np.ndarray:
    """Return True for a share of all documents, the same ones in every epoch, bool [n]."""
    if rate >= 1:
        return np.ones(len(numbers), bool)
    bits: np.ndarray = keyed_bits(np.asarray(numbers), key)
    return bits < np.uint64(rate * 2.0**64)


class FillInTheMiddle(DocumentTransform):
    """Moves the middle of some documents to their end, so that a model learns to fill gaps.

    A chosen document ``a b c`` becomes ``<prefix> a <suffix> c <middle> b`` (PSM), or ``<prefix>
    <suffix> c <middle> a b`` (SPM): Bavarian et al., https://arxiv.org/abs/2207.14255. The cuts are
    between tokens, at random. A first or last token that is the beginning or end of text stays.

    Args:
        prefix, suffix, middle: the three tokens, by name or id.
        rate: share of the documents.
        spm_rate: share of SPM among them.
        ends: tokens that stay where they are at the beginning and end of a document, by name or id.
    """

    def __init__(
        self,
        *,
        prefix: str | int,
        suffix: str | int,
        middle: str | int,
        rate: float = 0.5,
        spm_rate: float = 0.5,
        ends: Sequence[str | int] = (),
    ):
        self._tokens = {"prefix": prefix, "suffix": suffix, "middle": middle}
        if not isinstance(ends, (list, tuple)):
            raise ConfigError(f"ends: {ends!r:.80} found, a list of tokens is needed.")
        _check_tokens({**self._tokens, **{f"ends[{n}]": each for n, each in enumerate(ends)}})
        _check_rates(rate=rate, spm_rate=spm_rate)
        self._rate, self._spm_rate, self._ends = rate, spm_rate, list(ends)

    def resolve(self, token_id: Callable[[str], int]) -> FillInTheMiddle:
        ids = {name: _id_of(each, token_id) for name, each in self._tokens.items()}
        ends = [_id_of(each, token_id) for each in self._ends]
        return FillInTheMiddle(**ids, rate=self._rate, spm_rate=self._spm_rate, ends=ends)

    def lengths(self, numbers: np.ndarray, stored: np.ndarray) -> np.ndarray:
        return stored + 3 * (chosen(numbers, "fill_in_the_middle", self._rate) & (stored >= 3))

    def apply(
        self, number: int, columns: DocumentColumns, rng: np.random.Generator
    ) -> Mapping[str, Any]:
        tokens, count = columns[TOKENS], len(columns[TOKENS])
        if self.lengths(np.array([number]), np.array([count]))[0] == count:
            return columns
        first, last = int(tokens[0] in self._ends), count - int(tokens[-1] in self._ends)
        begin, end = sorted(rng.integers(first, last + 1, 2).tolist())
        prefix, suffix, middle = (self._tokens[name] for name in ("prefix", "suffix", "middle"))
        before, between, after = (
            np.arange(*part) for part in ((first, begin), (begin, end), (end, last))
        )
        new = np.array([-1])
        parts = (new, before, new, after, new, between)
        ids = [prefix, suffix, middle]
        if rng.random() < self._spm_rate:
            parts = (new, new, after, new, before, between)
        places = np.concatenate([np.arange(first), *parts, np.arange(last, count)])
        changed = tokens[places].astype(np.int64)
        changed[places < 0] = ids
        return columns.move(places, changed)

    def to_json(self) -> dict[str, Any]:
        return {
            **self._tokens,
            "rate": self._rate,
            "spm_rate": self._spm_rate,
            "ends": self._ends,
        }


class MetadataPrefix(DocumentTransform):
    """Puts what is known of a document before it: its URL, its rating (MeCo).

    Gao et al., https://arxiv.org/abs/2501.01956, condition on metadata for most of a run, and cool
    down without. The metadata are a column per document of token ids, padded with negative numbers;
    no loss is taken on them. For the cool-down list the source a second time, without the
    transform, and schedule the two weights.

    Args:
        column: name of the column, of integers [k].
        rate: share of the documents.
        keep_first: tokens at the beginning of a document that stay there, such as its beginning of
            text.
    """

    def __init__(self, *, column: str, rate: float = 1.0, keep_first: int = 0):
        if not isinstance(column, str):
            raise ConfigError(f"column: {column!r:.80} found, the name of a column is needed.")
        check_integer("keep_first", keep_first, 0)
        _check_rates(rate=rate)
        self._column, self._rate, self._keep_first = column, rate, keep_first
        self._values: DocumentValues | None = None

    def bind(self, values: DocumentValues) -> MetadataPrefix:
        bound = MetadataPrefix(column=self._column, rate=self._rate, keep_first=self._keep_first)
        bound._values = values
        found = values(self._column, np.zeros(0, np.int64))
        if found.ndim != 2 or found.dtype.kind not in "iu":
            raise ConfigError(
                f"the column {self._column} has values {found.dtype} {list(found.shape[1:])} of "
                f"each document; integers [k] are needed."
            )
        return bound

    def lengths(self, numbers: np.ndarray, stored: np.ndarray) -> np.ndarray:
        return stored + (self._metadata(numbers) >= 0).sum(1) * (stored > 0)

    def fingerprint(self, numbers: np.ndarray) -> dict[str, Any]:
        return {self._column: sha256(self._metadata(numbers).astype("<i8").tobytes())}

    def _metadata(self, numbers: np.ndarray) -> np.ndarray:
        """Return the metadata of documents, [n, k], filled up with negative numbers."""
        assert self._values is not None, "it is bound before a plan"
        found = self._values(self._column, numbers).astype(np.int64)
        found[~chosen(numbers, "metadata_prefix", self._rate)] = -1
        return found

    def apply(
        self, number: int, columns: DocumentColumns, rng: np.random.Generator
    ) -> Mapping[str, Any]:
        (metadata,) = self._metadata(np.array([number]))
        metadata = metadata[metadata >= 0]
        count, first = len(columns[TOKENS]), min(self._keep_first, len(columns[TOKENS]))
        if not count:
            return columns
        places = np.concatenate(
            [np.arange(first), np.full(len(metadata), -1), np.arange(first, count)]
        )
        changed = columns[TOKENS][places].astype(np.int64)
        changed[places < 0] = metadata
        return columns.move(places, changed, label_weight=0.0)

    def to_json(self) -> dict[str, Any]:
        return {"column": self._column, "rate": self._rate, "keep_first": self._keep_first}


class TokenNoise(DocumentTransform):
    """Replaces random tokens, on whose prediction no loss is taken.

    Args:
        rate: share of the tokens.
        below: random ids are in ``[0, below)``.
        token: the id or name of one token that replaces them, such as a mask, in place of
            ``below``.
    """

    def __init__(self, *, rate: float, below: int | None = None, token: str | int | None = None):
        _check_rates(rate=rate)
        if (below is None) == (token is None):
            raise ConfigError("give either below or token.")
        if below is not None:
            check_integer("below", below, 1)
        else:
            _check_tokens({"token": token})
        self._rate, self._below, self._token = rate, below, token

    def resolve(self, token_id: Callable[[str], int]) -> TokenNoise:
        token = None if self._token is None else _id_of(self._token, token_id)
        return TokenNoise(rate=self._rate, below=self._below, token=token)

    def lengths(self, numbers: np.ndarray, stored: np.ndarray) -> np.ndarray:
        return stored

    def apply(
        self, number: int, columns: DocumentColumns, rng: np.random.Generator
    ) -> Mapping[str, Any]:
        count = len(columns[TOKENS])
        is_replaced = rng.random(count) < self._rate
        random = rng.integers(0, self._below, count) if self._below else np.full(count, self._token)
        changed = np.where(is_replaced, random, columns[TOKENS])
        moved = columns.move(np.arange(count), changed)
        weights = moved[LABEL_WEIGHTS]
        weights = np.ones(count, np.float32) if weights is None else weights
        moved[LABEL_WEIGHTS] = np.where(is_replaced, np.float32(0), weights)
        return moved

    def to_json(self) -> dict[str, Any]:
        given = {"below": self._below} if self._token is None else {"token": self._token}
        return {"rate": self._rate, **given}


#: Transforms by the name that a metadataset gives.
TRANSFORMS = Registry(
    "transform",
    DocumentTransform,
    fill_in_the_middle=FillInTheMiddle,
    metadata_prefix=MetadataPrefix,
    token_noise=TokenNoise,
)


@dataclass(frozen=True)
class Transform:
    """A transform with the name that it is registered under."""

    name: str
    change: DocumentTransform

    def to_json(self) -> dict[str, Any]:
        return {self.name: self.change.to_json()}


def transform_from_config(value: Any, where: str) -> Transform:
    """Return the transform that a field of a metadataset describes.

    Raises:
        ConfigError: it describes none.

    Example:
        >>> transform_from_config({"token_noise": {"rate": 0.1, "token": 3}}, "x").to_json()
        {'token_noise': {'rate': 0.1, 'token': 3}}
    """
    if not isinstance(value, dict) or len(value) != 1:
        raise ConfigError(
            f"{where}: {value!r:.80} found, one of {', '.join(TRANSFORMS)} with its options is "
            f"needed."
        )
    ((name, options),) = value.items()
    if name not in TRANSFORMS:
        raise ConfigError(f"{where}: {name!r:.80} found, it may be {choices(name, TRANSFORMS)}")
    if not isinstance(options, dict) or not all(isinstance(each, str) for each in options):
        raise ConfigError(f"{where}.{name}: {options!r:.80} found, its options are needed.")
    try:
        return Transform(name, TRANSFORMS[name](**options))
    except ConfigError as error:
        raise ConfigError(f"{where}.{name}: {error}") from None
    except TypeError as error:  # an option that is missing or that it does not have
        reason = str(error).partition("__init__() ")[2] or str(error)
        raise ConfigError(f"{where}.{name}: {reason}.") from None


def _check_rates(**rates: Any) -> None:
    for name, rate in rates.items():
        if type(rate) not in (int, float) or not 0 <= rate <= 1:
            raise ConfigError(f"{name}: {rate!r:.80} found, a share from 0 to 1 is needed.")


def _check_tokens(tokens: Mapping[str, Any]) -> None:
    for name, token in tokens.items():
        is_id = type(token) is int and 0 <= token < 2**31
        if not is_id and not (isinstance(token, str) and token):
            raise ConfigError(f"{name}: {token!r:.80} found, a token is needed, by name or id.")


def _id_of(token: str | int, token_id: Callable[[str], int]) -> int:
    return token_id(token) if isinstance(token, str) else token
