# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Hostile and broken files run no code and hit a limit everywhere."""

import argparse
import json
import pickle
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from webdataset import ShardWriter

from energon_ext import (
    ConfigError,
    PackedTaskEncoder,
    PromptTaskEncoder,
    SFTTaskEncoder,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.cli import echo
from energon_ext.cli.main import main
from energon_ext.config import yaml_file
from energon_ext.encoders.text import TextDecoder
from energon_ext.errors import printable
from energon_ext.storage import folders
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import (
    CRUDE,
    TEXT_SAMPLE,
    config,
    loader_for,
    prepare_shards,
    take,
    write_dataset,
    write_mix,
    write_tokens,
)

SCHEDULED = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
STOCK = {"__module__": "megatron.energon", "__class__": "MetadatasetV2"}
FIRST = {"__module__": "megatron.energon", "__class__": "Metadataset"}


def load(path, **options):
    encoder = PackedTaskEncoder(ByteTokenizer(), 16, packing_buffer_docs=4)
    defaults = {"worker_config": config(), "task_encoder": encoder, "batch_size": 2}
    return get_train_dataset(path, **{**defaults, **options})


def refuse(path, *messages, **options):
    """Check that loading fails at once, with one line that contains every message."""
    begin = time.monotonic()
    with pytest.raises(ConfigError) as error:
        load(path, **options)
    assert time.monotonic() - begin < 10
    text = str(error.value)
    for message in messages:
        assert message in text, text
    assert "\n" not in text and "secret" not in text and len(text) < 2000


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture
def evil(tmp_path):
    """A metadataset that would run a command, with a check that it did not."""
    witness = tmp_path / "it_ran"
    weight = {"__module__": "os", "__function__": "system", "command": f"touch {witness}"}
    blend = [{"path": "../good", "weight": weight}]
    write(tmp_path / "evil.yaml", {**SCHEDULED, "splits": {"train": {"blend": blend}}})
    yield "./evil.yaml"
    assert not witness.exists()


# References anywhere in a file ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["x.aux", "aux", "path", "subflavors", "aux.path"])
def test_splits_with_any_name_are_all_checked(tmp_path, good, evil, name):
    splits = {"train": {"path": "good"}, name: {"path": evil}}
    mix = write(tmp_path / "mix.yaml", {**SCHEDULED, "splits": splits})
    refuse(mix, "evil.yaml: splits.train.blend[0].weight: names os.system")
    outer = write(tmp_path / "outer.yaml", {**STOCK, "splits": {"train": {"path": "mix.yaml"}}})
    refuse(outer, "names os.system")
    result = CliRunner().invoke(main, ["plan", str(outer)])
    assert result.exit_code == 2 and "names os.system" in result.output


@pytest.mark.parametrize("name", ["aux_meta", "aux", "path", "subflavors"])
def test_join_members_with_any_name_are_all_checked(tmp_path, good, name):
    bad = write_dataset(tmp_path / "bad", ["text"])
    hostile = {"sample_type": {"__module__": "os", "__class__": "system"}}
    write(bad / ".nv-meta" / "dataset.yaml", hostile)
    sample = {"__module__": "megatron.energon", "__class__": "TextSample"}
    join = {"join": {"text": {"path": "good"}, name: {"path": "bad"}}, "joiner": sample}
    mix = write(tmp_path / "mix.yaml", {**SCHEDULED, "splits": {"train": join}})
    refuse(mix, "bad/.nv-meta/dataset.yaml: sample_type: names os.system")


def test_fields_without_datasets_are_not_followed(tmp_path, good):
    reference = {"path": "good", "subflavors": {"path": "nowhere"}}
    load(write(tmp_path / "mix.yaml", {**SCHEDULED, "splits": {"train": reference}}))


@pytest.mark.parametrize("header", [FIRST, {}, {"__module__": "energon_ext", "__class__": None}])
@pytest.mark.parametrize("name", ["x.jsonl", "x.bin", "x.txt", "x"])
def test_version_1_treats_every_file_as_a_metadataset(tmp_path, good, evil, header, name):
    (tmp_path / "evil.yaml").rename(tmp_path / name)
    for index in ("x.jsonl.idx", "x.idx"):
        (tmp_path / index).touch()
    nested = {**header, "splits": {"train": {"datasets": [{"path": name}]}}}
    mix = write(tmp_path / "mix.yaml", json.dumps(nested))
    refuse(mix, f"{name}: splits.train.blend[0].weight: names os.system")


def test_a_metadataset_cannot_override_its_own_path(tmp_path, good, evil):
    content = {**STOCK, "path": f"{tmp_path}/x/m.yaml", "splits": {"train": {"path": "good"}}}
    mix = write(tmp_path / "mix.yaml", content)
    write(tmp_path / "x" / "good" / ".nv-meta" / "dataset.yaml", "")
    refuse(mix, "mix.yaml: no field 'path'; it has __class__, __module__, splits")


def test_the_configuration_named_by_the_caller_is_checked(good):
    hostile = {"sample_type": {"__module__": "os", "__class__": "system"}, "field_map": {}}
    write(good / ".nv-meta" / "other.yaml", hostile)
    refuse(good, "other.yaml: sample_type: names os.system", dataset_config="other.yaml")
    many = {"split_parts": {"train": ["{0..999999999}.tar"]}, "exclude": []}
    write(good / ".nv-meta" / "many.yaml", many)
    refuse(good, "many.yaml: train: more than 1,000,000 shards", split_config="many.yaml")
    split = good / ".nv-meta" / "split.yaml"
    write(good / ".nv-meta" / "same.yaml", split.read_text())
    load(good, split_config="same.yaml")
    write(split, many)
    refuse(good, "split.yaml: train: more than 1,000,000 shards", split_config="same.yaml")


@pytest.mark.parametrize(
    "weight", [CRUDE, SCHEDULED, {"__module__": "os", "__class__": ["system"]}, {"__class__": "os"}]
)
def test_a_class_is_allowed_only_where_it_belongs(tmp_path, good, weight):
    refuse(write_mix(tmp_path / "mix.yaml", [("good", weight)]), "weight: names ")
    write(tmp_path / "top.yaml", {**CRUDE, "splits": {"train": {"path": "good"}}})
    refuse(tmp_path / "top.yaml", "top level: names megatron.energon.CrudeWebdataset")


def test_token_files_need_a_metadataset_that_reads_them(tmp_path):
    write_tokens(tmp_path / "web", [[1, 2, 3]])
    mix = write(tmp_path / "mix.yaml", {**STOCK, "splits": {"train": {"path": "web"}}})
    refuse(mix, "splits.train: ", "web: token files, which MetadatasetV2 cannot read")


# Members of samples -------------------------------------------------------------------------


class Run:
    """Creates a file when it is unpickled."""

    def __init__(self, witness):
        self.witness = witness

    def __reduce__(self):
        return (open, (str(self.witness), "w"))


ENCODERS = {
    "text": (lambda: PackedTaskEncoder(ByteTokenizer(), 16, packing_buffer_docs=4), {"text": "x"}),
    "sft": (
        lambda: SFTTaskEncoder(ByteTokenizer(), 32, packing_buffer_docs=4),
        {"prompt": "x", "response": "y"},
    ),
    "prompts": (lambda: PromptTaskEncoder(ByteTokenizer()), {"prompt": "x"}),
}


def encode_members(sample):
    """Return the members unchanged: ShardWriter would pickle them again."""
    return {
        k: v if isinstance(v, (str, bytes)) else json.dumps(v).encode() for k, v in sample.items()
    }


@pytest.mark.parametrize("kind", ENCODERS)
def test_no_member_of_a_sample_is_unpickled(tmp_path, kind):
    new_encoder, record = ENCODERS[kind]
    witness = tmp_path / "it_ran"
    folder = tmp_path / "crude"
    folder.mkdir()
    pickled = pickle.dumps(Run(witness))
    with ShardWriter(f"{folder}/shard_%03d.tar", encoder=encode_members, verbose=0) as shards:
        for index in range(8):
            members = dict.fromkeys(("pyd", "pickle", "pth", "a.pyd", "pyd.gz"), pickled)
            shards.write({"__key__": f"{index}", "json": record, **members})
    prepare_shards(folder, CRUDE)
    take(loader_for(load(folder, task_encoder=new_encoder())), 2)
    assert not witness.exists()


# Limits -------------------------------------------------------------------------------------


def test_duplicate_keys_are_found_in_large_mappings(tmp_path):
    keys = "".join(f"key{n}: 1\n" for n in range(90_000))
    refuse(write(tmp_path / "mix.yaml", keys + "key5: 1\n"), "mix.yaml: key5 given twice")


def test_exponential_nesting_is_counted_without_opening_each_file_again(tmp_path, good):
    for n in range(1, 15):
        entries = [(f"m{n - 1}.yaml", 1)] * 5 if n > 1 else [("good", 1)]
        write_mix(tmp_path / f"m{n}.yaml", entries)
    refuse(tmp_path / "m14.yaml", "splits.train.blend", "more than 100,000 sources")


def test_nesting_is_limited_even_if_every_file_was_seen_before(tmp_path, good):
    write_mix(tmp_path / "m00.yaml", [("good", 1)])
    for n in range(1, 20):
        write_mix(tmp_path / f"m{n:02}.yaml", [(f"m{n - 1:02}.yaml", 1)])
    refuse(tmp_path / "m19.yaml", "nested more than 16 deep")
    refuse(
        write_mix(tmp_path / "all.yaml", [(f"m{n:02}.yaml", 1) for n in range(20)]),
        "nested more than 16 deep",
    )


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("{000000..999999999}.tar", "more than 1,000,000 shards"),
        ("{0..9}" * 12, "more than 1,000,000 shards"),
        ("{{0..9}{0..9}{0..9}{0..9}{0..9}{0..9}{0..9}{0..9},x}", "more than 1,000,000 shards"),
        ("{a..z}" * 8, "more than 1,000,000 shards"),
        ("{a,b}" * 40, "more than 1,000,000 shards"),
        ("{" * 400 + "a" + "}" * 400, "64 braces"),
        ("a" * 5000, "a backslash, 64 braces or 1,000 characters"),
        ("{a\\},b}" * 40, "a name has a backslash"),
        ("{1..999999999\n}.tar", "more than 1,000,000 shards"),
        ("{a", "unbalanced braces"),
    ],
)
def test_shard_patterns_have_limits(good, pattern, message):
    shards = ["shard_000.tar"]
    for part, parts, exclude in (
        ("train", {"train": [pattern]}, []),
        ("val", {"train": shards, "val": [pattern]}, []),
        ("exclude", {"train": shards}, [pattern]),
    ):
        content = {"split_parts": parts, "exclude": exclude}
        write(good / ".nv-meta" / "split.yaml", content)
        refuse(good, f"split.yaml: {part}: ", message)


