# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Text is tokenized once: by one process of several, even if one is killed, never stale."""

import io
import json
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from megatron.energon import Cooker, SkipSample, TextSample, stateless
from megatron.energon.task_encoder.cooking import basic_sample_keys

from energon_ext import (
    ConfigError,
    PackedTaskEncoder,
    SFTTaskEncoder,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.data_files import DEFAULT_CACHE
from energon_ext.encoders import text_sources
from energon_ext.encoders.text import Document
from energon_ext.prepare import cache, job, samples
from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.prepare.runs import unfinished, wait_for
from tests.support import (
    batch_hash,
    config,
    loader_for,
    take,
    write_dataset,
    write_mix,
    write_tokens,
)

TEXTS = [f"<{n}> " + "word " * (n % 40) for n in range(200)]


def write_lines(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path.with_name(f"{path.name}.idx").unlink(missing_ok=True)
    return path


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prepared")
    write_lines(folder / "lines.jsonl")
    write_dataset(folder / "web", TEXTS[:90], shard_size=20)
    write_mix(folder / "mix.yaml", [("lines.jsonl", 2), ("web", 1)])
    return folder


@pytest.fixture
def mix(prepared, tmp_path):
    """A copy in which nothing has been tokenized."""
    return shutil.copytree(prepared, tmp_path, dirs_exist_ok=True) / "mix.yaml"


def load(path, encoder=None, **options):
    encoder = encoder or PackedTaskEncoder(ByteTokenizer(), 64)
    options = {"worker_config": config(), "batch_size": 2, **options}
    return get_train_dataset(path, task_encoder=encoder, **options)


def hashes(path, count=12, **options):
    return [batch_hash(batch) for batch in take(loader_for(load(path, **options)), count)]


def caches(folder):
    """Return the names in a cache folder, complete and hidden."""
    root = folder / DEFAULT_CACHE
    return sorted(path.name for path in root.iterdir()) if root.is_dir() else []


def refuse_to_tokenize(monkeypatch):
    def fail(*arguments, **options):
        raise AssertionError("tokenized again")

    monkeypatch.setattr(text_sources, "TokenWriter", fail)


def test_text_is_tokenized_at_first_use_and_reused_afterwards(mix, tmp_path, monkeypatch):
    first = hashes(mix)
    names = caches(tmp_path)
    assert [name.rpartition("-")[0] for name in names] == ["lines.jsonl", "web"]
    refuse_to_tokenize(monkeypatch)
    assert hashes(mix) == first
    assert hashes(mix, encoder=PackedTaskEncoder(ByteTokenizer(), 64, train_on_eos=False)) != first
    load(mix, PackedTaskEncoder(ByteTokenizer(), 17, packing="sequential"))
    assert caches(tmp_path) == names


def test_text_gives_the_same_rows_as_token_files_of_its_documents(tmp_path):
    write_lines(tmp_path / "lines.jsonl")
    pair = tmp_path / "tokens" / "lines.jsonl"  # the same name, so the same order
    write_tokens(pair, [ByteTokenizer().encode(text) for text in TEXTS])
    mixes = [
        write_mix(tmp_path / f"{number}.yaml", [(path, 1)])
        for number, path in enumerate(("lines.jsonl", "tokens/lines.jsonl"))
    ]
    assert hashes(mixes[0], 60) == hashes(mixes[1], 60)


def test_an_environment_variable_sets_the_cache_that_metadatasets_share(mix, tmp_path, monkeypatch):
    monkeypatch.setenv(cache.CACHE_VARIABLE, str(tmp_path / "shared" / "deep"))
    first = hashes(mix)
    other = tmp_path / "other"
    other.mkdir()
    moved = write_mix(other / "mix.yaml", [("../lines.jsonl", 2), ("../web", 1)])
    refuse_to_tokenize(monkeypatch)
    assert len(hashes(moved)) == len(first)
    assert caches(tmp_path) == caches(other) == []


def test_subsets_share_the_tokens_of_the_whole(tmp_path):
    write_lines(tmp_path / "lines.jsonl")
    halves = [{"range": ["0%", "50%"]}, {"range": [120, 200]}]
    for subset, expected in zip(halves, (range(100), range(120, 200))):
        path = write_mix(tmp_path / "mix.yaml", [("lines.jsonl", 1)])
        content = json.loads(path.read_text())
        content["splits"]["train"]["blend"][0]["subset"] = subset
        path.write_text(json.dumps(content))
        found = set()
        for batch in loader_for(load(path, repeat=False)):
            text = ByteTokenizer().decode(batch.tokens)
            found.update(int(part.partition(">")[0]) for part in text.split("<")[1:])
        assert found == set(expected)
    assert len(caches(tmp_path)) == 1


def test_a_rejected_or_empty_sample_is_a_document_without_tokens(tmp_path, caplog):
    lines = ['{"text": "one"}', '{"other": 1}', '{"text": two}', '{"text": "three"}']
    (tmp_path / "lines.jsonl").write_text("\n".join(lines) + "\n")
    mix = write_mix(tmp_path / "mix.yaml", [("lines.jsonl", 1)])
    with caplog.at_level(logging.WARNING):
        dataset = load(mix, PackedTaskEncoder(ByteTokenizer(add_bos=False, add_eos=False), 8))
    (source,) = dataset.run.sources.values()
    assert source.first_rows.lengths.lengths(np.arange(4)).tolist() == [3, 0, 0, 5]
    (message,) = caplog.messages
    assert (  # each kind, as `prepare` lists them
        "lines.jsonl: 2 of 4 samples cannot be tokenized: 1, the first: Sample 1: no `text`; it "
        "has ['other']; 1, the first: Sample 2: JSONDecodeError (Expecting value: line 1 column "
        "10 (char 9)). They are left out; `energon-ext tokenize " in message
    )
    (tmp_path / "excluded.txt").write_text("lines.jsonl:0\n")
    content = {**json.loads(mix.read_text()), "exclude": "excluded.txt"}
    mix.write_text(json.dumps(content))
    (batch,) = loader_for(load(mix, repeat=False))
    assert ByteTokenizer().decode(batch.tokens).startswith("three")


@pytest.mark.parametrize(
    "change",
    [
        lambda path: write_lines(path, [*TEXTS, "more"]),
        lambda path: write_lines(path, [text.replace("word", "some") for text in TEXTS]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"<77>", b"<78>")),  # one text
    ],
)
def test_a_changed_file_is_tokenized_again(mix, tmp_path, change):
    first, names = hashes(mix), caches(tmp_path)
    time.sleep(0.01)
    change(tmp_path / "lines.jsonl")
    load(mix)
    added = set(caches(tmp_path)) - set(names)
    assert len(added) == 1 and added.pop().startswith("lines.jsonl-")
    assert len(first) == 12


def test_another_tokenizer_gets_its_own_tokens(mix, tmp_path):
    load(mix)
    load(mix, PackedTaskEncoder(ByteTokenizer(add_bos=False), 64))
    assert len(caches(tmp_path)) == 4


def test_validation_reads_every_document_once_in_order(tmp_path):
    write_lines(tmp_path / "lines.jsonl", TEXTS[:50])
    mix = write_mix(tmp_path / "mix.yaml", [("lines.jsonl", 1)], split="val")
    encoder = PackedTaskEncoder(ByteTokenizer(), 64, packing="sequential")
    ((dataset, _),) = get_val_datasets(
        mix, worker_config=config(), batch_size=1, task_encoder=encoder
    )
    text = "".join(ByteTokenizer().decode(batch.tokens) for batch in loader_for(dataset))
    assert [int(part.partition(">")[0]) for part in text.split("<")[1:]] == list(range(50))


# Custom code --------------------------------------------------------------------------------------


class Shouting(PackedTaskEncoder):
    @stateless
    def encode_document(self, sample):
        if sample.text.startswith("<13>"):
            raise SkipSample()
        tokens = self.tokenizer.encode_array(sample.text.upper())
        weights = np.full(len(tokens), 0.5, np.float32)
        return Document.derive_from(sample, tokens=tokens, label_weights=weights)


@stateless
def cook_backwards(sample):
    return TextSample(**basic_sample_keys(sample), text=sample["json"]["text"][::-1])


class Backwards(PackedTaskEncoder):
    cookers = [Cooker(cook_backwards)]


def with_fingerprint(encoder_class, value):
    changed = type(encoder_class.__name__, (encoder_class,), {"encoding_fingerprint": value})
    return changed(ByteTokenizer(), 64)


@pytest.mark.parametrize("encoder_class", [Shouting, Backwards])
def test_custom_encoders_need_a_fingerprint_for_the_cache(
    mix, tmp_path, encoder_class, monkeypatch
):
    with pytest.raises(ConfigError, match=rf"{encoder_class.__name__}: .* is custom code"):
        load(mix, encoder_class(ByteTokenizer(), 64))
    load(mix, with_fingerprint(encoder_class, {"version": 1}))
    assert len(caches(tmp_path)) == 2
    load(mix, with_fingerprint(encoder_class, {"version": 2}))
    assert len(caches(tmp_path)) == 4
    refuse_to_tokenize(monkeypatch)
    load(mix, with_fingerprint(encoder_class, {"version": 1}))


def test_a_custom_encode_document_decides_tokens_and_weights(mix, caplog):
    loader = loader_for(load(mix, with_fingerprint(Shouting, {"version": 1}), repeat=False))
    weights, text = set(), ""
    for batch in loader:
        weights |= set(batch.token_weights.tolist())
        text += ByteTokenizer().decode(batch.tokens)
    assert weights == {0.0, 0.5}
    assert "WORD" in text and "word" not in text and "<13>" not in text and "<14>" in text
    assert "1 of 200 samples cannot be tokenized, the first: " in caplog.text


# Large text ---------------------------------------------------------------------------------------


def test_large_text_is_a_one_line_error_with_the_command_to_run(mix, tmp_path, monkeypatch):
    monkeypatch.setattr(text_sources, "BYTES_PER_SECOND", 100)
    with pytest.raises(ConfigError) as error:
        load(mix)
    command = f"energon-ext tokenize {mix} --tokenizer bytes"
    assert f"Run `{command}` first" in str(error.value) and "\n" not in str(error.value)
    assert caches(tmp_path) == []
    result = energon_ext(*command.split()[1:], "--jobs", 1)
    assert result.exit_code == 0, result.stderr
    tokens = sum(len(ByteTokenizer().encode(text)) for text in TEXTS)
    assert f"lines.jsonl: 200 documents, {tokens:,} tokens in " in result.stdout
    assert "web: 90 documents, " in result.stdout
    refuse_to_tokenize(monkeypatch)
    assert len(hashes(mix)) == 12


def test_the_command_names_the_outermost_metadataset_and_fills_gaps(tmp_path, monkeypatch):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_lines(tmp_path / name / "lines.jsonl", [f"{name} {n}" for n in range(30)])
        write_mix(tmp_path / name / "mix.yaml", [("lines.jsonl", 1)])
    outer = write_mix(tmp_path / "outer.yaml", [("first/mix.yaml", 1), ("second/mix.yaml", 1)])
    monkeypatch.setattr(text_sources, "BYTES_PER_SECOND", 1)
    command = ("tokenize", outer, "--tokenizer", "bytes")
    for missing in ("first/lines.jsonl and 1 more", "second/lines.jsonl"):
        with pytest.raises(ConfigError, match=missing) as error:
            load(outer)
        assert f"Run `energon-ext tokenize {outer} --tokenizer bytes` first" in str(error.value)
        output = energon_ext(*command).stdout
        of_second = next(line for line in output.splitlines() if "second" in line)
        shutil.rmtree(of_second.rpartition(" ")[2])
    assert energon_ext(*command).exit_code == 0
    load(outer)


def test_the_suggested_command_uses_an_encoder_for_unknown_tokenizers(mix, monkeypatch):
    monkeypatch.setattr(text_sources, "BYTES_PER_SECOND", 100)
    encoder = PackedTaskEncoder(ByteTokenizer(add_bos=False), 64)
    with pytest.raises(ConfigError, match="tokenize .*mix.yaml --encoder MODULE:FUNCTION. first"):
        load(mix, encoder)


def test_text_is_tokenized_with_standard_error_closed(mix, monkeypatch):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    assert len(load(mix).run.sources) == 2


def test_building_in_threads_leaves_stdout_alone(mix, capsys):
    before = sys.stdout

    def build(number):
        for _ in range(3):
            print(f"thread {number}")
            load(mix)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(build, range(4)))
    assert sys.stdout is before
    print("and now")
    printed = capsys.readouterr().out
    assert sorted(printed.split("\n")) == sorted(
        [f"thread {n}" for n in range(4)] * 3 + ["and now", ""]
    )


