# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""From YAML files to the mix of a TaskEncoder, including Energon's own metadatasets."""

import json
import shutil

import pytest
from megatron.energon import DefaultTaskEncoder, get_train_dataset
from megatron.energon.metadataset import load_dataset

from energon_ext import ConfigError, PackedTaskEncoder, ScheduleAxis
from energon_ext import get_train_dataset as our_train_dataset
from energon_ext.config.mix import mix_of
from energon_ext.mixture.mixture import Mixture
from energon_ext.mixture.tree import BLEND, INTERLEAVE, Tree
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import config, loader_for, take, write_dataset, write_mix, write_tokens

FALLING = {"linear": {0: 10, 5: 0}}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for name in "abcd":
        write_tokens(root / name, [[5, 6, 7]] * 4)
    write_dataset(root / "web", ["x"] * 3)  # stock metadatasets name no token files
    return root


def ours(path, entries, **fields):
    """Write a metadataset of ours with this blend."""
    blend = [{"path": str(entry), "weight": weight} for entry, weight in entries]
    return ours_with_split(path, {"blend": blend}, **fields)


def ours_with_split(path, split, **fields):
    """Write a metadataset of ours with this train split; ``fields`` are added at the top level."""
    content = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path.write_text(json.dumps({**content, "splits": {"train": split}, **fields}))
    return path


def stock(path, *entries, version="MetadatasetV2"):
    blend = [{"path": str(entry), "weight": weight} for entry, weight in entries]
    name = "blend" if version == "MetadatasetV2" else "datasets"
    content = {"__module__": "megatron.energon", "__class__": version}
    path.write_text(json.dumps({**content, "splits": {"train": {name: blend}}}))
    return path


def load_datasets(path):
    kwargs = {"training": True, "split_part": "train", "worker_config": config()}
    return load_dataset(path).get_datasets(**kwargs).datasets


def shares(mix, position):
    keys = sorted(mix.tree.keys())
    values = Mixture(mix.tree, keys, seed="").shares(position)
    return {key: round(share, 12) for key, share in zip(keys, values)}


# The tree ----------------------------------------------------------------------------------------


def test_entries_follow_yaml_order_and_the_tree_follows_key_order(data):
    inner = ours(data / "inner.yaml", [("c", 1), ("a", 3)])
    entries = [
        {"path": "d", "weight": 2, "name": "last", "max_epochs": 3},
        {"path": str(inner), "weight": {"step": {0: 2, 9: 0}}, "max_epochs": 2},
    ]
    path = ours_with_split(data / "mix.yaml", {"interleave": entries})
    mix = mix_of(load_datasets(path))
    assert [entry.key for entry in mix.entries] == ["d", "c", "a"]
    assert [entry.max_epochs for entry in mix.entries] == [3, 2, 2]
    assert [entry.name for entry in mix.entries] == ["last", None, None]
    assert mix.entries[1].where == f"{inner}: blend[0] (c)"
    assert mix.entries[0].where == f"{path}: interleave[0] (d)"
    assert mix.tree.to_json() == [
        "",
        INTERLEAVE,
        "baseline",
        [{"step": [[0, 2.0], [9, 0.0]]}, 2.0],
        [["inner.yaml:train", BLEND, "baseline", [3.0, 1.0], ["a", "c"]], "d"],
    ]
    outer, below = mix.tree.nodes()
    assert (outer.name, outer.identity) == ("", f"{path}:train")
    assert (below.name, below.identity) == ("inner.yaml:train", f"{inner}:train")


def test_each_copy_of_a_file_is_a_separate_node(data):
    inner = ours(data / "inner.yaml", [("a", 1), ("b", 3)])
    mix = mix_of(load_datasets(ours(data / "mix.yaml", [(inner, 1), (inner, 2)])))
    assert [entry.key for entry in mix.entries] == ["a", "b", "a#2", "b#2"]
    assert [node.name for node in mix.tree.nodes()] == [
        "",
        "inner.yaml:train",
        "inner.yaml:train#2",
    ]


