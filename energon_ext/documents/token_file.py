# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Megatron-core's writer of token files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from energon_ext.errors import ConfigError


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
