# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause

import gzip
import json
import tracemalloc

import numpy as np
import pytest

from energon_ext.errors import ConfigError
from energon_ext.prepare import inputs, job
from energon_ext.tokenizers.protocol import check_written
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.tokens.file_set import open_token_files
from tests.cli.command import energon_ext, error_line
from tests.prepare.runs import files, read, write

FILES_OF_A_PAIR = ("bin", "idx", "meta.json", "origins.txt")
TEXTS = [f"document {number}\r\nwith a second line and an é\n" for number in range(40)]


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "input.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def prepare(output, *inputs):
    return energon_ext("prepare", output, "--tokenizer", "bytes", *inputs)


def test_every_document_is_written_once_and_unchanged(tmp_path, jsonl):
    out = prepare(tmp_path / "out", "--jsonl", jsonl, "--val", 0.25).stdout
    parts = [f"{split}/part-00000" for split in ("train", "val")]
    names = [f"{part}.{suffix}" for part in parts for suffix in FILES_OF_A_PAIR]
    assert files(tmp_path / "out") == sorted(["prepared.json", *names])
    train, val = read(tmp_path / "out", "train"), read(tmp_path / "out", "val")
    assert sorted(train + val) == sorted(TEXTS)
    assert 0 < len(val) < len(train)
    assert out.splitlines()[1].split() == ["documents", "characters", "tokens"]
    total = sum(int(line.split()[3].replace(",", "")) for line in out.splitlines()[2:4])
    assert total == sum(len(text.encode()) + 2 for text in TEXTS)  # BOS and EOS of each document


def test_a_pair_has_small_ids_and_names_its_tokenizer(tmp_path, jsonl):
    prepare(tmp_path / "out", "--jsonl", jsonl)
    tokens, tokenizer = open_token_files(tmp_path / "out" / "train"), ByteTokenizer()
    check_written(tokens, tokenizer)
    assert tokens.tokens(0, 0, 1).dtype == np.uint16


def test_counts_match_the_documents(tmp_path, jsonl):
    out = prepare(tmp_path / "out", "--jsonl", jsonl, "--val", 0).stdout
    numbers = (sum(map(len, TEXTS)), sum(len(text.encode()) + 2 for text in TEXTS))
    assert out.splitlines()[2].split() == ["train", "40", *(f"{number:,}" for number in numbers)]
    assert out.splitlines()[3].split() == ["val", "0", "0", "0"]


def test_the_split_depends_only_on_text_and_seed(tmp_path):
    def val_split(name, texts, seed=0):
        write(texts, tmp_path / name, val_fraction=0.3, seed=seed)
        return read(tmp_path / name, "val")

    val = val_split("forward", TEXTS)
    assert sorted(val_split("backward", TEXTS[::-1])) == sorted(val)
    assert sorted(val_split("twice", TEXTS + TEXTS)) == sorted(val + val)
    assert sorted(val_split("seed", TEXTS, seed=1)) != sorted(val)


