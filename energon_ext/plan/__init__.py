# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Plan the rows of a step from lengths alone, and those of this rank."""
