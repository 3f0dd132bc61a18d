# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Numbers in files of others are bounded where they are read, whatever a library makes of them."""

import functools
import gzip
import json

import pytest

from energon_ext import ConfigError
from energon_ext.data_files import parse_json
from energon_ext.errors import StateFormatError, StateMismatchError
from energon_ext.packing import BestFitPacker
from energon_ext.state.schema import SEAL, seal
from energon_ext.tokens.formats import open_documents
from energon_ext.tokens.prepared import parse_prepared
from energon_ext.weights import LiveWeights
from tests.cli.command import energon_ext, error_line
from tests.cli.runs import write_run
from tests.state.mutations import places_of
from tests.state.test_mutated_states import new_loader
from tests.support import take, write_mix, write_tokens

# JSON ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1" * 5000, "the integer 11111111111111111111... has more than 64 bits"),
        (str(2**64), "has more than 64 bits"),
        (str(-(2**63) - 1), "has more than 64 bits"),
        ("[" * 100_000 + "]" * 100_000, "too many lists and objects within each other"),
        ('{"a": 1, "b": {"c": 1, "d": 2, "c": 1}}', "the key 'c' is there twice"),
        ("{half", "Expecting property name"),
        (b"\xff", "codec can't decode"),
    ],
)
def test_json_of_others_is_a_value_or_a_value_error(text, message):
    with pytest.raises(ValueError, match=message):
        parse_json(text)


def test_json_has_every_integer_of_64_bits_and_what_python_writes():
    text = json.dumps([2**64 - 1, -(2**63), float("inf"), 1e308, {"a": None}])
    assert json.dumps(parse_json(text)) == text


def test_a_line_of_live_weights_with_a_source_twice_is_refused(tmp_path):
    (tmp_path / "live.jsonl").write_text('{"from_step": 0, "weights": {"web": 1, "web": 2}}\n')
    with pytest.raises(ConfigError, match="live.jsonl: line 1: .*the key 'web' is there twice"):
        LiveWeights(tmp_path / "live.jsonl").read()


@pytest.mark.parametrize("number", ["1e999", "-1", "1.5", str(2**63), "9" * 400, "[]", "true"])
def test_counts_of_a_prepared_folder_are_counts(number):
    unit = b'{"name": "a", "documents": {"train": 1}, "tokens": {"train": %b}, "files": {}}'
    content = b'{"units": [' + unit + b"]}"
    with pytest.raises(ConfigError, match=r"o/prepared.json: not written by .energon-ext prepare"):
        parse_prepared(content % number.encode(), "o")


@pytest.mark.parametrize("number", [2**63, 10**400], ids=["2^63", "10^400"])
def test_an_argument_is_an_integer_of_int64(number):
    with pytest.raises(ConfigError, match=r"alignment: a number >= 2\^63 found"):
        BestFitPacker(8, alignment=number)


# Arrays -------------------------------------------------------------------------------------------

HEADER = b"{'descr': '<u2', 'fortran_order': False, 'shape': (3,), }\n"


def write_npy(folder, header, *, size=None, version=b"\1\0"):
    size = len(header) if size is None else size
    width = 2 if version == b"\1\0" else 4
    content = b"\x93NUMPY" + version + size.to_bytes(width, "little") + header + bytes(6)
    (folder / "a.npy").write_bytes(content)
    with gzip.open(folder / "a.csv.gz", "wb") as table:
        table.write(b"0,3,\n")
    return folder / "a.npy"


@pytest.mark.parametrize(
    "header",
    [
        b"(" * 9000,  # tokenize.TokenError of NumPy's parser
        b"-" * 9000 + b"1",  # MemoryError
        b"{[]: 1}",  # TypeError
        b"{{}: 1}",
        b"[" * 60_000,
        HEADER.replace(b"3,", b"-3,"),
        HEADER.replace(b"3,", b"3, 1"),
        HEADER.replace(b"3,", b"9" * 400 + b","),
        HEADER.replace(b"'<u2'", b"[('a', '<u2')]"),
        HEADER.replace(b"<u2", b"|O"),
        HEADER.replace(b"<u2", b"<u3"),
    ],
)
def test_a_header_that_is_no_row_of_integers_is_shown(header, tmp_path):
    message = r"a.npy: its header is ['\"].*; that of an array with one row of integers is needed"
    with pytest.raises(ConfigError, match=message):
        len(open_documents(write_npy(tmp_path, header)))


@pytest.mark.parametrize("version", [b"\1\0", b"\2\0", b"\3\0"])
def test_a_header_of_every_version_is_read(version, tmp_path):
    path = write_npy(tmp_path, HEADER, version=version)
    assert open_documents(path).document(0).tolist() == [0, 0, 0]


