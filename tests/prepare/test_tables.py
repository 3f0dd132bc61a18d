# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Parquet files and Hugging Face datasets: only what is asked for is read, errors name the row."""

import json
import re
from pathlib import Path

import pytest

from tests.cli.command import energon_ext, error_line
from tests.prepare.runs import read

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

BROKEN = {"bytes": b"broken", "path": None}
TEXTS = [f"text {n}" for n in range(40)]


@pytest.fixture(autouse=True)
def _offline(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def prepare(*words):
    return energon_ext(
        "prepare", "out", "--val", 0, "--tokenizer", "bytes", "--jobs", 1, "--force", *words
    )


def texts(*words):
    result = prepare(*words)
    assert result.exit_code == 0, result.output
    return read(Path("out"), "train")


def write_media(path):
    """Write texts beside images, lists of images and sounds, none of which can be decoded."""
    rows = {
        "text": TEXTS,
        "image": [BROKEN] * 40,
        "pages": [[BROKEN]] * 40,
        "sound": [BROKEN] * 40,
    }
    features = {
        "text": datasets.Value("string"),
        "image": datasets.Image(),
        "pages": [datasets.Image()],
        "sound": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
    }
    saved = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    saved = saved.cast_column("sound", datasets.Audio())  # from_dict would need torchcodec
    saved.save_to_disk(path)
    saved.to_parquet(f"{path}.parquet")


def test_media_beside_the_text_are_not_decoded(tmp_path):
    write_media("saved")
    assert texts("--hf-dataset", "saved") == TEXTS
    (tmp_path / "local").mkdir()
    (tmp_path / "saved.parquet").rename(tmp_path / "local" / "train.parquet")
    for streaming in ((), ("--hf-streaming",)):
        assert texts("--hf-dataset", "local", *streaming) == TEXTS
    assert texts("--parquet", "local") == TEXTS


def test_a_missing_column_is_named_with_those_that_exist(tmp_path):
    write_media("saved")
    wanted = "[0]: no key 'body'; it has ['image', 'pages', 'sound', 'text']. Choose with --key."
    for words in (["--hf-dataset", "saved"], ["--parquet", "saved.parquet"]):
        assert error_line(prepare(*words, "--key", "body")) == words[1] + wanted


def test_media_beside_a_conversation_are_seen_and_not_decoded():
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
    rows = {"messages": [messages] * 3, "image": [None, BROKEN, None]}
    features = datasets.Features(
        {"messages": datasets.Dataset.from_dict(rows).features["messages"]}
        | {"image": datasets.Image()}
    )
    datasets.Dataset.from_dict(rows, features=features).save_to_disk("saved")
    result = prepare("--chat", "--hf-dataset", "saved")
    assert result.exit_code == 0, result.output
    assert re.search(r"saved\[1\].*image.*would be trained without", result.stdout)
    assert len(read(Path("out"), "train")) == 2


def write_damaged(path):
    """Write 40 texts of which those of the rows 3 and 20 are not UTF-8."""
    content = [text.encode() for text in TEXTS]
    content[3] = content[20] = b"\xff\xfe"
    damaged = pa.array(content, pa.binary()).view(pa.string())
    parquet.write_table(pa.table({"text": damaged}), path)


@pytest.mark.parametrize("kind", ["--parquet", "--hf-dataset"])
def test_a_row_that_cannot_be_read_is_named_or_skipped(tmp_path, kind):
    (tmp_path / "local").mkdir()
    write_damaged("local/train.parquet")
    path = "local" if kind == "--hf-dataset" else "local/train.parquet"
    line = error_line(prepare(kind, path))
    assert line.startswith(f"{path}[3]: not UTF-8 text (byte 0xff)")
    result = prepare(kind, path, "--on-error", "skip")
    assert result.exit_code == 0 and "skipped as unreadable: 2" in result.stdout
    assert read(Path("out"), "train") == [text for n, text in enumerate(TEXTS) if n not in (3, 20)]


def test_a_stream_that_breaks_off_is_one_line_with_the_row(tmp_path):
    (tmp_path / "local").mkdir()
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "local" / "train.jsonl").write_text("\n".join([*lines[:20], "{", *lines[20:]]))
    line = error_line(prepare("--hf-dataset", "local", "--hf-streaming"))
    assert line.startswith("local[0] and all rows after it: cannot be read (")


@pytest.mark.skipif(not hasattr(datasets, "Json"), reason="an older datasets")
def test_json_columns_are_parsed_as_datasets_does():
    messages = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    features = datasets.Features({"messages": datasets.List(datasets.Json())})
    saved = datasets.Dataset.from_dict({"messages": [messages] * 2}, features=features)
    saved.save_to_disk("saved")
    result = prepare("--chat", "--hf-dataset", "saved")
    assert result.exit_code == 0 and "refused" not in result.stdout, result.output
    assert len(read(Path("out"), "train")) == 2
