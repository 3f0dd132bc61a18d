# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Further values of documents: per token or per document, of any type and shape, by name."""

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from energon_ext.errors import ConfigError, SampleError

#: Names under which a store returns tokens and label weights.
TOKENS, LABEL_WEIGHTS = "tokens", "label_weights"

#: Columns of a batch that the package writes itself. 1 on the response tokens to train on, also
#: where the weight is 0:
RESPONSE_MASK = "response_mask"

#: ``1 / n`` on each of the ``n`` trained labels of a document, 0 elsewhere:
DOCUMENT_SHARE = "document_share"

#: At the first trained label of each piece of a document, the part of the document that the piece
#: is, in multiples of ``1 / PARTS``; 0 elsewhere. The parts of all pieces of a document add up to
#: exactly 1.
DOCUMENT_PARTS = "document_parts"
PARTS = 4096

#: Per document: its number in its source, and how often the source had been read before.
DOCUMENT, VISIT = "document", "visit"

#: The weight of the source in the loss:
LOSS_WEIGHT = "loss_weight"

#: Names that no other column may have: those above, and the fields of a batch.
RESERVED = frozenset(
    (
        *(TOKENS, LABEL_WEIGHTS, "ends", "digests", RESPONSE_MASK, DOCUMENT_SHARE, DOCUMENT_PARTS),
        *(LOSS_WEIGHT, "labels", "token_weights", "position_ids", "cu_seqlens", "max_seqlen"),
        *("source_ids", "sources", "source_documents", "cu_seqlens_padded", "log_probs"),
        *("rewards", "pair_ids", "columns", "segments", "row_tokens", "context_size"),
        *(DOCUMENT, VISIT),
    )
)

NO_COLUMNS: Mapping[str, Any] = MappingProxyType({})

#: Field of the meta file of a pair.
COLUMNS = "columns"

#: Types of label weights in a file: bytes if all are 0 or 1, as for fine-tuning on answers.
WEIGHTS_TYPES = ("uint8", "float32")

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_KINDS = "a number of at most 8 bytes, such as float32 or int16, or bool"
_MOST_DIMENSIONS, _MOST_VALUES = 4, 1 << 20


