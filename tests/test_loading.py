# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Wrong paths, wrong YAML and hostile YAML are refused before any data is read."""

import json

import numpy as np
import pytest
from megatron.energon import DefaultTaskEncoder
from megatron.energon.epathlib import EPath
from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

from energon_ext import (
    ConfigError,
    PackedTaskEncoder,
    get_val_datasets,
)
from energon_ext.encoders.load import load_mix, load_split
from energon_ext.plan.lookup import find_blend
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import (
    TEXT_SAMPLE,
    config,
    loader_for,
    take,
    write_mix,
    write_tokens,
)
from tests.test_yaml_safety import load, refuse


def test_a_missing_path_is_named_with_its_place(tmp_path, good):
    refuse(tmp_path / "missing", "missing: does not exist")
    mix = write_mix(tmp_path / "mix.yaml", [("good", 1), ("nowhere", 1)])
    refuse(mix, "mix.yaml: splits.train.blend[1]: ", "nowhere: does not exist")


def test_a_jsonl_file_is_indexed_once_automatically(tmp_path):
    path = tmp_path / "books.jsonl"
    path.write_text('{"text": "one"}\n\n{"text": "two"}\n')
    mix = write_mix(tmp_path / "mix.yaml", [("books.jsonl", 1)])
    for _ in range(2):
        (batch,) = take(loader_for(load(mix)), 1)
        assert [*batch.tokens_per_source()] == ["books.jsonl"]
        # Both lines have 16 bytes; the blank line between them belongs to the second.
        assert np.fromfile(f"{path}.idx", np.uint64).tolist() == [0, 17, 33]
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        ".energon_ext_cache", "books.jsonl", "books.jsonl.idx", "mix.yaml",
    ]  # fmt: skip


def test_data_for_another_task_is_refused_with_source_sample_and_fields(tmp_path, capfd):
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a", "response": "b"}\n' * 100)
    mix = write_mix(tmp_path / "mix.yaml", [("chat.jsonl", 1)])
    with pytest.raises(ConfigError) as error:
        load(mix)
    message = str(error.value)
    assert message.endswith(
        "chat.jsonl: 100 documents in a row cannot be trained on, the first: Sample 0: no `text`; "
        "it has ['prompt', 'response']. Use the TaskEncoder for such samples (--task or --encoder)."
    )
    assert "Traceback" not in capfd.readouterr().err


def test_the_error_for_a_bare_token_file_shows_a_metadataset(tmp_path):
    pair = write_tokens(tmp_path / "web_text_document", [[1, 2, 3]])
    for path in (pair, f"{pair}.bin", tmp_path):
        refuse(path, "token files need a metadataset", f"splits: {{train: {{path: {path}}}}}")


def test_an_empty_source_and_a_missing_split_are_named(tmp_path, good):
    mix = write_mix(tmp_path / "mix.yaml", [("good", 1)], split="test")
    refuse(mix, "no split 'train'; it has test")
    refuse(mix, "no split 'test'; it has train", split_part="test")
    split = good / ".nv-meta" / "split.yaml"
    split.write_text("split_parts: {train: []}\nexclude: []\n")
    refuse(write_mix(tmp_path / "mix.yaml", [("good", 1)]), "split 'train' has no samples")


def test_a_stock_metadataset_without_sources_is_refused(tmp_path):
    text = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: {blend: []}}\n"
    (tmp_path / "empty.yaml").write_text(text)
    refuse(tmp_path / "empty.yaml", "names no source; list at least one")


def test_every_way_to_load_a_split_gives_one_error_for_one_fault(tmp_path, good):
    text = "{path: good, subset: {range: [x, y]}}"
    path = tmp_path / "stock.yaml"
    path.write_text(
        f"__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {{train: {text}}}\n"
    )
    refuse(path, "stock.yaml: Range must be a percentage")
    for load_any in (
        lambda: load_mix(path, split_part="train", trusted_modules=()),
        lambda: load_split(path, "train"),
    ):
        with pytest.raises(ConfigError, match="stock.yaml: Range must be a percentage"):
            load_any()


@pytest.mark.parametrize("weight", [-1, "much", None, True, {"step": {}}, {"slope": {0: 1}}])
def test_a_wrong_weight_is_named_with_its_place(tmp_path, good, weight):
    mix = write_mix(tmp_path / "mix.yaml", [("good", 1), ("good", weight)])
    refuse(mix, "mix.yaml: blend[1] (good).weight")


