# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""One of Megatron's tokenized files: a ``.bin`` of token ids, an ``.idx`` of where documents begin.

:mod:`energon_ext.documents.file_set` reads one and many alike.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from energon_ext.documents.file_set import TokenFiles
from energon_ext.documents.token_index import META_SUFFIX as META_SUFFIX
from energon_ext.documents.token_paths import SUFFIXES as SUFFIXES
from energon_ext.documents.token_paths import is_token_file as is_token_file
from energon_ext.errors import ConfigError


class TokenFile(TokenFiles):
    """The documents of one pair.

    Args:
        prefix: path without suffix, as Megatron's ``--data-path`` takes it.
    """

    def __init__(self, prefix: str | Path):
        super().__init__([prefix])


def token_file_builder(prefix: str | Path, vocab_size: int) -> Any:
    """Megatron-core's builder of a pair: ``add_document``, then ``finalize`` with the ``.idx``."""
    try:
        from megatron.core.datasets import indexed_dataset
    except ImportError as error:
        raise ConfigError(
            "Token files are written with megatron-core: pip install 'energon_ext[megatron]'."
        ) from error
    dtype = indexed_dataset.DType.optimal_dtype(vocab_size)
    return indexed_dataset.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
