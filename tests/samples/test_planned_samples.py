# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of a custom TaskEncoder: equal on any ranks and workers, each once per epoch."""

import json
import logging
import random
import re
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from megatron.energon import DefaultTaskEncoder, SampleDecoder, SkipSample, TaskEncoder, stateless
from megatron.energon.cache import NoCachePool
from megatron.energon.rng import SystemRng

from energon_ext import DynamicBlendMixin, ExactDataLoader, get_train_dataset
from energon_ext.encoders import plan_mix
from energon_ext.errors import ConfigError, SampleError, StateMismatchError
from energon_ext.plan.lookup import find_blend
from energon_ext.plan.order import EpochOrder
from energon_ext.samples.reader import keyed_random
from energon_ext.streamed.blend import StreamedBlend
from tests.samples.vision import Encoded, PlannedCaptions, write_images
from tests.support import config, loader_for, stock_loader_for, take, write_dataset, write_tokens

TOPOLOGIES = [(1, 2), (2, 1), (4, 0)]
ROWS = 8


def write(path, split):
    content = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path.write_text(json.dumps({**content, "splits": {"train": split}}))
    return path


def mix(folder, name="mix", rule="blend", **fields):
    entries = [
        {"path": "photos", "weight": {"linear": {0: 1, 6: 3}}, **fields},
        {"path": "charts", "weight": 2},
    ]
    return write(folder / f"{name}.yaml", {rule: entries})


