# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Turns text into token files, unit by unit, for `energon-ext prepare` and the text cache."""
