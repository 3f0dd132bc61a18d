# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Indices of JSON Lines files: Energon reads none without the offsets of its lines beside it."""

import logging
import os
import tempfile
from pathlib import Path

from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory
from megatron.energon.flavors.jsonl.ijsonl import IJsonlIndexReader

from energon_ext.errors import ConfigError

logger = logging.getLogger(__name__)


def ensure_index(path: EPath, found_in: str = "") -> None:
    """Make the index of a local file that has none; ConfigError for one of another content.

    Ranks that make it at the same time make the same, each in a folder of its own.
    """
    index = EPath(f"{path}.idx")
    if not index.is_file():
        if not path.is_local():
            raise ConfigError(f"{found_in}{path}: no index; run `energon prepare {path}`.")
        _make_index(path, found_in)
    size = index.size()
    if size % 8 or size < 16 or IJsonlIndexReader.size(path) != path.size():
        raise ConfigError(
            f"{found_in}{path}: the file has changed since its index was made; remove {path}.idx, "
            f"and the next start makes it again."
        )


def _make_index(path: EPath, found_in: str) -> None:
    file = Path(str(path))
    try:
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=f".{file.name}.") as folder:
            link = Path(folder) / file.name
            link.symlink_to(file.resolve())
            count = CrudeJsonlDatasetFactory.prepare_dataset(EPath(link))
            os.replace(f"{link}.idx", f"{file}.idx")
    except AssertionError as error:  # what Energon says of lines that are no objects
        raise ConfigError(f"{found_in}{path}: no index can be made ({error!s:.120})") from error
    except OSError as error:
        raise ConfigError(
            f"{found_in}{path}: no index can be made beside it ({error.strerror}); run `energon "
            f"prepare {path}` where its folder can be written."
        ) from error
    logger.info("%s: an index of its %d lines is written beside it.", path, count)