def test_the_command_divides_samples_among_processes(mix, tmp_path, monkeypatch):
    expected = hashes(mix)
    for name in caches(tmp_path):
        os.rename(tmp_path / DEFAULT_CACHE / name, tmp_path / name)
    monkeypatch.setattr(samples, "UNIT_SAMPLES", 16)
    call = ("tokenize", mix, "--tokenizer", "bytes", "--jobs", 3)
    assert energon_ext(*call).exit_code == 0
    assert len(caches(tmp_path)) == 2
    assert hashes(mix) == expected


def test_parts_by_several_commands_equal_one_command(mix, tmp_path, monkeypatch):
    expected = hashes(mix)
    shutil.rmtree(tmp_path / DEFAULT_CACHE)
    monkeypatch.setattr(samples, "UNIT_SAMPLES", 16)
    call = ("tokenize", mix, "--tokenizer", "bytes", "--part")
    first = energon_ext(*call, "1/2")
    assert first.exit_code == 0 and "part 1/2 is tokenized, other parts are not" in first.stdout
    assert " documents, " in energon_ext(*call, "0/2").stdout
    refuse_to_tokenize(monkeypatch)
    assert hashes(mix) == expected


def test_the_command_accepts_a_custom_encoder(mix, tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "from tests.prepare.test_cache import Shouting, with_fingerprint\n"
        "def encoder(): return with_fingerprint(Shouting, {'version': 1})\n"
    )
    monkeypatch.chdir(tmp_path)
    call = ("tokenize", mix, "--encoder")
    assert "MODULE:FUNCTION is needed" in error_line(energon_ext(*call, "own:absent"))
    assert energon_ext(*call, "own:encoder").exit_code == 0
    refuse_to_tokenize(monkeypatch)
    load(mix, with_fingerprint(Shouting, {"version": 1}))


