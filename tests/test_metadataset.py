# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Schedules at any level, combined with the other features of Energon's metadatasets."""

import json

import pytest
from megatron.energon import (
    Cooker,
    DefaultTaskEncoder,
    TextSample,
    basic_sample_keys,
    get_loader,
    stateless,
)
from megatron.energon.epathlib import EPath
from megatron.energon.metadataset import loader
from megatron.energon.metadataset.loader import prepare_metadataset

from energon_ext import ConfigError, DynamicBlendMixin, get_train_dataset, get_val_datasets
from energon_ext.plan.lookup import find_blend
from tests.support import CRUDE, config, loader_for, take, write_dataset, write_mix

FALLING = {"linear": {0: 4, 100: 0}}


class Encoder(DynamicBlendMixin, DefaultTaskEncoder):
    """Only the mixin."""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for source in ("a", "b", "c"):
        write_dataset(
            root / source,
            [f"{source}{number:03d}" for number in range(60)],
            split_parts=[("train", "shard_000.tar"), ("val", "shard_001.tar")],
        )
    return root


def write(path, content):
    path.write_text(json.dumps(content))
    return path


def stock(splits, version="MetadatasetV2"):
    return {"__module__": "megatron.energon", "__class__": version, "splits": splits}


def shares(path, position, encoder=None, **options):
    """Return the planned shares, keyed by source without its split."""
    dataset = get_train_dataset(
        path,
        worker_config=config(),
        batch_size=2,
        task_encoder=encoder or Encoder(),
        **options,
    )
    planned = find_blend(dataset).shares_at(position)
    return {key.split(":")[0]: round(share, 12) for key, share in planned.items()}


def test_a_schedule_on_the_outer_blend_keeps_the_inner_shares(data):
    write_mix(data / "inner.yaml", [("a", 1), ("b", 3)])
    path = write_mix(data / "outer.yaml", [("inner.yaml", FALLING), ("c", 4)])
    assert shares(path, 0) == {"a": 0.125, "b": 0.375, "c": 0.5}
    # At 50: 2 of 6 to the inner blend.
    assert shares(path, 50) == pytest.approx({"a": 1 / 12, "b": 3 / 12, "c": 8 / 12})
    assert shares(path, 100) == {"a": 0, "b": 0, "c": 1}


def test_a_schedule_on_the_inner_blend_keeps_the_outer_shares(data):
    write_mix(data / "inner.yaml", [("a", FALLING), ("b", 4)])
    path = write_mix(data / "outer.yaml", [("inner.yaml", 1), ("c", 1)])
    assert shares(path, 0) == {"a": 0.25, "b": 0.25, "c": 0.5}
    assert shares(path, 50) == pytest.approx({"a": 1 / 6, "b": 2 / 6, "c": 0.5})
    assert shares(path, 100) == {"a": 0, "b": 0.5, "c": 0.5}


def test_our_metadataset_can_be_nested_in_both_stock_versions(data):
    write_mix(data / "inner.yaml", [("a", FALLING), ("b", 4)])
    entries = [{"path": "inner.yaml", "weight": 1}, {"path": "c", "weight": 3}]
    second = write(data / "v2.yaml", stock({"train": {"blend": entries}}))
    first = write(data / "v1.yaml", stock({"train": {"datasets": entries}}, "Metadataset"))
    for path in (first, second):
        for position, (a, b) in ((0, (0.125, 0.125)), (100, (0, 0.25))):
            planned = shares(path, position)
            assert sorted(planned.values()) == sorted([a, b, 0.75])


def test_a_stock_metadataset_can_be_nested_in_ours(data):
    write(
        data / "inner.yaml",
        stock({"train": {"blend": [{"path": "a", "weight": 1}, {"path": "b", "weight": 1}]}}),
    )
    path = write_mix(data / "outer.yaml", [("inner.yaml", FALLING), ("c", 4)])
    assert shares(path, 0) == {"a": 0.25, "b": 0.25, "c": 0.5}
    assert shares(path, 100) == {"a": 0, "b": 0, "c": 1}


def test_a_join_can_have_a_schedule(data):
    join = {
        "join": [{"path": "a"}, {"path": "b"}],
        "joiner": {"__module__": "megatron.energon", "__class__": "TextSample"},
        "weight": FALLING,
    }
    content = json.loads(write_mix(data / "join.yaml", [("c", 4)]).read_text())
    content["splits"]["train"]["blend"].append(join)
    path = write(data / "join.yaml", content)
    prepare_metadataset(EPath(path))
    assert shares(path, 50) == pytest.approx({"a+b": 2 / 6, "c": 4 / 6})
    dataset = get_train_dataset(
        path, worker_config=config(), batch_size=8, task_encoder=Encoder(), repeat=False
    )
    texts = [text for batch in loader_for(dataset) for text in batch.text]
    # The default joiner takes each field from the last of the joined samples.
    assert sorted(texts) == [f"{source}{number:03d}" for source in "bc" for number in range(50)]


