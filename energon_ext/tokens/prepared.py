# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ``prepared.json`` of `energon-ext prepare`, which lists and counts the pairs it wrote."""

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_ext.data_files import count_of, parse_json
from energon_ext.errors import ConfigError
from energon_ext.storage.object_store import StoredObject
from energon_ext.tokens.index import PREPARED, Header

#: Token types that `energon-ext prepare` writes, by their size in bytes.
_TOKENS: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<i4")}


@dataclass(frozen=True)
class Prepared:
    """The files of an output by path, the documents and tokens of its parts by prefix, options."""

    files: dict[str, StoredObject]
    counts: dict[str, tuple[int, int]]
    options: dict[str, Any]

    def size_of(self, path: str) -> int | None:
        """Return the bytes of a file; None if there is none."""
        return self.files[path].size if path in self.files else None

    def header(self, prefix: str) -> Header:
        """Return the header of a pair without reading it: each document is one sequence."""
        if prefix not in self.counts:
            raise ConfigError(f"{prefix}: {PREPARED} does not count its tokens; prepare it again.")
        documents, tokens = self.counts[prefix]
        num_bytes = self.files[prefix + ".bin"].size
        dtype = _TOKENS.get(num_bytes // tokens if tokens else 4)
        if dtype is None or tokens * dtype.itemsize != num_bytes:
            raise ConfigError(
                f"{prefix}.bin: {num_bytes} bytes for {tokens} tokens; prepare it again."
            )
        return dtype, documents, documents, num_bytes


def parse_prepared(content: bytes, folder: str) -> Prepared:
    """Parse the ``prepared.json`` of a folder; ConfigError if it is not one."""
    files, counts = {}, {}
    try:
        written = parse_json(content)
        options = dict(written.get("options", {}))
        for unit in written["units"]:
            for name, known in unit["files"].items():
                path, sha256 = os.path.join(folder, name), str(known["sha256"])
                files[path] = StoredObject(path, count_of(known["bytes"]), sha256=sha256)
            for split, documents in unit["documents"].items():
                prefix = os.path.join(folder, split, unit["name"])
                counts[prefix] = count_of(documents), count_of(unit["tokens"][split])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{folder}/{PREPARED}: not written by `energon-ext prepare` ({error!r})."
        ) from error
    return Prepared(files, counts, options)
