# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Which rows a step has, from lengths alone, and which of them are mine."""
