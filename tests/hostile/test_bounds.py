# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Small inputs that ask for endless work or huge memory are refused."""

import contextlib
import json
import os
import sqlite3
import tarfile

import numpy as np
import pytest
from megatron.energon import Cooker, DefaultTaskEncoder, TextSample, cooker, stateless
from megatron.energon.task_encoder.cooking import basic_sample_keys

from energon_ext import ConfigError, DynamicBlendMixin, PackedTaskEncoder, get_train_dataset
from energon_ext.chats.templates import HFChatTemplate
from energon_ext.errors import EnergonExtError, SampleError
from energon_ext.tokenizers.tokenizers import ByteTokenizer, HFTokenizer
from tests.cli.command import energon_ext, error_line
from tests.cli.runs import write_run
from tests.support import CRUDE, config, loader_for, write_dataset, write_mix, write_tokens


class Streamed(DynamicBlendMixin, DefaultTaskEncoder):
    plan_samples = False


def read(path, encoder=None):
    encoder = encoder or PackedTaskEncoder(ByteTokenizer(), 16, packing_buffer_docs=4)
    options = {"worker_config": config(), "batch_size": 2, "task_encoder": encoder}
    return next(iter(loader_for(get_train_dataset(path, **options))))


# Metadatasets and folders -------------------------------------------------------------------------


def write_looped_folder(folder):
    """Write a folder with four links to itself."""
    folder.mkdir()
    for number in range(4):
        (folder / f"again{number}").symlink_to(folder)
    write_tokens(folder / "a", [[5, 6, 7]] * 9)


@pytest.mark.parametrize(
    "skip, path, message",
    [
        ([[0, 4_600_000_000_000_000_000]], "web/a", "more than 100,000 steps"),
        ([[0, 60_000], [70_000, 120_000]], "web/a", "more than 100,000 steps"),
        ([], "web", "more than 2,000 folders"),
        ([], "web/**/a", "more than 2,000 folders"),
        ([], "web/" + "*/" * 15 + "a", "more than 2,000 folders"),
        ([], "web/" + "*/" * 15 + "nothing", "more than 2,000 folders"),
        ([], "web/**/**/a", "more than 2,000 folders or has more than one `**`"),
    ],
)
def test_a_metadataset_cannot_ask_for_endless_work(skip, path, message, tmp_path, monkeypatch):
    monkeypatch.setattr("energon_ext.storage.folders.MAX_FOLDERS", 2000)
    write_looped_folder(tmp_path / "web")
    mix = write_mix(tmp_path / "mix.yaml", [(path, 1)])
    mix.write_text(json.dumps({**json.loads(mix.read_text()), "skip": skip}))
    assert message in error_line(energon_ext("peek", mix))


def test_a_pattern_still_matches_folder_by_folder(tmp_path):
    for name in ("a/x", "a/b/y", "a/.hidden/z", "c/x"):
        write_tokens(tmp_path / name, [[5, 6, 7]])
    from energon_ext.tokens.paths import list_pairs

    def found(pattern):
        return [prefix.removeprefix(f"{tmp_path}/") for prefix in list_pairs(tmp_path / pattern)]

    assert found("*/x") == ["a/x", "c/x"]
    assert found("a/**/*") == ["a/b/y", "a/x"]
    assert found("**/[xy]") == ["a/b/y", "a/x", "c/x"]
    assert found(".") == ["a/b/y", "a/x", "c/x"]


@pytest.mark.parametrize("encoder", [None, Streamed()], ids=["planned", "streamed"])
@pytest.mark.parametrize("names", ["shard_000.tar", "shard_000.tar/{000000..000008}"])
def test_a_split_that_excludes_all_of_its_samples_is_refused(names, encoder, tmp_path):
    folder = write_dataset(tmp_path / "d", ["some text"] * 9)
    split = folder / ".nv-meta" / "split.yaml"
    split.write_text(split.read_text().replace("exclude: []", f"exclude: ['{names}']"))
    with pytest.raises(ConfigError, match="has no samples, or excludes all of them"):
        read(folder, encoder)


# Tar files ----------------------------------------------------------------------------------------


