# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Images and text packed into rows: planned by number, compared with stock Energon's buffer.

Both use the same samples, the same encoder and rows of the same length, in separate processes.
Stock Energon packs a buffer of 512 samples with the encoder's knapsack; ours plans by lengths that
were measured once. Both start, are saved, and resume.
"""

import bisect
import io
import itertools
import json
import pickle
import tarfile
import tempfile
import time
from pathlib import Path

import megatron.energon
import numpy as np
import torch
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    WorkerConfig,
    basic_sample_keys,
    stateless,
)
from megatron.energon.edataclass import edataclass
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.webdataset.base_webdataset import BaseWebdatasetFactory
from PIL import Image
from timing import fresh_process, markdown, peak_mib

from energon_ext import DynamicBlendMixin, ExactDataLoader, get_train_dataset
from energon_ext.plan.cost import AttentionCost, VisionCost
from energon_ext.plan.topology import balance
from energon_ext.state.plain import to_plain

SAMPLES, SHARD_SAMPLES, IMAGES = 4000, 500, 60
SEQ_LEN, PACKING_BUFFER = 8192, 512
BATCHES, BEFORE_SAVE = 120, 40
UNIT = 28  # side of the square that becomes one token, in pixels
RANKS, ROUNDS, STEPS = 64, 8, 5

#: A vision encoder with 0.63 billion parameters, 32 layers, width 1280, and 4 patches per token.
VISION = VisionCost(linear=2 * 0.63e9, quadratic=4 * 32 * 1280)


def run():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_samples(folder / "photos")
        mix = folder / "mix.yaml"
        head = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
        mix.write_text(json.dumps({**head, "splits": {"train": {"blend": [{"path": "photos"}]}}}))
        begin = time.process_time()
        planned(mix)  # measures the lengths
        measuring = (time.process_time() - begin) / SAMPLES * 1e3
        rows = [
            (name, *fresh_process(figures, mix, make, 0), fresh_process(speed, mix, make, 2))
            for name, make in (("`energon_ext`", planned), ("stock Energon", stock))
        ]
        waits = imbalance(mix)
    header = (
        "loader",
        "fill of the rows",
        "state, kB",
        "CPU to the first batch of a resume, s",
        "peak memory, MiB",
        "samples/s",
        "with two workers",
    )
    title = (
        f"Images and text in rows of {SEQ_LEN} tokens, measured in {measuring:.2f} ms per sample"
    )
    orders = ("natural", "balanced by tokens", "balanced by tokens and images")
    title_of_waits = f"Busiest of {RANKS} ranks over their mean, {ROUNDS} rows each"
    return markdown(title, header, rows) + "\n" + markdown(title_of_waits, orders, [waits])


def imbalance(mix):
    """Return the time of the busiest rank over the mean, for each order, averaged over steps."""
    dataset = get_train_dataset(
        mix,
        worker_config=WorkerConfig(rank=0, world_size=RANKS, num_workers=0),
        batch_size=1,
        rows_per_step=RANKS * ROUNDS,
        task_encoder=Costly(),
    )
    topology, rows = dataset.topology, RANKS * ROUNDS
    found = []
    for step in itertools.islice(dataset.fork().draw_steps(), STEPS):
        images = step.costs(lambda lengths: np.zeros(len(lengths)), rows)
        both = step.costs(AttentionCost(), rows)
        orders = np.arange(rows), balance(both - images, topology), balance(both, topology)
        busy = [both[order].reshape(ROUNDS, RANKS).sum(0) for order in orders]
        found.append([each.max() / each.mean() for each in busy])
    return [f"{waits:.3f}" for waits in np.mean(found, 0)]


def figures(mix, make_loader, workers):
    """Return the columns of the table from the fill of the rows to the speed without workers."""
    torch.set_num_threads(1)
    loader = make_loader(mix, workers)
    batches = iter(loader)
    next(batches)
    begin, samples, tokens = time.perf_counter(), 0, 0
    for number in range(BATCHES):
        batch = next(batches)
        samples += len(batch.lengths)
        tokens += int(batch.lengths.sum())
        if number == BEFORE_SAVE:
            state = pickle.loads(pickle.dumps(loader.save_state_rank()))
    samples_per_second = samples / (time.perf_counter() - begin)
    peak = peak_mib()
    begin = time.process_time()
    resumed = make_loader(mix, workers)
    resumed.restore_state_rank(state)
    next(iter(resumed))
    return (
        f"{tokens / SEQ_LEN / BATCHES:.2%}",
        f"{len(json.dumps(to_plain(state))) / 1e3:.1f}",
        f"{time.process_time() - begin:.2f}",
        f"{peak:.0f}",
        f"{samples_per_second:.0f}",
    )


def speed(mix, make_loader, workers):
    """Return samples per second."""
    torch.set_num_threads(1)
    batches = iter(make_loader(mix, workers))
    next(batches)
    begin = time.perf_counter()
    samples = sum(len(next(batches).lengths) for _ in range(BATCHES))
    return f"{samples / (time.perf_counter() - begin):.0f}"


def planned(mix, workers=0):
    return ExactDataLoader(
        get_train_dataset(
            mix,
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers),
            batch_size=1,
            task_encoder=Planned(),
        )
    )


def stock(mix, workers):
    dataset = megatron.energon.get_train_dataset(
        mix.parent / "photos",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=workers),
        batch_size=1,
        task_encoder=Encoder(),
        shuffle_buffer_size=100,
        max_samples_per_sequence=None,
        packing_buffer_size=PACKING_BUFFER,
    )
    options = {"checkpoint_every_sec": 0, "checkpoint_every_min_n_samples": 1}
    return megatron.energon.get_savable_loader(dataset, **options)


# The data ---------------------------------------------------------------------------------------


def write_samples(folder):
    """Write samples of 100 to 200 kB: a fifth only text, most with one image, some with more."""
    folder.mkdir()
    chance = np.random.default_rng(0)
    areas = np.clip(np.exp(chance.normal(np.log(0.3e6), 0.8, IMAGES)), 0.03e6, 2e6)
    pool = [image_bytes(chance, area) for area in areas]
    for begin in range(0, SAMPLES, SHARD_SAMPLES):
        with tarfile.open(folder / f"shard_{begin // SHARD_SAMPLES:03d}.tar", "w") as tar:
            for number in range(begin, begin + SHARD_SAMPLES):
                kind = chance.random()
                images = 0 if kind < 0.2 else 1 if kind < 0.85 else int(chance.integers(2, 5))
                words = int(np.clip(np.exp(chance.normal(4.6, 0.9)), 5, 3000))
                parts = {f"{n}.jpg": pool[chance.integers(IMAGES)] for n in range(images)}
                parts["json"] = json.dumps({"words": words, "images": images}).encode()
                for name, content in parts.items():
                    info = tarfile.TarInfo(f"{number:07d}.{name}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    BaseWebdatasetFactory.prepare_dataset(
        EPath(folder),
        sorted(path.name for path in folder.glob("*.tar")),
        split_parts_patterns=[("train", ".*")],
        progress_fn=lambda items, total: items,
        tar_index_only=False,
        workers=1,
    )
    crude = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    (folder / ".nv-meta" / "dataset.yaml").write_text(json.dumps(crude))


def image_bytes(chance, area):
    side = max(UNIT, int(area**0.5))
    coarse = chance.integers(0, 255, (side // 20, side // 20, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((side, side), Image.BICUBIC)).astype(int)
    noisy = np.clip(smooth + chance.integers(-14, 15, (side, side, 1)), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=80)
    return file.getvalue()


# The encoder ------------------------------------------------------------------------------------


@edataclass
class Stored(Sample):
    words: int
    images: list


@edataclass
class Encoded(Sample):
    pixels: list
    length: int


@edataclass
class Packed(Sample):
    pixels: torch.Tensor
    lengths: torch.Tensor


@stateless
def cook(sample):
    meta = sample["json"] if isinstance(sample["json"], dict) else json.loads(sample["json"])
    images = [sample[f"{number}.jpg"] for number in range(meta["images"])]
    return Stored(**basic_sample_keys(sample), words=meta["words"], images=images)


def tokens_of(size):
    return max(1, size[0] // UNIT) * max(1, size[1] // UNIT)


class Encoder(DefaultTaskEncoder):
    """Turns images into patches, and text into one token per word."""

    cookers = [Cooker(cook)]
    decoder = None
    seq_len = SEQ_LEN

    @stateless
    def encode_sample(self, sample: Stored) -> Encoded:
        pixels = []
        for content in sample.images:
            image = Image.open(io.BytesIO(content)).convert("RGB")
            pixels.append(torch.from_numpy(np.array(image).reshape(-1)))
        sizes = [Image.open(io.BytesIO(content)).size for content in sample.images]
        length = min(self.seq_len, sample.words + sum(map(tokens_of, sizes)))
        return Encoded.derive_from(sample, pixels=pixels, length=length)

    def select_samples_to_pack(self, samples):
        ordered = sorted(samples, key=lambda each: each.length)
        sizes, rows = [each.length for each in ordered], []
        while sizes:
            left, row = self.seq_len, []
            while (place := bisect.bisect(sizes, left) - 1) >= 0:
                left -= sizes.pop(place)
                row.append(ordered.pop(place))
            rows.append(row)
        return rows

    @stateless
    def pack_selected_samples(self, samples):
        pixels = [part for each in samples for part in each.pixels] or [torch.zeros(0)]
        lengths = torch.tensor([each.length for each in samples])
        return Packed.derive_from(samples[0], pixels=torch.cat(pixels), lengths=lengths)

    @stateless
    def batch(self, samples):
        return samples[0]


class Planned(DynamicBlendMixin, Encoder):
    """The encoder with lengths from image headers, so that its samples can be planned."""

    encoding_fingerprint = {"version": 1}
    select_samples_to_pack = DefaultTaskEncoder.select_samples_to_pack

    def length_of(self, encoded):
        return encoded.length

    def sample_length(self, sample):
        sizes = [Image.open(io.BytesIO(content)).size for content in sample.images]
        return min(self.seq_len, sample.words + sum(map(tokens_of, sizes)))


class Costly(Planned):
    """The planned encoder, with the cost of its images."""

    encoding_fingerprint = {"version": "with costs"}

    def sample_length(self, sample):
        sizes = [Image.open(io.BytesIO(content)).size for content in sample.images]
        patches = np.array([4 * tokens_of(size) for size in sizes], np.int64)
        return super().sample_length(sample), float(VISION(patches).sum())
