# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Units: equal documents for any division and number of jobs, and runs that resume."""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from energon_ext.cli.main import main
from energon_ext.errors import ConfigError, WorkerError
from energon_ext.prepare import inputs, job, tables, token_writer
from energon_ext.prepare.accounts import check_files, read_record, write_record
from energon_ext.prepare.documents import Unit, text_under
from energon_ext.prepare.sorted_documents import SortedWriter
from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.storage.claim import ClaimedError, claim
from energon_ext.tokens.file_set import open_token_files
from tests.cli.command import energon_ext, error_line
from tests.prepare.runs import files, memory_unit, read, run, unfinished, wait_for

TEXTS = [f"text {n} " + "é" * (n % 50) for n in range(700)]


def units_of(texts, count):
    bounds = [len(texts) * n // count for n in range(count + 1)]
    parts = [texts[begin:end] for begin, end in zip(bounds, bounds[1:])]
    return [memory_unit(part, f"memory{n}") for n, part in enumerate(parts)]


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def test_documents_and_fingerprint_are_equal_for_any_units_and_jobs(tmp_path):
    found = []
    for count, jobs in ((1, 1), (7, 1), (7, 3), (20, 2)):
        output = tmp_path / f"{count}x{jobs}"
        run(units_of(TEXTS, count), output, jobs=jobs, val_fraction=0.2)
        texts = [read(output, split) for split in ("train", "val")]
        prints = [open_token_files(output / split).fingerprint() for split in ("train", "val")]
        found.append((texts, prints))
    assert sorted(found[0][0][0] + found[0][0][1]) == sorted(TEXTS)
    assert all(each == found[0] for each in found[1:])
    assert (tmp_path / "7x1" / "prepared.json").read_bytes() == (
        tmp_path / "7x3" / "prepared.json"
    ).read_bytes()


def test_a_unit_may_have_no_document_of_a_split(tmp_path):
    run([memory_unit(["a"]), memory_unit([], "empty"), memory_unit(["b"], "c")], tmp_path / "out")
    assert read(tmp_path / "out", "train") == ["a", "b"]
    assert not [file for file in files(tmp_path / "out") if "part-00001" in file]


def test_large_files_are_divided_at_line_ends_with_line_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "UNIT_BYTES", 1000)
    monkeypatch.setattr(inputs, "_BLOCK", 64)
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    units = inputs.jsonl_units([path], text_under("text"))
    assert len(units) > 20
    found = [each for unit in units for each in unit.read()]
    assert [each.text for each in found] == TEXTS
    assert [each.origin for each in found] == [f"{path}:{n + 1}" for n in range(len(TEXTS))]
    assert sum(unit.num_bytes for unit in units) == path.stat().st_size


def test_small_text_files_are_grouped_by_size(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "UNIT_BYTES", 100)
    paths = [tmp_path / f"{n}.txt" for n in range(6)]
    for path, size in zip(paths, (40, 60, 1, 300, 50, 50)):
        path.write_text("x" * size)
    units = inputs.text_units(paths)
    groups = [[Path(each.origin).name for each in unit.read()] for unit in units]
    assert groups == [["0.txt", "1.txt"], ["2.txt"], ["3.txt"], ["4.txt", "5.txt"]]
    assert [unit.num_bytes for unit in units] == [100, 1, 300, 100]


def test_parquet_row_groups_are_units_with_row_numbers(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([{"text": text} for text in TEXTS])
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    monkeypatch.setattr(inputs, "UNIT_BYTES", 8000)
    units = tables.parquet_units([tmp_path], text_under("text"))
    assert 3 < len(units) < 14
    found = [each for unit in units for each in unit.read()]
    assert [each.text for each in found] == TEXTS
    assert found[-1].origin == f"{tmp_path}/a.parquet[699]"


def test_a_bad_line_in_a_later_unit_is_named_and_the_command_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "UNIT_BYTES", 4000)
    path = write_lines(tmp_path / "a.jsonl", TEXTS)
    lines = path.read_bytes().splitlines(keepends=True)
    good, lines[500] = lines[500], b"\xff" * (len(lines[500]) - 1) + b"\n"
    path.write_bytes(b"".join(lines))
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    call = ("prepare", tmp_path / "out", "--tokenizer", "bytes", "--jsonl", path, "--jobs", 1)
    assert "a.jsonl:501: not JSON" in error_line(energon_ext(*call))
    assert not (tmp_path / "out").exists()
    parts = [part for unit in unfinished(tmp_path / "out") for part in unit["files"]]
    work = tmp_path / ".out.unfinished"
    before = {part: (work / part).stat().st_ino for part in parts}
    assert len(before) > 12
    lines[500] = good
    path.write_bytes(b"".join(lines))
    os.utime(path, ns=times)  # otherwise every unit would be of a changed file
    result = energon_ext(*call)
    assert result.exit_code == 0, result.stderr
    assert sorted(read(tmp_path / "out", "train") + read(tmp_path / "out", "val")) == sorted(TEXTS)
    assert before.items() <= {p: (tmp_path / "out" / p).stat().st_ino for p in before}.items()
    assert files(tmp_path) == sorted(
        ["a.jsonl", *(f"out/{file}" for file in files(tmp_path / "out"))]
    )
    skipped = tmp_path / "skipped"
    lines[500] = b"\xff\n"
    path.write_bytes(b"".join(lines))
    output = energon_ext("prepare", skipped, *call[2:], "--on-error", "skip", "--jobs", 2).stdout
    assert "skipped as unreadable: 1" in output and "a.jsonl:501" in output


