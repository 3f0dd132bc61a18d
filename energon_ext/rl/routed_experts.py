# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The experts to which a server has routed each token, as it sends them."""

import base64
import re
from dataclasses import dataclass

import numpy as np

from energon_ext.arguments import check_integers
from energon_ext.batch.columns import Column, check_names
from energon_ext.errors import ConfigError, SampleError

#: The header that NumPy writes before the values of an array of integers with three axes.
_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([<>|][iu][1248])', 'fortran_order': False, "
    rb"'shape': \((\d{1,18}), (\d{1,18}), (\d{1,18})\), \} *\n",
    re.DOTALL,
)
_MOST_EXPERTS = 2**15


@dataclass(frozen=True)
class RoutedExperts:
    """A description of the experts of each token: ``top_k`` numbers for each layer.

    Attributes:
        layers: layers that the server reports: all, or those with experts.
        top_k: experts of each token in a layer.
        experts: experts of a layer to choose from.
        name: of the column.

    Raises:
        ConfigError: a number is out of range, or the name is not one for a column.

    Example:
        >>> RoutedExperts(layers=48, top_k=8, experts=128).column.to_json()
        {'dtype': 'int16', 'item': [48, 8], 'per': 'token', 'at': 'input', 'fill': -1}
    """

    layers: int
    top_k: int
    experts: int
    name: str = "experts"

    def __post_init__(self) -> None:
        check_integers("RoutedExperts", layers=self.layers, top_k=self.top_k, experts=self.experts)
        if not self.top_k <= self.experts <= _MOST_EXPERTS:
            raise ConfigError(
                f"RoutedExperts: {self.top_k} of {self.experts} experts found, at most "
                f"{_MOST_EXPERTS} are possible, and top_k of them."
            )
        check_names({self.name: None}, "RoutedExperts.name")

    @property
    def column(self) -> Column:
        """The column, for the ``columns`` of :class:`~energon_ext.rl.RLDataset`."""
        return Column(np.dtype("int16"), (self.layers, self.top_k), at="input", fill=-1)

    @property
    def most_bytes(self) -> int:
        """Largest size of the experts of a token in an answer: int64 in base64."""
        return self.layers * self.top_k * 8 * 4 // 3 + 4

    def read_npy(self, sent: object, tokens: int) -> np.ndarray:
        """Return the experts that vLLM sends: a ``.npy`` file in base64.

        Args:
            tokens: of the prompt and the answer.

        Returns:
            int16 [tokens, layers, top_k]; -1 for the last token, which no layer has seen.

        Raises:
            SampleError: they are something else.
        """
        content = _decode(sent, "--enable-return-routed-experts (vLLM 0.22 or later)")
        header = _NPY_HEADER.match(content)
        if header is None:
            raise SampleError(
                f"routed_experts that begin with {content[:80]!r}, a .npy file of integers "
                f"{self._needed(tokens)} is needed"
            )
        dtype = np.dtype(header[1].decode())
        return self._check(content[header.end() :], dtype, [*map(int, header.groups()[1:])], tokens)

    def read_int32(self, sent: object, tokens: int) -> np.ndarray:
        """Return the experts that SGLang sends, as :meth:`read_npy` does: int32 in base64."""
        content = _decode(sent, "--enable-return-routed-experts")
        rows = len(content) // (4 * self.layers * self.top_k)
        shape = [rows, self.layers, self.top_k]
        return self._check(content, np.dtype("<i4"), shape, tokens)

    def _check(self, content: bytes, dtype: np.dtype, shape: list[int], tokens: int) -> np.ndarray:
        rows = shape[0]
        is_whole = len(content) == dtype.itemsize * shape[0] * shape[1] * shape[2]
        if not is_whole or rows not in (tokens - 1, tokens) or shape[1:] != [*self.column.item]:
            raise SampleError(
                f"routed_experts {shape} ({dtype}, {len(content)} bytes), {self._needed(tokens)} "
                f"are needed"
            )
        values = np.frombuffer(content, dtype).reshape(shape)
        lowest, highest = int(values.min(initial=0)), int(values.max(initial=0))
        if lowest < -1 or highest >= self.experts:
            raise SampleError(
                f"routed_experts from {lowest} to {highest}, numbers from 0 to {self.experts - 1} "
                f"are needed, or -1 for none"
            )
        result = self.column.filled(tokens)
        result[:rows] = values
        return result

    def _needed(self, tokens: int) -> str:
        return f"[{tokens - 1}, {self.layers}, {self.top_k}] (RoutedExperts)"


def _decode(sent: object, option: str) -> bytes:
    if not isinstance(sent, str):
        found = "no routed_experts" if sent is None else f"routed_experts {sent!r:.40}"
        raise SampleError(f"an answer with {found}; start the server with {option}")
    try:
        return base64.b64decode(sent, validate=True)
    except ValueError:
        raise SampleError(f"routed_experts {sent!r:.40}, which is no base64") from None
