# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext peek``; tokens are bytes, with one special token before and after each text."""

import itertools
import json

import numpy as np
import pytest
import torch
from megatron.energon import Sample, stateless
from megatron.energon.edataclass import edataclass
from PIL import Image

from energon_ext.batch.columns import Column
from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.samples.vision import PackedCaptions, write_images
from tests.support import write_mix, write_tokens, write_weights

ABC = [1, 101, 102, 103, 2]  # <bos> a b c <eos>


@pytest.fixture
def mix(tmp_path):
    write_tokens(tmp_path / "web", [ABC] * 6)
    write_tokens(tmp_path / "code", [[1, 37, 2]] * 6)  # !
    return write_mix(tmp_path / "mix.yaml", [("web", 1), ("code", 1)])


def peek(*arguments):
    result = energon_ext("peek", *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_a_row_is_shown_with_segments_sources_and_padding(mix):
    # Four of the five tokens have a label in the same document: a, b, c and the end.
    assert peek(mix, "--seq-length", 11, "--source", "web", "--rows", 1)[1:] == [
        "  web: 5 tokens, 4 trained",
        "    «<bos>»abc<eos>",
        "  web: 5 tokens, 4 trained",
        "    «<bos>»abc<eos>",
        "  padding: 1 positions",
    ]


def test_a_source_is_shown_and_selected_by_its_name(tmp_path):
    write_tokens(tmp_path / "web", [ABC] * 6)
    write_tokens(tmp_path / "code", [[1, 37, 2]] * 6)
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1), ("code", 1)])
    mix.write_text(mix.read_text().replace('"weight": 1}', '"weight": 1, "name": "Web, 2023"}', 1))
    shown = peek(mix, "--seq-length", 5, "--source", "2023", "--rows", 1)
    assert shown[1] == "  Web, 2023 (web): 5 tokens, 4 trained"
    assert energon_ext("plan", mix).stdout.splitlines()[1:3] == [
        "code                     50.00%",
        "Web, 2023                50.00%",
    ]


def test_columns_of_a_segment_are_shown_beside_it(tmp_path):
    columns = {
        "score": Column("float32", per="document"),
        "experts": Column("int16", (2,), at="input", fill=-1),
        "teacher": Column("float32"),
        "seen": Column("uint16", (2,), at="input"),
    }
    writer = TokenWriter(tmp_path / "web", 300, columns)
    values = {"score": 0.5, "experts": np.arange(10).reshape(5, 2), "teacher": -np.arange(5.0)}
    values["seen"] = values["experts"] + 60000
    writer.write(np.array(ABC), columns=values)
    described = {name: column.to_json() for name, column in columns.items()}
    writer.close({"tokenizer": ByteTokenizer().fingerprint(), "columns": described})
    shown = peek(write_mix(tmp_path / "mix.yaml", [("web", 1)]), "--seq-length", 7, "--rows", 1)
    assert shown[1] == (
        "  web: 5 tokens, 4 trained; experts [5, 2] from 0 to 9; "
        "teacher [-1.0, -2.0, -3.0, -4.0, 0.0]; seen [5, 2] from 60000 to 60009; score 0.5"
    )


def test_untrained_text_is_in_brackets(tmp_path):
    # A pair has one label weight per token; those of b and c are 0.
    write_tokens(tmp_path / "web", [ABC] * 4)
    write_weights(tmp_path / "web", [[1, 1, 0, 0, 1]] * 4)
    shown = peek(write_mix(tmp_path / "mix.yaml", [("web", 1)]), "--seq-length", 4, "--rows", 1)
    assert shown == [
        "row 0: 4 of 4 positions, 2 trained",
        "  web: 4 tokens, 2 trained",
        "    «<bos>»a«bc»<eos>",
    ]


def test_conversations_and_prompts_are_shown_as_their_encoders_read_them(tmp_path):
    record = {"prompt": "1+1=", "response": "2", "level": 3}
    (tmp_path / "chat.jsonl").write_text(json.dumps(record) + "\n")
    mix = write_mix(tmp_path / "mix.yaml", [("chat.jsonl", 1)])
    chat = peek(mix, "--task", "chat", "--seq-length", 8, "--rows", 1)
    assert chat[1:3] == ["  chat.jsonl: 7 tokens, 2 trained", "    «<bos>1+1=»2<eos>"]
    assert peek(mix, "--task", "prompts", "--rows", 1) == [
        "row 0: 1 sample, 1 prompt",
        "  chat.jsonl: sample 0 of chat.jsonl",
        f"    {json.dumps(record)}\\n",
        "  chat.jsonl: 5 tokens; metadata ['level', 'response']",
        "    <bos>1+1=",
    ]