def test_only_missing_and_changed_parts_are_prepared_again(tmp_path):
    units, output = units_of(TEXTS, 5), tmp_path / "out"
    run(units, output, val_fraction=0.2)
    whole = {file: (output / file).read_bytes() for file in files(output)}
    inodes = {file: (output / file).stat().st_ino for file in files(output)}
    (output / "val/part-00001.bin").unlink()
    with (output / "train/part-00003.bin").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ConfigError, match="2 of 40 files are missing or changed"):
        check_files(output)
    _, remarks = run(units, output, val_fraction=0.2)
    assert [remark.split(":")[0] for remark in remarks] == ["part-00001", "part-00003"]
    assert {file: (output / file).read_bytes() for file in files(output)} == whole
    kept = [f for f in whole if f.split(".")[0][-1] in "024" and f != "prepared.json"]
    assert kept and all((output / file).stat().st_ino == inodes[file] for file in kept)
    assert check_files(output) == 40


@pytest.mark.parametrize("is_ended", [False, True])
def test_a_smaller_input_leaves_no_old_part_behind(tmp_path, is_ended):
    def fail():
        raise ConfigError("unit 5 is bad")

    units, output = units_of(TEXTS, 5), tmp_path / "out"
    if is_ended:
        with pytest.raises(ConfigError, match="unit 5 is bad"):
            run([*units, Unit({"path": "bad"}, fail)], output, val_fraction=0.2)
        assert len(unfinished(output)) == 5
    else:
        run(units, output, val_fraction=0.2)
    run(units[:3], output, val_fraction=0.2)
    assert sorted(read(output, "train") + read(output, "val")) == sorted(TEXTS[:420])


def test_foreign_files_in_the_output_are_kept(tmp_path):
    units, output = units_of(TEXTS, 3), tmp_path / "out"
    run(units[:2], output, val_fraction=0.2)
    (output / "train/cache/indices").mkdir(parents=True)  # as Megatron's GPTDataset does
    (output / "val/notes.txt").write_text("read me")
    run(units, output, val_fraction=0.2)
    assert (output / "train/cache/indices").is_dir() and (output / "val/notes.txt").is_file()
    assert sorted(read(output, "train") + read(output, "val")) == sorted(TEXTS)


def test_a_run_killed_while_publishing_resumes_without_work(tmp_path, monkeypatch):
    units, output = units_of(TEXTS, 3), tmp_path / "out"
    run(units, output)
    for leave in (lambda: None, lambda: (tmp_path / ".out.old").mkdir()):
        output.rename(tmp_path / ".out.unfinished")
        leave()
        monkeypatch.setattr(token_writer, "TokenWriter", None)
        run(units, output)
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (("--val", 0.3), "started with val 0.1, now 0.3"),
        (("--seed", 1), "started with seed 0, now 1"),
        (("--tokenizer", "{folder}/words.json"), "started with tokenizer"),
        (("--key", "other"), 'started with key "text", now "other"'),
    ],
)
def test_other_options_are_refused_by_name(tmp_path, change, expected):
    tokenizers = pytest.importorskip("tokenizers")
    words = {"<unk>": 0, "</s>": 1}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.save(str(tmp_path / "words.json"))
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    call = ("prepare", tmp_path / "out", "--jsonl", lines, "--tokenizer", "bytes", "--val", 0.1)
    assert energon_ext(*call).exit_code == 0
    changed = [str(each).format(folder=tmp_path) for each in change]
    line = error_line(energon_ext(*call, *changed))
    assert expected in line and line.endswith("or --force to prepare everything again.")
    assert energon_ext(*call).exit_code == 0


# Killed processes ---------------------------------------------------------------------------------

PROCESSES = multiprocessing.get_context("fork")


def start_slowly(tmp_path, *call):
    """Start the command slowed down in another process; its workers write their ids to pids."""
    (tmp_path / "pids").mkdir(exist_ok=True)
    process = PROCESSES.Process(target=call_slowly, args=(tmp_path, list(map(str, call))))
    process.start()
    return process


