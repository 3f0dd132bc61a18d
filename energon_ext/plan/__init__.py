# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Plan the rows of every step from lengths alone, and select those of this rank.

``rows.py`` packs the documents of one source into rows, ``step.py`` draws the rows of a step from
all sources, ``deal.py`` distributes them over ranks, ``dataset.py`` turns them into batches, and
``state.py`` saves and restores the run. ``forecast.py`` and ``estimate.py`` look ahead.
"""