def write_first_member(folder, header, content):
    """Write a dataset whose first sample has these bytes, with a matching index."""
    write_dataset(folder, ["some text"] * 9)
    shard, index = folder / "shard_000.tar", folder / "shard_000.tar.idx"
    ends = np.fromfile(index, "<u8").astype(np.int64)
    member = header + content.ljust(-(-len(content) // 512) * 512, b"\0")
    shard.write_bytes(member + shard.read_bytes()[ends[1] :])
    ends[1:] += len(member) - ends[1]
    ends.tofile(index)


def header_of(kind, size):
    info = tarfile.TarInfo("000000.txt")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT)


def pax(**headers):
    info = tarfile.TarInfo("000000.txt")
    info.size, info.pax_headers = 3, headers
    return info.tobuf(tarfile.PAX_FORMAT)


@pytest.mark.parametrize("encoder", [None, Streamed()], ids=["planned", "streamed"])
@pytest.mark.parametrize(
    "header, message",
    [
        (header_of(tarfile.GNUTYPE_SPARSE, 512), "a sparse file"),
        (header_of(tarfile.XHDTYPE, 2**20), "extended header of 1,048,576 bytes"),
        (pax(**{"GNU.sparse.realsize": str(2**40)}), "a sparse file"),
        (pax(size=str(2**40)), "an extended header of 22 bytes"),
        (pax(**{f"k{n}": "1" * 1000 for n in range(40)}), "an extended header of"),
        (header_of(b"0", 2**40), "cannot be read"),
    ],
)
def test_a_tar_member_larger_than_its_stored_bytes_is_refused(header, message, encoder, tmp_path):
    write_first_member(tmp_path / "d", header, b"abc")
    with pytest.raises(EnergonExtError, match=message):
        read(tmp_path / "d", encoder)


@pytest.mark.parametrize("encoder", [None, Streamed()], ids=["planned", "streamed"])
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE])
def test_a_link_or_device_in_a_tar_is_not_followed(kind, encoder, tmp_path):
    info = tarfile.TarInfo("000000.txt")
    info.type, info.linkname = kind, str(tmp_path / "secret")
    (tmp_path / "secret").write_text("secret")
    write_first_member(tmp_path / "d", info.tobuf(tarfile.GNU_FORMAT), b"")
    with pytest.raises(EnergonExtError, match="No valid files found in sample"):
        read(tmp_path / "d", encoder)


def test_an_ordinary_extended_header_is_read(tmp_path):
    write_first_member(tmp_path / "d", pax(comment="written by hand"), b"abc")
    assert read(tmp_path / "d").tokens is not None


def test_an_index_with_huge_offsets_is_refused(tmp_path):
    folder = write_dataset(tmp_path / "d", ["some text"] * 9)
    ends = np.fromfile(folder / "shard_000.tar.idx", "<u8")
    ends[3] = 2**45
    ends.tofile(folder / "shard_000.tar.idx")
    with pytest.raises(ConfigError, match="35,184,372,.* bytes, must be 0 to 2,147,483,648"):
        read(folder)


@stateless
@cooker(need_primary=True)
def cook_from_store(sample, primary):
    """Read the text by the name of its sample, which Energon looks up in its SQLite index."""
    text = primary[f"{sample['__key__']}.txt"]
    return TextSample(**basic_sample_keys(sample), text=str(text))


class FromStore(DynamicBlendMixin, DefaultTaskEncoder):
    cookers = [Cooker(cook_from_store)]


class FromStoreStreamed(FromStore):
    plan_samples = False


def change_index(path, statement):
    with contextlib.closing(sqlite3.connect(path)) as index, index:
        index.execute(statement)


INDEX_DAMAGES = {
    "missing": (lambda p: p.unlink(), "an auxiliary dataset cannot be opened .*not a file"),
    "text": (lambda p: p.write_bytes(b"x" * 9000), "cannot be opened .*not a database"),
    "a pipe": (lambda p: (p.unlink(), os.mkfifo(p)), "cannot be opened .*not a file"),
    "empty": (lambda p: p.write_bytes(b""), "no such table: samples"),
    "beyond the shard": (
        lambda p: change_index(p, "UPDATE sample_parts SET content_byte_offset = 1 << 62"),
        "samples in a row cannot be used, .*Invalid argument",
    ),
    "of terabytes": (
        lambda p: change_index(p, "UPDATE sample_parts SET content_byte_size = 1 << 42"),
        "samples in a row cannot be used, .*MemoryError",
    ),
}


@pytest.mark.parametrize("encoder", [FromStore, FromStoreStreamed])
@pytest.mark.parametrize("damage", INDEX_DAMAGES)
def test_a_damaged_sqlite_index_is_an_error_of_its_source(damage, encoder, tmp_path):
    change, message = INDEX_DAMAGES[damage]
    write_dataset(tmp_path / "d", ["some text"] * 9, dataset_config=CRUDE)
    change(tmp_path / "d" / ".nv-meta" / "index.sqlite")
    with pytest.raises(EnergonExtError, match=rf"\bd\b.*: .*{message}"):
        read(tmp_path / "d", encoder())


# Parquet and metrics ------------------------------------------------------------------------------


def prepare_parquet(folder):
    """Return the error line of a command that reads ``a.parquet``, which is a small file."""
    path = folder / "a.parquet"
    assert path.stat().st_size < 2**18
    command = ("prepare", folder / "o", "--parquet", path, "--min-chars", 10**6)
    return error_line(energon_ext(*command, "--tokenizer", "bytes"))