def test_ordinary_shard_patterns_are_expanded(good):
    content = {"split_parts": {"train": ["shard_{000..000}.tar", "{a,b{1..2}}.tar"]}}
    write(good / ".nv-meta" / "split.yaml", {**content, "exclude": ["{a,b{1..2}}.tar"]})
    assert yaml_file.expand_shards(content["split_parts"]["train"], "") == [
        "shard_000.tar", "a.tar", "b1.tar", "b2.tar",
    ]  # fmt: skip
    load(good)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + "[" * 100_000 + "]" * 100_000, "more than 32 levels"),
        ("- " * 100_000, "more than 32 levels"),
        ("[" + "1," * 300_000 + "1]", "250,000 entries"),
        ("#" * (5 * 2**20), "has more than 4,194,304 bytes"),
        ("a: &a [x]\nb: &b [*a,*a]\nc: [*b,*b]\n", "not a metadataset"),
        ("3", "3 found, a mapping is needed"),
        ("[1, 2]", "[1, 2] found, a mapping is needed"),
        ("---\na: 1\n---\nb: 2\n", "a mapping is needed"),
        ("? [1]\n: 2\n", "not a YAML file"),
        ("a:\n", "`a` has no value"),
        ("a: \xff", "not a YAML file"),
        ("{x: !a !b !c !d !e y}", "more than 2 tags"),  # alone, the parser crashes the process
        ("&\n!\n!<a b> \n\n  !!map ? \n  [&\n", "more than 2 tags"),
        ("# !a !b !c !d\n{x: !a !b # !c\n  !d y}", "more than 2 tags"),
        ("# !a !b !c !d\n  # !!! !!! !!!\n[1]", "[1] found, a mapping is needed"),  # comments
    ],
    ids=lambda text: text[:12],
)
def test_yaml_files_have_limits(tmp_path, good, text, message):
    for path in (tmp_path / "mix.yaml", good / ".nv-meta" / "dataset.yaml"):
        path.write_bytes(text.encode("latin-1"))
    refuse(tmp_path / "mix.yaml", "mix.yaml:", message)
    if message != "not a metadataset":
        refuse(good, "dataset.yaml:", message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "not a JSON file"),
        ("{", "not a JSON file"),
        ("[]", "a mapping is needed"),
        ("{}", "no split 'train'; it has none"),
        ('{"split_parts": {"train": ["a", "{b,a}"]}}', "train: a is listed twice"),
        ('{"split_parts": {"train": 3}}', "split.json: train: 3 found, a list of shards is needed"),
        (" " * (33 * 2**20), "has more than 33,554,432 bytes"),
    ],
    ids=lambda text: text[:12],
)
def test_json_files_have_limits(good, text, message):
    (good / ".nv-meta" / "split.yaml").unlink()
    write(good / ".nv-meta" / "split.json", text)
    refuse(good, message)