def test_a_sparse_file_with_a_header_of_gigabytes_takes_no_memory(tmp_path):
    path = write_npy(tmp_path, HEADER[:20], size=3 << 29, version=b"\2\0")
    with path.open("r+b") as file:
        file.truncate(1 << 32)
    with pytest.raises(ConfigError, match="a.npy: its header is") as raised:
        len(open_documents(path))
    assert "pickle" not in str(raised.value)


@pytest.mark.parametrize("end", [2**63, 2**64, 10**400], ids=["2^63", "2^64", "10^400"])
def test_an_end_beyond_int64_is_refused_with_its_line(end, tmp_path):
    path = write_npy(tmp_path, HEADER)
    with gzip.open(tmp_path / "a.csv.gz", "wb") as table:
        table.write(b"0,1,\n1,%d,\n" % end)
    with pytest.raises(ConfigError, match="a.csv.gz:2: 1 to 9223.* after|a.csv.gz:2: 1 to 1"):
        len(open_documents(path))


# Metrics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "field", "value", "message"),
    [
        (3, "loss", 10**400, "not JSON .the integer 1000"),
        (3, "loss", 1e308, "loss: 1e.308 found, a number is needed that float32"),
        (3, "loss", -1e308, "loss: -1e.308 found"),
        (3, "tokens_per_second", 1e300, "tokens_per_second: 1e.300 found"),
        (3, "planned_share", {"a": 1e308}, "planned_share.a: 1e.308 found"),
        (3, "loss_by_source", {"a": 1e308}, "loss_by_source.a: 1e.308 found"),
        (3, "val/loss/a", 1e308, "val/loss/a: 1e.308 found"),
        (3, "tokens", {"a": 2**62}, "tokens.a: 46116.* found, at most 68,719,476,736 is possible"),
        (3, "documents", {"a": 2**62}, "documents.a: 46116.* found, at most"),
        (1, "sources", [], "start.sources: empty; a run reads at least one source"),
        (1, "config", {"x": 10**400}, "not JSON .the integer 1000"),
        (1, "epoch_tokens", {"a": 2**63}, "epoch_tokens.a: 92233.* found, an integer"),
    ],
    ids=lambda value: f"{value!s:.30}",
)
def test_a_number_that_no_run_writes_is_refused_with_its_line(
    line, field, value, message, tmp_path
):
    path = write_run(tmp_path / "run", steps=5) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[line - 1] = json.dumps({**json.loads(lines[line - 1]), field: value})
    path.write_text("\n".join(lines))
    found = error_line(energon_ext("report", tmp_path / "run"))
    assert f"metrics.jsonl:{line}: " in found
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found)


def test_a_loss_that_is_infinite_or_as_large_as_float32_is_shown(tmp_path):
    path = write_run(tmp_path / "run", steps=5) / "metrics.jsonl"
    lines = path.read_text().splitlines()
    for line, loss in ((2, float("inf")), (3, 3.4e38), (4, -3.4e38)):
        lines[line] = json.dumps({**json.loads(lines[line]), "loss": loss})
    path.write_text("\n".join(lines))
    assert energon_ext("report", tmp_path / "run").exit_code == 0


# Cursors ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_tokens(folder / "short", [[n % 200] * (8 + n % 9) for n in range(1, 91)])
    write_tokens(folder / "long", [[n % 200] * 50 for n in range(1, 91)])
    write_mix(folder / "both.yaml", [("short", 1), ("long", 1)])
    return folder


@pytest.mark.filterwarnings("error::RuntimeWarning")  # an overflow of NumPy's integers
@pytest.mark.parametrize("packing", ["bin", pytest.param("sequential", marks=pytest.mark.nightly)])
def test_a_cursor_with_a_valid_seal_and_huge_numbers_is_continued_or_refused(packing, folder):
    """It may be restored into other rows, for which the old packer is built again."""
    options = {"packing": packing, **({"alignment": 4} if packing == "bin" else {})}
    loader = new_loader(folder, **options)
    take(loader, 8)
    text = json.dumps({k: v for k, v in loader.state_dict().items() if k != SEAL})
    accepted = refused = 0
    for *path, key in filter(None, places_of(json.loads(text))):
        for value in (2**63 - 1, 2**62, 2**31, 2**64, 10**400, -1):
            state = json.loads(text)
            parent = functools.reduce(lambda found, step: found[step], path, state)
            if type(parent[key]) is not int:
                break
            parent[key] = value
            loader = new_loader(folder, **{**options, "seq_len": 64})
            try:
                loader.load_state_dict(seal(state))
            except (StateFormatError, StateMismatchError):
                refused += 1
            else:
                take(loader, 1)
                accepted += 1
    assert accepted > 20 and refused > 80