@dataclass(frozen=True)
class Column:
    """Values of each token, or of each document.

    Attributes:
        dtype: of the values; a name such as ``"int16"`` becomes a NumPy type.
        item: shape of the values of one token or document, such as ``(8,)`` or ``(layers, k)``.
        per: ``token`` or ``document``.
        at: the token of a transition that a value belongs to, for values of tokens. A value of a
            ``label`` is needed where the token is predicted, such as its log-probability; one of an
            ``input`` where the token is read, such as its routed experts.
        fill: value on padding, and of sources without the column.

    Raises:
        ConfigError: a field has a value that is not allowed.

    Example:
        >>> experts = Column("int16", (8,), at="input", fill=-1)
        >>> experts.to_json()
        {'dtype': 'int16', 'item': [8], 'per': 'token', 'at': 'input', 'fill': -1}
        >>> Column.from_json(experts.to_json(), "web.meta.json") == experts
        True
    """

    dtype: np.dtype
    item: tuple[int, ...] = ()
    per: Literal["token", "document"] = "token"
    at: Literal["input", "label"] = "label"
    fill: float = 0

    def __post_init__(self) -> None:
        try:
            if self.dtype is None:  # for NumPy this is float64
                raise TypeError
            dtype = np.dtype(self.dtype).newbyteorder("<")
        except (TypeError, ValueError, SyntaxError):  # NumPy parses some texts as Python
            raise ConfigError(
                f"Column: dtype {self.dtype!r:.80} found, {_KINDS} is needed."
            ) from None
        if dtype.kind not in "biuf" or dtype.itemsize > 8:
            raise ConfigError(f"Column: dtype {dtype} found, {_KINDS} is needed.")
        item = tuple(self.item) if isinstance(self.item, (list, tuple)) else None
        sizes = item or ()
        is_shape = item is not None and all(type(n) is int and n > 0 for n in sizes)
        if not is_shape or len(sizes) > _MOST_DIMENSIONS or math.prod(sizes) > _MOST_VALUES:
            raise ConfigError(
                f"Column: item {self.item!r:.80} found, a shape of up to {_MOST_DIMENSIONS} "
                f"dimensions and {_MOST_VALUES:,} values is needed."
            )
        for field, allowed in (("per", ("token", "document")), ("at", ("input", "label"))):
            if getattr(self, field) not in allowed:
                found = getattr(self, field)
                raise ConfigError(
                    f"Column: {field} {found!r:.80} found, {' or '.join(allowed)} is needed."
                )
        if type(self.fill) not in (int, float, bool) or not _holds(dtype, self.fill):
            raise ConfigError(f"Column: fill {self.fill!r:.80} found, a {dtype} is needed.")
        object.__setattr__(self, "dtype", dtype)
        object.__setattr__(self, "item", item)

    @property
    def item_bytes(self) -> int:
        """Bytes of the values of one token or document."""
        return math.prod(self.item) * self.dtype.itemsize

    def filled(self, *counts: int) -> np.ndarray:
        """Return an array ``[*counts, *item]`` of fill values."""
        return np.full((*counts, *self.item), self.fill, self.dtype)

    def to_json(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype.name,
            "item": list(self.item),
            "per": self.per,
            "at": self.at,
            "fill": self.fill,
        }

    @classmethod
    def from_json(cls, value: Any, where: str) -> "Column":
        """Return the column that :meth:`to_json` describes; ConfigError if it describes none."""
        fields = {"dtype", "item", "per", "at", "fill"}
        if not isinstance(value, Mapping) or "dtype" not in value or set(value) - fields:
            raise ConfigError(
                f"{where}: {value!r:.200} found, an object with dtype and any of item, per, at and "
                f"fill is needed."
            )
        try:
            return cls(**value)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None


def _holds(dtype: np.dtype, value: float) -> bool:
    """Return True if a type can hold a number."""
    if dtype.kind == "f":
        largest = float(np.finfo(dtype).max)
        return -largest <= value <= largest  # beyond it, a value would become infinite
    if isinstance(value, float) and not value.is_integer():
        return False
    info = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    return info[0] <= value <= info[1]


#: Columns that say which document a segment belongs to; -1 on padding.
NUMBERS = {
    DOCUMENT: Column(np.dtype(np.int64), per="document", fill=-1),
    VISIT: Column(np.dtype(np.int32), per="document", fill=-1),
}


# What a pair says of its columns ----------------------------------------------------------------


