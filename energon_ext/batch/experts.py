# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Experts that routers chose: k different ones for each token and layer, or none."""

import itertools
from collections.abc import Sequence

import numpy as np


def find_fault(experts: np.ndarray, count: int, layers: Sequence[int]) -> str | None:
    """Describe what is invalid in the experts of tokens; None if nothing is.

    Args:
        experts: integers [tokens, layers, k]: the numbers of different experts, or only -1.
        count: number of experts of a layer.
        layers: indices of the layers that have experts; those of others are ignored.

    Example:
        >>> find_fault(np.array([[[2, 0]], [[-1, -1]]]), 3, [0])
        >>> print(find_fault(np.array([[[2, 0]], [[3, 1]]]), 3, [0]))
        experts [3, 1] of token 1, layer 0 found; different ones from 0 to 2, or only -1, are needed
    """
    # One array per place, so that the comparisons below run through memory.
    places = np.ascontiguousarray(np.moveaxis(experts, 2, 0))  # [k, tokens, layers]
    if len(layers) < experts.shape[1]:
        places = places[:, :, layers]
    if not places.size:
        return None
    lowest, highest = places.min(0), places.max(0)
    is_wrong = (lowest < 0) & ((highest >= 0) | (lowest < -1)) | (highest >= count)
    is_repeated = np.zeros_like(is_wrong)
    for one, other in itertools.combinations(places, 2):
        is_repeated |= one == other
    is_wrong |= is_repeated & (highest >= 0)
    if not is_wrong.any():
        return None
    token, layer = np.argwhere(is_wrong)[0]
    found = places[:, token, layer].tolist()
    return (
        f"experts {found} of token {token}, layer {layers[layer]} found; different ones from 0 to "
        f"{count - 1}, or only -1, are needed"
    )