def test_subsets_and_splits_select_their_samples(data):
    content = json.loads(write_mix(data / "subset.yaml", [("a", FALLING), ("a", 4)]).read_text())
    first, second = content["splits"]["train"]["blend"]
    first["subset"] = {"range": ["0%", "50%"]}
    second["subset"] = {"range": ["50%", "100%"]}
    content["splits"]["val"] = {"blend": [{"path": "b", "weight": FALLING}, {"path": "c"}]}
    path = write(data / "subset.yaml", content)
    dataset = get_train_dataset(
        path, worker_config=config(), batch_size=1, task_encoder=Encoder(), repeat=False
    )
    assert find_blend(dataset).keys == ("a:train[0, 0.5]", "a:train[0.5, 1]")
    assert sorted(batch.text[0] for batch in loader_for(dataset)) == [
        f"a{number:03d}" for number in range(50)
    ]
    validation = get_val_datasets(
        path, worker_config=config(), batch_size=1, task_encoder=Encoder()
    )
    texts = [[batch.text[0] for batch in get_loader(dataset)] for dataset, _ in validation]
    assert texts == [[f"{s}{number:03d}" for number in range(50, 60)] for s in "bc"]


def test_crude_samples_are_cooked(data):
    write_dataset(
        data / "crude",
        [f"crude{number}" for number in range(20)],
        dataset_config=CRUDE,
    )

    @stateless
    def cook(sample):
        return TextSample(**basic_sample_keys(sample), text=sample["txt"])

    class Cooking(Encoder):
        cookers = [Cooker(cook)]

    path = write_mix(
        data / "crude.yaml", [("crude", {"step": {0: 1, 5: 0}}), ("a", {"step": {0: 0, 5: 1}})]
    )
    dataset = get_train_dataset(path, worker_config=config(), batch_size=2, task_encoder=Cooking())
    batches = take(loader_for(dataset), 8)
    assert [batch.text[0].startswith("crude") for batch in batches] == [True] * 5 + [False] * 3


def test_energon_can_traverse_our_metadataset(data):
    write_mix(data / "inner.yaml", [("a", FALLING), ("b", 4)])
    path = write_mix(data / "outer.yaml", [("inner.yaml", 1), ("c", 1)])
    if not hasattr(loader, "traverse_metadataset"):
        pytest.skip("Energon < 7.4 does not traverse")
    references = loader.traverse_metadataset(path, split_part="train")
    assert [reference.path.name for reference in references] == ["a", "b", "c"]


def test_an_epochized_blend_cannot_be_nested_in_a_blend(data):
    write(data / "inner.yaml", stock({"train": {"blend_epochized": [{"path": "a"}]}}))
    with pytest.raises(ConfigError, match=r"blend\[0\].*blend_epochized"):
        shares(write_mix(data / "outer.yaml", [("inner.yaml", 1), ("b", 1)]), 0)


def test_the_upstream_proposal_loads_with_only_its_header_changed(data):
    path = data / "upstream.yaml"
    path.write_text(
        """
__module__: energon_ext
__class__: ScheduledMetadataset
splits:
  train:
    blend:
      - path: ./a
        weight:
          step:
            0: 100
            1500: 10
            3000: 0
      - path: ./b
        weight: {linear: {0: 1, 3000: 100}}
      - {path: ./c, weight: 5}
"""
    )
    assert shares(path, 0) == pytest.approx({"a": 100 / 106, "b": 1 / 106, "c": 5 / 106})
    assert shares(path, 1500) == pytest.approx({"a": 10 / 65.5, "b": 50.5 / 65.5, "c": 5 / 65.5})
    assert shares(path, 3000) == pytest.approx({"a": 0, "b": 100 / 105, "c": 5 / 105})


def test_a_source_moved_with_its_yaml_keeps_its_key(data, tmp_path):
    write_dataset(tmp_path / "old" / "web", ["text"] * 9)
    write_mix(tmp_path / "old" / "mix.yaml", [("web", 1)])
    before = list(shares(tmp_path / "old" / "mix.yaml", 0))
    (tmp_path / "old").rename(tmp_path / "new")
    assert list(shares(tmp_path / "new" / "mix.yaml", 0)) == before == ["web"]


def test_a_source_keeps_its_key_at_another_level_of_nesting(data):
    (data / "below").mkdir(exist_ok=True)
    flat = write_mix(data / "flat.yaml", [("a", 1), ("b", 1)])
    write_mix(data / "below" / "inner.yaml", [("../a", 1)])
    nested = write_mix(data / "nested.yaml", [("below/inner.yaml", 1), ("b", 1)])
    assert set(shares(flat, 0)) == set(shares(nested, 0)) == {"a", "b"}
