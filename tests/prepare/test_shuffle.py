# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Documents in random order on disk: the same one for any jobs and parts, and runs that resume."""

import hashlib
import json
import os
import shutil
import signal
import tracemalloc

import numpy as np
import pytest

from energon_ext.errors import ConfigError
from energon_ext.prepare import inputs, shuffle, sorted_documents
from energon_ext.prepare import units as units_module
from energon_ext.prepare.accounts import check_files
from energon_ext.prepare.sorted_documents import SortedWriter, read_bucket
from energon_ext.prepare.units import run_part, run_units
from energon_ext.storage.claim import Part
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.tokens.file_set import open_token_files
from tests.cli.command import energon_ext, error_line
from tests.prepare.runs import bytes_job, files, memory_unit, read, unfinished, wait_for
from tests.prepare.test_cluster import contents
from tests.prepare.test_units import (
    TEXTS,
    is_alive,
    pids,
    start_slowly,
    units_of,
    write_lines,
)

SEED = 7
MIX = 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53


@pytest.fixture(autouse=True)
def _small_buckets(monkeypatch):
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 40_000)


def shuffled(units, output, *, jobs=1, seed=SEED, **options):
    job = bytes_job(**options)
    job = type(job)(**{**vars(job), "shuffle": seed, "options": {**options, "shuffle": seed}})
    return run_units(job, units, output, jobs=jobs)


def shuffled_part(units, output, number, count):
    job = bytes_job()
    job = type(job)(**{**vars(job), "shuffle": SEED, "options": {"shuffle": SEED}})
    return run_part(job, units, output, Part(number, count))


def slow_key(unit, number):
    """Return the key of a document by plain integers."""
    digest = hashlib.blake2b(f"{SEED}/part-{unit:05}-sorted".encode(), digest_size=40).digest()
    value = number
    for word in (0, 1):
        value ^= int.from_bytes(digest[8 * word : 8 * word + 8], "little")
        value = value * MIX[0] % 2**64
        value ^= value >> 32
        value = value * MIX[1] % 2**64
    return value


def parts_of(folder, split):
    return sorted({path.name.split(".")[0] for path in (folder / split).iterdir()})


# The order --------------------------------------------------------------------------------------