def test_equal_input_gives_equal_files_whatever_the_batch_size(tmp_path, monkeypatch):
    for name, characters in (("first", 100), ("second", 10_000)):
        monkeypatch.setattr(job, "BATCH_BYTES", characters)
        write(TEXTS, tmp_path / name, val_fraction=0.2)
    for file in files(tmp_path / "first"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()


def test_text_files_are_documents_and_a_separator_splits_them(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\n")
    (tmp_path / "b.txt").write_text("two<|end|>three<|end|> \n")
    call = (tmp_path / "out", "--val", 0, "--force", "--text")
    inputs = (tmp_path / "a.txt", tmp_path / "b.txt")
    assert prepare(*call, *inputs).exit_code == 0
    assert read(tmp_path / "out", "train") == ["one\r\n", "two<|end|>three<|end|> \n"]
    result = prepare(*call, *inputs, "--separator", "<|end|>")
    assert read(tmp_path / "out", "train") == ["one\r\n", "two", "three"]
    assert "skipped as too short: 1" in result.stdout


def test_a_separator_is_found_across_read_boundaries(tmp_path, monkeypatch):
    monkeypatch.setattr("energon_ext.prepare.inputs.READ_CHARACTERS", 3)
    (tmp_path / "a.txt").write_text("one####two####three")
    prepare(tmp_path / "out", "--val", 0, "--text", tmp_path / "a.txt", "--separator", "####")
    assert read(tmp_path / "out", "train") == ["one", "two", "three"]


def test_matching_files_of_a_folder_are_read_in_order(tmp_path):
    for name in ("src/b.py", "src/deep/a.py", "src/c.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    inputs = ("--folder", tmp_path / "src", "--glob", "**/*.py")
    result = prepare(tmp_path / "out", *inputs, "--val", 0)
    assert result.exit_code == 0
    assert read(tmp_path / "out", "train") == ["src/b.py", "src/deep/a.py"]


def test_a_local_hugging_face_dataset_is_read(tmp_path, monkeypatch):
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "train.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    for streaming in ((), ("--hf-streaming",)):
        inputs = ("--hf-dataset", tmp_path / "local", "--key", "body", *streaming)
        result = prepare(tmp_path / "out", *inputs, "--val", 0, "--force")
        assert result.exit_code == 0
        assert read(tmp_path / "out", "train") == ["one", "two"]


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    line = error_line(prepare(tmp_path / "out", "--hf-dataset", "some/name"))
    assert "pip install 'energon_ext[datasets]'" in line


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (b"", "no document of at least 1 characters"),
        (b'{"text": " \\n"}\n', "(1 shorter)"),
        (b'{"text": "good"}\n\n{"text": \n', "input.jsonl:3: not JSON"),
        (b'{"text": "good"}\n["text"]\n', "input.jsonl:2: list found, a JSON object"),
        (b'{"content": "x", "id": 1}\n', "input.jsonl:1: no key 'text'; it has ['content', 'id']"),
        (b'{"text": 5}\n', "input.jsonl:1: 'text': int found, a string"),
        (b'{"text": "\xff"}\n', "input.jsonl:1: not JSON"),
        (b'{"text": "\\ud800 half"}\n', "input.jsonl:1: the text contains a lone surrogate"),
        (b"[" * 100_000 + b"\n", "input.jsonl:1: not JSON"),
    ],
)
def test_damaged_jsonl_is_one_line_with_file_and_line(tmp_path, lines, expected):
    (tmp_path / "input.jsonl").write_bytes(lines)
    line = error_line(prepare(tmp_path / "out", "--jsonl", tmp_path / "input.jsonl", "--val", 0))
    assert expected in line
    assert files(tmp_path) == ["input.jsonl"], "nothing half written"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "found none"),
        (["--text", "good.txt", "--folder", "."], "found --text and --folder"),
        (["--text", "absent.txt"], "absent.txt: does not exist"),
        (["--text", "sub"], "sub: is a folder, not a file"),
        (["--text", "latin.txt"], "latin.txt: not UTF-8 text (byte 0xe9)"),
        (["--text", "good.txt", "--separator", ""], "--separator: '' found"),
        (["--folder", "absent"], "absent: does not exist"),
        (["--folder", "sub"], "sub: no file matches '**/*.txt'"),
        (["--folder", "sub", "--glob", "/etc/*"], "is not a relative pattern"),
        (["--folder", "sub", "good.txt"], "more files can follow --text, --jsonl or --parquet"),
        (["--text", "good.txt", "--val", "0.001"], "None of the 1 documents is in val"),
        (["--text", "good.txt", "--tokenizer", "good.txt"], "is not a tokenizer.json"),
    ],
)
def test_user_mistakes_are_one_line(tmp_path, monkeypatch, arguments, expected):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    assert expected in error_line(prepare("out", *arguments))
    assert files(tmp_path) == ["good.txt", "latin.txt"], "nothing half written"


def test_the_error_for_a_missing_tokenizer_suggests_energon_prepare(jsonl, tmp_path):
    line = error_line(energon_ext("prepare", tmp_path / "out", "--jsonl", jsonl))
    assert "--tokenizer is missing" in line and "`energon prepare`" in line


def test_nothing_is_overwritten_without_force(tmp_path, jsonl):
    (tmp_path / "one.txt").write_text("another text")
    call = (tmp_path / "out", "--val", 0)
    prepare(*call, "--jsonl", jsonl)
    line = error_line(prepare(*call, "--text", tmp_path / "one.txt"))
    assert 'out: started with input ["--jsonl"' in line and "or --force" in line
    assert read(tmp_path / "out", "train") == TEXTS
    assert prepare(*call, "--text", tmp_path / "one.txt", "--force").exit_code == 0
    assert read(tmp_path / "out", "train") == ["another text"]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"input.jsonl", "one.txt", "out"}


def test_force_never_removes_what_prepare_did_not_write(tmp_path, jsonl):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years of work")
    for out in (tmp_path / "home", tmp_path / "home" / "thesis.tex"):
        assert "so --force does not replace it" in error_line(
            prepare(out, "--jsonl", jsonl, "--force")
        )
    assert (tmp_path / "home" / "thesis.tex").read_text() == "years of work"


