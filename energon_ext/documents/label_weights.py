# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The weights of a token file's labels: ``PREFIX.weights.bin`` beside ``PREFIX.bin``.

One number for each token, in the order of the tokens: uint8 where all are 0 or 1, as for
fine-tuning on answers, else float32. ``PREFIX.meta.json`` says which of the two, as
``{"label_weights": {"dtype": "uint8"}}``.
"""

from __future__ import annotations

import os
from typing import Any, Mapping

import numpy as np

from energon_ext.errors import ConfigError

WEIGHTS_SUFFIX = ".weights.bin"
DTYPES = ("uint8", "float32")


def weights_dtype(prefix: str, meta: Mapping[str, Any] | None, num_tokens: int) -> np.dtype | None:
    """Type of the weights that a pair has, None where it has none.

    Args:
        prefix: of the pair.
        meta: content of its ``.meta.json``, None where there is none.
        num_tokens: of the pair; each needs a weight.

    Raises:
        ConfigError: the description, the file and the tokens do not fit each other.
    """
    path = prefix + WEIGHTS_SUFFIX
    described = (meta or {}).get("label_weights")
    found_bytes = os.path.getsize(path) if os.path.isfile(path) else None
    if described is None:
        if found_bytes is None:
            return None
        raise ConfigError(
            f"{path}: {prefix}.meta.json does not speak of it, so it would be ignored; copy that "
            f"file as well, or remove the weights."
        )
    name = described.get("dtype") if isinstance(described, Mapping) else described
    if name not in DTYPES:
        raise ConfigError(
            f"{prefix}.meta.json: label_weights of type {name!r}; {' or '.join(DTYPES)} is needed."
        )
    dtype = np.dtype(name)
    if found_bytes != num_tokens * dtype.itemsize:
        found = "does not exist" if found_bytes is None else f"has {found_bytes} bytes"
        raise ConfigError(
            f"{path}: {found}, {num_tokens} tokens need {num_tokens * dtype.itemsize}; copy it "
            f"again, or prepare the pair again."
        )
    return dtype