def dataset_of(path, ranks=1, workers=0, rank=0, encoder=None, seed=0, **options):
    options = {"batch_size": ROWS // ranks, "rows_per_step": ROWS, **options}
    worker_config = config(workers, rank, ranks, seed)
    encoder = encoder or PlannedCaptions()
    return get_train_dataset(path, worker_config=worker_config, task_encoder=encoder, **options)


def run(path, steps, ranks=1, workers=0, state=None, loader_options=None, **options):
    """Return the samples of each step in planned order, and the state that all ranks share."""
    read, states = [[] for _ in range(steps)], []
    for rank in range(ranks):
        dataset = dataset_of(path, ranks, workers, rank, **options)
        loader = loader_for(dataset, **(loader_options or {}))
        if state is not None:
            loader.load_state_dict(state)
        for step, batch in zip(read, take(loader, steps)):
            step += batch
        states.append(loader.state_dict())
        loader.close()
    assert all(each == states[0] for each in states)
    return read, states[0]


@pytest.mark.parametrize("rule", [pytest.param("blend", marks=pytest.mark.nightly), "interleave"])
def test_steps_states_and_random_numbers_are_the_same_on_any_ranks_and_workers(data, rule):
    path = mix(data, rule, rule)
    expected = run(path, 8)
    for ranks, workers in TOPOLOGIES:
        assert run(path, 8, ranks, workers) == expected, (ranks, workers)


def test_a_run_continues_on_other_ranks_and_workers(data):
    path = mix(data)
    expected, _ = run(path, 8)
    read, state = [], None
    for steps, ranks, workers in ((3, 4, 0), (2, 1, 2), (3, 2, 0)):
        found, state = run(path, steps, ranks, workers, state)
        read += found
    assert read == expected


def test_every_sample_is_read_once_per_epoch_with_its_own_images(data):
    path = write(data / "alone.yaml", {"blend": [{"path": "photos", "max_epochs": 2}]})
    read, _ = run(path, 12)
    samples = [sample for step in read for sample in step]
    first, second = samples[:50], samples[50:]
    assert sorted(number for _, number, *_ in first) == list(range(50))
    assert len({number for _, number, *_ in second}) == 46  # the last four do not fill a step
    assert all(len(greys) == number % 3 for _, number, greys, _ in samples)
    assert all(abs(grey - number) <= 2 for _, number, greys, _ in samples for grey in greys)


@pytest.mark.parametrize(
    ("multiplier", "is_streamed"), [(1, False), (None, False), (2, True), (-1, True)]
)
def test_samples_that_are_not_shuffled_by_epochs_are_streamed(data, multiplier, is_streamed):
    """-1 draws with replacement, which no plan of epochs does; None is planned as stored."""
    entry = {"path": "photos", "shuffle_over_epochs_multiplier": multiplier}
    dataset = dataset_of(write(data / "alone.yaml", {"blend": [entry]}))
    assert isinstance(find_blend(dataset), StreamedBlend) == is_streamed


class Caching(PlannedCaptions):
    """Uses Energon's cache in a method, as encoders for large media do."""

    @stateless
    def encode_sample(self, sample):
        assert isinstance(self.cache, NoCachePool)
        return super().encode_sample(sample)


def test_methods_may_use_energons_cache(data):
    assert run(mix(data), 2, encoder=Caching())[0] == run(mix(data), 2)[0]


def test_a_sample_comes_from_its_shard(data):
    """The 50 samples of ``photos`` have the keys 000000 to 000049."""
    path = write(data / "alone.yaml", {"blend": [{"path": "photos"}]})
    (reader,) = dataset_of(path).batches.readers
    for number in (0, 37):
        shard, found, key = reader.origin(number)
        assert (found, key) == (number, f"{number:06d}")
        assert {part["__shard__"] for part in reader.read_stored(number)} == {shard}


def test_random_numbers_depend_on_the_epoch_the_sample_and_the_seed(data):
    path = write(data / "noise.yaml", {"blend": [{"path": "photos"}]})
    samples = [sample for step in run(path, 12)[0] for sample in step]
    drawn = Counter(tuple(noise) for *_, noise in samples)
    assert max(drawn.values()) == 1 and len(drawn) == 96
    others = [sample for step in run(path, 12, seed=1)[0] for sample in step]
    assert not {tuple(noise) for *_, noise in others} & set(drawn)


def test_an_encoder_does_not_touch_the_trainers_random_state(data):
    def drawn(steps):
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        run(mix(data), steps)
        return torch.rand(()).item(), np.random.rand(), random.random()

    assert drawn(0) == drawn(4)


def test_rows_short_of_a_full_step_are_read_after_a_raised_limit(data, caplog):
    path = write(data / "ends.yaml", {"blend": [{"path": "photos", "max_epochs": 1}]})
    with caplog.at_level(logging.INFO, "energon_ext"):
        loader = loader_for(dataset_of(path))
        read = list(loader)
    assert [len(step) for step in read] == [8] * 6
    assert "The last 2 rows do not fill a step and are dropped; a method make_pad" in caplog.text
    write(path, {"blend": [{"path": "photos", "max_epochs": 2}]})
    more, _ = run(path, 6, state=loader.state_dict())
    numbers = [number for step in read + more for _, number, *_ in step]
    assert sorted(numbers[:50]) == list(range(50))
    assert max(Counter(numbers).values()) == 2


def test_energons_loader_reads_the_same(data):
    path = mix(data)
    expected, _ = run(path, 4, 2, 0)
    for workers in (0, 3):
        ranks = [take(stock_loader_for(dataset_of(path, 2, workers, rank)), 4) for rank in (0, 1)]
        assert [a + b for a, b in zip(*ranks)] == expected


def blocks_of(size):
    encoder = PlannedCaptions()
    encoder.sample_block = size
    return encoder


def test_samples_of_a_block_are_read_together_on_any_topology(data, monkeypatch):
    monkeypatch.setattr(plan_mix, "EpochOrder", partial(EpochOrder, mixed=1))
    path = write(data / "blocks.yaml", {"blend": [{"path": "photos", "max_epochs": 1}]})
    expected, state = run(path, 6, encoder=blocks_of(10))
    numbers = [number for step in expected for _, number, *_ in step]
    assert len(set(numbers)) == 48
    for begin in range(0, 40, 10):  # blocks of ten consecutive samples; the last one wraps
        block = numbers[begin : begin + 10]
        assert {(number - min(block)) % 50 for number in block} <= {*range(10), *range(40, 50)}
    assert run(path, 6, 2, 1, encoder=blocks_of(10)) == (expected, state)
    with pytest.raises(StateMismatchError, match="sample_block: saved 10, now 5"):
        run(path, 1, state=state, encoder=blocks_of(5))


# What cannot be used ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    folder = tmp_path_factory.mktemp("damaged")
    write_images(folder / "photos", 50, damaged=range(0, 50, 5))
    return write(folder / "mix.yaml", {"blend": [{"path": "photos"}]})


def test_a_sample_that_cannot_be_decoded_is_replaced_by_the_same_one_everywhere(damaged, caplog):
    with caplog.at_level(logging.WARNING, "energon_ext"):
        expected = run(damaged, 12)
    assert all(len(step) == ROWS for step in expected[0])
    assert all(greys or not number % 3 for step in expected[0] for _, number, greys, _ in step)
    cut_off = {number for number in range(0, 50, 5) if number % 3}
    assert not cut_off & {number for step in expected[0] for _, number, *_ in step}
    found = re.search(
        r"photos:train\S* \S+:(\d+): sample skipped .1 so far.: Sample (\d+): ", caplog.text
    )
    number, key = map(int, found.groups())  # the log names the sample as `exclude` does
    assert number == key and number in cut_off
    for ranks, workers in TOPOLOGIES[:2]:
        assert run(damaged, 12, ranks, workers) == expected


def test_a_sample_that_replaces_another_has_random_numbers_of_its_own(damaged):
    read = [sample for step in run(damaged, 60)[0] for sample in step]
    times = Counter(number for _, number, *_ in read)
    assert min(times.values()) > 1 and len({tuple(noise) for *_, noise in read}) == len(read)


def fresh_encoder():
    """An encoder of a new class: Energon keeps a worker's seed in each decorated method."""

    class Fresh(PlannedCaptions):
        @stateless(restore_seeds=True)
        def encode_sample(self, sample):
            number = int(sample.caption.split()[1])
            return Encoded.derive_from(sample, number=number, greys=[], noise=torch.rand(3))

    return Fresh()


def test_energons_worker_seeds_do_not_matter(data):
    path, per_rank = mix(data), []
    for rank in (0, 1):
        loader = loader_for(dataset_of(path, 2, 0, rank, encoder=fresh_encoder()))
        per_rank.append(take(loader, 3))
    expected, _ = run(path, 3, encoder=fresh_encoder())
    assert [a + b for a, b in zip(*per_rank)] == expected


class Choosy(PlannedCaptions):
    """Skips most samples."""

    wanted = set(range(0, 50, 5))

    @stateless
    def encode_sample(self, sample):
        if int(sample.caption.split()[1]) not in self.wanted:
            raise SkipSample
        return super().encode_sample(sample)


def test_random_numbers_are_reproducible_when_a_parent_method_seeds(data):
    expected = run(mix(data), 3, encoder=Choosy())
    assert {number for step in expected[0] for _, number, *_ in step} <= Choosy.wanted
    assert run(mix(data), 3, 2, 1, encoder=Choosy()) == expected


def test_an_excluded_sample_is_never_a_replacement(data):
    key = 'photos:train{"caption": true}'
    (data / "tens.txt").write_text("".join(f"{key}:{number}\n" for number in range(0, 50, 10)))
    path = write(data / "replaced.yaml", {"blend": [{"path": "photos"}]})
    path.write_text(json.dumps({**json.loads(path.read_text()), "exclude": "tens.txt"}))
    steps, _ = run(path, 6, encoder=Choosy())
    assert {number for step in steps for _, number, *_ in step} == {5, 15, 25, 35, 45}


def test_a_run_without_usable_samples_ends_with_the_reason(data):
    encoder = Choosy()
    encoder.wanted = set()
    with pytest.raises(SampleError, match="101 samples in a row cannot be used, the first: Sample"):
        run(mix(data), 1, encoder=encoder)


@pytest.mark.parametrize(("tolerance", "failures"), [(7, 8), (0, None)])
def test_the_encoder_sets_how_many_unusable_samples_in_a_row_end_a_run(data, tolerance, failures):
    class Rare(Choosy):
        wanted = {25}

        @stateless(failure_tolerance=tolerance)
        def encode_sample(self, sample):
            return super().encode_sample(sample)

    if failures is None:  # no limit
        steps, _ = run(mix(data), 4, encoder=Rare())
        assert {number for step in steps for _, number, *_ in step} == {25}
        return
    with pytest.raises(SampleError, match=f"{failures} samples in a row cannot be used"):
        run(mix(data), 4, encoder=Rare())


class WithPillow(PlannedCaptions):
    """Needs images of PIL, but gets NumPy arrays."""

    decoder = SampleDecoder(image_decode="rgb8")
    checks = False

    @stateless
    def encode_sample(self, sample):
        if self.checks and any(isinstance(image, np.ndarray) for image in sample.images):
            raise ValueError("a PIL image is needed")
        sample.images = [image.convert("RGB") for image in sample.images]
        return super().encode_sample(sample)


@pytest.fixture
def single_images(tmp_path):
    write_images(tmp_path / "photos", 40, images=lambda number: 1)
    return write(tmp_path / "mix.yaml", {"blend": [{"path": "photos"}]})


def test_samples_that_all_fail_alike_name_the_decoder(single_images):
    encoder = WithPillow()
    encoder.checks = True
    with pytest.raises(
        SampleError,
        match=r"101 samples in a row .* Sample 0000\d\d: ValueError .* All failed with ValueError: "
        r"the files of a sample are decoded by SampleDecoder\(image_decode='rgb8'\); set `decoder`",
    ):
        run(single_images, 1, encoder=encoder)


@pytest.mark.parametrize(
    ("decoder", "error", "how"),
    [
        (WithPillow.decoder, AttributeError, "are decoded by SampleDecoder(image_decode='rgb8')."),
        (None, TypeError, "are not decoded, as the encoder's `decoder` is None."),
    ],
)
def test_wrong_code_is_raised_after_a_line_on_the_decoder(
    single_images, decoder, error, how, caplog
):
    encoder = WithPillow()
    encoder.decoder = decoder
    with pytest.raises(error):
        run(single_images, 1, encoder=encoder)
    assert f"the first 10 samples all fail: the files of a sample {how}" in caplog.text


def test_samples_that_fail_in_several_ways_do_not_blame_the_decoder(data):
    class Moody(PlannedCaptions):
        @stateless
        def encode_sample(self, sample):
            raise (KeyError if self.sample_number % 2 else IndexError)("no such field")

    with pytest.raises(SampleError, match=r"101 samples in a row .*no such field'?\)\.$"):
        run(mix(data), 1, encoder=Moody())


def test_a_truncated_tar_is_named(tmp_path):
    folder = write_images(tmp_path / "photos", 40)
    path = write(tmp_path / "mix.yaml", {"blend": [{"path": "photos"}]})
    shard = folder / "shard_001.tar"
    dataset = dataset_of(path)
    shard.write_bytes(shard.read_bytes()[:4000])
    with pytest.raises(ConfigError, match="photos: sample [0-9]+ cannot be read.*copy its files"):
        take(loader_for(dataset), 6)
    with pytest.raises(ConfigError, match="shard_001.tar: has 4000 bytes, .* it was truncated"):
        dataset_of(path)


# What is planned and what is streamed -----------------------------------------------------------


class Stateful(PlannedCaptions):
    def encode_sample(self, sample):
        return sample


class Yields(PlannedCaptions):
    """Yields samples like the encoders of Megatron-LM; ``odd`` is yielded ``times`` times."""

    odd, times = -1, 0

    @stateless
    def encode_sample(self, sample):
        encoded = super().encode_sample(sample)
        yield from [encoded] * (self.times if encoded.number == self.odd else 1)


class Grouped(PlannedCaptions):
    def batch_group_criterion(self, sample):
        return len(sample.images), 2


class OwnStages(PlannedCaptions):
    def build_batch(self, dataset, **options):
        return super().build_batch(dataset, **options)


class Sized(PlannedCaptions):
    def blend_sample_size(self, sample):
        return 3


class Packing(PlannedCaptions):
    def select_samples_to_pack(self, samples):
        return [samples]

    @stateless
    def pack_selected_samples(self, samples):
        return samples[0]


def streamed():
    encoder = PlannedCaptions()
    encoder.plan_samples = False
    return encoder


@pytest.mark.parametrize(
    ("encoder", "options", "reason"),
    [
        (Stateful(), {}, "encode_sample is not marked @stateless"),
        (Grouped(), {}, "batch_group_criterion groups samples only after"),
        (OwnStages(), {}, "build_batch builds its own stages"),
        (Sized(), {}, "blend_sample_size needs samples that have been read"),
        (Packing(), {"packing_buffer_size": 4}, "packing_buffer_size packs samples whose lengths"),
        (PlannedCaptions(), {"repeat": False}, "every sample is read once, and without make_pad"),
        (PlannedCaptions(), {"batch_size": None}, "without a batch_size there are no batches"),
        (streamed(), {}, "plan_samples is False"),
    ],
)
def test_unplannable_encoders_are_streamed_with_a_logged_reason(
    data, caplog, encoder, options, reason
):
    with caplog.at_level(logging.INFO, "energon_ext"):
        dataset = dataset_of(mix(data), encoder=encoder, **options)
    assert isinstance(find_blend(dataset), StreamedBlend)
    assert f"Samples are streamed, which fixes the ranks x workers: {reason}" in caplog.text


def test_an_inherited_blend_sample_size_does_not_prevent_planning(data, monkeypatch):
    def blend_sample_size(self, sample):
        return 1.0

    monkeypatch.setattr(TaskEncoder, "blend_sample_size", blend_sample_size, raising=False)
    assert find_blend(dataset_of(mix(data), encoder=PlannedCaptions())).is_planned
    sized = find_blend(dataset_of(mix(data), encoder=Sized()))
    assert isinstance(sized, StreamedBlend)


def test_yielding_one_sample_equals_returning_it(data):
    assert run(mix(data), 4, encoder=Yields())[0] == run(mix(data), 4)[0]


def test_yielding_several_samples_is_an_error_and_none_a_replacement(data):
    encoder = Yields()
    encoder.odd, encoder.times = 7, 2
    loader = loader_for(dataset_of(mix(data), encoder=encoder))
    with pytest.raises(ConfigError, match="encode_sample yields several samples for 000007, but"):
        take(loader, 20)
    encoder.times = 0
    read = run(mix(data), 12, encoder=encoder)[0]
    assert 7 not in {number for step in read for _, number, *_ in step}


def test_subsets_and_exclusions_hold_on_any_topology(data):
    key = 'photos:train[10, 30]{"caption": true}'
    (data / "excluded.txt").write_text(f"{key}:12\n{key}:17\n")
    split = {"blend": [{"path": "photos", "subset": {"range": [10, 30]}}]}
    path = write(data / "subset.yaml", split)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "exclude": "excluded.txt"}))
    expected = run(path, 3)
    numbers = {number for step in expected[0] for _, number, *_ in step}
    assert numbers == set(range(10, 30)) - {12, 17}
    assert run(path, 3, 2, 1) == expected


