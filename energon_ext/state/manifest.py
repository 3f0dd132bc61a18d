# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The file that makes a directory a checkpoint, and notices every change to itself.

``manifest.json`` holds ``format``, ``version``, ``step``, ``save_index`` (1, 2, ... in the order of
saving: the newest is not the highest step where a run went back), ``files`` ``{name: {bytes,
sha256}}``, the caller's ``metadata``, and ``checksum``, the SHA-256 of the file without it. It is
read only if it is byte for byte what was written.

Upgrade rule: no key ever changes its meaning. Whoever adds version n + 1 adds the function that
makes a manifest of version n one of n + 1; a reader verifies the checksum, then applies them in
order. So every older version stays readable, and a newer one is refused.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from energon_ext.errors import ConfigError, StateFormatError
from energon_ext.state.serialize import first_line, fsync, record_of, write_file

FORMAT = "energon_ext.state.checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

#: Files up to this size are hashed, whatever they are.
HASHED_BYTES = 2**24

_TYPES = {
    "format": str,
    "version": int,
    "step": int,
    "save_index": int,
    "files": dict,
    "metadata": dict,
}


def write_manifest(directory: Path, **content: Any) -> None:
    """Make a directory a checkpoint, in one atomic step.

    Args:
        content: ``step``, ``save_index``, ``files``, ``metadata``.

    Raises:
        ConfigError: the metadata is not a JSON object.
        OSError: the file could not be written.

    Example:
        >>> import tempfile
        >>> directory = Path(tempfile.mkdtemp())
        >>> write_manifest(directory, step=7, save_index=1, files={}, metadata={"lr": 0.1})
        >>> read_manifest(directory)["metadata"]
        {'lr': 0.1}
    """
    if not isinstance(content["metadata"], dict):
        found = type(content["metadata"]).__name__
        raise ConfigError(f"metadata: found {found}, allowed is a dict.")
    content["metadata"] = json.loads(to_json("metadata", content["metadata"]))
    write_file(directory / MANIFEST, _encode({"format": FORMAT, "version": VERSION, **content}))
    fsync(directory)


def read_manifest(directory: Path) -> dict[str, Any]:
    """What :func:`write_manifest` was given, verified.

    Raises:
        FileNotFoundError: the directory has none, so it is no checkpoint.
        StateFormatError: the manifest is damaged, or of a newer version.
    """
    path = directory / MANIFEST
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise StateFormatError(
            f"{path} cannot be used: {first_line(error)}. Open another checkpoint with open(step), "
            "or move this directory away."
        ) from error


def records_below(
    directory: Path, folder: str, *, settle: bool = False
) -> dict[str, dict[str, Any]]:
    """By which the files of a folder in a checkpoint are known: size, and SHA-256 of small ones.

    Args:
        settle: flush them all to disk first.
    """
    records: dict[str, dict[str, Any]] = {}
    for path in (directory / folder, *sorted((directory / folder).rglob("*"))):
        if settle:
            fsync(path)
        if path.is_file():
            size = path.stat().st_size
            small = size <= HASHED_BYTES
            name = path.relative_to(directory).as_posix()
            records[name] = record_of(path.read_bytes()) if small else {"bytes": size}
    return records


def to_json(what: str, value: Any) -> bytes:
    """A value as JSON text.

    Raises:
        ConfigError: it is not JSON.
    """
    try:
        return json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{what} is not JSON: {first_line(error)}.") from error


def _encode(content: dict[str, Any]) -> bytes:
    text = json.dumps(content, indent=1, allow_nan=False)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({**content, "checksum": checksum}, indent=1).encode()


def _decode(data: bytes) -> dict[str, Any]:
    content = json.loads(data)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(f"it is not of format {FORMAT!r}")
    if content.get("version") not in range(1, VERSION + 1):
        raise ValueError(
            f"it has version {content.get('version')!r}, this energon_ext reads 1 to {VERSION}"
        )
    content.pop("checksum", None)
    if _encode(content) != data:
        raise ValueError("it is not what was written, its checksum differs")
    if {key: type(value) for key, value in content.items()} != _TYPES:
        raise ValueError(f"its keys or their types are not those of version {VERSION}")
    return content
