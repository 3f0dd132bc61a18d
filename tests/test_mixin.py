# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Any user's TaskEncoder with the mixin in front: Energon's own order, our blend and state."""

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
    """A TaskEncoder that knows nothing of this package but the mixin; its samples are streamed."""

    plan_samples = False

    @stateless
    def encode_sample(self, sample: TextSample) -> TextSample:
        return TextSample.derive_from(sample, text=sample.text.upper())


class Packing(UpperCase):
    """Groups of three texts in one sample, as a multimodal encoder packs images."""

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


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize("world_size", [1, 2])
def test_one_epoch_yields_every_document_exactly_once(data, num_workers, world_size):
    seen = Counter()
    for rank in range(world_size):
        seen.update(
            texts(
                loader_for(
                    build(
                        data / "constant.yaml",
                        num_workers=num_workers,
                        rank=rank,
                        world_size=world_size,
                        repeat=False,
                    )
                )
            )
        )
    assert seen == {f"{source}{n:03d}": 1 for source, count in COUNTS.items() for n in range(count)}


@pytest.mark.parametrize(
    ("encoder", "num_workers"),
    [
        (UpperCase, 0),
        (Packing, 0),
        (Packing, 3),
        pytest.param(UpperCase, 3, marks=pytest.mark.nightly),
    ],
)
def test_a_run_continues_sample_by_sample(data, num_workers, encoder):
    options = {"packing_buffer_size": 10} if encoder is Packing else {}

    def loader(state=None):
        new = loader_for(build(data / "mix.yaml", encoder(), num_workers=num_workers, **options))
        new.restore_state_rank(state)
        return new

    expected = [batch.text for batch in take(loader(), 24)]
    state, position = None, 0
    for save_point in (5, 6, 17, 24):
        running = loader(state)
        assert [b.text for b in take(running, save_point - position)] == expected[
            position:save_point
        ]
        state, position = running.save_state_rank(), save_point
        close_loaders()


@pytest.mark.parametrize("num_workers", [0, 3])
@pytest.mark.parametrize(
    ("axis", "tokens_per_sample", "first_of_b"),
    [
        ("steps", 0, 18),  # step 6 of three batches
        ("batches", 0, 6),
        ("samples", 0, 2),  # batch 2 begins at sample 8
        ("tokens", 2, 1),  # batch 1 begins at token 8
    ],
)
def test_breakpoints_count_what_the_metadataset_says(
    data, num_workers, axis, tokens_per_sample, first_of_b
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


def test_constant_weights_give_the_shares_that_stock_energon_gives(data):
    for encoder in (UpperCase(), Plain()):
        loader = stock_loader(build(data / "constant.yaml", encoder))
        drawn = Counter(text[0] for text in texts(take(loader, 600)))
        for source, share in (("a", 3 / 6), ("b", 2 / 6), ("c", 1 / 6)):
            sigma = math.sqrt(2400 * share * (1 - share))
            assert abs(drawn[source] - 2400 * share) <= 5 * sigma


def test_a_scheduled_weight_without_the_mixin_fails_loudly(data):
    with pytest.raises(ConfigError, match="DynamicBlendMixin"):
        build(data / "mix.yaml", Plain())


def test_a_step_without_buffers_moves_the_very_next_batch(data):
    path = write_mix(
        data / "step.yaml", [("a", {"step": {0: 1, 6: 0}}), ("b", {"step": {0: 0, 6: 1}})]
    )
    batches = take(loader_for(build(path, num_workers=3, shuffle_buffer_size=None)), 12)
    assert [{text[0].lower() for text in batch.text} for batch in batches] == [{"a"}] * 6 + [
        {"b"}
    ] * 6


def test_one_state_in_memory_is_continued_any_number_of_times(data):
    """Stock readers keep references into a state that they restore, and write there."""

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


def test_sources_may_be_reordered_and_reweighted_between_runs(data):
    """No shuffle buffer, so that every sample drawn is a sample seen."""
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


class OwnBlend(DynamicBlendDataset):
    """Drawn as the one it inherits from."""


class OwnBlends(UpperCase):
    def build_blend(self, *arguments, **options):
        dataset = super().build_blend(*arguments, **options)
        find_blend(dataset).__class__ = OwnBlend
        return dataset


@pytest.mark.parametrize("encoder", [UpperCase, OwnBlends])
def test_a_source_with_buffered_samples_cannot_leave(data, encoder):
    """Also where the blend is of a class of one's own."""
    loader = loader_for(build(data / "constant.yaml", encoder()))
    take(loader, 2)
    path = write_mix(data / "without_a.yaml", [("b", 1), ("c", 1)])
    other = loader_for(build(path, encoder()))
    with pytest.raises(StateMismatchError, match="sample of source.*a:train.*weight: 0"):
        other.restore_state_rank(loader.save_state_rank())
        take(other, 1)


class Renamed(UpperCase):
    """The same encoder under another name."""


def test_a_resume_is_exact_at_every_batch_with_packed_and_shuffled_samples_that_wait(data):
    options = {"packing_buffer_size": 10, "shuffle_buffer_size": 5}
    path = data / "mix.yaml"
    loader = loader_for(build(path, Packing(), **options))
    iterator, expected, states = iter(loader), [], []
    for _ in range(16):
        expected.append(next(iterator).text)
        states.append(json.dumps(loader.state_dict()))
    for position, state in enumerate(states, 1):
        resumed = loader_for(build(path, Packing(), **options))
        resumed.load_state_dict(json.loads(state))
        assert [batch.text for batch in take(resumed, 16 - position)] == expected[position:]


def test_a_renamed_encoder_continues_and_is_told(data, caplog):
    path = data / "mix.yaml"
    expected = [batch.text for batch in take(loader_for(build(path, UpperCase())), 9)]
    loader = loader_for(build(path, UpperCase()))
    take(loader, 4)
    resumed = loader_for(build(path, Renamed()))
    resumed.restore_state_rank(loader.save_state_rank())
    assert [batch.text for batch in take(resumed, 5)] == expected[4:]
    assert "The TaskEncoder was UpperCase and is now Renamed; check that it reads" in caplog.text


@pytest.mark.parametrize(
    "num_workers",
    [pytest.param(1, marks=pytest.mark.nightly), 3, pytest.param(4, marks=pytest.mark.nightly)],
)
def test_a_virtual_epoch_is_rounded_up_to_as_many_batches_of_every_worker(data, num_workers):
    endless = loader_for(build(data / "mix.yaml", num_workers=num_workers))
    expected = texts(take(endless, 24))
    loader = loader_for(build(data / "mix.yaml", num_workers=num_workers, virtual_epoch_length=10))
    epochs = [list(loader), list(loader)]
    assert [len(epoch) for epoch in epochs] == {1: [10, 10], 3: [12, 12], 4: [12, 12]}[num_workers]
    found = texts(epochs[0] + epochs[1])
    assert found == expected[: len(found)]


@pytest.mark.parametrize("name", ["shuffle_buffer_size", "packing_buffer_size"])
def test_a_buffer_for_each_group_of_sources_is_refused(data, name):
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