def test_a_stateless_encoder_over_text_samples_is_planned_too(tmp_path):
    class Plain(DynamicBlendMixin, DefaultTaskEncoder):
        """Samples as they are."""

    write_dataset(tmp_path / "text", [f"text {number}" for number in range(20)])
    options = {"batch_size": 5, "rows_per_step": 5}
    loader = ExactDataLoader(dataset_of(tmp_path / "text", encoder=Plain(), **options))
    texts = [text for batch in take(loader, 4) for text in batch.text]
    assert sorted(texts) == sorted(f"text {number}" for number in range(20))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("photos", "[Nn]o cookers registered"),
        ("tokens", "token files yield packed rows; load them with a PackedTaskEncoder"),
    ],
)
def test_sources_the_encoder_cannot_read_are_refused_at_build_time(data, path, message):
    class Plain(DynamicBlendMixin, DefaultTaskEncoder):
        """Has no cooker for crude samples."""

    write_tokens(data / "tokens", [[1, 2, 3]])
    mix_path = write(data / "refused.yaml", {"blend": [{"path": path}]})
    with pytest.raises(ConfigError, match=message):
        dataset_of(mix_path, encoder=Plain())


# Wrong code in an encoder -------------------------------------------------------------------------


class Misspelled(PlannedCaptions):
    @stateless
    def encode_sample(self, sample):
        return Encodd.derive_from(sample)  # noqa: F821