def call_slowly(tmp_path, call):
    for writer in (TokenWriter, SortedWriter):
        write = writer.write

        def slow(self, *arguments, write=write, **options):
            (tmp_path / "pids" / str(os.getpid())).touch()
            time.sleep(0.004)
            write(self, *arguments, **options)

        writer.write = slow
    inputs.UNIT_BYTES, job.BATCH_BYTES = 4000, 500
    file = os.open(tmp_path / "pids" / "stderr", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(file, 2)
    sys.stderr = os.fdopen(2, "w")
    main(call)


def pids(tmp_path):
    return [int(path.name) for path in (tmp_path / "pids").iterdir() if path.name.isdecimal()]


def test_a_killed_worker_ends_the_command_in_one_line_and_the_next_run_does_the_rest(
    tmp_path,
):
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    call = ("prepare", tmp_path / "out", "--jsonl", lines, "--tokenizer", "bytes", "--jobs", 2)
    process = start_slowly(tmp_path, *call)
    wait_for(lambda: len(unfinished(tmp_path / "out")) >= 2)
    worker = pids(tmp_path)[0]
    assert worker != process.pid
    os.kill(worker, signal.SIGKILL)
    process.join(60)
    assert process.exitcode == 2
    stderr = (tmp_path / "pids" / "stderr").read_text()
    assert "Error: A worker was killed" in stderr and "Traceback" not in stderr
    assert unfinished(tmp_path / "out") and not [*tmp_path.glob(".out.unfinished/.staging-*")]
    again = start_slowly(tmp_path, *call)
    again.join(60)
    assert again.exitcode == 0
    assert sorted(read(tmp_path / "out", "train") + read(tmp_path / "out", "val")) == sorted(TEXTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out", "pids"]


def test_a_killed_command_leaves_no_process_and_resumes_at_once(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    call = ("prepare", tmp_path / "out", "--jsonl", lines, "--tokenizer", "bytes", "--jobs", 2)
    process = start_slowly(tmp_path, *call)
    wait_for(lambda: len(unfinished(tmp_path / "out")) >= 2)
    refused = error_line(energon_ext(*call))
    assert f"is being prepared by process {process.pid} on" in refused
    process.kill()
    process.join()
    wait_for(lambda: not any(is_alive(worker) for worker in pids(tmp_path)))
    kept = unfinished(tmp_path / "out")
    failing = error_line(energon_ext(*call, "--val", 0.3))
    assert "started with val 0.05, now 0.3" in failing
    assert unfinished(tmp_path / "out") == kept
    again = start_slowly(tmp_path, *call)
    again.join(60)
    assert again.exitcode == 0
    assert sorted(read(tmp_path / "out", "train") + read(tmp_path / "out", "val")) == sorted(TEXTS)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out", "pids"]


def is_alive(process):
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_worker_error_is_raised_and_the_others_end(tmp_path):
    def fail():
        raise ConfigError("unit 3 is bad")

    units = [*units_of(TEXTS, 3), Unit({"path": "bad"}, fail), *units_of(TEXTS, 3)]
    with pytest.raises(ConfigError, match="unit 3 is bad"):
        run(units, tmp_path / "out", jobs=3)


def test_a_worker_that_exits_early_is_an_error(tmp_path):
    ending = Unit({"path": "b"}, lambda: os._exit(3))
    with pytest.raises(WorkerError, match="A worker was killed"):
        run([memory_unit(["a"]), ending], tmp_path / "out", jobs=2)


# Claims -------------------------------------------------------------------------------------------


def test_a_claim_has_one_owner_and_is_taken_over_when_stale(tmp_path):
    path, output = tmp_path / ".out.claim", tmp_path / "out"
    with claim(output):
        with pytest.raises(ClaimedError, match=f"out: is being prepared by process {os.getpid()} "):
            claim(output).__enter__()
        path.write_text("elsewhere pid:[1] 7")  # another host, which has just touched it
        with pytest.raises(ClaimedError, match="by process 7 on elsewhere"):
            claim(output).__enter__()
        os.utime(path, (time.time() - 31,) * 2)
        with claim(output) as beat:
            os.utime(path, (time.time() - 20,) * 2)
            beat()
            assert time.time() - path.stat().st_mtime < 10
    assert not path.exists()
    path.write_text("elsewhere pid:[1] 7")
    os.utime(path, (time.time() + 3600,) * 2)  # its clock was wrong, and it is gone
    with pytest.raises(ClaimedError, match="by process 7 on elsewhere"):
        claim(output).__enter__()
    assert abs(path.stat().st_mtime - time.time()) < 20  # it becomes stale as others do
    path.unlink()
    with claim(output):
        owner = path.read_text().split()
        path.write_text(" ".join([*owner[:2], "999999999"]))  # no process of this host
        with claim(output):
            assert path.read_text().split() == owner


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_damaged_account_counts_as_missing(content, tmp_path):
    write_record(tmp_path / "account.json", {"unit": 1})
    assert read_record(tmp_path / "account.json") == {"unit": 1}
    (tmp_path / "account.json").write_bytes(content)
    assert read_record(tmp_path / "account.json") is None
