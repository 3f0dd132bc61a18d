# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Interleaves in YAML, through real loaders, over text and over token files."""

import itertools
import json
import shutil
from collections import Counter

import pytest
from megatron.energon import DefaultTaskEncoder

from energon_ext import ConfigError, DynamicBlendMixin, PackedTaskEncoder, get_train_dataset
from energon_ext.plan.lookup import find_blend
from tests.plan.runs import write_split
from tests.support import (
    LargeTokenizer,
    batch_hash,
    close_loaders,
    config,
    loader_for,
    take,
    write_dataset,
    write_tokens,
)


class Encoder(DynamicBlendMixin, DefaultTaskEncoder):
    """The mixin alone."""


SOURCES = (("short", 400, 8), ("long", 80, 80), ("other", 100, 30))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for source, count, length in SOURCES:
        texts = [f"{source}{n:03d}".ljust(length, ".") for n in range(count)]
        write_dataset(root / source, texts)
    write_token_files(root)
    return root


def write_token_files(root):
    """Write token files of the same sizes with unique token ids."""
    first = 0
    for source, count, length in SOURCES:
        ids = range(first, first + count * length)
        documents = [list(ids[n : n + length]) for n in range(0, len(ids), length)]
        write_tokens(root / "tokens" / source, documents)
        first += len(ids)


def build(path, *, num_workers=0, rows_per_step=None, **options):
    encoder = PackedTaskEncoder(LargeTokenizer(), 32, **{"packing_buffer_docs": 8, **options})
    return get_train_dataset(
        path,
        worker_config=config(num_workers),
        batch_size=4,
        task_encoder=encoder,
        rows_per_step=rows_per_step,
    )


def sources_of(batches):
    """Return the name of the source of each row."""
    firsts = [
        batch.sources[number]
        for batch in batches
        for number in batch.segment_sources().view(-1, 32)[:, 0].tolist()
    ]
    return [key.split(":")[0].rsplit("/", 1)[-1] for key in firsts]


def by_name(counts):
    return {key.split(":")[0].rsplit("/", 1)[-1]: count for key, count in counts.items()}


@pytest.mark.parametrize(("folder", "num_workers"), [("", 2), ("tokens/", 0)])
def test_token_shares_are_exact_if_lengths_differ_tenfold(data, num_workers, folder):
    path = write_split(
        data / "interleave.yaml",
        {"interleave": [{"path": f"{folder}short"}, {"path": f"{folder}long", "weight": 2}]},
    )
    tokens = Counter()
    for batch in take(loader_for(build(path, num_workers=num_workers)), 60):
        tokens.update(by_name(batch.tokens_per_source()))
        # A step is off by less than a row of 32 tokens.
        assert abs(2 * tokens["short"] - tokens["long"]) <= 3 * 32


@pytest.mark.parametrize("folder", ["", "tokens/"])
def test_a_nested_run_resumes_exactly(data, folder):
    path = write_split(
        data / "nested.yaml",
        {
            "blend": [
                {"path": "interleave.yaml", "weight": {"linear": {0: 3, 20: 1}}},
                {"path": f"{folder}other", "weight": 1},
            ]
        },
    )
    entries = [{"path": f"{folder}short"}, {"path": f"{folder}long"}]
    write_split(data / "interleave.yaml", {"interleave": entries})
    expected = [batch_hash(batch) for batch in take(loader_for(build(path)), 24)]
    state, position = None, 0
    for save_point in (3, 4, 17, 24):
        loader = loader_for(build(path))
        loader.restore_state_rank(state)
        found = [batch_hash(batch) for batch in take(loader, save_point - position)]
        assert found == expected[position:save_point]
        state, position = loader.save_state_rank(), save_point
        close_loaders()