def test_documents_are_sorted_by_the_hash_of_their_unit_and_number(tmp_path):
    prepared, _ = shuffled(units_of(TEXTS, 7), tmp_path / "out")
    bounds = [len(TEXTS) * n // 7 for n in range(8)]
    keys = {
        TEXTS[first + number]: slow_key(unit, number)
        for unit, (first, stop) in enumerate(zip(bounds, bounds[1:]))
        for number in range(stop - first)
    }
    assert read(tmp_path / "out", "train") == sorted(TEXTS, key=keys.get)
    assert len(parts_of(tmp_path / "out", "train")) == 4
    assert prepared["shuffled"] == SEED
    assert json.loads((tmp_path / "out/prepared.json").read_text())["shuffled"] == SEED


def test_any_parts_and_jobs_give_the_same_files(tmp_path):
    units = units_of(TEXTS[:300], 20)
    shuffled(units, tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    assert len([name for name in expected if name.endswith(".idx")]) == 2
    shuffled(units, tmp_path / "jobs", jobs=3)
    assert contents(tmp_path / "jobs") == expected
    for count in (1, 7, 20):
        output = tmp_path / str(count)
        for number in [*range(count)][::-1]:
            last, _ = shuffled_part(units, output, number, count)
        assert (last is None) == (count > 1) and output.exists() == (count == 1)
        for number in range(count):
            shuffled_part(units, output, number, count)
        assert contents(output) == expected
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "20", "7", "jobs", "whole"]


def test_the_command_shuffles_each_split_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(inputs, "UNIT_BYTES", 4000)
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    call = ("--jsonl", lines, "--tokenizer", "bytes", "--jobs", 1, "--val", 0.2)
    plain = energon_ext("prepare", tmp_path / "plain", *call)
    result = energon_ext("prepare", tmp_path / "out", *call, "--shuffle", SEED)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == plain.stdout.replace("plain", "out")
    for split in ("train", "val"):
        before, after = read(tmp_path / "plain", split), read(tmp_path / "out", split)
        assert before != after and sorted(before) == sorted(after)
    call = ("prepare", tmp_path / "parts", *call, "--shuffle", SEED, "--part")
    printed = [energon_ext(*call, part).stdout for part in ("0/2", "1/2", "0/2")]
    line = f"{tmp_path}/parts: part 1/2 is prepared, other parts are not; with --shuffle, run"
    assert printed[1].startswith(line)
    assert printed[2] == result.stdout.replace("out:", "parts:")
    assert contents(tmp_path / "parts") == contents(tmp_path / "out")


def test_another_seed_is_another_order_and_each_unit_has_its_own(tmp_path):
    units = units_of(TEXTS, 2)
    shuffled(units, tmp_path / "a")
    shuffled(units, tmp_path / "b", seed=8)
    a, b = read(tmp_path / "a", "train"), read(tmp_path / "b", "train")
    assert a != b and sorted(a) == sorted(b)
    first = [TEXTS.index(text) for text in a if TEXTS.index(text) < 350]
    second = [TEXTS.index(text) - 350 for text in a if TEXTS.index(text) >= 350]
    assert sorted(first) == sorted(second) and first != second


@pytest.mark.parametrize("run_bytes", [1, 500, 2**28])
@pytest.mark.parametrize("buckets", [1, 8, 2**14])
def test_a_bucket_has_the_documents_of_its_keys_however_runs_are_cut(
    tmp_path, monkeypatch, run_bytes, buckets
):
    """More buckets than ranges of keys in the table of a file, and fewer."""
    monkeypatch.setattr(sorted_documents, "RUN_BYTES", run_bytes)
    rng = np.random.default_rng(0)
    expected, paths = [], []
    for unit in range(3):
        writer = SortedWriter(tmp_path / f"part-{unit:05}-sorted", vocab_size=70_000, seed=SEED)
        for number in range(40):
            tokens = rng.integers(0, 70_000, rng.integers(0, 6))
            weights = [None, tokens % 2, tokens / 70_000][number % 3]
            origin = f"é {unit}:{number}"
            writer.write(tokens, weights, origin=origin)
            weights = None if weights is None else weights.astype(np.float32).tolist()
            expected.append((slow_key(unit, number), tokens.tolist(), weights, origin))
        writer.close()
        paths.append(tmp_path / f"part-{unit:05}-sorted.documents")
    expected.sort()
    wanted = range(buckets) if buckets < 100 else {key * buckets >> 64 for key, *_ in expected}
    found = []
    for bucket in sorted(wanted):
        documents = [*read_bucket(paths, bucket, buckets, 70_000)]
        keys = [key for key, *_ in expected if key * buckets >> 64 == bucket]
        assert len(documents) == len(keys)
        for document in documents:
            weights = document.weights
            weights = None if weights is None else weights.astype(np.float32).tolist()
            found.append((document.tokens.tolist(), weights, document.origin))
    assert found == [each[1:] for each in expected]


def test_memory_is_bounded_by_a_run_and_a_bucket(tmp_path, monkeypatch):
    """24 MB of tokens in one unit."""
    texts = [f"{n} " + "x" * 3000 for n in range(4000)]
    monkeypatch.setattr(sorted_documents, "RUN_BYTES", 2**20)
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 2**20)
    tracemalloc.start()
    try:
        shuffled([memory_unit(texts)], tmp_path / "out")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(parts_of(tmp_path / "out", "train")) == 32
    assert peak < 14e6  # in the order of the input: 9e6
    assert sorted(read(tmp_path / "out", "train")) == sorted(texts)


# What belongs to a document ---------------------------------------------------------------------


def documents_of(folder):
    """Return tokens and weights of each document by its origin."""
    tokens, found = open_token_files(folder), {}
    for number in range(len(tokens)):
        document = tokens.document(number).tolist()
        weights = tokens.label_weights(number, 0, len(document))
        weights = [1.0] * len(document) if weights is None else weights.tolist()
        found[tokens.origin(number).key] = document, weights
    assert len(found) == len(tokens)
    return found