# Several processes, and killed ones ---------------------------------------------------------------

PROCESSES = multiprocessing.get_context("fork")


def start(mix, seconds=0.002):
    """Start a process that loads a mix slowly; return it and the pipe that gets its hashes."""
    here, there = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=load_slowly, args=(mix, seconds, there))
    process.start()
    there.close()
    return process, here


def load_slowly(mix, seconds, there):
    samples.UNIT_SAMPLES, job.BATCH_DOCUMENTS = 20, 5
    write = TokenWriter.write

    def slow(self, *arguments, **options):
        time.sleep(seconds)
        write(self, *arguments, **options)

    TokenWriter.write = slow
    there.send(hashes(mix))


def end(process):
    process.kill()
    process.join()


def parts(tmp_path):
    """Return when the finished parts of an unfinished cache were written, by name."""
    for work in tmp_path.glob(f"{DEFAULT_CACHE}/.lines*.unfinished"):
        output = work.with_name(work.name[1:].removesuffix(".unfinished"))
        return times_of(work / f"tokens/{unit['name']}.idx" for unit in unfinished(output))
    return {}


def times_of(paths):
    return {path.name: path.stat().st_mtime_ns for path in paths}


def test_one_of_several_processes_tokenizes_and_all_read_the_result(mix, tmp_path):
    started = [start(mix) for _ in range(3)]
    found = [pipe.recv() for _, pipe in started]
    for process, _ in started:
        process.join()
    assert found[0] == found[1] == found[2] == hashes(mix)
    assert len(caches(tmp_path)) == 2


