# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Kinds of data planned by number: audio, auxiliary files, joins and video."""

import io
import json
import tarfile
import wave

import numpy as np
import pytest
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    Sample,
    SampleDecoder,
    basic_sample_keys,
    cooker,
    stateless,
)
from megatron.energon.edataclass import edataclass
from megatron.energon.epathlib import EPath
from megatron.energon.media.extractor import MediaFilterConfig
from megatron.energon.metadataset.loader import load_dataset

from energon_ext import ConfigError, DynamicBlendMixin
from tests.samples.test_planned_samples import run, write
from tests.samples.vision import image_bytes, write_images
from tests.support import TEXT_SAMPLE, add_sample, prepare_shards


def write_shards(folder, samples, subflavors, shard_size=8, media=None):
    """Write and prepare a webdataset; samples are mappings from extensions to bytes."""
    folder.mkdir(parents=True)
    for begin in range(0, len(samples), shard_size):
        with tarfile.open(folder / f"shard_{begin // shard_size:03d}.tar", "w") as tar:
            for number, files in enumerate(samples[begin : begin + shard_size], begin):
                add_sample(tar, f"{number:06d}", files)
    crude = {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"}
    prepare_shards(folder, {**crude, "subflavors": subflavors}, media=media)


@edataclass
class Whatever(Sample):
    content: object


class Plain(DynamicBlendMixin, DefaultTaskEncoder):
    """Leaves samples as cooked."""

    decoder = None

    @stateless
    def encode_sample(self, sample):
        return sample

    @stateless
    def batch(self, samples):
        return samples

    def encode_batch(self, batch):
        return [(each.__key__, each.content) for each in batch]


def read_once(path, encoder, samples):
    """Return the samples of one epoch by key, checking that two ranks with workers agree."""
    steps = -(-samples // 8)
    expected = run(path, steps, encoder=encoder)
    assert run(path, steps, 2, 1, encoder=encoder) == expected
    return dict(sample for step in expected[0] for sample in step)


class Packed(Plain):
    """Rows of two samples."""

    seq_len, encoding_fingerprint = 60, {"version": 1}

    def length_of(self, sample):
        return 30

    @stateless
    def pack_selected_samples(self, samples):
        return samples

    def encode_batch(self, batch):
        return [(each.__key__, each.content) for row in batch for each in row]


# Audio --------------------------------------------------------------------------------------------


def wav(number):
    """Return a WAV file of 100 + number samples."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(8000)
        sound.writeframes(np.arange(100 + number, dtype=np.int16).tobytes())
    return file.getvalue()


@stateless
def cook_sound(sample):
    with wave.open(io.BytesIO(sample["wav"])) as sound:
        frames = np.frombuffer(sound.readframes(sound.getnframes()), np.int16)
    return Whatever(**basic_sample_keys(sample), content=(len(frames), sample["txt"].decode()))


def test_audio_is_read_by_number(tmp_path):
    class Heard(Plain):
        cookers = [Cooker(cook_sound, has_subflavors={"sound": True})]

    spoken = [{"wav": wav(n), "txt": f"word {n}".encode()} for n in range(24)]
    write_shards(tmp_path / "speech", spoken, {"sound": True})
    path = write(tmp_path / "mix.yaml", {"path": "speech"})
    found = read_once(path, Heard(), 24)
    assert found == {f"{n:06d}": (100 + n, f"word {n}") for n in range(24)}


# Subflavors and auxiliary files -------------------------------------------------------------------


@stateless
def cook_with_file(sample, pictures):
    name = sample["txt"].decode()
    kind = sample["__subflavors__"]["kind"]
    content = (kind, len(pictures[f"{name}.0.jpeg"][0]))
    return Whatever(**basic_sample_keys(sample), content=content)


def test_auxiliary_files_and_subflavors_reach_the_cooker(tmp_path):
    class WithFiles(Plain):
        cookers = [Cooker(cook_with_file)]

    write_images(tmp_path / "pictures", 16, images=lambda number: 1)
    names = [{"txt": f"{n:06d}".encode()} for n in range(0, 16, 3)]
    write_shards(tmp_path / "names", names, {})
    entry = {
        "path": "names",
        "subflavors": {"kind": "photo"},
        "aux": {"pictures": "pictures"},
    }
    path = write(tmp_path / "mix.yaml", {"blend": [entry]})
    found = read_once(path, WithFiles(), 6)
    with tarfile.open(tmp_path / "pictures" / "shard_000.tar") as tar:
        sizes = {member.name: member.size for member in tar}
    assert found == {
        f"{number:06d}": ("photo", sizes[f"{n:06d}.0.jpeg"])
        for number, n in enumerate(range(0, 16, 3))
    }


@stateless
@cooker(need_primary=True)
def cook_size(sample, primary):
    size = primary.get_media_metadata(".jpeg")
    return Whatever(**basic_sample_keys(sample), content=size.width * size.height)


@pytest.mark.nightly
def test_lengths_can_come_from_energons_media_metadata(tmp_path):
    class BySize(Plain):
        seq_len, encoding_fingerprint = 120, {"version": 1}
        cookers = [Cooker(cook_size)]

        def length_of(self, sample):
            return sample.content

        sample_length = length_of

        @stateless
        def pack_selected_samples(self, samples):
            return samples

        def encode_batch(self, batch):
            return [[(each.__key__, each.content) for each in row] for row in batch]

    images = [{"jpeg": image_bytes(number, "jpeg")} for number in range(20)]
    media = MediaFilterConfig.parse(None, False, True)
    write_shards(tmp_path / "pictures", images, {}, media=media)
    path = write(tmp_path / "mix.yaml", {"path": "pictures"})
    rows = [row for step in run(path, 1, encoder=BySize())[0] for row in step]
    sizes = {f"{number:06d}": 6 * (4 + number % 5) for number in range(20)}  # of image_bytes
    assert rows and all(sizes[key] == size for row in rows for key, size in row)
    assert all(90 < sum(size for _, size in row) <= 120 for row in rows)


# Joins --------------------------------------------------------------------------------------------


@edataclass
class Joined(Sample):
    content: object

    @classmethod
    def from_joined(cls, one, other):
        answer = "no answer" if other is None else other.text.decode()
        return cls.derive_from(one, content=f"{one.text.decode()}, {answer}")


def write_join(folder, nonmatch):
    """Write two webdatasets that share keys in different shards; the second lacks every fifth."""
    texts = [{"txt": f"question {n}".encode()} for n in range(20)]
    write_shards(folder / "questions", texts, {})
    answers = folder / "answers"
    answers.mkdir()
    with tarfile.open(answers / "all.tar", "w") as tar:
        for number in (n for n in reversed(range(20)) if n % 5):
            add_sample(tar, f"{number:06d}", {"txt": f"answer {number}".encode()})
    for name in ("questions", "answers"):
        prepare_shards(folder / name, {"sample_type": TEXT_SAMPLE, "field_map": {"text": "txt"}})
    joined = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {
            "train": {
                "join": [{"path": "questions"}, {"path": "answers", "nonmatch": nonmatch}],
                "joiner": {"__module__": __name__, "__class__": "Joined"},
            }
        },
    }
    (folder / "joined.yaml").write_text(json.dumps(joined))
    load_dataset(EPath(str(folder / "joined.yaml"))).prepare("train")
    return folder / "joined.yaml"


@pytest.mark.parametrize("nonmatch", ["skip", "none"])
def test_a_join_is_numbered_by_its_own_index(tmp_path, nonmatch):
    path = write_join(tmp_path, nonmatch)

    def pairs(steps, encoder, **options):
        return run(path, steps, encoder=encoder(), trusted_modules=[__name__], **options)

    whole = {f"{n:06d}": f"question {n}, answer {n}" for n in range(20) if n % 5}
    if nonmatch == "none":  # the joiner gets None in place of an answer
        whole |= {f"{n:06d}": f"question {n}, no answer" for n in range(0, 20, 5)}
    for encoder, steps in ((Plain, 3), (Packed, 2)):
        expected = pairs(steps, encoder)
        assert pairs(steps, encoder, ranks=2, workers=1) == expected
        assert dict(sample for step in expected[0] for sample in step) == whole


def test_a_damaged_join_is_told_to_be_prepared_again(tmp_path):
    path = write_join(tmp_path, "none")
    (index,) = tmp_path.rglob("join_index_*.bin")
    rows = np.fromfile(index, np.int64)
    rows[2:].reshape(-1, 2, 3)[:, 0] = -1  # questions, which every sample has
    rows.tofile(index)
    with pytest.raises(ConfigError, match="run `energon prepare` on the metadataset with the join"):
        run(path, 1, encoder=Plain(), trusted_modules=[__name__])


# Video --------------------------------------------------------------------------------------------


def mp4(av, number):
    """Return a video of a few frames in one grey."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        for _ in range(3 + number % 4):
            pixels = np.full((32, 32, 3), 10 * number, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


@stateless
def cook_video(sample):
    frames = sample["mp4"].get_video().video_clips[0]
    content = (len(frames), round(frames.float().mean().item() / 10))
    return Whatever(**basic_sample_keys(sample), content=content)


def test_video_is_decoded_by_number(tmp_path):
    av = pytest.importorskip("av")

    class Watched(Plain):
        decoder = SampleDecoder(av_decode="AVDecoder")
        cookers = [Cooker(cook_video, has_subflavors={"video": True})]

    write_shards(tmp_path / "clips", [{"mp4": mp4(av, n)} for n in range(16)], {"video": True})
    path = write(tmp_path / "mix.yaml", {"path": "clips"})
    found = read_once(path, Watched(), 16)
    assert found == {f"{n:06d}": (3 + n % 4, n) for n in range(16)}
