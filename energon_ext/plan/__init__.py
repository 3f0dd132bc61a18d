# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Plan the rows of every step from lengths alone, and select those of this rank.

``packed_rows.py`` packs the documents of one source into rows, ``plan.py`` draws the rows of a step
from all sources, ``topology.py`` distributes them over ranks, ``run.py`` keeps how much has been
handed out, and ``cursor.py`` saves and restores it. ``forecast.py`` and ``estimate.py`` look ahead.
"""