@pytest.mark.parametrize("size", [0, -1, 1.5, True])
def test_batch_size_must_be_at_least_one(good, size):
    refuse(good, f"batch_size: {size!r} found, an integer >= 1", batch_size=size)
    with pytest.raises(ConfigError, match="batch_size"):
        get_val_datasets(
            good,
            worker_config=config(),
            batch_size=size,
            split_part="train",
            task_encoder=PackedTaskEncoder(ByteTokenizer(), 16),
        )


@pytest.mark.parametrize("path", ["links", "links/**/a", "links/**/a/**/b"])
def test_folders_reached_through_links_are_limited(tmp_path, path, monkeypatch):
    monkeypatch.setattr(folders, "MAX_FOLDERS", 5_000)
    (tmp_path / "links").mkdir()
    for name in ("one", "two"):
        (tmp_path / "links" / name).symlink_to(".")
    refuse(write_mix(tmp_path / "mix.yaml", [(path, 1)]), "more than 5,000 folders")


def test_paths_the_system_rejects_are_errors(tmp_path):
    (tmp_path / "circle").symlink_to("circle")
    for path in ("circle", "a" * 5000):
        refuse(write_mix(tmp_path / "mix.yaml", [(path, 1)]), "mix.yaml: ")


@pytest.mark.parametrize("weights", [(0, 0), (-1, 1), (1e308, 1e308), (10**400, 1)])
@pytest.mark.parametrize("header", [SCHEDULED, STOCK])
def test_weights_that_cannot_be_normalized_are_one_error(tmp_path, good, header, weights):
    blend = [{"path": "good", "weight": weight} for weight in weights]
    refuse(write(tmp_path / "mix.yaml", {**header, "splits": {"train": {"blend": blend}}}), "")


