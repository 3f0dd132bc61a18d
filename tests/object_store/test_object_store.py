# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Token files in an object store equal local ones, and a failing store is a clear error."""

import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import multistorageclient as msc
import numpy as np
import pytest

from energon_ext import (
    ExactDataLoader,
    PackedTaskEncoder,
    get_train_dataset,
    get_val_datasets,
    written_tokenizer,
)
from energon_ext.cli.main import main
from energon_ext.errors import ConfigError, StoreError
from energon_ext.prepare.input_files import input_files
from energon_ext.storage import object_store, range_reader
from energon_ext.storage.claim import claim, claim_of
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.tokens.file_set import open_token_files
from tests.support import batch_hash, config, loader_for, take, write_mix, write_tokens

pytest.importorskip("moto", reason="moto is not installed: pip install 'energon_ext[test]'")
pytest.importorskip("boto3", reason="boto3 is not installed: pip install 'energon_ext[test]'")


@pytest.fixture
def pairs(tmp_path, store):
    """Three pairs in a local folder, and in the store below a name of the test."""
    draw = np.random.default_rng(0)
    folder = tmp_path / "tokens" / "web"
    for part in range(3):
        documents = [draw.integers(0, 250, draw.integers(1, 60)).tolist() for _ in range(40)]
        write_tokens(folder / f"part-{part}", documents)
    name = hashlib.sha1(str(tmp_path).encode()).hexdigest()
    store.put(folder, f"{name}/web")
    return folder, f"{name}/web"


def dataset(path, tmp_path, *topology):
    return load(write_mix(tmp_path / "mix.yaml", [(path, 1)]), *topology)


def load(mix, workers=0, rank=0, ranks=1, batch=2):
    encoder = PackedTaskEncoder(ByteTokenizer(), 64)
    return get_train_dataset(
        mix,
        worker_config=config(workers, rank, ranks),
        batch_size=batch,
        rows_per_step=4,
        task_encoder=encoder,
    )


def rows_of(*batches):
    """Return the tokens of the rows of some ranks, sorted."""
    tokens = [batch for of_rank in batches for batch in of_rank]
    return sorted(row.tobytes() for batch in tokens for row in batch.numpy().reshape(-1, 64))


def hashes(loader, count):
    return [batch_hash(batch) for batch in take(loader, count)]


@pytest.mark.parametrize(
    "path, scheme",
    [
        ("{}", "msc://store/"),
        ("{}/part-*", "msc://store/"),
        ("{}/part-1", "s3://corpus/"),
        pytest.param("{}/part-1.bin", "msc://store/", marks=pytest.mark.nightly),
    ],
)
def test_batches_of_a_pair_folder_or_pattern_equal_local_ones(path, scheme, pairs, tmp_path):
    local, name = pairs
    expected = hashes(loader_for(dataset(path.format(local), tmp_path)), 6)
    stored = dataset(path.format(scheme + name), tmp_path)
    assert hashes(loader_for(stored, read_ahead_bytes=2048), 6) == expected


def test_a_folder_with_endlessly_many_objects_is_refused(store, tmp_path, monkeypatch):
    (tmp_path / "many").mkdir()
    for number in range(3):
        (tmp_path / "many" / f"{number}.jsonl").write_text("{}")
    store.put(tmp_path / "many", "many")
    monkeypatch.setattr(object_store, "MAX_OBJECTS", 2)
    for refuse in (open_token_files, lambda url: input_files([url], (".jsonl",))):
        with pytest.raises(ConfigError, match="many: has more than 2 objects below it"):
            refuse("s3://corpus/many")


def test_a_folder_of_a_store_with_several_splits_is_refused(store, tmp_path):
    for name in ("web_train", "web_valid"):
        write_tokens(tmp_path / "data" / name, [[5, 6, 7]])
        (tmp_path / "data" / f"{name}.jsonl").write_text('{"text": "a"}\n')
    url = f"msc://store/{tmp_path.name}/data"
    store.put(tmp_path / "data", f"{tmp_path.name}/data")
    for refuse in (open_token_files, lambda url: input_files([url], (".jsonl",))):
        with pytest.raises(ConfigError, match="splits train and valid, which"):
            refuse(url)
    assert len(open_token_files(f"{url}/*train*")) == 1


BOTH_CLIENTS = pytest.mark.parametrize(
    "client", [pytest.param("boto3", marks=pytest.mark.nightly), "rust"]
)