def test_the_smallest_limit_and_the_nearest_name_apply(data):
    near = {"path": "a", "max_epochs": 2, "name": "near"}
    path = ours_with_split(data / "inner.yaml", {"blend": [near]})
    far = {"path": str(path), "max_epochs": 5, "name": "far"}
    (entry,) = mix_of(load_datasets(ours_with_split(data / "mix.yaml", {"blend": [far]}))).entries
    assert (entry.max_epochs, entry.name) == (2, "near")
    assert entry.where.startswith(str(path))


def test_one_dataset_of_a_tree_is_a_mix_by_itself(data):
    """Energon builds a validation dataset for each source, from only its own dataset."""
    inner = ours(data / "inner.yaml", [("a", FALLING), ("b", 0)])
    datasets = load_datasets(ours(data / "mix.yaml", [(inner, 1), ("c", 0), (inner, 1)]))
    for dataset, key in zip(datasets, ["a", "b", "c", "a", "b"], strict=True):
        mix = mix_of([dataset])
        assert [entry.key for entry in mix.entries] == list(mix.tree.keys()) == [key]
        assert mix.entries[0].loaded is dataset


def test_a_dataset_without_a_metadataset_is_a_mix_of_one(data, tmp_path):
    folder = write_dataset(tmp_path / "web", ["x"] * 3)
    mix = mix_of(load_datasets(folder))
    assert [entry.key for entry in mix.entries] == ["web:train"]
    assert shares(mix, 0) == {"web:train": 1}
    assert mix.axis == ScheduleAxis("steps")


def test_an_entry_without_a_source_is_refused(data):
    empty = stock(data / "empty.yaml")
    with pytest.raises(ConfigError, match=r"mix.yaml: blend\[0\] .* names no source"):
        load_datasets(ours(data / "mix.yaml", [(empty, 1), ("a", 1)]))


@pytest.mark.parametrize("split", [{"path": "a"}, {"blend_epochized": [{"path": "a"}]}])
def test_a_split_without_weights_keeps_its_path_and_fields(data, split):
    path = ours_with_split(data / "mix.yaml", split, skip=[[1, 2]], schedule_axis="tokens")
    mix = mix_of(load_datasets(path))
    assert list(mix.tree.keys()) == ["a"]
    assert (mix.run.skip.ranges, mix.axis.unit) == (((1, 2),), "tokens")
    assert mix.entries[0].where == f"{path}: train"


def test_nested_schedules_are_refused_with_both_places(data):
    inner = ours(data / "inner.yaml", [("a", FALLING), ("b", 1)])
    path = ours(data / "mix.yaml", [(inner, FALLING), ("c", 1)])
    places = r"mix\.yaml: blend\[0\] .*\.weight and .*inner\.yaml: blend\[0\] .*\.weight"
    with pytest.raises(ConfigError, match=f"A schedule inside a schedule: .*{places}"):
        mix_of(load_datasets(path))
    content = json.loads(path.read_text())
    content["splits"]["train"]["allow_nested_schedules"] = True
    path.write_text(json.dumps(content))
    assert shares(mix_of(load_datasets(path)), 0)["c"] == round(1 / 11, 12)


# Stock metadatasets around ours -------------------------------------------------------------------


@pytest.mark.parametrize("version", ["MetadatasetV2", "Metadataset"])
def test_a_constant_factor_scales_a_falling_schedule(data, version):
    """{0: 10, 5: 0} x 0.5 is 5 at 0 and 0 at 5, next to a constant 5."""
    inner = ours(data / "inner.yaml", [("a", FALLING), ("b", 10)])
    mix = mix_of(load_datasets(stock(data / "top.yaml", (inner, 1), (inner, 1), version=version)))
    node = mix.tree.node
    assert [0.5 * weight.evaluate(0) for weight in mix.tree.members[0].node.weights] == [5, 5]
    assert [weight.evaluate(0) for weight in node.weights] == [0.5, 0.5]
    assert shares(mix, 0) == {"a": 0.25, "a#2": 0.25, "b": 0.25, "b#2": 0.25}
    assert shares(mix, 5) == {"a": 0, "a#2": 0, "b": 0.5, "b#2": 0.5}


