# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Weights as pure functions of a position in the run.

``schedule.py`` defines one weight, ``axis.py`` the unit of its breakpoints, and ``live.py`` weights
from a file that a controller writes while the run trains.
"""

from energon_ext.weights.axis import ScheduleAxis
from energon_ext.weights.live import LiveWeights
from energon_ext.weights.schedule import (
    ConstantWeight,
    ScheduledWeight,
    Weights,
    WeightSpec,
    weight_from_config,
)

__all__ = [
    "ConstantWeight",
    "LiveWeights",
    "ScheduleAxis",
    "ScheduledWeight",
    "WeightSpec",
    "Weights",
    "weight_from_config",
]
