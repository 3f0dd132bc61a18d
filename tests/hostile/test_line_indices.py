# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A line index that omits, joins or cuts lines is refused."""

import codecs

import numpy as np
import pytest
from megatron.energon import Cooker, DefaultTaskEncoder
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from energon_ext import ConfigError, DynamicBlendMixin, PackedTaskEncoder, get_train_dataset
from energon_ext.encoders.text import TextDecoder, cook_text
from energon_ext.samples.jsonl_index import ensure_index
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.support import config, loader_for

LINES = [b'{"text": "line %d"}\n' % number for number in range(40)]


class Streamed(DynamicBlendMixin, DefaultTaskEncoder):
    plan_samples = False
    cookers = [Cooker(cook_text)]
    decoder = TextDecoder()


def shift(bounds, number, by):
    bounds = bounds.copy()
    bounds[number] += by
    return bounds


#: Changes to the index; all but the last four keep the first entry 0 and the end of the file.
CASES = {
    "two lines are joined": lambda b: np.delete(b, 20),
    "twenty lines are joined": lambda b: np.delete(b, range(11, 30)),
    "the last lines are joined": lambda b: np.delete(b, range(30, 40)),
    "a line starts later": lambda b: shift(b, 20, 3),
    "a line starts earlier": lambda b: shift(b, 20, -3),
    "the first line is cut": lambda b: shift(b, 1, -1),
    "an entry is repeated": lambda b: shift(b, 20, int(b[19]) - int(b[20])),
    "the first line is omitted": lambda b: shift(b, 0, int(b[1])),
    "an entry is past the end of the file": lambda b: shift(b, 20, 1 << 60),
    "the last line is omitted": lambda b: b[:-1],
}


@pytest.mark.parametrize("encoder", ["planned", "streamed"])
@pytest.mark.parametrize("case", CASES)
def test_an_index_that_does_not_match_the_lines_is_refused(case, encoder, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(LINES))
    ensure_index(EPath(path))
    bounds = np.fromfile(f"{path}.idx", "<i8")
    assert np.diff(bounds).tolist() == [len(line) for line in LINES]
    CASES[case](bounds).tofile(f"{path}.idx")
    planned = PackedTaskEncoder(ByteTokenizer(), 16, packing_buffer_docs=4)
    with pytest.raises(ConfigError, match="remove .*a.jsonl.idx, and the next start writes it"):
        dataset = get_train_dataset(
            path,
            worker_config=config(),
            batch_size=40,
            task_encoder=planned if encoder == "planned" else Streamed(),
        )
        next(iter(loader_for(dataset)))


@pytest.mark.parametrize(
    "content",
    [
        b"".join(LINES),
        b"".join(LINES).rstrip(),
        b"\n \n" + b"\n\t\n".join(LINES) + b"\n\n",
        b"\r\n".join(line.rstrip() for line in LINES),
    ],
    ids=["plain", "no final newline", "blank lines", "windows"],
)
def test_the_index_equals_energons_and_every_line_is_read(content, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    ensure_index(EPath(path))
    ours = (tmp_path / "a.jsonl.idx").read_bytes()
    assert CrudeJsonlDatasetFactory.prepare_dataset(EPath(path)) == len(LINES)
    assert (tmp_path / "a.jsonl.idx").read_bytes() == ours
    options = {"worker_config": config(), "batch_size": 40, "task_encoder": Streamed()}
    batch = next(iter(loader_for(get_train_dataset(path, **options))))
    assert sorted(map(int, batch.__key__)) == list(range(40))


@pytest.mark.parametrize("content", [b"", b"\n\n", b"[1]\n", b'{"a": 1}\nx\n', b'{"a":'])
def test_a_file_without_json_objects_gets_no_index(content, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="cannot be indexed"):
        ensure_index(EPath(tmp_path / "a.jsonl"))
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_byte_order_mark_before_the_first_line_is_no_reason_to_refuse_a_file(tmp_path):
    """`prepare --jsonl` reads such files, too."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(codecs.BOM_UTF8 + b"".join(LINES))
    options = {"worker_config": config(), "batch_size": 40, "task_encoder": Streamed()}
    batch = next(iter(loader_for(get_train_dataset(path, **options))))
    assert sorted(map(int, batch.__key__)) == list(range(40))
    path.write_bytes(LINES[0] + codecs.BOM_UTF8 + LINES[1])
    (tmp_path / "a.jsonl.idx").unlink()
    with pytest.raises(ConfigError, match="cannot be indexed: line 2"):
        ensure_index(EPath(path))


def test_lines_that_end_with_a_carriage_return_are_refused_with_a_remedy(tmp_path, monkeypatch):
    """For Energon the whole file would be one sample, which is no JSON."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\r".join(line.rstrip() for line in LINES) + b"\r")
    advice = r"its lines end with a carriage return \(CR\); write them with line feeds"
    with pytest.raises(ConfigError, match=f"a.jsonl: cannot be indexed: {advice}"):
        ensure_index(EPath(path))
    monkeypatch.chdir(tmp_path)
    words = ("prepare", "out", "--jsonl", "a.jsonl", "--tokenizer", "bytes", "--val", 0)
    line = error_line(energon_ext(*words))
    assert line == (
        "a.jsonl:1: its lines end with a carriage return (CR); write them with line feeds, for "
        "example `tr '\\r' '\\n' < OLD > NEW`."
    )
    CrudeJsonlDatasetFactory.prepare_dataset(EPath(path))  # Energon's own command accepts it
    with pytest.raises(ConfigError, match=f"line 1: {advice}"):
        dataset = get_train_dataset(
            path, worker_config=config(), batch_size=1, task_encoder=Streamed()
        )
        next(iter(loader_for(dataset)))
    path.write_bytes(path.read_bytes().replace(b"\r", b"\n"))
    assert energon_ext(*words).exit_code == 0


def test_a_carriage_return_inside_an_object_is_white_space(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text":\r"a"}\r\n{"text": "b"}\r\n')
    ensure_index(EPath(path))
    assert len(np.fromfile(f"{path}.idx", "<i8")) == 3