@pytest.mark.parametrize("rule", ["blend", "interleave"])
def test_order_of_entries_does_not_matter(data, rule):
    inner = [{"path": "tokens/short"}, {"path": "tokens/long", "weight": 2}]
    runs = []
    for entries in itertools.permutations([{"path": "inner.yaml"}, {"path": "tokens/other"}]):
        for members in (inner, inner[::-1]):
            write_split(data / "inner.yaml", {rule: members})
            path = write_split(data / "outer.yaml", {rule: list(entries)})
            runs.append([batch_hash(batch) for batch in take(loader_for(build(path)), 20)])
            close_loaders()
    assert runs[0] == runs[1] == runs[2] == runs[3]


def test_shares_of_nested_nodes_multiply(data):
    write_split(
        data / "interleave.yaml", {"interleave": [{"path": "short"}, {"path": "long", "weight": 3}]}
    )
    path = write_split(
        data / "nested.yaml",
        {"blend": [{"path": "interleave.yaml", "weight": 2}, {"path": "other", "weight": 2}]},
    )
    assert find_blend(build(path)).shares_at_step(0) == pytest.approx(
        {"short:train": 0.125, "long:train": 0.375, "other:train": 0.5}
    )


# Sources that end ---------------------------------------------------------------------------------


def test_other_sources_continue_after_one_ends(data):
    path = write_split(data / "ending.yaml", {"interleave": [{"path": "short"}, {"path": "long"}]})
    dataset = get_train_dataset(
        path, worker_config=config(), batch_size=5, task_encoder=Encoder(), repeat=False
    )
    texts = [text for batch in loader_for(dataset) for text in batch.text]
    assert len(texts) == len(set(texts)) == 480
    assert Counter(text[0] for text in texts[:160]) == {"s": 80, "l": 80}


@pytest.mark.parametrize("folder", ["", "tokens/"])
@pytest.mark.parametrize(("outside", "inside"), [("interleave", "blend"), ("blend", "interleave")])
def test_a_node_counts_as_zero_once_all_its_sources_reach_their_limit(
    data, folder, outside, inside
):
    """Once each of its documents was read once, the other source gets all rows."""
    members = [{"path": f"{folder}{s}", "max_epochs": 1} for s in ("short", "long")]
    write_split(data / "inner.yaml", {inside: members})
    entries = [{"path": "inner.yaml", "weight": 9}, {"path": f"{folder}other"}]
    batches = take(loader_for(build(write_split(data / "outer.yaml", {outside: entries}))), 150)
    found = [set(by_name(batch.tokens_per_source())) for batch in batches]
    assert set().union(*found[:50]) == {"short", "long", "other"}
    assert found[110:] == [{"other"}] * 40
    documents = Counter()
    for batch in batches:
        documents.update(by_name(batch.documents_per_source()))
    assert (documents["short"], documents["long"]) == (400, 80)


@pytest.mark.filterwarnings("ignore:.*only sources with a max_epochs")
@pytest.mark.parametrize("folder", ["", "tokens/"])
@pytest.mark.parametrize("rule", ["blend", "interleave"])
@pytest.mark.parametrize("rows_per_step", [4, 8])
def test_a_run_left_with_zero_weights_raises_an_error(data, folder, rule, rows_per_step):
    """3,000 tokens of other are at least 94 rows, which end after step 10, when long becomes 0."""
    entries = [
        {"path": f"{folder}other", "max_epochs": 1},
        {"path": f"{folder}long", "weight": {"step": {0: 1, 10: 0}}},
    ]
    loader = loader_for(
        build(write_split(data / "gap.yaml", {rule: entries}), rows_per_step=rows_per_step)
    )
    with pytest.raises(ConfigError, match=r"Every weight is 0 at step \d+ .*long"):
        for _ in loader:
            pass


# Resumes ------------------------------------------------------------------------------------------


