# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Members of a webdataset sample as text: what the encoders here read, and nothing beside it."""

import json
from typing import Any

from megatron.energon import SampleDecoder


class TextDecoder(SampleDecoder):
    """Decodes ``json`` and ``txt``; every other member stays bytes.

    Energon's own decoder unpickles members that are called ``pyd``, ``pickle`` or ``pth``.

    Example:
        >>> TextDecoder()({"__key__": "7", "txt": b"hi", "json": b"[1]", "pyd": b"..."})
        {'__key__': '7', 'txt': 'hi', 'json': [1], 'pyd': b'...'}
    """

    def __init__(self) -> None:
        pass  # the decoders of images and sounds are never made

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {name: _decoded(name, value) for name, value in sample.items()}

    def config(self) -> dict[str, Any]:
        return {"decoded": ["json", "txt"]}


def _decoded(name: str, value: Any) -> Any:
    suffix = name.rpartition(".")[2].lower()
    if not isinstance(value, bytes) or name.startswith("__") or suffix not in ("json", "txt"):
        return value
    return json.loads(value) if suffix == "json" else value.decode("utf-8")
