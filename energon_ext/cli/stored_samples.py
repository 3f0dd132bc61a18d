# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Stored samples for display: their texts, and their images as sizes or thumbnails."""

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Mapping, Sequence

from PIL import Image, ImageDraw, ImageOps

from energon_ext.errors import ConfigError, printable
from energon_ext.plan.source import Reader
from energon_ext.state.files import write_file

_TEXTS = ("json", "txt", "md", "text", "cls")

#: Pixels of a thumbnail's side, of the line of text below it, and of the gap between.
_SIDE, _LINE, _GAP = 160, 14, 8

#: Most images in a line.
_MAX_PER_LINE = 8

#: Most characters of the name below a thumbnail.
_LONGEST_NAME = 26


@dataclass
class StoredSample:
    """A sample, by its number in its source."""

    number: int
    tokens: int | None  # as measured; None if a row is one sample
    files: Mapping[str, Any]  # contents by extension; also `__key__` and `__shard__`

    @property
    def name(self) -> str:
        return str(self.files.get("__key__", self.number))

    def about(self) -> str:
        """Return its key, shard and length, and a summary of its contents other than text."""
        parts = [] if self.tokens is None else [f"{self.tokens} tokens"]
        parts += [f"{ext} {_shape(data)}" for ext, data in self._contents() if not _is_text(ext)]
        shard = self.files.get("__shard__")
        where = f"sample {self.name}" + (f" of {shard}" if shard else "")
        return ", ".join([where, *parts])

    def text(self) -> str:
        """Return all texts, in the order of their extensions."""
        return " ".join(_text(data) for ext, data in self._contents() if _is_text(ext))

    def images(self) -> list[Image.Image]:
        """Return the images that can be decoded."""
        return [image for _, data in self._contents() if (image := _image(data)) is not None]

    def _contents(self) -> list[tuple[str, Any]]:
        names = sorted(name for name in self.files if not name.startswith("__"))
        return [(name, self.files[name]) for name in names]


def stored_samples(
    reader: Reader, contents: Sequence[tuple[int, int, int]], are_packed: bool
) -> list[StoredSample]:
    """Return the samples of a row; none if it is made of tokens.

    Args:
        contents: ``(number, start, stop)`` of each sample in the row.
        are_packed: whether samples were measured, so that their lengths are known.
    """
    return [
        StoredSample(number, stop - start if are_packed else None, files)
        for number, start, stop in contents
        for files in reader.read_stored(number)
    ]


@dataclass
class ContactSheet:
    """The images of rows as one picture; each row begins a line, and a long one takes several."""

    rows: list[list[tuple[str, Image.Image]]] = field(default_factory=list)

    def add(self, title: str, samples: Sequence[StoredSample]) -> None:
        """Append a row, if it has images."""
        images = [(sample.name, image) for sample in samples for image in sample.images()]
        for first in range(0, len(images), _MAX_PER_LINE):
            line = images[first : first + _MAX_PER_LINE]
            self.rows.append([(f"{title} {name}", image) for name, image in line])

    def save(self, path: Path) -> None:
        """Write the picture; raise ConfigError if there is no image."""
        if not self.rows:
            raise ConfigError(f"{path}: none of the rows has an image; no picture was drawn.")
        width = max(map(len, self.rows)) * (_SIDE + _GAP) + _GAP
        height = len(self.rows) * (_SIDE + _LINE + _GAP) + _GAP
        sheet = Image.new("RGB", (width, height), "white")
        draw = ImageDraw.Draw(sheet)
        for line, images in enumerate(self.rows):
            top = _GAP + line * (_SIDE + _LINE + _GAP)
            for place, (name, image) in enumerate(images):
                left = _GAP + place * (_SIDE + _GAP)
                sheet.paste(ImageOps.contain(image, (_SIDE, _SIDE)), (left, top))
                shown = printable(name).encode("ascii", "replace").decode()
                draw.text((left, top + _SIDE), shown[-_LONGEST_NAME:], fill="black")
        picture = io.BytesIO()
        sheet.save(picture, "PNG")
        write_file(path, picture.getvalue())


def _is_text(ext: str) -> bool:
    return ext.rpartition(".")[2] in _TEXTS


def _text(content: Any) -> str:
    if isinstance(content, bytes):
        return content.decode(errors="replace")
    return content if isinstance(content, str) else json.dumps(content, default=str)


def _shape(content: Any) -> str:
    image = _image(content)
    if image is not None:
        return f"{image.width}x{image.height}"
    return f"of {len(content):,} bytes" if isinstance(content, bytes) else type(content).__name__


def _image(content: Any) -> Image.Image | None:
    """Decode an image; return None if the content is not one."""
    try:
        image = Image.open(io.BytesIO(content))
        return image.convert("RGB")
    except Exception:  # noqa: BLE001 - decoders raise anything for damaged files
        return None
