# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A user's TaskEncoder with the mixin: Energon's sample order, our blend and state."""

import json
import math
from collections import Counter

import megatron.energon
import pytest
from megatron.energon import (
    DefaultTaskEncoder,
    TextSample,
    get_savable_loader,
    stateless,
)

from energon_ext import (
    ConfigError,
    DynamicBlendDataset,
    DynamicBlendMixin,
    StateMismatchError,
    get_train_dataset,
)
from energon_ext.plan.lookup import find_blend
from tests.support import close_loaders, config, loader_for, take, write_dataset, write_mix


class UpperCase(DynamicBlendMixin, DefaultTaskEncoder):
    """A TaskEncoder that uses only the mixin of this package; its samples are streamed."""

    plan_samples = False

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=sample.text.upper())


class Packing(UpperCase):
    """Packs groups of three texts into one sample, as a multimodal encoder packs images."""

    def select_samples_to_pack(self, samples):
        return [samples[start : start + 3] for start in range(0, len(samples), 3)]

    @stateless
    def pack_selected_samples(self, samples):
        return TextSample.derive_from(samples[0], text="+".join(s.text for s in samples))


class Plain(DefaultTaskEncoder):
    """A TaskEncoder without the mixin."""


COUNTS = {"a": 90, "b": 50, "c": 31}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for source, count in COUNTS.items():
        write_dataset(root / source, [f"{source}{number:03d}" for number in range(count)])
    write_mix(root / "mix.yaml", [("a", 3), ("b", {"linear": {0: 0, 30: 2}}), ("c", 1)])
    write_mix(root / "constant.yaml", [("a", 3), ("b", 2), ("c", 1)])
    return root


def build(path, encoder=None, *, num_workers=0, rank=0, world_size=1, **options):
    defaults = {"batch_size": 4, "shuffle_buffer_size": 20}
    return get_train_dataset(
        path,
        worker_config=config(num_workers, rank, world_size),
        task_encoder=encoder or UpperCase(),
        **{**defaults, **options},
    )


def stock_loader(dataset):
    return get_savable_loader(dataset, watchdog_timeout_seconds=None, gc_collect_every_n_steps=0)


def texts(batches):
    return [name for batch in batches for text in batch.text for name in text.lower().split("+")]


@pytest.mark.parametrize(
    ("world_size", "num_workers"),
    [
        (1, 0),
        (2, 3),
        *(
            pytest.param(*each, marks=pytest.mark.nightly)
            for each in [(1, 1), (2, 1), (2, 0), (1, 3)]
        ),
    ],
)
def test_one_epoch_yields_every_document_exactly_once(data, num_workers, world_size):
    seen = Counter()
    options = {"num_workers": num_workers, "world_size": world_size, "repeat": False}
    for rank in range(world_size):
        seen.update(texts(loader_for(build(data / "constant.yaml", rank=rank, **options))))
    assert seen == {f"{source}{n:03d}": 1 for source, count in COUNTS.items() for n in range(count)}


@pytest.mark.parametrize(
    ("encoder", "num_workers"),
    [
        (UpperCase, 0),
        (Packing, 0),
        (Packing, 2),
        pytest.param(Packing, 3, marks=pytest.mark.nightly),
        pytest.param(UpperCase, 3, marks=pytest.mark.nightly),
    ],
)
def test_a_resumed_run_yields_the_same_samples(data, num_workers, encoder):
    options = {"packing_buffer_size": 10} if encoder is Packing else {}

    def loader(state=None):
        new = loader_for(build(data / "mix.yaml", encoder(), num_workers=num_workers, **options))
        new.restore_state_rank(state)
        return new

    expected = [batch.text for batch in take(loader(), 24)]
    state, position = None, 0
    for save_point in (6, 17, 24) if num_workers == 2 else (5, 6, 17, 24):
        running = loader(state)
        found = [batch.text for batch in take(running, save_point - position)]
        assert found == expected[position:save_point]
        state, position = running.save_state_rank(), save_point
        close_loaders()


