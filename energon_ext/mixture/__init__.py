# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Whose row is next: blends that draw and interleaves that keep shares to a row."""