class SomeAreNull(PlannedCaptions):
    """Code that expects a number, which the first samples of an epoch do not have."""

    missing = frozenset()

    @stateless
    def encode_sample(self, sample):
        encoded = super().encode_sample(sample)
        encoded.number += None if encoded.number in self.missing else 0
        return encoded


@pytest.mark.parametrize("workers", [0, 2])
def test_wrong_code_ends_the_run_with_its_own_error_and_traceback(data, workers):
    loader = loader_for(dataset_of(mix(data), workers=workers, encoder=Misspelled()))
    with pytest.raises(NameError, match="name 'Encodd' is not defined") as raised:
        next(iter(loader))
    text = str(raised.value.__cause__) if workers else str(raised.getrepr())
    assert "return Encodd.derive_from(sample)" in text


def test_samples_that_raise_such_an_error_are_skipped_even_as_the_first_ones(data, caplog):
    path = write(data / "null.yaml", {"blend": [{"path": "photos"}]})
    expected = [number for step in run(path, 6)[0] for _, number, *_ in step]
    encoder = SomeAreNull()
    encoder.missing = frozenset(expected[:5])
    found = [number for step in run(path, 6, encoder=encoder)[0] for _, number, *_ in step]
    assert found[5:] == expected[5:] and not encoder.missing & set(found)
    assert "sample skipped (1 so far)" in caplog.text and "TypeError" in caplog.text


def test_keyed_random_numbers_may_be_nested():
    encoder = PlannedCaptions()

    def drawn(nested):
        with keyed_random("outer"):
            first = random.random(), encoder.current_sample_index
            if nested:
                with keyed_random("inner"):
                    SystemRng.seed_args(3)
                    random.random(), np.random.rand(), torch.rand(())
            SystemRng.seed_args(3)  # no effect inside the context
            second = random.random(), np.random.rand(), torch.rand(()).item()
            return first, second, encoder.current_sample_index

    seed_args = SystemRng.seed_args
    assert drawn(nested=True) == drawn(nested=False)
    assert encoder.sample_number is None and SystemRng.seed_args is seed_args


def test_keyed_random_numbers_depend_on_the_key_alone():
    def drawn(key, before):
        torch.manual_seed(before), np.random.seed(before), random.seed(before)
        with keyed_random(key):
            return random.random(), np.random.rand(), torch.rand(()).item()

    assert drawn("one", before=1) == drawn("one", before=2)
    assert all(a != b for a, b in zip(drawn("one", before=1), drawn("other", before=1)))
