# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Megatron data arguments imported as metadatasets, with Megatron's shares and splits."""

import json
import re

import numpy as np
import pytest
import torch
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from megatron.core.datasets import helpers
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.blended_megatron_dataset_config import BlendedMegatronDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import get_blend_from_list, normalize
from megatron.energon.metadataset.metadataset_v2 import Subset

from energon_ext import PackedTaskEncoder, get_train_dataset, get_val_datasets
from energon_ext.cli.import_split import parse_split, range_of
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


class Part:
    """A dataset of Megatron that has only the documents it is given."""

    build_low_level_dataset = staticmethod(lambda documents, config: range(documents))
    numel_low_level_dataset = staticmethod(len)

    def __init__(self, documents, path, indices, *further):
        self.documents = indices.tolist()


def documents_of_megatron(split, documents):
    """Return the documents of each split, by the builder of Megatron's datasets itself."""
    config = BlendedMegatronDatasetConfig(
        random_seed=1, sequence_length=1, blend=(["a"], None), split=split
    )
    builder = BlendedMegatronDatasetBuilder(Part, [1, 1, 1], lambda: True, config)
    parts = builder._build_megatron_dataset_splits(documents, config.split_matrix, [1, 1, 1])
    return [part.documents if part else [] for part in parts]


def documents_here(split, documents):
    """Return the documents that the written ranges select, by Energon's own code."""
    found = {}
    for name, bounds in parse_split(split).items():
        written = Subset(range=tuple(range_of(bounds, documents))).as_dataset_subset()
        found[name] = list(range(*written.compute_subset(documents)))
    return [found.get(name, []) for name in ("train", "val", "test")]


SHARES = st.one_of(
    st.integers(0, 1000).map(str),
    st.floats(0, 1000).map(lambda share: f"{share:.17f}"),
    st.sampled_from(["969", "30", "1", ".98", "0.01", "99.", "0"]),
)


@pytest.mark.parametrize("documents", [1, 2, 500])
@pytest.mark.parametrize(
    "split", ["969,30,1", "0,0,100", "0.969, 0.03, 0.001", "1,1,1", "100", "98 2", ".5,.5,"]
)
def test_a_split_has_exactly_the_documents_of_megatron(split, documents):
    assert documents_here(split, documents) == documents_of_megatron(split, documents)


@given(st.lists(SHARES, min_size=1, max_size=3), st.integers(0, 5000))
def test_every_split_of_any_size_has_exactly_the_documents_of_megatron(shares, documents):
    assume(any(float(share) for share in shares))
    split = ",".join(shares)
    assert documents_here(split, documents) == documents_of_megatron(split, documents)


@pytest.mark.parametrize("split", ["90,10,0", "8,1,1", "940, 30, 30", "100", "0,0,100", "969,30,1"])
def test_a_run_reads_the_documents_that_megatron_assigns(folder, split):
    splits = import_splits("1", "web", "1", "code", "--split", split)
    for name, count in DOCUMENTS.items():
        parts = documents_of_megatron(split, count)
        for part, documents in zip(("train", "val", "test"), parts):
            read = (
                [
                    source.documents
                    for dataset, _ in get_val_datasets("out/mix.yaml", **options(part))
                    for key, source in find_blend(dataset).sources.items()
                    if key.startswith(f"../{name}")
                ]
                if part in splits
                else []
            )
            assert sum(read) == (len(documents) if name != "wiki" else 0)


def test_keys_show_fractions_as_they_are_written(folder):
    write_tokens(folder / "large", [[65] * 3] * 2000)
    import_splits("large", "--split", "969,30,1")
    blends = [
        find_blend(dataset) for dataset, _ in get_val_datasets("out/mix.yaml", **options("val"))
    ]
    assert [blend.keys for blend in blends] == [("../large[0.969, 0.999]",)]
    assert find_blend(get_train_dataset("out/mix.yaml", **options())).keys == (
        "../large[0, 0.969]",
    )


def test_numbers_of_documents_are_written_where_a_percentage_is_rounded_otherwise(folder):
    """Of 90 documents of web and 2 000 of large; 0.999 and 0.9999 of them are 90, 1998 and 2000."""
    write_tokens(folder / "large", [[65] * 3] * 2000)
    result = energon_ext("import", "out/mix.yaml", "1", "large", "1", "web", "--split", "9990,9,1")
    assert result.exit_code == 0, result.output
    content = (folder / "out/mix.yaml").read_text()
    found = {
        name: {entry["path"]: entry["subset"]["range"] for entry in node["interleave"]}
        for name, node in yaml.safe_load(content)["splits"].items()
    }
    assert found == {
        "train": {"../large": ["0%", "99.9%"], "../web": [0, 90]},
        "val": {"../large": [1998, 2000]},
    }
    remark = "val: ../web has no tokens in documents 90 to 90; left out."
    assert f"# {remark}" in content and remark in result.stdout
    for split in found:
        get_val_datasets("out/mix.yaml", **options(split))


