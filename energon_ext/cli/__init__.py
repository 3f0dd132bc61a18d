# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The command ``energon-ext``: one module per command, and what the commands share."""