def test_a_join_without_an_index_is_one_error(tmp_path, good):
    split = {"join": [{"path": "good"}, {"path": "good"}], "joiner": TEXT_SAMPLE}
    mix = write(tmp_path / "mix.yaml", {**STOCK, "splits": {"train": split}})
    refuse(mix, "the join index cannot be read", "energon prepare")


def test_a_field_the_format_does_not_accept_is_one_error(good):
    write(good / ".nv-meta" / "dataset.yaml", {**CRUDE, "cookers": []})
    refuse(good, "cookers")


@pytest.mark.parametrize(("count", "message"), [(-1, "good: "), (5, "not an index of 5 samples")])
def test_an_index_must_match_the_sample_count(good, count, message):
    write(good / ".nv-meta" / ".info.json", {"shard_counts": {"shard_000.tar": count}})
    refuse(good, message)


# Messages -----------------------------------------------------------------------------------


def test_an_unknown_field_is_refused_with_suggestions(tmp_path, good):
    """Further ones are in test_yaml_mistakes.py."""
    for node, field, near in (
        ({"interleave": [{"path": "good"}], "new_sources": "zero"}, "new_sources", "new_source"),
        ({"blend_epochized": [{"path": "good", "repetition": 2}]}, "repetition", "repetitions"),
        ({"path": "good", "_dataset": None}, "_dataset", "dataset_config"),
    ):
        mix = write(tmp_path / "mix.yaml", {**SCHEDULED, "splits": {"train": node}})
        refuse(mix, f"no field '{field}'", f"did you mean {near}")