def test_stock_blends_are_constant_factors_around_whole_trees(data):
    """With ours in stock in ours in stock, each level is a node."""
    deep = ours(data / "deep.yaml", [("a", FALLING), ("b", 10)])
    between = stock(data / "between.yaml", (deep, 1), ("web", 3))
    outer = ours(data / "outer.yaml", [(between, 1), ("d", 1)])
    mix = mix_of(load_datasets(stock(data / "top.yaml", (outer, 1))))
    falling = {"linear": [[0, 10.0], [5, 0.0]]}
    in_deep = ["deep.yaml:train", BLEND, "baseline", [falling, 10.0], ["a", "b"]]
    in_between = ["", BLEND, "baseline", [0.25, 0.75], [in_deep, "web:train"]]
    in_outer = ["outer.yaml:train", BLEND, "baseline", [1.0, 1.0], [in_between, "d"]]
    assert mix.tree.to_json() == ["", BLEND, "baseline", [1.0], [in_outer]]
    names = [node.name for node in mix.tree.nodes()]
    assert names == ["", "outer.yaml:train", "", "deep.yaml:train"]
    assert shares(mix, 0) == {"a": 0.0625, "b": 0.0625, "web:train": 0.375, "d": 0.5}


def test_a_node_below_a_stock_metadataset_keeps_the_name_of_its_file(data):
    inner = ours(data / "inner.yaml", [("a", 1), ("b", 1)])
    between = stock(data / "between.yaml", (inner, 1))
    names = []
    for reference in (between, inner):
        path = ours_with_split(data / "mix.yaml", {"path": str(reference)})
        names.append([node.identity for node in mix_of(load_datasets(path)).tree.nodes()])
    assert names == [["", f"{inner}:train"], [f"{path}:train"]]


def test_our_single_dataset_file_is_allowed_in_any_stock_metadataset(data):
    one = ours_with_split(data / "one.yaml", {"path": "a"})
    for version in ("MetadatasetV2", "Metadataset"):
        path = stock(data / "top.yaml", (one, 1), (one, 3), version=version)
        assert shares(mix_of(load_datasets(path)), 0) == {"a": 0.25, "a#2": 0.75}
    epochized = {"blend_epochized": [{"path": str(one), "repetitions": 2}, {"path": str(one)}]}
    for module, name in (
        ("megatron.energon", "MetadatasetV2"),
        ("energon_ext", "ScheduledMetadataset"),
    ):
        content = {"__module__": module, "__class__": name, "splits": {"train": epochized}}
        (data / "top.yaml").write_text(json.dumps(content))
        mix = mix_of(load_datasets(data / "top.yaml"))
        assert mix.tree.to_json() == ["", BLEND, "baseline", [8.0, 4.0], ["a", "a#2"]]


# Encoders without the mixin -----------------------------------------------------------------------


def train(path):
    return get_train_dataset(
        path,
        worker_config=config(),
        batch_size=1,
        task_encoder=DefaultTaskEncoder(),
        shuffle_buffer_size=None,
        max_samples_per_sequence=None,
    )


def test_constant_blends_give_the_floats_of_stock_energon(data):
    inner = ours(data / "inner.yaml", [("a", 1), ("b", 3)])
    path = stock(
        data / "top.yaml", (ours(data / "mix.yaml", [("c", 2), (inner, 6)]), 1), ("web", 3)
    )
    weights = [dataset.weight for dataset in load_datasets(path)]
    assert all(isinstance(weight, float) for weight in weights)
    assert [float(weight) for weight in weights] == weights == [0.0625, 0.046875, 0.140625, 0.75]


@pytest.mark.parametrize(
    ("rule", "weight"), [("blend", {"step": {0: 1, 9: 2}}), ("blend", 0), ("interleave", 1)]
)
def test_an_encoder_without_the_mixin_is_an_error(tmp_path, rule, weight):
    for name in "ab":
        write_dataset(tmp_path / name, ["x"] * 3)
    entries = [{"path": "a", "weight": weight}, {"path": "b", "weight": 1}]
    path = ours_with_split(tmp_path / "inner.yaml", {rule: entries})
    for outer in (path, write_mix(tmp_path / "mix.yaml", [("a", 1), (path, 1)])):
        with pytest.raises(
            ConfigError, match=r"inner\.yaml: .*\[0\] .*\.weight: .*DynamicBlendMixin"
        ):
            train(outer)


# Fields for the whole run -------------------------------------------------------------------------


