# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""See :mod:`energon_ext.tokens.file_set`."""

from energon_ext.tokens.file_set import TokenFiles, open_token_files

__all__ = ["TokenFiles", "open_token_files"]
