# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The sample or batch that an encoder's method is called for.

One encoder may serve several datasets at once, so nothing about a dataset is written to it. Its
methods ask the context instead, through the properties of
:class:`~energon_ext.encoders.mixin.DynamicBlendMixin`.
"""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from energon_ext.batch.columns import Column


@dataclass(frozen=True)
class EncoderContext:
    """The sample, row or batch that a method of an encoder is called for.

    Attributes:
        source_key: key of the source of the sample or row.
        sample_number: number from which the random choices of a planned sample are derived; None
            outside one.
        source_keys: all keys that the rows of a batch may have.
        pad_id: token that fills rows; None for the tokenizer's.
        columns: all columns that the rows of a batch may have, by name.
        context_size: context-parallel ranks that share a batch of a layout, whose rows are joined;
            None for rows as they were planned.
        row_tokens: positions of each row of a batch; None for those of the encoder.
    """

    source_key: str = ""
    sample_number: int | None = None
    source_keys: tuple[str, ...] = ()
    pad_id: int | None = None
    columns: Mapping[str, Column] = field(default_factory=dict)
    context_size: int | None = None
    row_tokens: int | None = None


_OUTSIDE = EncoderContext()
_current: ContextVar[EncoderContext] = ContextVar("energon_ext", default=_OUTSIDE)


def current_context() -> EncoderContext:
    """Return the context of the method that is running."""
    return _current.get()


@contextlib.contextmanager
def encoder_context(**changes: Any) -> Iterator[None]:
    """Call methods of an encoder in the current context with some fields changed."""
    token = _current.set(dataclasses.replace(_current.get(), **changes))
    try:
        yield
    finally:
        _current.reset(token)
