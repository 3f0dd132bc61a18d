# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Blends of any Energon dataset: scheduled weights and keyed state, under Energon's own loader."""
