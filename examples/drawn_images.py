# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Write data for example 06: drawn images with correct captions, and real prose.

    python examples/drawn_images.py vision        (a few seconds)

Writes vision/shapes (one image per sample, sometimes none) and vision/pairs (two per sample), both
prepared like Energon's own datasets with a tenth in ``val``; vision/prose, token files of real
text; and the metadataset vision/mix.yaml, which moves from captions to text.
"""

import contextlib
import io
import json
import random
import tarfile
from pathlib import Path

from demo_corpora import reference_prose, write_tokens
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.base_webdataset import BaseWebdatasetFactory
from options import count, new_parser
from PIL import Image, ImageDraw

SIDE, SIZE = 32, 9  # pixels of an image, and of its shape
COLORS = ("red", "green", "blue", "orange", "purple", "black")
SHAPES = ("circle", "square", "triangle")
ROWS, COLUMNS = ("top", "middle", "bottom"), ("left", "center", "right")
FORMATS = ("png", "webp", "jpeg")

#: A dataset.yaml: the encoder cooks the samples, which it recognizes by their subflavor.
CRUDE = {
    "__module__": "megatron.energon",
    "__class__": "CrudeWebdataset",
    "subflavors": {"images": True},
}

MIX = """\
# From captions to text: the share of images falls from 9 in 10 to 1 in 2 over 60 steps.
__module__: energon_ext
__class__: ScheduledMetadataset
splits:
  train:
    blend:
      - {path: shapes, weight: {linear: {0: 6, 60: 2}}, name: shapes}
      - {path: pairs, weight: {linear: {0: 3, 60: 1}}, name: pairs}
      - {path: prose/train, weight: {linear: {0: 1, 60: 3}}, name: prose}
  val:
    path: shapes
"""


def main():
    parser = new_parser(__doc__.splitlines()[0], "python examples/drawn_images.py vision")
    parser.add_argument("folder", type=Path, help="folder for the data")
    parser.add_argument("--images", type=count, default=3000, help="samples with one image")
    args = parser.parse_args()
    write_data(args.folder, args.images)
    print(f"Next: python examples/06_vision_language.py {args.folder / 'mix.yaml'}")


def write_data(folder, images):
    """Write all sources and their metadataset."""
    write_webdatasets(folder, images)
    write_tokens(folder / "prose", reference_prose())
    (folder / "mix.yaml").write_text(MIX)


def write_webdatasets(folder, images):
    """Write single shapes, a few captions without an image, and captioned pairs of images."""
    write_webdataset(folder / "shapes", images, lambda number: 0 if number % 20 == 19 else 1)
    write_webdataset(folder / "pairs", images // 3, lambda number: 2)


def write_webdataset(folder, samples, images_of, shard_samples=20):
    """Write a webdataset of samples with 0, 1 or 2 images, prepared as by ``energon prepare``."""
    folder.mkdir(parents=True)
    rng = random.Random(folder.name)
    for first in range(0, samples, shard_samples):
        with tarfile.open(folder / f"shard_{first // shard_samples:03d}.tar", "w") as tar:
            for number in range(first, min(samples, first + shard_samples)):
                for name, content in sample(rng, images_of(number)).items():
                    info = tarfile.TarInfo(f"{number:06d}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    with contextlib.redirect_stdout(io.StringIO()):  # it prints every step
        BaseWebdatasetFactory.prepare_dataset(
            EPath(folder),
            sorted(path.name for path in folder.glob("*.tar")),
            split_parts_ratio=[("train", 9), ("val", 1)],
            progress_fn=lambda items, total: items,
            tar_index_only=False,
            workers=1,
        )
    (folder / ".nv-meta" / "dataset.yaml").write_text(json.dumps(CRUDE))


def sample(rng, images):
    """Return the files of a sample by extension."""
    shapes = [describe(rng) for _ in range(images)]
    files = {}
    for index, shape in enumerate(shapes):
        format_ = rng.choice(FORMATS)
        files[f"{index}.{format_}"] = draw(rng, *shape, format_)
    text = (
        " and ".join("one {} {} at the {} {}".format(*shape) for shape in shapes)
        or f"no image, and {rng.randrange(10)} is a digit"
    )
    return {**files, "txt": text.encode()}


def describe(rng):
    return tuple(rng.choice(choices) for choices in (COLORS, SHAPES, ROWS, COLUMNS))


def draw(rng, color, shape, row, column, format_):
    """Draw one shape on a light background, at one of nine positions."""
    image = Image.new("RGB", (SIDE, SIDE), tuple(rng.randrange(200, 256) for _ in range(3)))
    top, left = 10 * ROWS.index(row), 10 * COLUMNS.index(column)
    top, left = top + rng.randrange(3), left + rng.randrange(3)
    box = (left, top, left + SIZE, top + SIZE)
    pen = ImageDraw.Draw(image)
    if shape == "triangle":
        corners = [(left, top + SIZE), (left + SIZE, top + SIZE), (left + SIZE // 2, top)]
        pen.polygon(corners, fill=color)
    else:
        {"circle": pen.ellipse, "square": pen.rectangle}[shape](box, fill=color)
    file = io.BytesIO()
    image.save(file, format_, **({"quality": 95} if format_ == "jpeg" else {}))
    return file.getvalue()


if __name__ == "__main__":
    main()
