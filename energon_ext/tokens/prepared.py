# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ``prepared.json`` of `energon-ext prepare`, which lists and counts the pairs it wrote."""

import os
from dataclasses import dataclass

import numpy as np

from energon_ext.data_files import count_of, parse_json
from energon_ext.errors import ConfigError
from energon_ext.tokens.index import PREPARED, Header

#: Token types that `energon-ext prepare` writes, by their size in bytes.
_TOKENS: dict[int, np.dtype] = {2: np.dtype("<u2"), 4: np.dtype("<i4")}


@dataclass(frozen=True)
class PreparedFile:
    """Size and SHA-256 of a file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Prepared:
    """The files of an output by path, and the documents and tokens of its pairs by prefix."""

    files: dict[str, PreparedFile]
    counts: dict[str, tuple[int, int]]

    def size_of(self, path: str) -> int | None:
        """Return the bytes of a file; None if there is none."""
        return self.files[path].num_bytes if path in self.files else None

    def header(self, prefix: str) -> Header:
        """Return the header of a pair without reading it: each document is one sequence."""
        if prefix not in self.counts:
            raise ConfigError(f"{prefix}: {PREPARED} does not count its tokens; prepare it again.")
        documents, tokens = self.counts[prefix]
        num_bytes = self.files[prefix + ".bin"].num_bytes
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
        for unit in parse_json(content)["units"]:
            for name, known in unit["files"].items():
                path = os.path.join(folder, name)
                files[path] = PreparedFile(count_of(known["bytes"]), str(known["sha256"]))
            for split, documents in unit["documents"].items():
                prefix = os.path.join(folder, split, unit["name"])
                counts[prefix] = count_of(documents), count_of(unit["tokens"][split])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{folder}/{PREPARED}: not written by `energon-ext prepare` ({error!r})."
        ) from error
    return Prepared(files, counts)
