# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a run has to remember, and how it is written, read and matched to new sources."""
