# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext peek``; tokens are bytes, with one special token before and after each text."""

import json

import numpy as np
import pytest
from PIL import Image

from tests.cli.command import energon_ext, error_line
from tests.samples.vision import write_images
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
        "    abc",
        "  web: 5 tokens, 4 trained",
        "    abc",
        "  padding: 1 positions",
    ]


def test_a_source_is_shown_and_selected_by_its_name(tmp_path):
    write_tokens(tmp_path / "web", [ABC] * 6)
    write_tokens(tmp_path / "code", [[1, 37, 2]] * 6)
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1), ("code", 1)])
    mix.write_text(mix.read_text().replace('"weight": 1}', '"weight": 1, "name": "Web, 2023"}', 1))
    shown = peek(mix, "--seq-length", 5, "--source", "2023", "--rows", 1)
    assert shown[1] == "  Web, 2023 (web): 5 tokens, 4 trained"
    assert energon_ext("plan", mix).stdout.splitlines()[1:] == [
        "code                     50.00%",
        "Web, 2023                50.00%",
    ]


def test_untrained_text_is_in_brackets(tmp_path):
    # A pair has one label weight per token; those of b and c are 0.
    write_tokens(tmp_path / "web", [ABC] * 4)
    write_weights(tmp_path / "web", [[1, 1, 0, 0, 1]] * 4)
    shown = peek(write_mix(tmp_path / "mix.yaml", [("web", 1)]), "--seq-length", 4, "--rows", 1)
    assert shown == [
        "row 0: 4 of 4 positions, 2 trained",
        "  web: 4 tokens, 2 trained",
        "    a<bc>",
    ]


def test_conversations_and_prompts_are_shown_as_their_encoders_read_them(tmp_path):
    record = {"prompt": "1+1=", "response": "2", "level": 3}
    (tmp_path / "chat.jsonl").write_text(json.dumps(record) + "\n")
    mix = write_mix(tmp_path / "mix.yaml", [("chat.jsonl", 1)])
    chat = peek(mix, "--task", "chat", "--seq-length", 8, "--rows", 1)
    assert chat[1:3] == ["  chat.jsonl: 7 tokens, 2 trained", "    <1+1=>2"]
    assert peek(mix, "--task", "prompts", "--rows", 1) == [
        "row 0: 1 prompt",
        "  chat.jsonl: 5 tokens; metadata ['level', 'response']",
        "    1+1=",
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
    assert peek(*options)[2] == f"    {'a' * 300} ..."
    assert peek(*options, "--text")[2] == f"    {'a' * 400}\\x1b"


def test_user_mistakes_are_one_line(mix):
    assert error_line(energon_ext("peek", mix, "--source", "wbe")) == (
        "--source wbe: matches none of code, web."
    )
    line = error_line(energon_ext("peek", mix, "--task", "chat", "--splice", "{}"))
    assert line == "--splice: is for text, not for --task chat."


# Samples of a user's encoder ------------------------------------------------------------------


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    write_images(folder / "photos", 12, damaged=[4])
    return write_mix(folder / "photos.yaml", [("photos", 1)])


def test_samples_are_shown_as_stored_with_image_sizes(photos):
    shown = peek(photos, "--encoder", "tests.samples.vision:PlannedCaptions", "--rows", 12)
    assert len(shown) == 3 * 12
    by_sample = {line.split("sample ")[1][:6]: line for line in shown if "sample 0" in line}
    # Sample n has n % 3 images of 6 x (4 + n % 5) pixels.
    assert by_sample["000008"].endswith("sample 000008 of shard_000.tar, 0.webp 6x7, 1.jpeg 6x7")
    assert by_sample["000009"].endswith("sample 000009 of shard_000.tar")
    assert " bytes" in by_sample["000004"]  # cut off, so no image
    assert '    {"caption": "caption 8"}' in shown


def test_the_rows_of_packed_samples_are_shown_and_drawn(photos, tmp_path):
    encoder = ("--encoder", "tests.samples.vision:PackedCaptions")
    shown = peek(photos, *encoder, "--rows", 2, "--png", tmp_path / "sheet.png")
    samples = [line for line in shown if "sample 0" in line]
    assert sum(int(line.split()[2]) for line in shown if line.startswith("row")) == len(samples)
    images = [line.count("6x") for line in samples]
    sheet = Image.open(tmp_path / "sheet.png").convert("RGB")
    grey = np.asarray(sheet).reshape(-1, 3).std(0).max()
    assert sum(images) and grey > 0  # something was drawn


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
