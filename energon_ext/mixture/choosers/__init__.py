# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whose turn it is: from the state of a blend to the next source.

A chooser knows keys, weights and counts, and nothing of datasets. Its order depends on its seed,
the set of keys and its state only: keys are sorted, so the order in a YAML file says nothing.
"""

from energon_ext.mixture.choosers.base import Chooser
from energon_ext.mixture.choosers.by_weight import RandomChooser
from energon_ext.mixture.choosers.least_consumed import NEW_SOURCES, LeastConsumedChooser
from energon_ext.mixture.choosers.redeal import part_of, redealt_chooser_state
from energon_ext.mixture.choosers.tree import TreeChooser, chooser_for

__all__ = [
    "NEW_SOURCES",
    "Chooser",
    "LeastConsumedChooser",
    "RandomChooser",
    "TreeChooser",
    "chooser_for",
    "part_of",
    "redealt_chooser_state",
]