@BOTH_CLIENTS
@pytest.mark.parametrize("workers, ranks", [(2, 1), pytest.param(0, 2, marks=pytest.mark.nightly)])
def test_a_run_moved_to_a_store_resumes_on_other_ranks_and_workers(workers, ranks, pairs, store):
    local, name = pairs
    mix = write_mix(local.parent / "mix.yaml", [("web", 1)])
    store.s3.upload_file(str(mix), "corpus", f"{name}.yaml")
    loader = loader_for(load(mix))
    take(loader, 4)  # two steps of two batches
    state = loader.state_dict()
    expected = [batch.tokens for batch in take(loader, 4)]
    found = []
    for rank in range(ranks):
        resumed = loader_for(load(f"msc://store/{name}.yaml", workers, rank, ranks, 4 // ranks))
        resumed.load_state_dict(state)
        assert [change.change for change in resumed.changes] == ["kept"]
        found.append([batch.tokens for batch in take(resumed, 2)])
    assert rows_of(*found) == rows_of(expected)
    assert len(rows_of(expected)) == 8


@BOTH_CLIENTS
def test_prepared_json_replaces_listing_and_headers(store, tmp_path):
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} " * (n % 40)}) + "\n" for n in range(200))
    )
    out, name = tmp_path / "out", tmp_path.name
    words = ["prepare", str(out), "--jsonl", str(tmp_path / "in.jsonl"), "--tokenizer", "bytes"]
    main(words, standalone_mode=False)
    store.put(out, f"{name}/out")
    expected = hashes(loader_for(dataset(out / "train", tmp_path)), 6)
    store.requests.clear()
    files = open_token_files(f"msc://store/{name}/out/train")
    assert len(files) == len(open_token_files(out / "train"))
    # Requests of an earlier test may still arrive.
    methods = [method for method, path in store.requests if name in path]
    assert methods == ["GET"] * 2  # prepared.json, one meta
    assert not store.asked("GET", ".idx")
    assert hashes(loader_for(dataset(f"msc://store/{name}/out/train", tmp_path)), 6) == expected
    assert len(store.asked("GET", ".idx")) == 1
    assert hashes(loader_for(dataset(f"msc://store/{name}/out/train", tmp_path)), 6) == expected
    assert len(store.asked("GET", ".idx")) == 1  # the copy is there


def test_rows_of_later_batches_are_prefetched(pairs, store, tmp_path):
    found = dataset(f"msc://store/{pairs[1]}", tmp_path)
    row_bytes = 2 * 64 * 4  # a batch of two rows
    asked = {}
    for ahead in (0, 8):
        loader = ExactDataLoader(found, read_ahead_bytes=ahead * row_bytes, read_requests=4)
        store.requests.clear()
        take(loader, 1)
        range_reader.range_reader().run_all([lambda: None] * 8)  # queued after the reads
        asked[ahead] = len(store.asked("GET", ".bin"))
        loader.close()
        found = dataset(f"msc://store/{pairs[1]}", tmp_path)
    assert asked[8] > 3 * asked[0] > 0


@pytest.mark.parametrize(
    "fault, reason",
    [
        ("down", "cannot be read"),
        pytest.param("denied", "Permission denied", marks=pytest.mark.nightly),
        pytest.param("short", "check that the object", marks=pytest.mark.nightly),
    ],
)
def test_a_failing_store_is_a_one_line_error_and_the_run_resumes(
    fault, reason, pairs, store, tmp_path
):
    local, name = pairs
    expected = hashes(loader_for(dataset(local, tmp_path)), 8)
    found = dataset(f"msc://store/{name}", tmp_path)
    loader = ExactDataLoader(found, read_ahead_bytes=0)
    assert hashes(loader, 3) == expected[:3]
    store.fault = fault
    with pytest.raises(StoreError, match=reason) as caught:
        take(loader, 5)
    message = str(caught.value)
    assert "\n" not in message and f"{name}:" not in message.split(" ")[1]
    assert f"msc://store/{name}: msc://store/{name}/part-" in message
    if fault != "short":
        assert "2 attempts" in message
    store.fault = None
    # In the same process, and again without read-ahead: no failed read is left over.
    resumed = ExactDataLoader(dataset(f"msc://store/{name}", tmp_path), read_ahead_bytes=0)
    resumed.load_state_dict(loader.state_dict())
    done = loader.batches_drawn
    assert hashes(resumed, 8 - done) == expected[done:]


@pytest.mark.parametrize("content", [b"\x01\x00" * 2000, None])
def test_a_replaced_object_is_refused_at_the_next_read(content, pairs, store):
    """None stands for other bytes of the same length, which only the ETag reveals."""
    local, name = pairs
    files = open_token_files(f"msc://store/{name}/part-0")
    size = (local / "part-0.bin").stat().st_size
    store.put_object(f"{name}/part-0.bin", content or bytes(size))
    with pytest.raises(
        StoreError, match=r"0\.bin: (4000 bytes|ETag .*), but the plan was made with"
    ):
        files.document(0)