def test_an_empty_split_is_named_and_not_written(folder):
    result = energon_ext("import", "out/mix.yaml", "web", "--split", "98,1,1")
    # 98 % are 88 documents, 99 % are 89.
    assert result.exit_code == 0 and "left out" not in result.stdout
    result = energon_ext("import", "out/mix.yaml", "wiki", "--split", "98,1,1", "--overwrite")
    # 98 % of 30 are 29 documents, 99 % are 30.
    assert result.stdout.splitlines()[1:] == [
        "test: ../wiki has no tokens in documents 30 to 30; left out.",
        "test: empty, so there is no such split.",
        "out/mix.yaml: train, val",
    ]
    write_tokens(folder / "one", [[65]])
    line = error_line(energon_ext("import", "out/one.yaml", "one", "--split", "1,9"))
    assert line == (
        "train: no source has tokens and a weight above 0. train: ../one has no tokens in 0% to "
        "10%; left out."
    )


def test_a_split_without_a_share_for_training_has_none(folder):
    result = energon_ext("import", "out/mix.yaml", "web", "--split", "0,0,100")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[1:] == [
        "train: its share is 0, so there is no such split.",
        "out/mix.yaml: test",
    ]
    (dataset,) = get_val_datasets("out/mix.yaml", **options("test"))
    assert sum(s.documents for s in find_blend(dataset[0]).sources.values()) == 90


@pytest.mark.parametrize("words", [["web.bin"], ["1", "web.idx"], ["1", "web.bin", "2", "web"]])
def test_a_pair_is_named_with_and_without_suffix(folder, words):
    (entry,) = import_splits(*words)["train"]["interleave"]
    assert entry["path"] == "../web"
    get_train_dataset("out/mix.yaml", **options())


@pytest.mark.parametrize("split", [[], ["--split", "9,1"]])
def test_empty_pairs_are_left_out_and_named(folder, split):
    """A run refuses a source without documents, and one whose documents are all empty."""
    write_tokens(folder / "nothing", [])
    write_tokens(folder / "blank", [[], []])
    words = ["1", "nothing", "2", "web", "3", "blank", *split]
    result = energon_ext("import", "out/mix.yaml", *words)
    assert result.exit_code == 0, result.output
    content = yaml.safe_load((folder / "out/mix.yaml").read_text())["splits"]
    for name, node in content.items():
        assert [entry["path"] for entry in node["interleave"]] == ["../web"]
        for pair in ("nothing", "blank"):
            assert f"{name}: ../{pair} has no tokens" in result.stdout
        get_val_datasets("out/mix.yaml", **options(name))
    get_train_dataset("out/mix.yaml", **options())


def test_documents_of_several_sequences_are_named_since_megatron_divides_them(folder):
    builder = IndexedDatasetBuilder("pages.bin")
    for _ in range(4):
        builder.add_document(torch.full((5,), 65), [2, 3])
    builder.finalize("pages.idx")
    result = energon_ext("import", "out/mix.yaml", "1", "pages", "1", "web", "--split", "9,1")
    assert result.exit_code == 0, result.output
    remark = "pages: 4 documents with 8 sequences; Megatron's --split may divide a document."
    assert result.stdout.splitlines()[1] == remark


def test_a_phase_with_empty_pairs_only_is_an_error(folder):
    write_tokens(folder / "nothing", [])
    (folder / "one.txt").write_text("1 web 0 code")
    (folder / "two.txt").write_text("1 nothing 0 web")
    line = error_line(energon_ext(
        "import", "out/mix.yaml", "--data-args-path", "one.txt", "--data-args-path", "two.txt",
        "--phase-transition-iterations", "100",
    ))  # fmt: skip
    assert line.startswith("train: no source of phase 2 has tokens and a weight above 0. train: ..")
    assert not (folder / "out/mix.yaml").exists()


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
        (["1", "web", "--split", "0,0,0"], "shares such as 969,30,1 are needed"),
        (["1", "web", "--split", "1,1,1,1"], "shares such as 969,30,1 are needed"),
        (["1", "web", "--split", "1e3,1"], "shares such as 969,30,1 are needed"),
        (["1", "web", "--split", "1.2.3"], "shares such as 969,30,1 are needed"),
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


FIM = ("--fim-prefix-token", "<p>", "--fim-suffix-token", "254", "--fim-middle-token", "255")


def test_options_of_fill_in_the_middle_become_a_transform_of_each_entry(folder):
    rates = ("--fim-rate", "0.9", "--fim-spm-rate", "0.25", "--fim-eod-token", "2")
    splits = import_splits("web", "code", "--split", "90,10,0", *rates, *FIM)
    expected = {"prefix": "<p>", "suffix": 254, "middle": 255, "rate": 0.9, "spm_rate": 0.25}
    for split in ("train", "val"):
        assert [entry["transform"] for entry in splits[split]["interleave"]] == [
            {"fill_in_the_middle": {**expected, "ends": [2]}}
        ] * 2
    plan = forecast(find_blend(get_train_dataset("out/mix.yaml", **options())), 30)
    assert plan


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (FIM, "--fim-prefix-token: needs --fim-rate."),
        (("--fim-rate", "0.5", *FIM[:4]), "--fim-middle-token: is missing, a token is needed."),
    ],
)
def test_incomplete_options_of_fill_in_the_middle_are_refused(folder, arguments, words):
    assert words in error_line(energon_ext("import", "out/mix.yaml", "web", *arguments))