ROWS = [{"text": text} for text in TEXTS[:4]]


def as_jsonl():
    return "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def write_gz(folder):
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(as_jsonl()))
    return "--jsonl", folder / "a.jsonl.gz"


def write_zst(folder):
    pyarrow = pytest.importorskip("pyarrow")
    with pyarrow.output_stream(folder / "a.jsonl.zst", compression="zstd") as file:
        file.write(as_jsonl())
    return "--jsonl", folder / "a.jsonl.zst"


def write_folder(folder):
    (folder / "deep").mkdir()
    lines = as_jsonl().splitlines(keepends=True)
    (folder / "a.jsonl").write_bytes(b"".join(lines[:1]))
    (folder / "deep" / "b.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[1:])))
    (folder / "notes.txt").write_text("no JSON")
    return "--jsonl", folder


def write_parquet(folder):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / "a.parquet")
    return "--parquet", folder


def save_dataset(folder):
    pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(folder / "saved")
    return "--hf-dataset", folder / "saved"


def save_splits(folder):
    datasets = pytest.importorskip("datasets")
    other = datasets.Dataset.from_list([{"text": "other"}])
    splits = {"train": other, "half": datasets.Dataset.from_list(ROWS)}
    datasets.DatasetDict(splits).save_to_disk(folder / "saved")
    return "--hf-dataset", folder / "saved", "--hf-split", "half"


@pytest.mark.parametrize(
    "write_input", [write_gz, write_zst, write_folder, write_parquet, save_dataset, save_splits]
)
def test_rows_are_read_from_common_formats(tmp_path, write_input):
    (tmp_path / "in").mkdir()
    prepare(tmp_path / "out", *write_input(tmp_path / "in"), "--val", 0)
    assert read(tmp_path / "out", "train") == TEXTS[:4]


def test_unreadable_input_is_skipped_and_counted_on_request(tmp_path):
    for name, content in (("a", b"one"), ("b", b"\xff\xfe"), ("c", b"two")):
        (tmp_path / f"{name}.txt").write_bytes(content)
    folder = ("--folder", tmp_path, "--val", 0)
    assert "b.txt: not UTF-8 text (byte 0xff)" in error_line(prepare(tmp_path / "out", *folder))
    output = prepare(tmp_path / "out", *folder, "--on-error", "skip").stdout
    assert read(tmp_path / "out", "train") == ["one", "two"]
    assert "skipped as unreadable: 1\n    the first: " in output and "b.txt: not UTF-8" in output
    lines = b'{"text": "one"}\nno JSON\n{"txt": "no key"}\n{"text": "\\ud800"}\n{"text": "two"}\n'
    (tmp_path / "rows.jsonl").write_bytes(lines)
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(as_jsonl())[:-12])
    rows = ("--jsonl", tmp_path / "rows.jsonl", "--val", 0)
    assert "rows.jsonl:2: not JSON" in error_line(prepare(tmp_path / "rows", *rows))
    output = prepare(tmp_path / "rows", *rows, "--on-error", "skip").stdout
    assert read(tmp_path / "rows", "train") == ["one", "two"]
    assert "skipped as unreadable: 3" in output
    damaged = prepare(tmp_path / "cut", "--jsonl", tmp_path / "cut.jsonl.gz", "--val", 0)
    assert "cut.jsonl.gz: cannot be read (Compressed file ended" in error_line(damaged)


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ConfigError("damaged")])
def test_a_failure_halfway_leaves_the_old_dataset_alone(tmp_path, failure):
    def failing_at_the_end():
        yield from TEXTS
        raise failure

    write(["old"], tmp_path / "out", val_fraction=0)
    with pytest.raises(type(failure)):
        write(failing_at_the_end(), tmp_path / "out", val_fraction=0, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert read(tmp_path / "out", "train") == ["old"]


def test_memory_does_not_grow_with_the_input(tmp_path):
    tracemalloc.start()
    write(("x" * 100_000 for _ in range(400)), tmp_path / "out", val_fraction=0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20_000_000  # of 40 MB of text, which are 320 MB of token ids


def test_a_line_has_a_size_limit(tmp_path, monkeypatch):
    """A compressed file of a few kilobytes can be one line of gigabytes."""
    monkeypatch.setattr(inputs, "MAX_LINE_BYTES", 1000)
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(b'{"text": "' + b"0" * 5000))
    error = error_line(prepare(tmp_path / "out", "--jsonl", str(tmp_path / "bomb.jsonl.gz")))
    assert "bomb.jsonl.gz:1: not JSON (over 1,000 bytes)" in error
