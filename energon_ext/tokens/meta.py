# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The ``.meta.json`` of a pair: the tokenizer that wrote it, and its columns."""

from functools import lru_cache
from typing import Any, Mapping

from energon_ext.batch.columns import COLUMNS
from energon_ext.data_files import parse_json, read_data
from energon_ext.errors import ConfigError

#: Tokenizer and columns of a pair that `energon-ext prepare` wrote.
META_SUFFIX = ".meta.json"
MAX_META_BYTES = 2**20


def read_meta(name: str, path: str) -> Mapping[str, Any] | None:
    """Read the ``.meta.json`` at a path, None if there is none; messages use the name."""
    try:
        content = read_data(path, MAX_META_BYTES)
    except FileNotFoundError:
        return None
    try:
        return _parse_meta(content)
    except ValueError as error:
        raise ConfigError(f"{name}: not written by `energon-ext prepare` ({error}).") from error


def check_written(
    prefix: str, meta: Mapping[str, Any], what: str, name: str, now: Mapping[str, Any]
) -> None:
    """Raise ConfigError if a pair names a different tokenizer or chat template.

    Args:
        what: ``"tokenizer"`` or ``"chat template"``.
        name, now: name and fingerprint of the one that is used to read the pair.
    """
    field, option = what.replace(" ", "_"), what.replace(" ", "-")
    written = meta.get(field, now)
    if written == now:
        return
    before = written if isinstance(written, Mapping) else {}
    differing = [key for key in {**now, **before} if before.get(key) != now.get(key)]
    differences = ", ".join(
        f"{key} {before.get(key)!s:.12}, now {now.get(key)!s:.12}" for key in differing[:3]
    )
    arguments = meta.get(f"{field}_arguments")
    used = arguments.get("name_or_path") if isinstance(arguments, Mapping) else None
    written_with = f"the {what} {used}" if used else f"a different {what}"
    raise ConfigError(
        f"{prefix}: written with {written_with}, but {name} is used to read it ({differences}); "
        f"pass --{option} {used or 'NAME'}, as it was written."
    )


@lru_cache(64)
def _parse_meta(content: bytes) -> Mapping[str, Any]:
    """Parse a meta file; cached by content, as thousands of pairs may share one tokenizer."""
    meta = parse_json(content)
    if not isinstance(meta, dict) or not {"tokenizer", COLUMNS} & meta.keys():
        raise ValueError(f"it has no `tokenizer` and no `{COLUMNS}`")
    return meta
