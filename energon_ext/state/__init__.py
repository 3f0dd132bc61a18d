# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The state of a run: how it is written, read and matched to new sources."""
