# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Megatron's ``--split`` as subsets: the same documents, for every split and size.

Megatron rounds a bound to the nearest document, ``int(round(fraction * documents))``; Energon
rounds a percentage down. So percentages are written where both give the same documents, else the
numbers of the documents. (Megatron-core, ``datasets/blended_megatron_dataset_builder.py``.)
"""

import itertools
import math
import re
from collections.abc import Iterable

import numpy as np
from megatron.energon.metadataset.metadataset_v2 import Subset

from energon_ext.errors import ConfigError
from energon_ext.storage.object_store import is_remote
from energon_ext.tokens.file_set import TokenFiles
from energon_ext.tokens.index import Pair, read_pair
from energon_ext.tokens.paths import is_token_file, list_pairs
from energon_ext.tokens.remote_pairs import remote_pairs

#: Megatron's split -> split of the metadataset.
NAMES = {"train": "train", "valid": "val", "test": "test"}

_SHARE = r"(\d+\.?\d*|\.\d+)"

#: The first and last document of a part, as fractions of all.
Bounds = tuple[float, float]


def parse_split(text: str) -> dict[str, Bounds]:
    """Return the part of the documents of each split, for those with a share above 0.

    Example:
        >>> parse_split("3,1")
        {'train': (0.0, 0.75), 'val': (0.75, 1.0)}
        >>> parse_split("0,0,100")
        {'test': (0.0, 1.0)}
    """
    shares = [float(share) for share in re.findall(_SHARE, text)]
    is_list = re.fullmatch(rf"\s*{_SHARE}(\s*[, ]\s*{_SHARE})*\s*,?\s*", text) is not None
    if not is_list or len(shares) > len(NAMES) or not 0 < sum(shares) < math.inf:
        raise ConfigError(
            f"--split {text!r:.80}: one to three shares such as 969,30,1 are needed, for "
            f"{', '.join(NAMES)}, and not all 0."
        )
    # The sums are those of Megatron, to the last digit.
    ends = itertools.accumulate((np.array(shares) / np.sum(shares)).tolist(), initial=0.0)
    parts = zip(NAMES.values(), itertools.pairwise(ends))
    return {name: (begin, end) for name, (begin, end) in parts if begin < end}


def documents_in(bounds: Bounds, documents: int) -> tuple[int, int]:
    """Return the first document of a part and the one after its last, as Megatron does."""
    begin, end = (int(round(bound * float(documents))) for bound in bounds)
    return begin, end


def range_of(bounds: Bounds, documents: int | None) -> list[str | int]:
    """Return the ``range`` of a subset: percentages, or numbers where these differ.

    Args:
        documents: of the source; None if it is not known.

    Example:
        >>> range_of((0, 0.969), 1000)
        ['0%', '96.9%']
        >>> range_of((0, 0.969), 100)  # int(100 x 0.969) would be 96
        [0, 97]
    """
    percent = [f"{100 * bound:.10g}%" for bound in bounds]
    if documents is None:
        return [*percent]
    wanted = documents_in(bounds, documents)
    subset = Subset(range=(percent[0], percent[1])).as_dataset_subset()
    return [*percent] if subset.compute_subset(documents) == wanted else [*wanted]


def documents_of(prefix: str) -> int | None:
    """Return the number of documents that a path names; None if it names no pair."""
    pairs = _pairs_of(prefix)
    return None if pairs is None else sum(pair.documents for pair in pairs)


def tokens_in(prefix: str, bounds: Bounds | None) -> int | None:
    """Return the tokens of a source in a part of its documents; None if it names no pair."""
    pairs = _pairs_of(prefix)
    if pairs is None:
        return None
    if bounds is None or bounds == (0, 1):
        return sum(pair.tokens for pair in pairs)
    files = TokenFiles(pairs)
    return files.tokens_in(*documents_in(bounds, len(files)))


def remarks_on(prefixes: Iterable[str]) -> list[str]:
    """Return a remark on each source whose documents Megatron may divide between two splits."""
    remarks = []
    for prefix in dict.fromkeys(prefixes):
        pairs = _pairs_of(prefix) or []
        documents, sequences = sum(p.documents for p in pairs), sum(p.sequences for p in pairs)
        if documents != sequences:
            found = f"{documents:,} documents with {sequences:,} sequences"
            remarks.append(f"{prefix}: {found}; Megatron's --split may divide a document.")
    return remarks


def _pairs_of(prefix: str) -> list[Pair] | None:
    """Return the pairs that a path names, by their headers; None if it names none."""
    if not is_token_file(prefix):
        return None
    if is_remote(prefix):
        return remote_pairs(prefix)
    return [read_pair(name, files) for name, files in list_pairs(prefix).items()]