@pytest.mark.filterwarnings("ignore:.*listed more than once")
def test_a_position_where_all_weights_are_zero_is_found_before_the_run(tmp_path, good):
    falling = {"linear": {0: 1, 50: 0}}
    rising = {"step": {0: 0, 52: 1}}
    mix = write_mix(tmp_path / "mix.yaml", [("good", falling), ("good", rising)])
    refuse(mix, "Every weight is 0 at step 50")
    # If one starts at the step where the other ends, there is no gap.
    load(write_mix(tmp_path / "mix.yaml", [("good", falling), ("good", {"step": {0: 0, 50: 1}})]))


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ("batch_sise", "did you mean batch_size"),
        ("shuffle_buffer", "did you mean shuffle_buffer_size"),
        ("row_per_step", "did you mean rows_per_step"),
        ("zzz", "it has allow_dataset_code, auto_decode, av_decode"),
    ],
)
def test_an_unknown_option_is_refused_with_suggestions(good, option, near):
    refuse(good, f"get_train_dataset: no option '{option}'; it has ", near, **{option: 1})
    with pytest.raises(ConfigError, match=f"get_val_datasets: no option '{option}'"):
        get_val_datasets(
            good,
            worker_config=config(),
            batch_size=2,
            task_encoder=PackedTaskEncoder(ByteTokenizer(), 16),
            **{option: 1},
        )


def test_energon_options_are_accepted(good):
    load(good, auto_decode=True, packing_buffer_size=8, repeat=False)


def test_rows_per_step_must_be_a_multiple_of_the_global_batch(good):
    message = "rows_per_step: {} found; it must be a multiple of batch_size x data-parallel ranks"
    refuse(good, message.format(7) + " = 2 x 1", rows_per_step=7)
    refuse(good, message.format(6) + " = 2 x 2", rows_per_step=6, worker_config=config(0, 1, 2))
    for wrong in (0, -4, 2.0, True, "8"):
        refuse(good, f"get_train_dataset: rows_per_step: {wrong!r} found", rows_per_step=wrong)
    load(good, rows_per_step=8, worker_config=config(0, 1, 2))


def test_rows_per_step_needs_an_encoder_that_plans_steps(good):
    refuse(
        good,
        "rows_per_step: 4 found, but a DefaultTaskEncoder plans no steps",
        "DynamicBlendMixin",
        rows_per_step=4,
        task_encoder=DefaultTaskEncoder(),
    )


def test_one_encoder_serves_datasets_with_different_rows_per_step(good):
    encoder = PackedTaskEncoder(ByteTokenizer(), 16, packing_buffer_docs=4)
    rows = [
        find_blend(load(good, task_encoder=encoder, rows_per_step=wanted)).topology.rows_per_step
        for wanted in (4, 8, None)
    ]
    assert rows == [4, 8, 2]


@pytest.mark.filterwarnings("ignore:.*listed more than once")
def test_the_error_for_nested_schedules_names_both_places(tmp_path, good):
    schedule = {"step": {0: 1, 9: 2}}
    write_mix(tmp_path / "inner.yaml", [("good", schedule)])
    outer = write_mix(tmp_path / "outer.yaml", [("inner.yaml", schedule), ("good", 1)])
    refuse(outer, "outer.yaml: blend[0]", "inner.yaml: blend[0]")
    load(
        write_mix(
            tmp_path / "outer.yaml",
            [("inner.yaml", schedule), ("good", 1)],
            allow_nested_schedules=True,
        )
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "splits:\n  train:\n    blend:\n      - {path: good, weight: 1, weight: 2}\n",
            "weight given",
        ),
        ("splits:\n  train:\n    datasets:\n      - {path: 3}\n", "a path is needed"),
    ],
)
def test_a_file_that_is_not_a_metadataset_is_refused(tmp_path, good, text, message):
    (tmp_path / "mix.yaml").write_text(text)
    refuse(tmp_path / "mix.yaml", "mix.yaml", message)


def test_a_metadataset_that_contains_itself_is_refused(tmp_path, good):
    write_mix(tmp_path / "a.yaml", [("b.yaml", 1)])
    write_mix(tmp_path / "b.yaml", [("a.yaml", 1)])
    refuse(tmp_path / "a.yaml", "contains itself")


def command(witness):
    return {"__module__": "os", "__function__": "system", "command": f"touch {witness}"}


def hostile_metadataset(tmp_path, good, witness):
    mix = write_mix(tmp_path / "mix.yaml", [("good", 1)])
    content = json.loads(mix.read_text())
    content["splits"]["other"] = command(witness)
    mix.write_text(json.dumps(content))
    return mix


def hostile_header(tmp_path, good, witness):
    mix = tmp_path / "mix.yaml"
    mix.write_text(json.dumps({**command(witness), "splits": {"train": {"path": "good"}}}))
    return mix


