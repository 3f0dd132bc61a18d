# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A source whose samples are streamed from an Energon dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from energon_ext.plan.source import Source as AnySource
from energon_ext.streamed.spread import Spread
from energon_ext.weights import ConstantWeight, WeightSpec, weight_from_config


@dataclass(frozen=True, eq=False)
class StreamedSource(AnySource):
    """An Energon dataset as a source of a blend.

    Attributes:
        rows: the Energon dataset.
        weight: a number or a schedule, used if the blend is given no tree.
        fingerprint: JSON values that change with the data.
        spread: which workers read which samples; None for datasets that are not Energon's.
    """

    rows: Any
    weight: WeightSpec | float = field(default_factory=lambda: ConstantWeight(1.0))
    _: KW_ONLY
    fingerprint: dict[str, Any] = field(default_factory=dict)
    spread: Spread | None = None

    def identity(self) -> list[Any]:
        return [self.shuffle_name, self.max_epochs, self.fingerprint]

    @property
    def content(self) -> Mapping[str, Any]:
        return self.fingerprint

    @property
    def weight_spec(self) -> WeightSpec:
        if isinstance(self.weight, WeightSpec):
            return self.weight
        return weight_from_config(self.weight, f"Source {self.key}: weight")


#: The public name.
Source = StreamedSource
