# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Plan the rows of every step from lengths alone, and select those of this rank."""
