# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Images with captions as a webdataset, and a TaskEncoder like a user's."""

import io
import json
import random
import tarfile
from pathlib import Path

import numpy as np
import torch
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    SampleDecoder,
    basic_sample_keys,
    stateless,
)
from megatron.energon.edataclass import edataclass
from PIL import Image

from energon_ext import DynamicBlendMixin
from tests.support import add_sample, prepare_shards

CRUDE = {
    "__module__": "megatron.energon",
    "__class__": "CrudeWebdataset",
    "subflavors": {"caption": True},
}
FORMATS = ("jpeg", "png", "webp")


def image_bytes(number, format_="png"):
    """Return a small image in the grey of a number."""
    pixels = np.full((4 + number % 5, 6, 3), number % 256, np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format_, **({"lossless": True} if format_ == "webp" else {}))
    return file.getvalue()


def parts_of(number, images):
    """Return the files of a sample by extension."""
    formats = [FORMATS[(number + place) % len(FORMATS)] for place in range(images)]
    found = {f"{place}.{name}": image_bytes(number, name) for place, name in enumerate(formats)}
    return {**found, "json": json.dumps({"caption": f"caption {number}"}).encode()}


def write_images(folder, count, *, images=lambda number: number % 3, shard_size=20, damaged=()):
    """Write and prepare a webdataset; images of damaged samples are truncated."""
    folder = Path(folder)
    folder.mkdir(parents=True)
    for begin in range(0, count, shard_size):
        with tarfile.open(folder / f"shard_{begin // shard_size:03d}.tar", "w") as tar:
            for number in range(begin, min(begin + shard_size, count)):
                files = parts_of(number, images(number))
                if number in damaged:
                    files = {n: c if n == "json" else c[: len(c) // 2] for n, c in files.items()}
                add_sample(tar, f"{number:06d}", files)
    return prepare_shards(folder, CRUDE)


def write_photos_and_charts(folder):
    """Write two sources of images, with different numbers and sizes of shards."""
    write_images(folder / "photos", 50)
    write_images(folder / "charts", 30, shard_size=7)
    return folder


@edataclass
class Captioned(Sample):
    caption: str
    images: list


@edataclass
class Encoded(Sample):
    number: int
    greys: list
    noise: torch.Tensor

    @property
    def total_len(self):
        return len(self.noise)


@stateless
def cook(sample):
    images = [sample[name] for name in sorted(sample) if name.split(".")[-1] in FORMATS]
    return Captioned(**basic_sample_keys(sample), caption=sample["json"]["caption"], images=images)


class Captions(DefaultTaskEncoder):
    """Encodes images and captions, with random numbers from torch, numpy and random."""

    cookers = [Cooker(cook, has_subflavors={"caption": True})]
    decoder = SampleDecoder(image_decode="pilrgb")

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: Captioned) -> Encoded:
        drawn = torch.rand(()).item(), np.random.rand(), random.random()
        noise = [*drawn, self.current_sample_index % 2**32]
        return Encoded.derive_from(
            sample,
            number=int(sample.caption.split()[1]),
            greys=[np.asarray(image)[0, 0, 0].item() for image in sample.images],
            noise=torch.tensor(noise, dtype=torch.float64),
        )

    @stateless
    def batch(self, samples):
        return samples

    def encode_batch(self, batch):
        return [[each.__key__, each.number, each.greys, each.noise.tolist()] for each in batch]


class PlannedCaptions(DynamicBlendMixin, Captions):
    """The same encoder with the mixin of this package."""


@edataclass
class Packed(Sample):
    samples: list


class PackedCaptions(PlannedCaptions):
    """Packs samples of 5 to 25 tokens into rows of 40."""

    seq_len = 40
    encoding_fingerprint = {"version": 1}
    longest_extra = 0

    @stateless
    def encode_sample(self, sample: Captioned) -> Encoded:
        encoded = super().encode_sample(sample)
        number = encoded.number
        extra = int(np.random.randint(0, self.longest_extra + 1))
        return Encoded.derive_from(
            encoded,
            number=number,
            greys=encoded.greys,
            noise=torch.full((length_of_number(number) + extra,), float(number)),
        )

    def length_of(self, encoded):
        return encoded.total_len

    @stateless
    def pack_selected_samples(self, samples):
        return Packed.derive_from(
            samples[0], samples=[(each.number, each.total_len, each.greys) for each in samples]
        )

    def encode_batch(self, batch):
        return [each.samples for each in batch]


def length_of_number(number):
    return 5 + number * 8 % 21