def test_the_frames_of_a_splice_are_shown(mix):
    splice = '{"content_length": 2, "content_start_mode": "anchor_start"}'
    shown = peek(mix, "--seq-length", 8, "--splice", splice, "--rows", 2, "--source", "web")
    assert shown[0].startswith("row ") and any("web" in line for line in shown)


def test_long_text_is_cut_by_default_and_control_characters_are_escaped(tmp_path):
    text = [1, *[101] * 400, 31, 2]  # `a` 400 times, and an escape
    write_tokens(tmp_path / "web", [text] * 4)
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)])
    options = (mix, "--seq-length", 402, "--rows", 1)
    assert peek(*options)[2] == f"    «<bos>»{'a' * 293} ..."
    assert peek(*options, "--text")[2] == f"    «<bos>»{'a' * 400}\\x1b<eos>"


def test_user_mistakes_are_one_line(mix):
    assert error_line(energon_ext("peek", mix, "--source", "wbe")) == (
        "--source wbe: matches none of code, web."
    )
    line = error_line(energon_ext("peek", mix, "--task", "chat", "--splice", "{}"))
    assert line == "--splice: is for text, not for chat."


# Samples of a user's encoder ------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    write_images(folder / "photos", 12, damaged=[4])
    return write_mix(folder / "photos.yaml", [("photos", 1)])


def test_samples_are_shown_as_stored_with_image_sizes(photos):
    shown = peek(photos, "--encoder", "tests.samples.vision:PlannedCaptions", "--rows", 12)
    assert len(shown) == 4 * 12
    # Its encode_batch makes lists of the encoded samples, which have one tensor.
    assert shown[0] == "row 0: 1 sample, batch of type list"
    assert shown[3] == "  batch: noise float64 [4]"
    by_sample = {line.split("sample ")[1][:6]: line for line in shown if "sample 0" in line}
    # Sample n has n % 3 images of 6 x (4 + n % 5) pixels.
    assert by_sample["000008"].endswith("sample 000008 of shard_000.tar, 0.webp 6x7, 1.jpeg 6x7")
    assert by_sample["000009"].endswith("sample 000009 of shard_000.tar")
    assert " bytes" in by_sample["000004"]  # cut off, so no image
    assert '    {"caption": "caption 8"}' in shown


def test_the_rows_of_packed_samples_are_shown_and_drawn(photos, tmp_path):
    encoder = ("--encoder", "tests.samples.vision:PackedCaptions")
    (tmp_path / "kept.png").write_bytes(b"kept")
    (tmp_path / "sheet.png").symlink_to("kept.png")
    shown = peek(photos, *encoder, "--rows", 2, "--png", tmp_path / "sheet.png")
    assert (tmp_path / "kept.png").read_bytes() == b"kept"  # as other pictures: whole, or not
    samples = [line for line in shown if "sample 0" in line]
    assert sum(int(line.split()[2]) for line in shown if line.startswith("row")) == len(samples)
    images = [line.count("6x") for line in samples]
    sheet = Image.open(tmp_path / "sheet.png").convert("RGB")
    grey = np.asarray(sheet).reshape(-1, 3).std(0).max()
    assert sum(images) and grey > 0  # something was drawn


class CaptionIds(PackedCaptions):
    """Batches as a user's: two placeholders per image, then the caption, of which 7 are masked."""

    tokenizer = ByteTokenizer()
    placeholder = -200

    @stateless
    def encode_sample(self, sample):
        ids = [*[self.placeholder] * 2 * len(sample.images), *self.tokenizer.encode(sample.caption)]
        weights = [float(place >= len(ids) - 3) for place in range(len(ids))]
        images = [torch.zeros(3, 2 * place + 2, 4) for place in range(len(sample.images))]
        return Ids.derive_from(sample, ids=ids, weights=weights, images=images)

    def length_of(self, encoded):
        return len(encoded.ids)

    @stateless
    def pack_selected_samples(self, samples):
        return Ids.derive_from(
            samples[0],
            ids=sum((each.ids for each in samples), []),
            weights=sum((each.weights for each in samples), []),
            images=sum((each.images for each in samples), []),
        )

    def batch(self, samples):
        ids = torch.tensor([each.ids for each in samples])
        return {
            "tokens": ids,
            "labels": ids.roll(-1, 1),
            "loss_mask": torch.tensor([each.weights for each in samples]).roll(-1, 1),
            "images": [image for each in samples for image in each.images],
        }

    def encode_batch(self, batch):
        return batch