def test_missing_objects_and_logins_in_paths_are_refused(pairs, tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        dataset(f"msc://store/{pairs[1]}/nothing", tmp_path)
    with pytest.raises(ConfigError, match=r"s3://\*\*\*@corpus/web found, which is not a path"):
        dataset("s3://me:secret@corpus/web", tmp_path)


@pytest.mark.parametrize("client", ["rust"])
def test_the_rust_client_finds_the_objects_it_lists(pairs):
    listed = object_store.objects_below(f"msc://store/{pairs[1]}")
    assert len(listed) > 5 and listed == [object_store.find_object(each.url) for each in listed]


class EndsForks:
    """Ends a fork that destroys it."""

    def __init__(self):
        self.process = os.getpid()

    def __del__(self):
        if os.getpid() != self.process:
            os._exit(3)


@pytest.mark.parametrize("client", ["rust"])
def test_a_fork_does_not_destroy_the_rust_client_of_its_parent(pairs):
    # Destroying it takes a lock that a thread of the client may have held when the process forked.
    url = f"msc://store/{pairs[1]}/part-0.bin"
    found = object_store.find_object(url)
    # No name here may refer to the client or to its parts: that would keep them, too.
    msc.resolve_storage_client(url)[0]._storage_provider._rust_client = EndsForks()
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        assert pool.submit(object_store.find_object, url).result(60) == found
    msc.resolve_storage_client(url)[0]._storage_provider._rust_client = None


#: The Rust client wakes the thread that waits for a result, and is then itself not done yet.
ENDS_DURING_REQUESTS = """
import sys
import time
from asyncio.selector_events import BaseSelectorEventLoop
wake = BaseSelectorEventLoop._write_to_self
BaseSelectorEventLoop._write_to_self = lambda loop: (wake(loop), time.sleep(0.1))
from energon_ext.storage.object_store import find_object
from energon_ext.storage.range_reader import range_reader
stored = find_object(sys.argv[1])
for begin in range(0, stored.size - 4, 4):
    range_reader().prefetch(stored, begin, 4)
range_reader().take(stored, 0, 4)
"""


@BOTH_CLIENTS
def test_a_process_that_ends_during_read_ahead_exits_cleanly(pairs, store, monkeypatch):
    monkeypatch.setattr(store, "delay", 0.02)
    url = f"msc://store/{pairs[1]}/part-0.bin"
    command = [sys.executable, "-c", ENDS_DURING_REQUESTS, url]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(store.asked("GET", "part-0.bin")) < 400  # of some 1,200: queued requests are dropped


def test_a_metadataset_in_a_store_is_validated_and_names_its_tokenizer(pairs, tmp_path, store):
    folder, name = pairs
    mix = write_mix(folder / "mix.yaml", [("part-0", 1)], split="val")
    store.put(folder, f"{name}/mixed")
    stored = f"msc://store/{name}/mixed/mix.yaml"
    found = []
    for path in (mix, stored):
        ((dataset, _),) = get_val_datasets(
            path,
            worker_config=config(),
            batch_size=2,
            task_encoder=PackedTaskEncoder(ByteTokenizer(), 64),
        )
        found.append([batch_hash(batch) for batch in loader_for(dataset)])
        assert isinstance(written_tokenizer(path, "val"), ByteTokenizer)
    assert found[0] == found[1] != []


@pytest.fixture
def copied(pairs):
    """An object in the store, and the path of its copy, which was removed again."""
    stored = object_store.find_object(f"msc://store/{pairs[1]}/part-0.idx")
    copy = Path(object_store.local_copy(stored))
    copy.unlink()
    return stored, copy


def test_readers_of_one_node_copy_an_object_once(copied, pairs, store):
    stored, copy = copied
    store.requests.clear()
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(object_store.local_copy, [stored] * 8))
    assert found == {str(copy)}
    assert copy.read_bytes() == (pairs[0] / "part-0.idx").read_bytes()
    assert [request[0] for request in store.requests] == ["GET"]
    assert list(copy.parent.iterdir()) == [copy]


@pytest.mark.parametrize("process", ["4194305", str(os.getpid())], ids=["killed", "slow"])
def test_an_object_is_copied_though_another_reader_was_killed_or_is_slow(
    process, copied, monkeypatch
):
    stored, copy = copied
    monkeypatch.setattr(object_store, "DEADLINE_SECONDS", 0.3)
    with claim(copy):
        owner = claim_of(copy).read_text().rpartition(" ")[0]
        claim_of(copy).write_text(f"{owner} {process}")
        assert object_store.local_copy(stored) == str(copy)
        assert copy.stat().st_size == stored.size