def test_sources_continue_when_a_blend_becomes_an_interleave(data):
    entries = [{"path": "short"}, {"path": "long"}]
    blend = write_split(data / "as_blend.yaml", {"blend": entries})
    interleave = write_split(data / "as_interleave.yaml", {"interleave": entries})

    def loader(path):
        return loader_for(
            get_train_dataset(path, worker_config=config(), batch_size=4, task_encoder=Encoder())
        )

    first = loader(blend)
    seen = [text for batch in take(first, 15) for text in batch.text]
    second = loader(interleave)
    second.restore_state_rank(first.save_state_rank())
    after = [text for batch in take(second, 15) for text in batch.text]
    assert len({*seen, *after}) == 120
    # Credits start with the resume and do not correct for the random draws of the blend.
    assert Counter(text[0] for text in after) == {"s": 30, "l": 30}


def credits_in(loader):
    """Return the credits of each node in the state of a run."""
    return {name: node["credits"] for name, node in mixture_state(loader).items()}


def mixture_state(loader):
    """Return the mixture in the state of a run, at any depth."""

    def find(value):
        if isinstance(value, dict):
            if "mixture" in value and "sources" in value:
                yield value["mixture"]
            for inner in value.values():
                yield from find(inner)
        elif isinstance(value, (list, tuple)):
            for inner in value:
                yield from find(inner)

    return next(find(json.loads(json.dumps(loader.state_dict()))))


def continued(path, loader, batches):
    """Resume from a loader; return the new loader and its next batches."""
    other = loader_for(build(path))
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    return other, take(other, batches)


def hashes(batches):
    return [batch_hash(batch) for batch in batches]


def test_a_source_keeps_its_credit_while_it_is_absent(data):
    weights = {"short": 5, "long": 3, "other": 1}
    entries = [{"path": f"tokens/{s}", "weight": w} for s, w in weights.items()]
    every = write_split(data / "every.yaml", {"interleave": entries})
    some = write_split(data / "some.yaml", {"interleave": entries[::2]})
    first = loader_for(build(every))
    take(first, 5)
    before = credits_in(first)[""]
    assert abs(before["tokens/long"]) > 1
    between, _ = continued(some, first, 5)
    after = credits_in(between)[""]
    assert after["tokens/long"] == before["tokens/long"]
    assert after["tokens/short"] != before["tokens/short"]
    back, (batch,) = continued(every, between, 1)
    tokens = batch.tokens_per_source()
    for name, weight in weights.items():
        due = sum(tokens.values()) * weight / 9
        expected = after[f"tokens/{name}"] + due - tokens.get(f"tokens/{name}", 0)
        assert credits_in(back)[""][f"tokens/{name}"] == pytest.approx(expected)


def nested_files(folder, to_data):
    """Write a nested mix; ``to_data`` is the relative path to the token files."""
    folder.mkdir(parents=True, exist_ok=True)
    inner = [{"path": f"{to_data}/short"}, {"path": f"{to_data}/long", "weight": 4}]
    write_split(folder / "inner.yaml", {"interleave": inner})
    outer = [{"path": "inner.yaml", "weight": 5}, {"path": f"{to_data}/other", "weight": 2}]
    return write_split(folder / "outer.yaml", {"interleave": outer})


def test_a_run_continues_if_only_the_yaml_files_moved(data):
    """All keys are relative to the file, so all of them change."""
    first = loader_for(build(nested_files(data / "here", "../tokens")))
    take(first, 5)
    moved = nested_files(data / "far" / "away", "../../tokens")
    other, found = continued(moved, first, 20)
    assert set(credits_in(other)["inner.yaml:train"]) == {
        "../../tokens/short",
        "../../tokens/long",
    }
    assert hashes(found) == hashes(take(first, 20))


def test_a_run_continues_if_only_the_outer_file_moved(data):
    """The inner node is found by its absolute path, although its name changes."""
    first = loader_for(build(nested_files(data / "here", "../tokens")))
    take(first, 5)
    outer = [
        {"path": "../here/inner.yaml", "weight": 5},
        {"path": "../tokens/other", "weight": 2},
    ]
    (data / "there").mkdir(exist_ok=True)
    moved = write_split(data / "there" / "outer.yaml", {"interleave": outer})
    other, found = continued(moved, first, 20)
    assert set(credits_in(other)) == {"", "../here/inner.yaml:train"}
    assert hashes(found) == hashes(take(first, 20))