def test_breakpoints_count_the_unit_of_the_outermost_file(data):
    constant = ours(data / "constant.yaml", [("a", 1)])
    tokens = ours(data / "tokens.yaml", [("b", FALLING)], schedule_axis="tokens")
    assert mix_of(load_datasets(constant)).axis.unit == "steps"
    assert mix_of(load_datasets(tokens)).axis.unit == "tokens"
    both = [(constant, 1), (tokens, 1)]
    assert (
        mix_of(load_datasets(ours(data / "mix.yaml", both, schedule_axis="tokens"))).axis.unit
        == "tokens"
    )
    for fields, unit in (({}, "steps"), ({"schedule_axis": "samples"}, "samples")):
        with pytest.raises(
            ConfigError, match=rf"mix\.yaml counts {unit}, but .*tokens\.yaml counts tokens"
        ):
            load_datasets(ours(data / "mix.yaml", both, **fields))


def test_sibling_files_must_count_the_same_unit(data):
    steps = ours(data / "steps.yaml", [("a", FALLING)])
    tokens = ours(data / "tokens.yaml", [("b", FALLING)], schedule_axis="tokens")
    for first, second in ((steps, tokens), (tokens, steps)):
        words = f"{first.name} counts {first.stem}, but .*{second.name} counts {second.stem}; give"
        with pytest.raises(ConfigError, match=words):
            mix_of(load_datasets(stock(data / "top.yaml", (first, 1), (second, 1))))
    path = stock(data / "top.yaml", (tokens, 1), ("web", 1))
    assert mix_of(load_datasets(path)).axis.unit == "tokens"


@pytest.mark.parametrize("unit", ["epochs", 5, "", ["steps"]])
def test_an_unknown_unit_is_refused_with_the_file(data, unit):
    with pytest.raises(ConfigError, match=r"mix\.yaml: schedule_axis: .* found, one of steps, tok"):
        load_datasets(ours(data / "mix.yaml", [("a", 1)], schedule_axis=unit))


def test_a_launch_script_can_set_the_end_but_not_the_unit(data):
    mix = mix_of(load_datasets(ours(data / "mix.yaml", [("a", 1)], schedule_axis="samples")))
    assert mix.axis_with(None) == mix.axis == ScheduleAxis("samples")
    for given in (ScheduleAxis(end=7), ScheduleAxis("samples", end=7)):
        assert mix.axis_with(given) == ScheduleAxis("samples", end=7)
    with pytest.raises(
        ConfigError, match=r"schedule_axis: steps found in the launch script, but .*mix"
    ):
        mix.axis_with(ScheduleAxis("steps"))


def test_a_thousand_weights_share_one_tree(data):
    datasets = load_datasets(ours(data / "mix.yaml", [("a", n + 1) for n in range(1000)]))
    assert len({id(dataset.tree) for dataset in datasets}) == 1
    assert sum(map(float, [dataset.weight for dataset in datasets])) == pytest.approx(1)
    mix = mix_of(datasets)
    assert isinstance(mix.tree, Tree) and len(mix.entries) == 1000


STOCK = (
    "{__module__: megatron.energon, __class__: MetadatasetV2, splits: {train: {blend: "
    "[{path: data/web, weight: 1}, {path: data/code, weight: 2}]}}}"
)


@pytest.mark.parametrize("name", ["stock.yaml", "data/web"])
def test_sources_without_a_metadataset_of_ours_keep_their_state_if_all_moves(name, tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    for source in ("web", "code"):
        write_dataset(before / "data" / source, [f"{source} {n}" for n in range(40)])
    (before / "stock.yaml").write_text(STOCK)

    def loader(folder):
        encoder = PackedTaskEncoder(ByteTokenizer(), 16)
        dataset = our_train_dataset(
            folder / name, worker_config=config(), batch_size=2, task_encoder=encoder
        )
        return loader_for(dataset)

    first = loader(before)
    take(first, 4)
    state = first.state_dict()
    expected = [batch.tokens.tolist() for batch in take(first, 6)]
    shutil.move(before, after)
    second = loader(after)
    second.load_state_dict(state)
    assert [batch.tokens.tolist() for batch in take(second, 6)] == expected
    assert {change.change for change in second.changes} == {"kept"}