def hostile_nested(tmp_path, good, witness):
    (tmp_path / "inner").mkdir()
    hostile_metadataset(tmp_path / "inner", good, witness)
    return write_mix(tmp_path / "outer.yaml", [("inner/mix.yaml", 1), ("good", 1)])


def hostile_weight(tmp_path, good, witness):
    return write_mix(tmp_path / "mix.yaml", [("good", {"step": {"0": command(witness)}})])


def hostile_leaf(tmp_path, good, witness):
    (good / ".nv-meta" / "dataset.yaml").write_text(json.dumps(command(witness)))
    return good


def hostile_leaf_loader(tmp_path, good, witness):
    loader = good / ".nv-meta" / "sample_loader.py"
    loader.write_text(f"open({str(witness)!r}, 'w')\ndef load(raw): ...\ndef parts(p): ...\n")
    settings = {
        "sample_type": TEXT_SAMPLE,
        "sample_loader": "sample_loader.py:load",
        "part_filter": "sample_loader.py:parts",
    }
    (good / ".nv-meta" / "dataset.yaml").write_text(json.dumps(settings))
    return good


@pytest.mark.parametrize(
    "write_hostile",
    [
        hostile_metadataset,
        hostile_header,
        hostile_nested,
        hostile_weight,
        hostile_leaf,
        hostile_leaf_loader,
    ],
)
def test_code_in_yaml_is_refused_and_does_not_run(tmp_path, good, write_hostile):
    witness = tmp_path / "it_ran"
    path = write_hostile(tmp_path, good, witness)
    refuse(path)
    with pytest.raises(ConfigError):
        get_val_datasets(
            path,
            worker_config=config(),
            batch_size=1,
            split_part="train",
            task_encoder=PackedTaskEncoder(ByteTokenizer(), 16),
        )
    assert not witness.exists()


def test_dataset_code_runs_only_if_the_caller_trusts_it(tmp_path, good):
    loader = good / ".nv-meta" / "sample_loader.py"
    loader.write_text(
        "def load(raw): return {'text': raw['txt'].upper()}\n"
        "def parts(part): return part == 'txt'\n"
    )
    settings = {
        "sample_type": TEXT_SAMPLE,
        "sample_loader": "sample_loader.py:load",
        "part_filter": "sample_loader.py:parts",
    }
    (good / ".nv-meta" / "dataset.yaml").write_text(json.dumps(settings))
    refuse(good, "sample_loader.py:load", "allow_dataset_code=True")
    batch = take(loader_for(load(good, allow_dataset_code=True)), 1)[0]
    assert "TEXT" in ByteTokenizer().decode(batch.tokens)
    trusted = {"sample_type": {"__module__": "tests.support", "__class__": "OtherText"}}
    (good / ".nv-meta" / "dataset.yaml").write_text(
        json.dumps({**trusted, "field_map": {"text": "txt"}})
    )
    refuse(good, "tests.support.OtherText", "trusted_modules=('tests.support',)")
    load(good, trusted_modules=["tests.support"])


def test_a_jsonl_file_is_a_source_like_any_other(tmp_path, good):
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(12)))
    CrudeJsonlDatasetFactory.prepare_dataset(EPath(path))
    mix = write_mix(tmp_path / "mix.yaml", [("good", 1), ("lines.jsonl", 1)])
    batches = take(loader_for(load(mix)), 8)
    seen = {source for batch in batches for source in batch.tokens_per_source()}
    assert seen == {"good:train", "lines.jsonl"}


def test_validation_accepts_dataset_code_and_files_that_the_caller_names(tmp_path, good):
    meta = good / ".nv-meta"
    (meta / "loader.py").write_text(
        "def load(raw): return {'text': raw['txt'].upper()}\n"
        "def parts(part): return part == 'txt'\n"
    )
    settings = {
        "sample_type": TEXT_SAMPLE,
        "sample_loader": "loader.py:load",
        "part_filter": "loader.py:parts",
    }
    (meta / "loud.yaml").write_text(json.dumps(settings))
    (meta / "half.yaml").write_text((meta / "split.yaml").read_text().replace("train", "half"))
    options = {"split_part": "half", "split_config": "half.yaml", "dataset_config": "loud.yaml"}
    ((dataset, _),) = get_val_datasets(
        good,
        worker_config=config(),
        batch_size=1,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), 16),
        allow_dataset_code=True,
        **options,
    )
    batch = take(loader_for(dataset), 1)[0]
    assert "TEXT" in ByteTokenizer().decode(batch.tokens)
