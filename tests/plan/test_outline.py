# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The first file by which a source differs between two ranks is found, and fields are listed."""

import json
import shutil

import pytest

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.plan.outline import (
    Outline,
    differing_parts,
    first_difference,
    list_differences,
    list_sources,
)
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import config, loader_for, take, write_mix, write_tokens

NAMES = "on rank 0", "on rank 8"


def of_files(folder, files, **facts):
    listed = [[f"{folder}/{name}", content] for name, content in files.items()]
    return {"key": "web", "facts": facts, "files": listed}


@pytest.mark.parametrize(
    ("first", "other", "expected"),
    [
        ({"a": "1", "b": "2"}, {"a": "1", "b": "3"}, "web: /x/b has 2 on rank 0, 3 on rank 8"),
        ({"a": "1", "b": "2", "c": "1"}, {"a": "1", "c": "1"}, "web: /x/b is only on rank 0"),
        ({"a": "1", "c": "1"}, {"a": "1", "b": "2", "c": "1"}, "web: /y/b is only on rank 8"),
        ({"a": "1"}, {"a": "1", "b": "2"}, "web: /y/b is only on rank 8"),
        ({"a": "1", "b": "2"}, {"a": "1"}, "web: /x/b is only on rank 0"),
        ({"a": "1"}, {}, "web: /x/a is only on rank 0"),
        (
            {"d/a": "1", "e/b": "2"},
            {"d/a": "1", "e/b": "2"},
            "web: tokens 7 on rank 0, 8 on rank 8",
        ),
        ({}, {}, "web: tokens 7 on rank 0, 8 on rank 8"),
    ],
)
def test_the_first_file_that_differs_is_named_in_whatever_folder_it_is(first, other, expected):
    ranks = of_files("/x", first, tokens=7), of_files("/y", other, tokens=8)
    assert first_difference(*ranks, NAMES) == expected


def test_objects_in_a_store_are_named_by_their_urls():
    ranks = (of_files("s3://bucket/web", {"a": text, "b": "1"}) for text in "23")
    assert first_difference(*ranks, NAMES) == "web: s3://bucket/web/a has 2 on rank 0, 3 on rank 8"


def test_fields_of_fields_are_listed_up_to_three_of_them():
    first = {"seed": 1, "packing": {"name": "bin", "carry": 0.3}, "new": [1]}
    other = {"seed": 2, "packing": {"name": "bin", "carry": 0.5}}
    assert list_differences(first, other, NAMES) == (
        "seed 1 on rank 0, 2 on rank 8; packing.carry 0.3 on rank 0, 0.5 on rank 8; "
        "new [1] on rank 0, None on rank 8"
    )
    many = [{f"field{n}": n + rank for n in range(9)} for rank in range(2)]
    assert list_differences(*many, NAMES).endswith("; 6 more")
    assert list_differences(first, first, NAMES) == ""


def test_sources_of_one_rank_are_named():
    assert list_sources(["a", "b"], ["b", "c"], NAMES) == (
        "source a is only on rank 0; source c is only on rank 8"
    )
    assert list_sources(["a"], ["a"], NAMES) == ""


def outline_in(folder, seed=0, drawn=0):
    encoder = PackedTaskEncoder(ByteTokenizer(), 32, packing_buffer_docs=4)
    path = folder / "mix.yaml"
    options = {"worker_config": config(seed=seed), "batch_size": 1, "task_encoder": encoder}
    loader = loader_for(get_train_dataset(path, **options))
    if drawn:
        take(loader, drawn)
    return Outline(loader.dataset.run)


@pytest.fixture
def folder(tmp_path):
    for name, tokens in (("web", 5), ("code", 6)):
        write_tokens(tmp_path / "a" / name, [[tokens] * (3 + n) for n in range(9)])
    write_mix(tmp_path / "a" / "mix.yaml", [("web", 1), ("code", {"linear": {0: 1, 9: 3}})])
    return tmp_path / "a"


def test_copies_in_different_folders_are_the_same(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "elsewhere" / "b")
    parts = [outline_in(each, drawn=3).parts for each in (folder, tmp_path / "elsewhere" / "b")]
    assert parts[0] == parts[1]
    assert str(tmp_path) not in json.dumps(parts)


def test_the_parts_that_differ_are_those_that_were_changed(folder):
    before = outline_in(folder).summary()
    assert differing_parts(before, outline_in(folder).summary()) == []
    assert differing_parts(before, outline_in(folder, drawn=2).summary()) == ["cursor"]
    assert differing_parts(before, outline_in(folder, seed=1).summary()) == ["settings"]
    write_mix(folder / "mix.yaml", [("web", 1), ("code", {"linear": {0: 1, 9: 4}})])
    assert differing_parts(before, outline_in(folder).summary()) == ["mix"]
    write_mix(folder / "mix.yaml", [("web", 1), ("code", {"linear": {0: 1, 9: 3}})])
    write_tokens(folder / "web", [[5] * (11 - n) for n in range(9)])
    assert differing_parts(before, outline_in(folder).summary()) == ["data"]
