# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Writes and reads the state of a run, and matches it to the current sources."""
