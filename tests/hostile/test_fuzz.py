# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Commands on damaged files succeed or fail with one line, and write only their output."""

import contextlib
import copy
import json
import random
import shutil
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.errors import StateFormatError
from energon_ext.state.schema import seal
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.cli.runs import write_run
from tests.hostile.conftest import MAX_SECONDS
from tests.saves import save_cursor
from tests.support import (
    config,
    loader_for,
    take,
    write_dataset,
    write_mix,
    write_tokens,
    write_weights,
)

tokenizers = pytest.importorskip("tokenizers")

CHECK = ("check", "a", "--tokens")

#: Files to damage, and the commands that read them; only ``out`` and caches may be written.
COMMANDS = {
    "mix.yaml": [
        ("plan", "mix.yaml", "--tokenizer", "bytes"),
        ("plan", "mix.yaml", "--tokenizer", "bytes", "--steps", 3, "--json"),
        ("peek", "mix.yaml", "--rows", 1),
        ("import", "out/imported.yaml", "mix.yaml"),
        ("checkpoint", "diff", "run", "mix.yaml"),
    ],
    "a.idx": [("plan", "mix.yaml"), ("peek", "mix.yaml", "--rows", 1), CHECK],
    "a.bin": [("peek", "mix.yaml", "--rows", 1), CHECK],
    "a.meta.json": [("plan", "mix.yaml"), ("peek", "mix.yaml", "--rows", 1), CHECK],
    "a.weights.bin": [("peek", "mix.yaml", "--rows", 1), CHECK],
    "run/iter_0000004/data.json": [
        ("checkpoint", "show", "run"),
        ("checkpoint", "diff", "run", "mix.yaml"),
        ("trace", "run", "mix.yaml", "--step", 5),
        ("trace", "run", "mix.yaml", "--document", "a:3"),
    ],
    "log/metrics.jsonl": [("report", "log", "--out", "out/report")],
    "text.jsonl": [("prepare", "out/p", "--jsonl", "text.jsonl", "--tokenizer", "bytes")],
    "tokenizer.json": [("prepare", "out/p", "--text", "a.txt", "--tokenizer", "tokenizer.json")],
    "web/.nv-meta/dataset.yaml": [("peek", "web.yaml", "--rows", 1)],
    "web/.nv-meta/split.yaml": [("peek", "web.yaml", "--rows", 1)],
    "web/.nv-meta/.info.json": [("peek", "web.yaml", "--rows", 1)],
    "web/shard_000.tar": [("peek", "web.yaml", "--rows", 1)],
    "web/shard_000.tar.idx": [("peek", "web.yaml", "--rows", 1)],
}

#: Replacements for a value.
VALUES = [
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**40, 1e308, float("nan"), float("inf"), 0.5),
    *("", "x" * 5000, "../..", "/dev/zero", "\x1b[2J", "a\nb", "e\u0301", "\ud800", "1e9", "40B"),
    *("!!python/object/apply:os.abort []", [], {}, [[]], {"": {}}, [None] * 50, {"linear": {0: 1}}),
]
#: Replacements for some bytes.
BYTES = [
    *(b"", b"\0", b"\xff" * 8, b"\x80\0\0\0\0\0\0\0", b"\x7f" + b"\xff" * 7, b"\n", b"\r\n", b"\t"),
    *(
        b"{",
        b"]" * 2000,
        b"[" * 2000,
        b'"',
        b"\\ud800",
        b"&a [*a]",
        b"!!python/name:os.abort ",
        b"-",
    ),
    *(b"1" * 400, b"1e999", b"NaN", b"\xed\xa0\x80", b"\x1b[2J", b"../", b"%s%n", b"<script>"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    write_tokens(folder / "a", [[5, 6, 7, 8, 9] * 4] * 40)
    write_weights(folder / "a", [[1] * 20] * 40)
    write_tokens(folder / "b", [[n] * n for n in range(5, 40)])
    schedule = {"linear": {"0": 1, "40": 3}}
    write_mix(folder / "mix.yaml", [("a", schedule), ("b", 1)])
    dataset = get_train_dataset(
        folder / "mix.yaml",
        worker_config=config(),
        batch_size=2,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), 32),
    )
    loader = loader_for(dataset)
    take(loader, 4)
    save_cursor(folder / "run", 4, loader.state_dict())
    write_run(folder / "log", sources=["a", "b"], steps=5)
    texts = [f"text {number}" * 9 for number in range(12)]
    (folder / "a.txt").write_text(texts[0])
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    letters = {chr(letter): letter - 97 for letter in range(97, 123)}
    model = tokenizers.models.BPE(vocab=letters | {"</s>": 26}, merges=[])
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    write_dataset(folder / "web", texts)
    write_mix(folder / "web.yaml", [("web", 1)])
    (folder / "out").mkdir()
    return folder