def test_a_process_takes_over_from_a_killed_one_and_does_the_rest(mix, tmp_path):
    first, _ = start(mix, seconds=0.01)
    wait_for(lambda: len(parts(tmp_path)) >= 3)
    second, pipe = start(mix, seconds=0)
    end(first)
    kept = parts(tmp_path)
    found = pipe.recv()
    second.join()
    (folder,) = (tmp_path / DEFAULT_CACHE).glob("lines*")
    assert len(kept) >= 3 and found == hashes(mix)
    assert kept.items() <= times_of(folder.glob("tokens/*.idx")).items()
    assert all(not name.startswith(".") for name in caches(tmp_path))


def test_a_stopped_process_is_awaited_until_a_deadline(mix, tmp_path):
    first, _ = start(mix, seconds=0.01)
    wait_for(lambda: parts(tmp_path))
    os.kill(first.pid, signal.SIGSTOP)
    try:
        (claim,) = (tmp_path / DEFAULT_CACHE).glob(".lines*.claim")
        (text,) = [each for each in cached(mix) if f".{each.folder.name}.claim" == claim.name]
        with pytest.raises(ConfigError, match=f"prepared by process {first.pid} on .*not finished"):
            cache.prepare_entry(text, wait_seconds=0.5)
        os.utime(claim, (time.time() - 31,) * 2)  # as after 31 s
        cache.prepare_entry(text)
        assert text.is_complete
    finally:
        end(first)


