# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Refuses text whose tokens are random: a cache would keep one draw for every epoch."""

from collections.abc import Callable, Sequence

import numpy as np

from energon_ext.errors import ConfigError, SampleError
from energon_ext.prepare.documents import InputDocument
from energon_ext.prepare.job import Arrays, Encoded
from energon_ext.prepare.samples import SampleSource, unit_of
from energon_ext.samples.reader import keyed_random

#: Samples that are encoded twice before a source is.
_CHECKED = 32

_Encode = Callable[[Sequence[InputDocument]], Sequence[Encoded | SampleError]]


def check_repeatable(name: str, source: SampleSource, encode: _Encode) -> None:
    """Read and encode the first samples of a source twice, with other random numbers.

    Raises:
        ConfigError: the tokens or the label weights of one differ.
    """
    first, second = (_encode_first(source, encode, draw) for draw in ("first", "second"))
    for (origin, one), (_, other) in zip(first, second):
        if not _are_equal(one, other):
            raise ConfigError(
                f"{source.path}: {name} encodes sample {origin} differently each time. Tokens are "
                f"made once and cached, so a random choice would be the same in every epoch. Let "
                f"it depend on the sample alone, give the entry a `transform`, or use a "
                f"TaskEncoder with an `encode_sample`; their random choices are new in every epoch."
            )


def _encode_first(
    source: SampleSource, encode: _Encode, draw: str
) -> list[tuple[str, Encoded | SampleError]]:
    numbers = range(min(_CHECKED, source.count))
    with keyed_random(draw):
        read = unit_of(source, numbers, {"path": source.path}).read()
        documents = [item for item in read if isinstance(item, InputDocument)]
        return [(each.origin, encode([each])[0]) for each in documents]


def _are_equal(one: Encoded | SampleError, other: Encoded | SampleError) -> bool:
    if isinstance(one, SampleError) or isinstance(other, SampleError):
        return type(one) is type(other)
    pairs = zip(one.documents, other.documents)
    return len(one.documents) == len(other.documents) and all(_same(*pair) for pair in pairs)


def _same(one: Arrays, other: Arrays) -> bool:
    (tokens, weights, *further), (other_tokens, other_weights, *others) = one, other
    is_same = np.array_equal(tokens, other_tokens) and all(
        np.array_equal(values, other[name])
        for columns, other in zip(further, others)
        for name, values in columns.items()
    )
    if weights is None or other_weights is None:
        return weights is other_weights and is_same
    return is_same and np.array_equal(weights, other_weights)
