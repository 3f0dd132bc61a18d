# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The earlier place of :mod:`energon_ext.tokens`, kept for scripts that import from it."""
