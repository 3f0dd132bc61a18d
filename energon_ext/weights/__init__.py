# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Blend weights as pure functions of the batch index.

``schedule.py`` has one weight, ``compose.py`` what many weights mean together, ``axis.py`` what the
knots count.
"""

from energon_ext.weights.axis import ScheduleAxis
from energon_ext.weights.compose import (
    ScheduledFloat,
    WeightGroup,
    as_weight,
    compose_weights,
    eval_weight,
    without_common_total,
)
from energon_ext.weights.schedule import (
    KINDS,
    ConstantWeight,
    ScheduledWeight,
    WeightSpec,
    weight_from_config,
)

__all__ = [
    "KINDS",
    "ConstantWeight",
    "ScheduleAxis",
    "ScheduledFloat",
    "ScheduledWeight",
    "WeightGroup",
    "WeightSpec",
    "as_weight",
    "compose_weights",
    "eval_weight",
    "weight_from_config",
    "without_common_total",
]