def test_a_misspelt_split_is_refused_with_suggestions(tmp_path, good):
    mix = write_mix(tmp_path / "mix.yaml", [("good", 1)])
    refuse(mix, "no split 'trian'; it has train; did you mean train?", split_part="trian")
    refuse(good, "no split 'trian'; it has train; did you mean train?", split_part="trian")


def test_errors_contain_no_passwords_or_escape_sequences(tmp_path, good):
    mix = write_mix(tmp_path / "mix.yaml", [("s3://user:secret@bucket/data", 1)])
    refuse(mix, "blend[0].path: s3://***@bucket/data found, which is not a path (name a profile, ")
    mix = write_mix(tmp_path / "mix.yaml", [("msc://user:secret@bucket/data", 1)])
    refuse(mix, "blend[0].path: msc://***@bucket/data found, which is not a path (name a profile, ")
    mix = write_mix(tmp_path / "mix.yaml", [("good\x1b[31m", 1)])
    refuse(mix, "good\\x1b[31m found, which contains control characters")
    error = ConfigError("http://me:pw@host:80/x?y=http://a:b@c and\n\x9b31m\u202e")
    assert str(error) == "http://***@host:80/x?y=http://***@c and\\n\\x9b31m\\u202e"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert (
        printable("dss://name@version/x 日本\u3000a@b.c") == "dss://name@version/x 日本\u3000a@b.c"
    )


def test_a_very_long_message_keeps_both_ends(tmp_path):
    assert "me" not in printable("x" * 9_990 + "s3://me:me@x" + "x" * 10**5)  # cut in the login
    mix = write(tmp_path / "mix.yaml", {**SCHEDULED, "k" * 10**6: 1, "splits": {}})
    with pytest.raises(ConfigError) as error:
        load(mix)
    assert len(str(error.value)) == 20_005
    for part in ("mix.yaml: no field 'kkk", "kk ... kk", "it has __class__, __module__,"):
        assert part in str(error.value)


def test_commands_print_no_escape_sequences(capsys):
    echo("a\x1b[31m  │ s3://me:pw@x\nb")
    assert capsys.readouterr().out == "a\\x1b[31m  │ s3://***@x\nb\n"


@pytest.mark.parametrize("options", [["--train-iters", "-5"], ["--stop-after", "0"]])
def test_examples_refuse_invalid_counts(monkeypatch, capsys, options):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    from options import add_arguments

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--run-dir", "x", *options])
    assert f"{options[0]}: '{options[1]}' found, an integer >= 1" in capsys.readouterr().err


def test_the_text_decoder_decodes_only_known_extensions():
    sample = {"__key__": "1.txt", "TXT": b"a", "a.json": b"1", "gz": b"x", "json.gz": b"y", "n": 1}
    assert TextDecoder()(sample) == {**sample, "TXT": "a", "a.json": 1}
    assert TextDecoder().decode("1.pyd", b"raw") == b"raw"
    assert TextDecoder().decode("1.txt", b"raw") == "raw"


@pytest.mark.parametrize(
    "split",
    [
        {"blend": [{"path": "good", "weight": {"linear": {0: 1, 9: 2}}}]},
        {"interleave": [{"path": "good"}]},
        {"blend": [{"path": "good", "max_epochs": 2}]},
        {"blend": [{"path": "good"}], "allow_nested_schedules": True},
        {"path": "good", "subset": {"tokens": 9}},
    ],
)
def test_fields_of_our_metadataset_are_explained_in_stock_ones(tmp_path, good, split):
    mix = write(tmp_path / "mix.yaml", {**STOCK, "splits": {"train": split}})
    refuse(mix, "`__module__: energon_ext`", "`__class__: ScheduledMetadataset` for it.")