def test_weights_and_origins_stay_with_their_documents(tmp_path, monkeypatch):
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 5000)
    records = [{"prompt": f"{n}?", "response": "x" * (n * 5 % 30)} for n in range(60)]
    records[17] = {"messages": "nonsense"}
    lines = tmp_path / "chat.jsonl"
    lines.write_text("".join(json.dumps(each) + "\n" for each in records))
    call = ("--chat", "--jsonl", lines, "--tokenizer", "bytes", "--chat-template", "plain")
    plain = energon_ext("prepare", tmp_path / "plain", *call, "--jobs", 1)
    result = energon_ext("prepare", tmp_path / "out", *call, "--jobs", 1, "--shuffle", 1)
    assert result.exit_code == 0, result.stderr
    assert "skipped as invalid: 1" in result.stdout and "chat.jsonl:18" in result.stdout
    assert result.stdout == plain.stdout.replace("plain", "out")
    assert len(parts_of(tmp_path / "out", "train")) > 1
    for split in ("train", "val"):
        expected = documents_of(tmp_path / "plain" / split)
        found = documents_of(tmp_path / "out" / split)
        assert found == expected and [*found] != [*expected]
        assert {0.0, 1.0} == {w for _, weights in found.values() for w in weights}


def test_pairs_of_one_order_say_so_and_others_do_not(tmp_path):
    units = units_of(TEXTS, 3)
    shuffled(units, tmp_path / "a/web")
    shuffled(units_of(TEXTS[:300], 3), tmp_path / "a/code")
    run_units(bytes_job(), units, tmp_path / "plain")
    assert open_token_files(tmp_path / "a/web/train").is_shuffled
    assert open_token_files(tmp_path / "a/web/train/part-00001").is_shuffled
    assert not open_token_files(tmp_path / "a").is_shuffled  # one random order after another
    assert not open_token_files(tmp_path / "plain/train").is_shuffled
    shutil.copytree(tmp_path / "plain/train", tmp_path / "a/web/train/more")
    assert not open_token_files(tmp_path / "a/web/train").is_shuffled


# Stopped and continued --------------------------------------------------------------------------


def names_in(folder):
    return {each["name"] for each in unfinished(folder)}


@pytest.mark.parametrize("victim", ["command", pytest.param("worker", marks=pytest.mark.nightly)])
def test_a_run_killed_in_each_pass_continues_and_gives_the_same_files(
    tmp_path, monkeypatch, victim
):
    lines = write_lines(tmp_path / "a.jsonl", TEXTS[:500])
    call = ("--jsonl", lines, "--tokenizer", "bytes", "--jobs", 2, "--shuffle", SEED)
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 4000)
    with monkeypatch.context() as patch:  # as below
        patch.setattr(inputs, "UNIT_BYTES", 4000)
        assert energon_ext("prepare", tmp_path / "whole", *call).exit_code == 0
    for done in (
        lambda names: len(names) >= 2,
        lambda names: sum("sorted" not in name for name in names) >= 2,
    ):
        shutil.rmtree(tmp_path / "pids", ignore_errors=True)
        process = start_slowly(tmp_path, "prepare", tmp_path / "out", *call)
        wait_for(lambda done=done: done(names_in(tmp_path / "out")))
        workers = [each for each in pids(tmp_path) if is_alive(each)]  # of this pass
        os.kill(process.pid if victim == "command" else workers[0], signal.SIGKILL)
        process.join(60)
        assert process.exitcode != 0 and not (tmp_path / "out").exists()
    again = start_slowly(tmp_path, "prepare", tmp_path / "out", *call)
    again.join(120)
    assert again.exitcode == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["a.jsonl", "out", "pids", "whole"]


def test_a_run_killed_between_the_passes_and_while_publishing_continues(tmp_path, monkeypatch):
    units, output = units_of(TEXTS, 5), tmp_path / "out"
    shuffled(units, tmp_path / "whole")
    monkeypatch.setattr(shuffle, "read_bucket", None)
    with pytest.raises(TypeError):
        shuffled(units, output)
    assert names_in(output) == {f"part-{n:05}-sorted" for n in range(5)}
    monkeypatch.undo()
    monkeypatch.setattr(shuffle, "BUCKET_BYTES", 40_000)
    monkeypatch.setattr(SortedWriter, "write", None)  # nothing is sorted again
    shuffled(units, output)
    assert contents(output) == contents(tmp_path / "whole")
    output.rename(tmp_path / ".out.unfinished")
    shuffled(units, output)
    assert contents(output) == contents(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]


