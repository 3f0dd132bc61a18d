# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Choose the source of the next row: at random (blend), or by credits (interleave)."""
