# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Paths name a pair, a folder of pairs, a pattern or no pair at all."""

import os

import pytest

from energon_ext.errors import ConfigError
from energon_ext.prepare.input_files import input_files
from energon_ext.tokens.paths import is_token_file, list_pairs
from energon_ext.tokens.scanned import local_files


def touch(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def names(folder, path):
    """Return the pairs that a path in a folder names, relative to it."""
    return [os.path.relpath(prefix, folder) for prefix in list_pairs(folder / path)]


@pytest.mark.parametrize("path", ["web", "web.bin", "web.idx"])
def test_a_pair_is_named_with_and_without_suffix(tmp_path, path):
    touch(tmp_path, "web.bin", "web.idx", "web.v2.bin", "web.v2.idx")
    assert is_token_file(tmp_path / path)
    assert names(tmp_path, path) == ["web"]
    assert names(tmp_path, path.replace("web", "web.v2")) == ["web.v2"]


@pytest.mark.parametrize("left", ["web.bin", "web.idx"])
def test_half_a_pair_is_reported_with_the_missing_half(tmp_path, left):
    touch(tmp_path, left)
    for path in ("web", left):
        assert is_token_file(tmp_path / path)
        missing = {"web.bin": "web.idx", "web.idx": "web.bin"}[left]
        with pytest.raises(ConfigError, match=f"{missing}: does not exist; a pair needs both"):
            names(tmp_path, path)


def test_a_megatron_cache_folder_named_like_a_pair_resolves_to_the_pair(tmp_path):
    touch(tmp_path, "web.bin", "web.idx", "web/cache/GPTDataset-document_index.npy")
    assert is_token_file(tmp_path / "web")
    assert names(tmp_path, "web") == names(tmp_path, "web/") == ["web"]


def test_a_folder_prepared_by_energon_is_not_a_token_file(tmp_path):
    touch(tmp_path, "text.jsonl", "text.jsonl.idx")  # Energon's index of the lines
    touch(tmp_path, "web/.nv-meta/split.yaml", "web/a.tar", "web/a.tar.idx", "web.bin", "web.idx")
    touch(tmp_path, "raw/a.tar", "raw/a.tar.idx", "raw/model.bin")
    for path in ("text.jsonl", "text.jsonl.idx", "web", "web/a.tar", "raw", "mix.yaml", "absent"):
        assert not is_token_file(tmp_path / path), path


def test_a_folder_lists_the_pairs_in_and_below_it_by_name(tmp_path):
    touch(tmp_path, "web/b.bin", "web/b.idx", "web/b.meta.json", "web/b.weights.bin")
    touch(tmp_path, "web/part/a.bin", "web/part/a.idx", "web/part/x.jsonl", "web/part/x.jsonl.idx")
    touch(
        tmp_path, "web/a.idx", "web/a.bin", "web/.out.partial-1/c.bin", "web/.out.partial-1/c.idx"
    )
    assert is_token_file(tmp_path / "web")
    assert names(tmp_path, "web") == ["web/a", "web/b", "web/part/a"]


@pytest.mark.parametrize("pattern", ["web/p*", "web/p*.bin", "web/p*.idx", "w*/p?", "web/p[12]"])
def test_a_pattern_matches_with_and_without_suffix(tmp_path, pattern):
    touch(
        tmp_path, "web/p2.idx", "web/p2.bin", "web/p1.bin", "web/p1.idx", "web/q.bin", "web/q.idx"
    )
    assert is_token_file(tmp_path / pattern)
    assert names(tmp_path, pattern) == ["web/p1", "web/p2"]


def test_two_stars_match_nested_folders(tmp_path):
    touch(tmp_path, "web/a.bin", "web/a.idx", "web/x/b.bin", "web/x/b.idx", "web/x/y/c.idx")
    touch(tmp_path, "web/x/y/c.bin")
    assert names(tmp_path, "web/**") == names(tmp_path, "web") == ["web/a", "web/x/b", "web/x/y/c"]
    assert names(tmp_path, "web/**/b") == ["web/x/b"]


def test_brackets_in_an_existing_name_are_not_a_pattern(tmp_path):
    touch(tmp_path, "[new] web/a.bin", "[new] web/a.idx")
    for path in ("[new] web", "[new] web/a", "[new] web/a.bin"):
        assert names(tmp_path, path) == ["[new] web/a"]


def test_a_pattern_without_a_match_is_an_error(tmp_path):
    assert is_token_file(tmp_path / "web-*")
    with pytest.raises(ConfigError, match=r"web-\*: names no .bin/.idx pair"):
        list_pairs(tmp_path / "web-*")


@pytest.mark.parametrize("path", ["web", "web/*", "web/?.idx"])
def test_half_a_pair_among_others_is_an_error(tmp_path, path):
    touch(tmp_path, "web/a.bin", "web/a.idx", "web/b.bin")
    with pytest.raises(ConfigError, match="web/b.idx: does not exist; a pair needs"):
        list_pairs(tmp_path / path)


def test_splits_of_prepared_text_are_not_one_source(tmp_path):
    touch(tmp_path, "web/train.bin", "web/train.idx", "web/val.bin", "web/val.idx")
    with pytest.raises(ConfigError, match="contains the splits train and val.* /.*/web/train"):
        list_pairs(tmp_path / "web")
    assert names(tmp_path, "web/train") == ["web/train"]


# Splits -----------------------------------------------------------------------------------------

#: How each kind of data is listed; the ending of its files.
KINDS = {
    "pairs": (("",), lambda path: list(list_pairs(path))),
    "npy": ((".npy",), lambda path: [each.url for each in local_files(str(path), ".npy")]),
    "parquet": ((".parquet",), lambda path: urls(path, (".parquet",))),
    "jsonl": ((".jsonl", ".jsonl.gz"), lambda path: urls(path, (".jsonl", ".jsonl.gz"))),
}


def urls(path, endings):
    return [each.url for each in input_files([path], endings)]


def touch_files(folder, kind, names):
    for number, name in enumerate(names):
        endings = KINDS[kind][0]
        suffixes = (".bin", ".idx") if kind == "pairs" else [endings[number % len(endings)]]
        touch(folder, *(name + suffix for suffix in suffixes))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("names", "splits", "example"),
    [
        (["train", "valid", "test"], "test, train and valid", "train*"),
        (["web_train_text_document", "web_valid_text_document"], "train and valid", "*train*"),
        (["Train-00000-of-00001", "VALIDATION-0"], "train and validation", "Train*"),
        (["a/train/part-0", "a/val/part-0"], "train and val", "a/train"),
        (["train/part-0", "b/dev/part-0"], "dev and train", "train"),
        (["test/part-0", "b/eval/part-0"], "eval and test", "b/eval"),
        (["c4-train.00000", "c4-validation.00000"], "train and validation", "*train*"),
        (["web_train0", "web_train1", "web_test0"], "test and train", "*train*"),
        (["training", "evaluation"], "evaluation and training", "training*"),
        (["train", "holdout"], "holdout and train", "train*"),
    ],
)
def test_a_folder_with_several_splits_is_refused_for_every_kind_of_file(
    tmp_path, kind, names, splits, example
):
    touch_files(tmp_path / "data", kind, names)
    with pytest.raises(ConfigError) as caught:
        KINDS[kind][1](tmp_path / "data")
    is_pattern = example.endswith("*")
    ending = KINDS[kind][0][0] if is_pattern else ""
    assert str(caught.value) == (
        f"{tmp_path}/data: contains the splits {splits}, which cannot be one source; name one of "
        f"them, such as {tmp_path}/data/{example}{ending}."
    )
    assert KINDS[kind][1](f"{tmp_path}/data/{example}{ending}")  # the advice works


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "names",
    [
        ["train-00000", "train-00001"],
        ["contest", "trains", "valve"],
        ["train/test-driven", "train/development"],
        ["dev/a", "b"],
    ],
)
def test_a_folder_with_one_split_is_one_source_for_every_kind_of_file(tmp_path, kind, names):
    data = tmp_path / "test" / "val" / "data"  # what is above the folder does not matter
    touch_files(data, kind, names)
    assert len(KINDS[kind][1](data)) == len(names)


def test_hidden_files_are_ignored_for_every_kind_of_file(tmp_path):
    for kind in KINDS:
        touch_files(tmp_path / kind, kind, ["a", ".b", ".c/d", "e/f"])
        assert len(KINDS[kind][1](tmp_path / kind)) == 2