@edataclass
class Ids(Sample):
    ids: list
    weights: list
    images: list


class Anonymous(CaptionIds):
    """Has no tokenizer that commands could use."""

    tokenizer = None
    encoding = ByteTokenizer()

    @stateless
    def encode_sample(self, sample):
        ids = self.encoding.encode(sample.caption)
        weights = [float(place >= len(ids) - 3) for place in range(len(ids))]
        return Ids.derive_from(sample, ids=ids, weights=weights, images=[])


def test_the_encoded_rows_of_a_users_encoder_are_shown_with_loss_marks(tmp_path):
    """Sample 2 has two images: 4 placeholders and `<bos>caption 2<eos>`; the last 3 are trained."""
    write_images(tmp_path / "photos", 3)
    mix = write_mix(tmp_path / "mix.yaml", [("photos", 1)])
    shown = peek(mix, "--encoder", "tests.cli.test_peek:CaptionIds", "--rows", 1)
    assert shown[0] == "row 0: 3 samples, 39 positions"
    samples = [line.split(": sample ")[1] for line in shown if ": sample " in line]
    assert sorted(samples) == [
        "000000 of shard_000.tar, 11 tokens",
        "000001 of shard_000.tar, 13 tokens, 0.png 6x5",
        "000002 of shard_000.tar, 15 tokens, 0.webp 6x6, 1.jpeg 6x6",
    ]
    order = [int(name[:6]) for name in samples]
    images = ["", "[-200 x 2]", "[-200 x 4]"]
    lines = [f"«{images[number]}<bos>caption» {number}<eos>" for number in order]
    assert '  photos:train{"caption": true}: 39 tokens, 9 trained' in shown
    text = shown[-2].strip()
    assert text == "".join(lines)
    shapes = {1: ["float32 [3, 2, 4]"], 2: ["float32 [3, 2, 4]", "float32 [3, 4, 4]"]}
    found = sum((shapes.get(number, []) for number in order), [])
    merged = [(shape, len([*run])) for shape, run in itertools.groupby(found)]
    expected = ", ".join(f"{count} x {shape}" for shape, count in merged)
    assert shown[-1] == f"  batch: images {expected}"


def test_ids_are_numbers_without_a_tokenizer(tmp_path):
    write_images(tmp_path / "photos", 1)
    mix = write_mix(tmp_path / "mix.yaml", [("photos", 1)])
    own = ("--encoder", "tests.cli.test_peek:Anonymous", "--rows", 1)
    # Ids of bytes begin with 4: c is 99 + 4, the space 32 + 4 and 0 is 48 + 4.
    ids = "«1 103 101 116 120 109 115 114»36 52 2"
    assert ids in "\n".join(peek(mix, *own))


def test_many_images_of_a_row_take_several_lines(tmp_path):
    write_images(tmp_path / "photos", 1, images=lambda number: 19)
    mix = write_mix(tmp_path / "mix.yaml", [("photos", 1)])
    own = ("--encoder", "tests.samples.vision:PlannedCaptions", "--rows", 1)
    peek(mix, *own, "--png", tmp_path / "sheet.png")
    # 19 images in lines of 8: three lines.
    assert Image.open(tmp_path / "sheet.png").size == (8 * 168 + 8, 3 * 182 + 8)


def test_options_of_our_encoders_conflict_with_a_user_encoder(photos):
    encoder = ("--encoder", "tests.samples.vision:PlannedCaptions")
    line = error_line(energon_ext("peek", photos, *encoder, "--seq-length", 8))
    assert "--seq-length: is set by --encoder" in line


def test_a_forecast_of_samples_counts_documents_and_epochs(photos):
    encoder = ("--encoder", "tests.samples.vision:PlannedCaptions")
    result = energon_ext("plan", photos, *encoder, "--steps", 9, "--global-batch-size", 4, "--json")
    assert result.exit_code == 0, result.output
    (source,) = json.loads(result.stdout)["sources"].values()
    assert (sum(source["documents"]), source["epoch_documents"]) == (36, 12)


def test_files_without_a_recorded_tokenizer_are_reported(mix):
    result = energon_ext("peek", mix, "--rows", 1)
    assert "web: records no tokenizer; check that --tokenizer is" in result.stderr


def test_token_files_without_a_metadataset_are_refused(mix):
    assert "token files need a metadataset" in error_line(energon_ext("peek", mix.parent / "web"))
