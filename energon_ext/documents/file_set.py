# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Token files as scripts for earlier snapshots read them: by places instead of numbers."""

from typing import Any

import numpy as np

from energon_ext.tokens import file_set


class TokenFiles(file_set.TokenFiles):
    """Token files whose documents may also be looked up by a place, which is now their number."""

    def locate(self, numbers: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the place of each document and its length in tokens, both int64 [n]."""
        places = np.asarray(numbers, np.int64)
        return places, self.lengths(places)


def open_token_files(path: Any) -> TokenFiles:
    """Open the documents that a path names; see :mod:`energon_ext.tokens.file_set`."""
    rebuild, arguments = file_set.open_token_files(path).__reduce__()
    return TokenFiles(*arguments)