def cached(mix):
    from energon_ext.encoders.load import load_split
    from energon_ext.encoders.text_sources import cached_text

    encoder = PackedTaskEncoder(ByteTokenizer(), 64)
    return [cached_text(encoder, entry) for entry in load_split(mix, "train", encoder.decoder)]


def fill_the_disk(mix, there):
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    with pytest.raises(ConfigError) as error:
        load(mix)
    there.send(str(error.value))


def test_a_full_disk_is_a_one_line_error_and_the_next_start_continues(mix, tmp_path):
    here, there = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=fill_the_disk, args=(mix, there))
    process.start()
    message = here.recv()
    process.join()
    assert "cannot be written to" in message and "(File too large)" in message
    assert f"set {cache.CACHE_VARIABLE} to a writable folder" in message
    left = [path for path in (tmp_path / DEFAULT_CACHE).rglob("*") if path.is_file()]
    assert not [path for path in left if ".staging" in str(path) or path.suffix == ".claim"]
    assert len(hashes(mix)) == 12


def test_a_missing_part_is_made_again(mix, tmp_path):
    expected = hashes(mix)
    (part,) = tmp_path.glob(f"{DEFAULT_CACHE}/lines*/tokens/part-00000.idx")
    part.unlink()
    assert hashes(mix) == expected and part.exists()


@pytest.mark.parametrize("name", ["tokens/part-00000.idx", "prepared.json"])
def test_a_page_of_zeros_in_the_cache_is_named_and_made_again(mix, tmp_path, name):
    expected = hashes(mix)
    (file,) = tmp_path.glob(f"{DEFAULT_CACHE}/lines*/{name}")
    content = file.read_bytes()
    file.write_bytes(content[:100] + bytes(len(content) - 100))
    with pytest.raises(ConfigError, match=rf"{DEFAULT_CACHE}/lines.* removed.* the next start"):
        load(mix)
    assert hashes(mix) == expected


@pytest.mark.parametrize("suffix", [".bin", ".bin.sums", ".weights.bin", ".weights.bin.sums"])
def test_tokens_and_weights_of_the_cache_that_changed_are_never_used(tmp_path, suffix):
    """The size is right, and so are the ids: only a checksum shows it."""
    chats = tmp_path / "chats.jsonl"
    said = {"role": "assistant", "content": "word " * 9}
    record = {"messages": [{"role": "user", "content": "How?"}, said]}
    chats.write_text(f"{json.dumps(record)}\n" * 300)
    mix = write_mix(tmp_path / "mix.yaml", [("chats.jsonl", 1)])
    encoder = SFTTaskEncoder(ByteTokenizer(), 512)
    expected = [batch_hash(batch) for batch in take(load(mix, encoder), 30)]
    (file,) = tmp_path.glob(f"{DEFAULT_CACHE}/chats*/tokens/part-00000{suffix}")
    content = bytearray(file.read_bytes())
    content[8] ^= 1
    file.write_bytes(content)
    damaged = f"part-00000{suffix.removesuffix('.sums')}"
    with pytest.raises(ConfigError, match=f"{damaged}: this cached file is damaged .page .*again"):
        take(load(mix, encoder), 30)
    assert [batch_hash(batch) for batch in take(load(mix, encoder), 30)] == expected
