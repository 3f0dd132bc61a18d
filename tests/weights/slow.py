# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A slow reference for schedules."""

import math


def slow_weight(kind, points, position):
    """Return the value of a schedule by its formula, in plain Python."""
    before = [point for point in points if point <= position]
    after = [point for point in points if point > position]
    if not before or not after:
        return points[min(points) if not before else max(points)]
    left, right = max(before), min(after)
    low, high, t = points[left], points[right], (position - left) / (right - left)
    return {
        "step": low,
        "linear": low + t * (high - low),
        "cosine": low + (high - low) * (1 - math.cos(math.pi * t)) / 2,
        "exponential": low * (high / low) ** t,
    }[kind]