def check_names(columns: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError for a name that no column may have."""
    for name in columns:
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            raise ConfigError(
                f"{where}: {name!r:.80} found as the name of a column; letters, digits and _ are "
                f"needed."
            )
        if name in RESERVED:
            raise ConfigError(
                f"{where}: {name!r} found as the name of a column, which batches use themselves; "
                f"take another."
            )


def check_described(columns: Mapping[str, Any], where: str) -> None:
    """Raise ConfigError unless columns have allowed names, and each is described by a Column."""
    check_names(columns, where)
    for name, column in columns.items():
        if not isinstance(column, Column):
            raise ConfigError(f"{where}: {name}: {column!r:.80} found, a Column is needed.")


def columns_to_json(columns: Mapping[str, Column]) -> dict[str, Any]:
    """Return the fields of a meta file that describe columns; none if there is no column."""
    if not columns:
        return {}
    return {COLUMNS: {name: column.to_json() for name, column in columns.items()}}


def columns_in(meta: Mapping[str, Any] | None, where: str) -> Mapping[str, Column]:
    """Return the columns that a meta file describes, and label weights if it mentions them.

    Raises:
        ConfigError: it describes them wrongly.
    """
    if not meta or (COLUMNS not in meta and LABEL_WEIGHTS not in meta):
        return NO_COLUMNS
    described = (json.dumps(meta.get(name)) for name in (COLUMNS, LABEL_WEIGHTS))
    return _parse_columns(*described, where)


@functools.lru_cache(64)
def _parse_columns(columns: str, weights: str, where: str) -> Mapping[str, Column]:
    described, own = json.loads(columns), json.loads(weights)
    if not isinstance(described, dict | None):
        raise ConfigError(f"{where}: columns: {columns:.80} found, an object is needed.")
    check_names(described or {}, f"{where}: columns")
    found = {
        name: Column.from_json(value, f"{where}: columns.{name}")
        for name, value in (described or {}).items()
    }
    if own is None:
        return found
    dtype = own.get("dtype") if isinstance(own, dict) else own
    if dtype not in WEIGHTS_TYPES:
        raise ConfigError(
            f"{where}: the type of label_weights must be {' or '.join(WEIGHTS_TYPES)}, found "
            f"{dtype!r}."
        )
    return {LABEL_WEIGHTS: Column(dtype, fill=1), **found}


def merge_columns(columns_of: Mapping[str, Mapping[str, Column]]) -> dict[str, Column]:
    """Return the columns of all sources; ConfigError if two have one name for different columns.

    Args:
        columns_of: the columns of each source, by its key.
    """
    merged: dict[str, Column] = {}
    owners: dict[str, str] = {}
    for key, columns in columns_of.items():
        for name, column in columns.items():
            if merged.setdefault(name, column) != column:
                raise ConfigError(
                    f"{key}: its column {name} is {column.to_json()}, but that of {owners[name]} "
                    f"is {merged[name].to_json()}; rename one."
                )
            owners.setdefault(name, key)
    return merged


def foreign_id(tokens: np.ndarray, vocab_size: int) -> int | None:
    """Return a token id that is not in ``[0, vocab_size)``; None if all are."""
    ends = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    return next((token for token in ends if not 0 <= token < vocab_size), None)


def check_values(name: str, column: Column, values: Any, tokens: int, origin: str) -> np.ndarray:
    """Return the values of a document in the type of a column, ``[tokens, *item]`` or ``[*item]``.

    Raises:
        SampleError: they have another shape, or do not fit the type.
    """
    counts = (tokens,) if column.per == "token" else ()
    if values is None:
        return column.filled(*counts)
    try:
        array = np.asarray(values)
    except (TypeError, ValueError, RuntimeError) as error:  # lists of unequal lengths, some tensors
        raise SampleError(
            f"{origin}: column {name}: a {type(values).__name__} found, an array is needed "
            f"({' '.join(str(error).split())})."
        ) from error
    if np.ma.is_masked(values):
        raise SampleError(f"{origin}: column {name}: a masked value found; give a number for it.")
    if array.shape != (*counts, *column.item) or array.dtype.kind not in "biuf":
        raise SampleError(
            f"{origin}: column {name}: {array.dtype} {list(array.shape)} found, {column.dtype} "
            f"{[*counts, *column.item]} is needed."
        )
    stored, unfit = convert_values(column, array)
    if unfit is not None:
        raise SampleError(f"{origin}: column {name}: {unfit} does not fit {column.dtype}.")
    return stored


def convert_values(column: Column, array: np.ndarray) -> tuple[np.ndarray, Any]:
    """Return numbers in the type of a column, and the first one that does not fit it, or None."""
    with np.errstate(all="ignore"):
        stored = array.astype(column.dtype)
        # A float may be rounded. A whole number may not: it can be an id or a date.
        if column.dtype.kind == "f" and array.dtype.kind == "f":
            is_same = np.isfinite(stored) == np.isfinite(array)
        else:
            is_same = (stored == array) & (stored.astype(array.dtype) == array)
    return stored, None if is_same.all() else array[~is_same].flat[0]