def test_a_run_continues_if_files_and_data_moved_together(data, tmp_path):
    write_token_files(tmp_path / "old")
    first = loader_for(build(nested_files(tmp_path / "old" / "mix", "../tokens")))
    take(first, 5)
    saved = json.dumps(first.state_dict())
    expected, credits = hashes(take(first, 20)), credits_in(first)
    close_loaders()
    shutil.move(tmp_path / "old", tmp_path / "new")
    other = loader_for(build(tmp_path / "new" / "mix" / "outer.yaml"))
    other.load_state_dict(json.loads(saved))
    assert hashes(take(other, 20)) == expected
    assert credits_in(other) == credits


def test_a_run_that_becomes_one_entry_of_another_keeps_its_credits(data):
    """The order inside the entry is the same as alone."""
    outer = nested_files(data / "here", "../tokens")
    first = loader_for(build(data / "here" / "inner.yaml"))
    take(first, 3)
    assert any(credits_in(first)[""].values())
    _, batches = continued(outer, first, 20)
    inside = [source for source in sources_of(batches) if source != "other"]
    assert len(inside) > 50
    assert inside == sources_of(take(first, 20))[: len(inside)]


@pytest.mark.parametrize("folder", ["", "tokens/"])
def test_a_new_source_is_owed_by_the_weights_at_the_resume(data, folder):
    """Its weight is 1 at step 10, where the run resumes, and 0 from step 30 on.

    It is owed half of the tokens of ten steps, so it is read alone for the same number of steps.
    """
    old = write_split(data / "old.yaml", {"interleave": [{"path": f"{folder}short"}]})
    entries = [
        {"path": f"{folder}short"},
        {"path": f"{folder}other", "weight": {"step": {0: 1, 30: 0}}},
    ]
    both = write_split(data / "both.yaml", {"interleave": entries, "new_source": "zero"})
    first = loader_for(build(old))
    take(first, 10)
    other = loader_for(build(both))
    other.restore_state_rank(first.save_state_rank())
    found = [set(by_name(batch.tokens_per_source())) for batch in take(other, 9)]
    assert found == [{"other"}] * 9


# Refusals -----------------------------------------------------------------------------------------


def test_an_encoder_without_the_mixin_refuses_an_interleave(data):
    path = write_split(data / "plain.yaml", {"interleave": [{"path": "short"}, {"path": "long"}]})
    with pytest.raises(ConfigError, match="interleave.*DynamicBlendMixin"):
        get_train_dataset(
            path, worker_config=config(), batch_size=4, task_encoder=DefaultTaskEncoder()
        )


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ({"interleave": []}, "an empty `interleave`"),
        ({"interleave": [{"path": "short"}], "new_source": "soon"}, "new_source: 'soon'"),
        ({"interleave": [{"path": "short", "weight": -1}]}, r"interleave\[0\] \(short\).weight"),
    ],
)
def test_a_wrong_interleave_is_reported_with_its_place(data, split, message):
    with pytest.raises(ConfigError, match=message):
        build(write_split(data / "wrong.yaml", split))


class OwnSizes(Encoder):
    def blend_sample_size(self, sample):
        return len(sample.text)


def test_an_encoder_decides_what_an_interleave_counts(data):
    """Equal characters of each: ten documents of 8 per document of 80."""
    entries = [{"path": name, "weight": 1} for name in ("short", "long")]
    path = write_split(data / "sizes.yaml", {"interleave": entries})
    dataset = get_train_dataset(path, worker_config=config(), batch_size=1, task_encoder=OwnSizes())
    texts = [batch.text[0] for batch in take(loader_for(dataset), 220)]
    counts = Counter(text.rstrip(".")[:-3] for text in texts)
    assert counts == {"short": 200, "long": 20}