def test_a_part_does_not_publish_the_first_pass(tmp_path, monkeypatch):
    """The other part ends its share between the passes and the end of this one."""
    units, output, finish = units_of(TEXTS, 4), tmp_path / "out", units_module._finish_last

    def finish_late(*arguments):
        monkeypatch.setattr(units_module, "_finish_last", finish)
        assert shuffled_part(units, output, 1, 2)[0] is None
        return finish(*arguments)

    monkeypatch.setattr(units_module, "_finish_last", finish_late)
    assert shuffled_part(units, output, 0, 2)[0] is None and not output.exists()
    assert shuffled_part(units, output, 0, 2)[0] is not None
    assert sorted(read(output, "train")) == sorted(TEXTS)


def test_only_missing_parts_of_a_finished_output_are_written_again(tmp_path):
    units, output = units_of(TEXTS, 5), tmp_path / "out"
    shuffled(units, output, val_fraction=0.2)
    whole = contents(output)
    inodes = {file: (output / file).stat().st_ino for file in files(output)}
    assert shuffled(units, output, val_fraction=0.2)[1] == []
    assert {n: (output / n).stat().st_ino for n in inodes if n != "prepared.json"}.items() <= (
        inodes.items()
    )
    (output / "val/part-00001.bin").unlink()
    _, remarks = shuffled(units, output, val_fraction=0.2)
    assert remarks == ["part-00001: val/part-00001.bin is missing, prepared again"]
    assert contents(output) == whole and check_files(output) == 32
    kept = [file for file in whole if "part-00000" in file]
    assert kept and all((output / file).stat().st_ino == inodes[file] for file in kept)


def test_a_changed_input_is_shuffled_again(tmp_path):
    units, output = units_of(TEXTS, 5), tmp_path / "out"
    shuffled(units, output)
    other = [*units[:3], memory_unit(["another text"], "another"), units[4]]
    _, remarks = shuffled(other, output)
    assert remarks and all("the input has changed, prepared again" in each for each in remarks)
    assert sorted(read(output, "train")) == sorted([*TEXTS[:420], "another text", *TEXTS[560:]])


def test_another_seed_and_a_plain_order_are_refused_by_name(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", TEXTS[:50])
    call = ("prepare", tmp_path / "out", "--jsonl", lines, "--tokenizer", "bytes", "--jobs", 1)
    assert energon_ext(*call, "--shuffle", 1).exit_code == 0
    assert "started with shuffle 1, now 2; use" in error_line(energon_ext(*call, "--shuffle", 2))
    assert "started with shuffle 1, now null" in error_line(energon_ext(*call))
    assert energon_ext(*call, "--force").exit_code == 0
    assert "started with shuffle null, now 0" in error_line(energon_ext(*call, "--shuffle", 0))


def test_an_empty_split_and_an_id_outside_the_vocabulary_are_refused(tmp_path):
    lines = write_lines(tmp_path / "a.jsonl", ["only one"])
    call = ("prepare", tmp_path / "out", "--jsonl", lines, "--tokenizer", "bytes", "--shuffle", 1)
    assert "None of the 1 documents is in val" in error_line(energon_ext(*call))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    writer = SortedWriter(tmp_path / "web", vocab_size=300, seed=1)
    with pytest.raises(ConfigError, match="a.txt: token id 300, but the tokenizer has 300 ids"):
        writer.write(np.array([1, 300]), origin="a.txt")
    writer.abandon()


def test_text_is_read_back_in_the_words_of_its_tokenizer(tmp_path):
    texts = ["é", "", "two\nlines"]
    shuffled([memory_unit(texts + ["four"])], tmp_path / "out")
    tokens = open_token_files(tmp_path / "out/train")
    decode = ByteTokenizer().decode
    assert sorted(decode(tokens.document(n)) for n in range(len(tokens))) == sorted(
        ["é", "two\nlines", "four"]
    )