@pytest.mark.parametrize(
    ("axis", "tokens_per_sample", "first_of_b", "num_workers"),
    [
        ("steps", 0, 18, 0),  # step 6 of three batches
        ("steps", 0, 18, 2),
        ("batches", 0, 6, 0),
        ("samples", 0, 2, 0),  # batch 2 starts at sample 8
        ("tokens", 2, 1, 0),  # batch 1 starts at token 8
        ("tokens", 2, 1, 2),
        pytest.param("batches", 0, 6, 3, marks=pytest.mark.nightly),
        pytest.param("samples", 0, 2, 3, marks=pytest.mark.nightly),
    ],
)
def test_breakpoints_count_the_unit_in_the_metadataset(
    data, axis, tokens_per_sample, first_of_b, num_workers
):
    path = write_mix(
        data / "axis.yaml", [("a", {"step": {0: 1, 6: 0}}), ("b", {"step": {0: 0, 6: 1}})]
    )
    path.write_text(json.dumps({**json.loads(path.read_text()), "schedule_axis": axis}))
    encoder = UpperCase()
    encoder.tokens_per_sample = tokens_per_sample
    options = {"num_workers": num_workers, "shuffle_buffer_size": None, "rows_per_step": 12}
    batches = take(loader_for(build(path, encoder, **options)), 21)
    sources = "".join({text[0].lower() for text in batch.text}.pop() for batch in batches)
    assert sources == "a" * first_of_b + "b" * (21 - first_of_b)


