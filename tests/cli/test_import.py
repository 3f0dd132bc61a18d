# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Megatron data arguments imported as metadatasets, with Megatron's shares and splits."""

import json
import re

import numpy as np
import pytest
import yaml
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_config import (
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.utils import get_blend_from_list, normalize

from energon_ext import PackedTaskEncoder, get_train_dataset, get_val_datasets
from energon_ext.plan.forecast import forecast
from energon_ext.plan.lookup import find_blend
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.support import config, write_tokens

SEQ_LEN = 32
#: Documents per source; each fills one row of SEQ_LEN tokens, as Megatron counts samples.
DOCUMENTS = {"web": 90, "code": 60, "wiki": 30}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, count in DOCUMENTS.items():
        write_tokens(tmp_path / name, [[65 + n % 50] * SEQ_LEN for n in range(count)])
    return tmp_path


def import_splits(*arguments):
    result = energon_ext("import", "out/mix.yaml", *arguments)
    assert result.exit_code == 0, result.output
    with open("out/mix.yaml") as file:
        return yaml.safe_load(file)["splits"]


def options(split="train"):
    return {
        "worker_config": config(),
        "batch_size": 1,
        "task_encoder": PackedTaskEncoder(ByteTokenizer(), SEQ_LEN),
        "split_part": split,
    }


def drawn(rows):
    """Count the first rows by source key."""
    found = forecast(find_blend(get_train_dataset("out/mix.yaml", **options())), rows)
    assert found.tokens.sum() == rows * SEQ_LEN
    return dict(zip(found.keys, (found.tokens.sum(0) / SEQ_LEN).tolist()))


def blended_by_megatron(weights, rows):
    """Count the first samples of each dataset with Megatron-core's own code."""
    datasets, samples = np.zeros(rows, np.int16), np.zeros(rows, np.int64)
    helpers.build_blending_indices(
        datasets, samples, np.array(normalize(weights)), len(weights), rows, False
    )
    return np.bincount(datasets, minlength=len(weights)).tolist()


@pytest.mark.parametrize("rows", [7, 100, 1000])
@pytest.mark.parametrize("words", ["70 web 30 code", "0.1 web 0.7 code 2.2 wiki"])
def test_shares_match_megatrons_own_blending(folder, words, rows):
    import_splits(*words.split())
    prefixes, weights = get_blend_from_list(words.split())
    expected = dict(
        zip((f"../{prefix}" for prefix in prefixes), blended_by_megatron(weights, rows))
    )
    for key, count in drawn(rows).items():
        assert count == pytest.approx(expected[key], abs=1)


def test_a_single_prefix_repeats_as_in_megatron(folder):
    (entry,) = import_splits("web")["train"]["interleave"]
    assert "max_epochs" not in entry


def test_a_list_without_weights_reads_everything_once(folder):
    splits = import_splits("web", "code", "wiki")
    assert [entry["max_epochs"] for entry in splits["train"]["interleave"]] == [1, 1, 1]
    blend = find_blend(get_train_dataset("out/mix.yaml", **options()))
    found = forecast(blend, 1000)
    assert found.documents.sum(0).tolist() == [60, 90, 30]  # code, web, wiki
    # Shares are proportional to sizes, so all sources end at about the same step.
    assert min(found.exhausted.values()) > 0.9 * found.steps


@pytest.mark.parametrize("split", ["90,10,0", "8,1,1", "940, 30, 30", "100"])
def test_splits_have_the_documents_megatron_assigns(folder, split):
    splits = import_splits("1", "web", "1", "code", "--split", split)
    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    present = [name for name, part in zip(("train", "val", "test"), matrix) if part is not None]
    assert list(splits) == present
    for name, (begin, end) in zip(present, filter(None, matrix)):
        count = round(end * 90) - round(begin * 90)
        for dataset, _ in get_val_datasets("out/mix.yaml", **options(name)):
            blend = find_blend(dataset)
            if blend.keys[0].startswith("../web"):
                assert abs(sum(s.documents for s in blend.sources.values()) - count) <= 1


def test_a_split_keeps_its_digits_and_leaves_out_what_is_empty(folder):
    """Of 90 documents of web and 2 000 of large; train has the first 99.9 %: 89 and 1998."""
    write_tokens(folder / "large", [[65] * 3] * 2000)
    result = energon_ext("import", "out/mix.yaml", "1", "large", "1", "web", "--split", "9990,9,1")
    assert result.exit_code == 0, result.output
    content = (folder / "out/mix.yaml").read_text()
    splits = yaml.safe_load(content)["splits"]
    found = {
        name: {entry["path"]: entry["subset"]["range"] for entry in node["interleave"]}
        for name, node in splits.items()
    }
    # Documents 1998 and 89 begin the rest: 99.99 % are 1999 and 89 documents.
    assert found == {
        "train": {"../large": ["0%", "99.9%"], "../web": ["0%", "99.9%"]},
        "val": {"../large": ["99.9%", "99.99%"]},
        "test": {"../large": ["99.99%", "100%"], "../web": ["99.99%", "100%"]},
    }
    remark = "val: ../web has no document in 99.9% to 99.99%; left out."
    assert f"# {remark}" in content and remark in result.stdout
    for split in splits:
        get_val_datasets("out/mix.yaml", **options(split))


def test_shares_of_a_split_keep_eight_digits(folder):
    splits = import_splits("web", "--split", "9999999,1,0")
    assert splits["train"]["interleave"][0]["subset"]["range"] == ["0%", "99.99999%"]
    # int(90 x .9999999) = 89 documents, so one is left for val.
    assert splits["val"]["interleave"][0]["subset"]["range"] == ["99.99999%", "100%"]


def test_an_empty_split_is_named_and_not_written(folder):
    result = energon_ext("import", "out/mix.yaml", "web", "--split", "98,1,1")
    # 98 % are 88 documents, 99 % are 89.
    assert result.exit_code == 0 and "left out" not in result.stdout
    result = energon_ext("import", "out/mix.yaml", "wiki", "--split", "98,1,1", "--overwrite")
    # 98 % and 99 % of 30 are 29 documents.
    assert result.stdout.splitlines()[1:] == [
        "val: ../wiki has no document in 98% to 99%; left out.",
        "val: empty, so there is no such split.",
        "out/mix.yaml: train, test",
    ]
    write_tokens(folder / "one", [[65]])
    line = error_line(energon_ext("import", "out/one.yaml", "one", "--split", "98,1,1"))
    assert line == (
        "--split: train: ../one has no document in 0% to 98%; left out. A train split is needed."
    )


@pytest.mark.parametrize("absent", [None, [], ""])
def test_a_split_without_data_in_a_file_of_splits_is_absent(folder, absent):
    content = {"train": ["web"], "valid": absent, "test": absent}
    (folder / "splits.json").write_text(json.dumps(content))
    assert list(import_splits("--per-split-data-args-path", "splits.json")) == ["train"]
    (folder / "splits.json").write_text(json.dumps({**content, "train": absent}))
    arguments = ("--overwrite", "--per-split-data-args-path", "splits.json")
    line = error_line(energon_ext("import", "out/mix.yaml", *arguments))
    assert line == "splits.json: a mapping with train, valid, test is needed, train not empty."


def test_phases_become_steps_of_a_schedule(folder):
    (folder / "one.txt").write_text("1 web\n 3 code")
    (folder / "two.txt").write_text("2 web 2 wiki")
    splits = import_splits(
        "--data-args-path", "one.txt", "--data-args-path", "two.txt",
        "--phase-transition-iterations", "100",
    )  # fmt: skip
    assert splits["train"]["interleave"] == [
        {"path": "../web", "weight": {"step": {0: 1, 100: 2}}},
        {"path": "../code", "weight": {"step": {0: 3, 100: 0}}},
        {"path": "../wiki", "weight": {"step": {0: 0, 100: 2}}},
    ]
    blend = find_blend(get_train_dataset("out/mix.yaml", **options()))
    assert blend.shares_at_step(99) == {"../code": 0.75, "../web": 0.25, "../wiki": 0}
    assert blend.shares_at_step(100) == {"../code": 0, "../web": 0.5, "../wiki": 0.5}


def test_validation_has_the_sources_of_the_first_phase(folder):
    (folder / "one.txt").write_text("1 web 3 code 2 web")
    (folder / "two.txt").write_text("1 wiki")
    splits = import_splits(
        "--data-args-path", "one.txt", "--data-args-path", "two.txt",
        "--phase-transition-iterations", "100", "--split", "9,1",
    )  # fmt: skip
    # A source that is listed twice gets the sum of both weights.
    assert [entry["weight"] for entry in splits["val"]["interleave"]] == [3, 3]
    assert [entry["weight"] for entry in splits["train"]["interleave"]] == [
        {"step": {0: 3, 100: 0}},
        {"step": {0: 3, 100: 0}},
        {"step": {0: 0, 100: 1}},
    ]


def test_a_file_of_splits_becomes_splits(folder):
    content = {"train": ["7", "web", "3", "code"], "valid": "wiki", "test": []}
    (folder / "splits.json").write_text(json.dumps(content))
    splits = import_splits("--per-split-data-args-path", "splits.json", "--rule", "blend")
    assert splits == {
        "train": {"blend": [{"path": "../web", "weight": 7}, {"path": "../code", "weight": 3}]},
        "val": {"blend": [{"path": "../wiki", "weight": 960}]},
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "found none"),
        (["1", "web", "--data-args-path", "one.txt"], "found SOURCES and --data-args-path"),
        (["1", "web", "code", "wiki"], "'code' found, a weight is needed"),
        (["--", "-1", "web", "2", "code"], "weights >= 0 and not all 0 are needed"),
        (["0", "web", "0", "code"], "weights >= 0 and not all 0 are needed"),
        (["1", "gone"], "out/mix.yaml: .*gone: does not exist"),
        (["gone", "web", "code"], "gone.*does not exist"),
        (["1", "web", "--split", "x"], "shares such as 969,30,1 are needed"),
        (["1", "web", "--split", "0,1"], "shares such as 969,30,1 are needed"),
        (["1", "web", "--phase-transition-iterations", "5"], "1 transitions need 2 lists"),
        (["1", "web", "--phase-transition-iterations", "0"], "contains 0 or a duplicate"),
        (
            ["1", "web", "--phase-transition-iterations", "5,x"],
            "breakpoint .x. is not an integer from 0",
        ),
        (["--data-args-path", "empty.txt"], "the list is empty"),
        (
            ["--per-split-data-args-path", "one.txt"],
            "one.txt: '1 web 3 code' found, a mapping is needed",
        ),
        (["--per-split-data-args-path", "a", "--split", "9,1"], "a: has its own splits"),
    ],
)
def test_a_failed_import_is_one_line_and_writes_nothing(folder, arguments, words):
    (folder / "one.txt").write_text("1 web 3 code")
    (folder / "empty.txt").write_text("")
    line = error_line(energon_ext("import", "out/mix.yaml", *arguments))
    assert re.search(words, line), line
    assert not list(folder.glob("out/*")) and not list(folder.glob("out/.*"))


def test_an_existing_file_is_kept_without_overwrite(folder):
    import_splits("1", "web")
    before = (folder / "out/mix.yaml").read_text()
    assert "--overwrite" in error_line(energon_ext("import", "out/mix.yaml", "1", "code"))
    assert (folder / "out/mix.yaml").read_text() == before
    assert energon_ext("import", "out/mix.yaml", "1", "code", "--overwrite").exit_code == 0
    assert "code" in (folder / "out/mix.yaml").read_text()