def test_a_small_parquet_file_cannot_exhaust_memory(tmp_path):
    """It has 20,000 rows of one long text, which it stores once."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    numbers = arrow.array(np.zeros(20_000, "i4"))
    texts = arrow.DictionaryArray.from_arrays(numbers, ["x" * 60_000])
    parquet.write_table(arrow.table({"text": texts}), tmp_path / "a.parquet", compression="zstd")
    assert "(20000 shorter)" in prepare_parquet(tmp_path)


@pytest.fixture(scope="module")
def huge_row_group(tmp_path_factory):
    """A row group with 257 MiB of zeros beside the text, which compress to little.

    To write it takes more memory than a test may use here.
    """
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    zeros = arrow.FixedSizeBinaryArray.from_buffers(
        arrow.binary(2**20), 257, [None, arrow.py_buffer(bytes(257 * 2**20))]
    )
    table = arrow.table({"text": ["x"] * 257, "zeros": zeros})
    options = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
    folder = tmp_path_factory.mktemp("huge")
    parquet.write_table(table, folder / "a.parquet", **options)
    return folder


@pytest.mark.nightly
def test_a_small_parquet_file_with_a_huge_row_group_is_refused(huge_row_group):
    assert "a row group of" in prepare_parquet(huge_row_group)


def test_metrics_of_too_many_sources_are_refused(tmp_path):
    write_run(tmp_path / "run", sources=[f"s{n}:train" for n in range(10_001)], steps=1)
    assert "10,001 sources in 1 steps" in error_line(energon_ext("report", tmp_path / "run"))


# Tokenizers and chat templates --------------------------------------------------------------------

tokenizers = pytest.importorskip("tokenizers")


def tokenizer(path, normalizer):
    model = tokenizers.models.BPE(vocab={"a": 0, "b": 1, "</s>": 2}, merges=[])
    tokenizers.Tokenizer(model).save(str(path / "tokenizer.json"))
    content = json.loads((path / "tokenizer.json").read_text())
    content["normalizer"] = normalizer
    (path / "tokenizer.json").write_text(json.dumps(content))
    return HFTokenizer(path / "tokenizer.json")


def replace(content, **pattern):
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps):
    return {"type": "Sequence", "normalizers": list(steps)}


@pytest.mark.parametrize(
    "normalizer",
    [
        replace("a" * 100, String="a"),
        sequence(*[replace("aa", String="a")] * 40),
        sequence(*[replace("b", Regex="")] * 40),
        sequence(*[replace("b", Regex="(?>x*)")] * 40),
        sequence(*[{"type": "Prepend", "prepend": "a"}] * 40),
        sequence(*[{"type": "ByteLevel"}] * 40),
        sequence(sequence(replace("a" * 5, String="a")), replace("a" * 5, String="a")),
    ],
)
def test_a_tokenizer_that_multiplies_text_is_refused(normalizer, tmp_path):
    with pytest.raises(ConfigError, match="expands one character to more than 16"):
        tokenizer(tmp_path, normalizer)


@pytest.mark.parametrize("is_folder", [False, True], ids=["file", "folder"])
@pytest.mark.parametrize("number", [2**24, 2**31, 10**400], ids=["2^24", "2^31", "10^400"])
def test_a_tokenizer_with_a_huge_id_is_refused_before_it_takes_memory(number, is_folder, tmp_path):
    pytest.importorskip("transformers")
    tokenizer(tmp_path, None)
    path = tmp_path / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"]["b"] = number
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"has the token id \d+; ids are below 16,777,216"):
        HFTokenizer(tmp_path if is_folder else path)


def test_normalizers_of_known_tokenizers_are_accepted(tmp_path):
    llama = sequence({"type": "Prepend", "prepend": "▁"}, replace("▁", String=" "))
    clip = sequence({"type": "NFC"}, replace(" ", Regex=r"\s+"), {"type": "Lowercase"})
    quotes = sequence(replace('"', String="``"), replace('"', String="''"), {"type": "NFKD"})
    for normalizer in (llama, clip, quotes, None):
        assert tokenizer(tmp_path, normalizer).vocab_size == 3


class _Template:
    """The parts of a Hugging Face tokenizer that a template needs."""

    def __init__(self, text):
        self.chat_template, self.special_tokens_map = text, {}


MESSAGES = [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "template, message",
    [
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ messages[9].content.upper() }}", "UndefinedError"),
    ],
)
def test_any_chat_template_error_is_an_error_of_the_sample(template, message):
    with pytest.raises(SampleError, match=message):
        HFChatTemplate(_Template(template)).render(MESSAGES)