def damage(content, rng):
    """Return the content with a few changed bytes, or JSON with a few changed values."""
    try:
        tree = json.loads(content)
        assert isinstance(tree, dict) and rng.random() < 0.7
    except (ValueError, AssertionError):
        for _ in range(rng.choice((1, 1, 1, 5))):
            start = rng.randrange(len(content) + 1)
            if start < len(content) and rng.random() < 0.4:
                flipped = content[start] ^ 1 << rng.randrange(8)
                content = content[:start] + bytes([flipped]) + content[start + 1 :]
                continue
            end = min(len(content), start + rng.choice((0, 1, 1, 4, 8, 64)))
            content = content[:start] + rng.choice(BYTES) + content[end:]
        return content
    is_sealed = "energon_ext_digest" in tree
    for _ in range(rng.choice((1, 1, 1, 4))):
        _change(tree, rng)
    if is_sealed:  # seal it again, as an attacker would
        tree.pop("energon_ext_digest", None)
        with contextlib.suppress(StateFormatError):
            tree = seal(tree)
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def _change(tree, rng):
    place = tree
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(place[key], (dict, list)) and place[key] and rng.random() < 0.8:
            place = place[key]
            continue
        break
    if rng.random() < 0.15:
        del place[key]
    elif isinstance(place, dict) and rng.random() < 0.15:
        added = rng.choice(("", "x", "0", "path", "weight", "__class__"))
        place[added] = _random_value(rng)
    else:
        place[key] = _similar_value(place[key], rng) if rng.random() < 0.4 else _random_value(rng)


def _random_value(rng):
    return copy.deepcopy(rng.choice(VALUES))


def _similar_value(value, rng):
    """Return a similar value of the same type."""
    if isinstance(value, (int, float)):
        return rng.choice((value - 1, value + 1, -value, value * 1000, value // 2))
    if isinstance(value, str):
        return rng.choice((value[1:], value + "x", value.upper(), value[::-1], f"./{value}"))
    return [value] if value is None or rng.random() < 0.5 else list(value)[1:]


def contents(folder):
    """Return the contents of all files except those that a command may write."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and not {"out", ".energon_ext_cache"} & {*path.relative_to(folder).parts}
    }


def check(folder, number):
    rng = random.Random(number)
    name = rng.choice(list(COMMANDS))
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as parent:
        place = Path(parent) / "data"
        shutil.copytree(folder, place)
        (place / name).write_bytes(damage((place / name).read_bytes(), rng))
        before = contents(place)
        signal.alarm(MAX_SECONDS)
        command = rng.choice(COMMANDS[name])
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(place)
            result = energon_ext(*command)
        assert contents(place) == before, f"{command} changed its input, or wrote next to it"
    refuses = command[:2] == ("checkpoint", "diff") and result.exit_code == 1
    if result.exit_code != 0 and not refuses:
        line = error_line(result)
        assert len(line) < 30_000 and "\x1b" not in line
    return result


@given(number=st.integers(0, 2**62))
def test_a_damaged_file_ends_in_one_line_and_nothing_else_is_written(folder, number):
    check(folder, number)


@pytest.mark.nightly
def test_ten_thousand_damaged_files_end_in_one_line(folder):
    ends = [check(folder, number).exit_code for number in range(10_000)]
    assert ends.count(0) > 1000 and ends.count(2) > 5000