def test_constant_weights_match_the_shares_of_stock_energon(data):
    for encoder, draws in ((UpperCase(), 2400), (Plain(), 400)):
        loader = stock_loader(build(data / "constant.yaml", encoder, batch_size=40))
        drawn = Counter(text[0] for text in texts(take(loader, draws // 40)))
        for source, share in (("a", 3 / 6), ("b", 2 / 6), ("c", 1 / 6)):
            assert abs(drawn[source] - draws * share) <= 5 * math.sqrt(draws * share * (1 - share))


def test_a_scheduled_weight_without_the_mixin_fails_loudly(data):
    with pytest.raises(ConfigError, match="DynamicBlendMixin"):
        build(data / "mix.yaml", Plain())


def test_without_buffers_a_breakpoint_changes_the_very_next_batch(data):
    path = write_mix(
        data / "step.yaml", [("a", {"step": {0: 1, 6: 0}}), ("b", {"step": {0: 0, 6: 1}})]
    )
    batches = take(loader_for(build(path, num_workers=2, shuffle_buffer_size=None)), 12)
    sources = [{text[0].lower() for text in batch.text} for batch in batches]
    assert sources == [{"a"}] * 6 + [{"b"}] * 6


def test_one_state_in_memory_can_be_restored_repeatedly(data):
    """Stock readers keep and modify references into a state that they restore."""

    def loader():
        return stock_loader(build(data / "mix.yaml", shuffle_buffer_size=None))

    first = loader()
    take(first, 6)
    state = first.save_state_rank()
    expected = texts(take(first, 9))
    for _ in range(2):
        resumed = loader()
        resumed.restore_state_rank(state)
        assert texts(take(resumed, 9)) == expected


def test_sources_can_be_reordered_and_reweighted_between_runs(data):
    """Without a shuffle buffer every drawn sample is also returned."""
    seen, state = Counter(), None
    for number, order in enumerate((["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"])):
        path = write_mix(
            data / f"order{number}.yaml", [(s, 1 + number * (s == "b")) for s in order]
        )
        loader = loader_for(build(path, shuffle_buffer_size=None))
        loader.restore_state_rank(state)
        seen.update(texts(take(loader, 7)))
        state = loader.save_state_rank()
    assert set(seen.values()) == {1}


class SubclassedBlend(DynamicBlendDataset):
    """A blend of a user's own class."""


class SubclassingEncoder(UpperCase):
    def build_streamed_blend(self, *arguments, **options):
        dataset = super().build_streamed_blend(*arguments, **options)
        find_blend(dataset).__class__ = SubclassedBlend
        return dataset


@pytest.mark.parametrize("encoder", [UpperCase, SubclassingEncoder])
def test_a_source_with_buffered_samples_cannot_be_removed(data, encoder):
    loader = loader_for(build(data / "constant.yaml", encoder()))
    take(loader, 2)
    path = write_mix(data / "without_a.yaml", [("b", 1), ("c", 1)])
    other = loader_for(build(path, encoder()))
    with pytest.raises(StateMismatchError, match="sample of source.*a:train.*weight: 0"):
        other.restore_state_rank(loader.save_state_rank())
        take(other, 1)


class Renamed(UpperCase):
    """The same encoder under a different name."""


def test_a_resume_is_exact_at_every_batch_with_buffered_samples(data):
    options = {"packing_buffer_size": 10, "shuffle_buffer_size": 5}
    path = data / "mix.yaml"
    loader = loader_for(build(path, Packing(), **options))
    iterator, expected, states = iter(loader), [], []
    for _ in range(10):
        expected.append(next(iterator).text)
        states.append(json.dumps(loader.state_dict()))
    for position, state in enumerate(states, 1):
        resumed = loader_for(build(path, Packing(), **options))
        resumed.load_state_dict(json.loads(state))
        assert [batch.text for batch in take(resumed, 10 - position)] == expected[position:]


def test_a_renamed_encoder_resumes_and_is_logged(data, caplog):
    path = data / "mix.yaml"
    expected = [batch.text for batch in take(loader_for(build(path, UpperCase())), 9)]
    loader = loader_for(build(path, UpperCase()))
    take(loader, 4)
    resumed = loader_for(build(path, Renamed()))
    resumed.restore_state_rank(loader.save_state_rank())
    assert [batch.text for batch in take(resumed, 5)] == expected[4:]
    assert "The TaskEncoder was UpperCase and is now Renamed; check that it reads" in caplog.text


@pytest.mark.parametrize(
    ("num_workers", "batches"),
    [
        (2, 10),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in [(1, 9), (3, 9), (4, 12)]),
    ],
)
def test_a_virtual_epoch_is_rounded_up_to_equal_batches_per_worker(data, num_workers, batches):
    endless = loader_for(build(data / "mix.yaml", num_workers=num_workers))
    expected = texts(take(endless, 24))
    loader = loader_for(build(data / "mix.yaml", num_workers=num_workers, virtual_epoch_length=9))
    epochs = [list(loader), list(loader)]
    assert [len(epoch) for epoch in epochs] == [batches, batches]
    found = texts(epochs[0] + epochs[1])
    assert found == expected[: len(found)]


@pytest.mark.parametrize("name", ["shuffle_buffer_size", "packing_buffer_size"])
def test_per_group_buffer_sizes_are_refused(data, name):
    with pytest.raises(ConfigError, match=f"{name}: .'g': 4. found, an integer"):
        build(data / "mix.yaml", Packing(), **{name: {"g": 4}})


def test_an_epochized_blend_keeps_its_repetitions(data, tmp_path):
    path = tmp_path / "epochized.yaml"
    path.write_text(
        f"""
__module__: energon_ext
__class__: ScheduledMetadataset
splits:
  train:
    blend_epochized:
      - {{path: {data}/a, repetitions: 2}}
      - {{path: {data}/c, repetitions: 1}}
"""
    )
    seen = Counter(texts(loader_for(build(path, repeat=False))))
    assert seen == {
        **{f"a{n:03d}": 2 for n in range(90)},
        **{f"c{n:03d}": 1 for n in range(31)},
    }


def test_the_stock_entry_point_takes_the_same_yaml_and_encoder(data):
    dataset = megatron.energon.get_train_dataset(
        data / "mix.yaml",
        worker_config=config(),
        batch_size=4,
        shuffle_buffer_size=20,
        max_samples_per_sequence=None,
        task_encoder=UpperCase(),
    )
    ours = build(data / "mix.yaml")
    assert find_blend(dataset).keys == ("a:train", "b:train", "c:train")
    assert [b.text for b in take(loader_for(dataset), 9)] == [
        b.text for b in take(loader_for(ours), 9)
    ]


class ByLength(DefaultTaskEncoder):
    """An encoder of a user that sets what the mixin has defaults for."""

    sample_block = 7
    rows_per_step = 16

    def make_padding(self, row):
        return row


def test_the_attributes_of_the_users_encoder_win_over_the_mixins_defaults():
    class First(DynamicBlendMixin, ByLength):
        cost = "own"

    class Below(First):
        pass

    class Last(ByLength, DynamicBlendMixin):
        pass

    for each in (First(), Below(), Last()):
        assert (each.sample_block, each.rows_per_step) == (7, 16)
        assert each.make_padding("row") == "row"
    assert First.cost == Below.cost == "own" and Last.cost is None
    assert DynamicBlendMixin.sample_block == 1


def test_the_mixin_builds_the_dataset_wherever_it_is_among_the_base_classes(data):
    class Last(DefaultTaskEncoder, DynamicBlendMixin):
        plan_samples = False

    blend = find_blend(build(data / "mix.yaml", Last()))  # has a schedule
    assert blend.keys == ("a:train", "b:train", "c:train")
