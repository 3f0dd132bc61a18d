# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Text in an object store gives the same token files as local text."""

import gzip
import json

import pytest

from energon_ext.prepare import inputs
from tests.cli.command import energon_ext, error_line

pytest.importorskip("moto", reason="moto is not installed: pip install 'energon_ext[test]'")
pytest.importorskip("boto3", reason="boto3 is not installed: pip install 'energon_ext[test]'")


@pytest.fixture
def folder(tmp_path, store, monkeypatch):
    """JSON Lines and Parquet in a local folder, and in the store under the name of the test."""
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"document {number} " * (1 + number % 9)} for number in range(60)]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(lines)
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
    parquet.write_table(table, tmp_path / "in" / "c.parquet", row_group_size=20)
    store.put(tmp_path / "in", f"{tmp_path.name}/in")
    return tmp_path


def prepare(out, *words, jobs=1):
    result = energon_ext(
        "prepare", out, *words, "--tokenizer", "bytes", "--val", "0", "--jobs", jobs
    )
    assert result.exit_code == 0, result.output
    return result


def contents(folder):
    """Return the bytes of the token files by name."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("train/*.bin"))}


@pytest.mark.parametrize(
    "kind, name", [("--jsonl", "a.jsonl"), ("--jsonl", "b.jsonl.gz"), ("--parquet", "c.parquet")]
)
def test_an_object_gives_the_token_files_of_the_local_file(folder, kind, name, monkeypatch):
    monkeypatch.setattr(inputs, "UNIT_BYTES", 1000)  # several parts, unless compressed
    prepare("local", kind, f"in/{name}")
    prepare("stored", kind, f"s3://corpus/{folder.name}/in/{name}")
    found = contents(folder / "stored")
    assert found == contents(folder / "local")
    assert len(found) == (1 if name.endswith(".gz") else len(found)) and any(found.values())
    origins = (folder / "stored" / "train" / "part-00000.origins.txt").read_text()
    assert f"{folder.name}/in/{name}" in origins


@pytest.mark.parametrize("client", ["rust"])
def test_worker_processes_read_a_store_through_the_rust_client(folder):
    prepare("local", "--jsonl", "in")
    prepare("stored", "--jsonl", f"msc://store/{folder.name}/in", jobs=2)
    assert contents(folder / "stored") == contents(folder / "local")


def test_a_store_folder_is_prepared_again_only_if_a_file_changed(folder, store):
    path = f"msc://store/{folder.name}/in"
    prepare("local", "--jsonl", "in")
    prepare("stored", "--jsonl", path)
    assert contents(folder / "stored") == contents(folder / "local")
    store.requests.clear()
    prepare("stored", "--jsonl", path)
    assert not store.asked("GET", ".jsonl")  # nothing is prepared again
    store.put_object(f"{folder.name}/in/a.jsonl", b'{"text": "another one"}\n')
    assert "prepared again" in prepare("stored", "--jsonl", path).output
    assert contents(folder / "stored") != contents(folder / "local")


def test_a_line_that_is_not_json_is_named_by_object_and_byte(folder, store, monkeypatch):
    monkeypatch.setattr(inputs, "UNIT_BYTES", 100)
    lines = b'{"text": "good"}\n' * 20 + b"{bad}\n"
    store.put_object(f"{folder.name}/bad.jsonl", lines)
    url = f"msc://store/{folder.name}/bad.jsonl"
    words = ["out", "--jsonl", url, "--tokenizer", "bytes", "--jobs", "1"]
    assert f"{url}@{20 * 17}: not JSON" in error_line(energon_ext("prepare", *words))


@pytest.mark.parametrize(
    "url, reason",
    [
        ("msc://store/nothing/here.jsonl", "does not exist"),
        ("msc://elsewhere/a.jsonl", "no such store"),
        ("s3://key:secret@corpus/a.jsonl", "a path must not contain a login"),
    ],
)
def test_a_missing_input_is_a_one_line_error(folder, url, reason):
    line = error_line(energon_ext("prepare", "out", "--jsonl", url, "--tokenizer", "bytes"))
    assert reason in line and "secret" not in line


def test_a_failing_store_ends_the_command_even_with_on_error_skip(folder, store):
    url = f"msc://store/{folder.name}/in/a.jsonl"
    words = ["out", "--jsonl", url, "--tokenizer", "bytes", "--jobs", "1", "--on-error", "skip"]
    store.fault = "down"
    assert "cannot be read after up to 2 attempts" in error_line(energon_ext("prepare", *words))
    store.fault = None
    assert energon_ext("prepare", *words).exit_code == 0
