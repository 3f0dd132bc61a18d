# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents by number: how many there are, how long each is, its tokens, and their order."""
