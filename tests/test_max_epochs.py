# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""A source ends after its `max_epochs`; the run continues, or all ranks end together."""

import json
import logging
import warnings
from collections import Counter

import pytest
import torch.distributed as dist
from megatron.energon import DefaultTaskEncoder
from megatron.energon.epathlib import EPath
from megatron.energon.metadataset.loader import prepare_metadataset

from energon_ext import (
    ConfigError,
    DynamicBlendMixin,
    PackedTaskEncoder,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.errors import DataExhaustedError
from energon_ext.megatron import MegatronEnergonLoader
from energon_ext.mixture.checks import BlendWarning
from energon_ext.plan.lookup import find_blend
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron import processes
from tests.support import config, loader_for, take, write_dataset


class Encoder(DynamicBlendMixin, DefaultTaskEncoder):
    """Only the mixin, with streamed samples."""

    plan_samples = False


def limits_of(dataset):
    return {key: source.max_epochs for key, source in find_blend(dataset).sources.items()}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    for source, count in (("web", 12), ("code", 30), ("math", 8)):
        write_dataset(root / source, [f"{source}{number:02d}" for number in range(count)])
    return root


def write(path, split):
    content = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path.write_text(json.dumps({**content, "splits": {"train": split, "val": {"path": "web"}}}))
    return path


def entry(path, max_epochs=None, weight=1):
    limit = {} if max_epochs is None else {"max_epochs": max_epochs}
    return {"path": path, "weight": weight, **limit}


def load(path, *, num_workers=0, worker_config=None, batch_size=2, encoder=None, **options):
    return get_train_dataset(
        path,
        worker_config=worker_config or config(num_workers),
        batch_size=batch_size,
        task_encoder=encoder or Encoder(),
        **options,
    )


def texts(batches):
    return Counter(text for batch in batches for text in batch.text)


def only(counts, source):
    return {text: count for text, count in counts.items() if text.startswith(source)}


@pytest.mark.parametrize(
    ("rule", "num_workers"),
    [
        ("blend", 0),
        ("interleave", 2),
        pytest.param("blend", 2, marks=pytest.mark.nightly),
        pytest.param("interleave", 0, marks=pytest.mark.nightly),
    ],
)
def test_a_limited_source_is_read_max_epochs_times_and_the_others_continue(data, rule, num_workers):
    path = write(data / "limited.yaml", {rule: [entry("web", 2), entry("code")]})
    found = texts(take(loader_for(load(path, num_workers=num_workers)), 100))
    assert only(found, "web") == {f"web{number:02d}": 2 for number in range(12)}
    assert sum(only(found, "code").values()) == 200 - 24


def test_the_end_of_a_source_is_logged_in_one_line(data, caplog):
    path = write(data / "limited.yaml", {"interleave": [entry("web", 2), entry("code")]})
    take(loader_for(load(path)), 100)
    lines = [record.message for record in caplog.records if "to its end" in record.message]
    assert lines == ["web:train: read to its end (max_epochs: 2)."]


@pytest.mark.parametrize("packing", ["bin", "sequential"])
def test_packing_buffers_of_limited_sources_are_drained(data, packing):
    """12 documents of 5 bytes, BOS and EOS: 84 tokens per epoch."""
    path = write(data / "limited.yaml", {"blend": [entry("web", 3), entry("code", 1)]})
    encoder = PackedTaskEncoder(ByteTokenizer(), 16, packing=packing, packing_buffer_docs=5)
    dataset = load(path, encoder=encoder, shuffle_buffer_size=4)
    documents = Counter()
    for batch in loader_for(dataset):
        documents.update(batch.documents_per_source())
    assert documents == {"web:train": 36, "code:train": 30}


def test_the_smallest_limit_at_any_level_applies(data):
    write(data / "inner.yaml", {"interleave": [entry("web", 2), entry("math", 9)]})
    write(data / "middle.yaml", {"blend": [entry("inner.yaml", 5), entry("code")]})
    outer = write(data / "outer.yaml", {"blend": [entry("middle.yaml", 7)]})
    assert limits_of(load(outer)) == {
        "code:train": 7,
        "math:train": 5,
        "web:train": 2,
    }


def test_a_join_can_be_limited(data):
    write_dataset(data / "twin", [f"twin{number:02d}" for number in range(12)])
    joiner = {"__module__": "megatron.energon", "__class__": "TextSample"}
    join = {"join": [{"path": "web"}, {"path": "twin"}], "joiner": joiner, "max_epochs": 3}
    path = write(data / "join.yaml", {"blend": [join, entry("code")]})
    prepare_metadataset(EPath(path))
    dataset = load(path)
    assert limits_of(dataset) == {"code:train": None, "web+twin:train": 3}
    found = only(texts(take(loader_for(dataset), 60)), "twin")
    assert found == {f"twin{number:02d}": 3 for number in range(12)}


# Resuming ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [pytest.param("blend", marks=pytest.mark.nightly), "interleave"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_run_with_limits_resumes_exactly_from_any_save(data, rule, num_workers):
    path = write(data / "limited.yaml", {rule: [entry("web", 2), entry("math", 1), entry("code")]})
    first, expected, states = loader_for(load(path, num_workers=num_workers)), [], {}
    for save_point in (3, 11, 19, 30, 40) if num_workers == 0 else (11, 40):
        expected += [batch.text for batch in take(first, save_point - len(expected))]
        states[save_point] = first.save_state_rank()
    for save_point, state in states.items():
        second = loader_for(load(path, num_workers=num_workers))
        second.restore_state_rank(state)
        found = [batch.text for batch in take(second, 40 - save_point)]
        assert found == expected[save_point:]


def texts_around_resume(data, before, after, batches):
    """Return texts before and after a resume with a new limit for `web`, and the loader."""
    first = loader_for(load(write(data / "x.yaml", {"blend": [entry("web", before), CODE]})))
    seen = texts(take(first, batches))
    second = loader_for(load(write(data / "x.yaml", {"blend": [entry("web", after), CODE]})))
    second.restore_state_rank(first.save_state_rank())
    return seen, texts(take(second, 100)), second


CODE = entry("code")


@pytest.fixture(autouse=True)
def _log_of_this_package(caplog):
    caplog.set_level(logging.INFO, logger="energon_ext")


def test_an_exhausted_source_stays_exhausted_across_resumes(data, caplog):
    seen, later, loader = texts_around_resume(data, 1, 1, 60)
    assert len(only(seen, "web")) == 12
    assert not only(later, "web")
    third = loader_for(load(write(data / "x.yaml", {"interleave": [entry("web", 1), CODE]})))
    third.restore_state_rank(loader.save_state_rank())
    assert not only(texts(take(third, 50)), "web")
    assert caplog.text.count("read to its end") == 1


@pytest.mark.parametrize(("raised", "more"), [(3, 2), (2, 1)])
def test_a_raised_limit_brings_a_source_back_for_the_added_epochs(data, raised, more):
    _, later, loader = texts_around_resume(data, 1, raised, 60)
    assert only(later, "web") == {f"web{number:02d}": more for number in range(12)}
    again = loader_for(load(write(data / "x.yaml", {"blend": [entry("web", raised), CODE]})))
    again.restore_state_rank(loader.save_state_rank())
    assert not only(texts(take(again, 50)), "web")


def test_a_removed_limit_brings_a_source_back_for_good(data):
    _, later, _ = texts_around_resume(data, 1, None, 60)
    assert sum(only(later, "web").values()) > 4 * 12


def test_a_limit_raised_before_the_end_counts_from_the_first_epoch(data):
    seen, later, _ = texts_around_resume(data, 2, 3, 8)
    assert 0 < sum(only(seen, "web").values()) < 24
    assert only(seen + later, "web") == {f"web{number:02d}": 3 for number in range(12)}


def test_a_limit_added_at_a_resume_counts_earlier_epochs(data):
    seen, later, _ = texts_around_resume(data, None, 2, 8)
    assert 0 < sum(only(seen, "web").values()) < 24
    assert only(seen + later, "web") == {f"web{number:02d}": 2 for number in range(12)}


def test_a_limit_already_passed_ends_the_source_at_once(data):
    seen, later, _ = texts_around_resume(data, None, 1, 60)
    assert sum(only(seen, "web").values()) > 12
    assert not only(later, "web")


@pytest.mark.parametrize("rule", ["blend", "interleave"])
def test_a_source_can_come_back_inside_a_nested_node(data, rule):
    inner = data / "inner.yaml"
    outer = write(data / "outer.yaml", {rule: [entry("inner.yaml"), entry("code")]})
    write(inner, {"interleave": [entry("web", 1), entry("math", 1)]})
    first = loader_for(load(outer))
    take(first, 60)
    write(inner, {"interleave": [entry("web", 2), entry("math", 1)]})
    second = loader_for(load(outer))
    second.restore_state_rank(first.save_state_rank())
    later = texts(take(second, 60))
    assert only(later, "web") == {f"web{number:02d}": 1 for number in range(12)}
    assert not only(later, "math")


# The end of all sources --------------------------------------------------------------------------


def megatron_loader(path, **options):
    return MegatronEnergonLoader(load(path, **options), watchdog_timeout_seconds=None)


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_the_run_ends_when_all_sources_are_exhausted(data, num_workers, caplog):
    path = write(data / "all.yaml", {"blend": [entry("web", 2), entry("math", 1)]})
    loader = megatron_loader(path, num_workers=num_workers)
    found = Counter()
    message = (
        r"Every source has reached its max_epochs \(math:train: 1, web:train: 2\): this "
        r"data-parallel rank has no batch 16\."
    )
    with pytest.raises(DataExhaustedError, match=message):
        for batch in loader:
            found.update(batch.text)
    assert found == {
        **{f"web{number:02d}": 2 for number in range(12)},
        **{f"math{number:02d}": 1 for number in range(8)},
    }
    with pytest.raises(DataExhaustedError):  # it does not restart
        next(loader)
    if num_workers == 0:  # workers log in their own processes
        assert caplog.text.count("read to its end") == 2
    state = loader.save_state()
    loader.close()
    resumed_loader = megatron_loader(path, num_workers=num_workers)
    resumed_loader.restore_state(state)
    with pytest.raises(DataExhaustedError):
        next(resumed_loader)
    resumed_loader.close()


def test_virtual_epochs_end_with_the_sources(data):
    path = write(data / "all.yaml", {"blend": [entry("web", 2), entry("math", 1)]})
    loader = megatron_loader(path, virtual_epoch_length=5)
    batches = []
    with pytest.raises(DataExhaustedError, match="no batch 16"):
        for batch in loader:
            batches.append(batch)
    assert sum(texts(batches).values()) == 32


def train_rank(rank, world_size, mix, folder):
    """Train on one of two ranks whose sources end at different batches."""
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
    )
    # Use the default group, not a new one: Energon keeps worker configurations, and a group that
    # outlives destroy_process_group() sometimes aborts its process at exit.
    worker_config = config(rank=rank, world_size=world_size)
    loader = megatron_loader(mix, worker_config=worker_config, batch_size=1)
    batches, message = 0, ""
    try:
        for _ in loader:
            batches += 1
            dist.barrier()  # as in a training step
    except DataExhaustedError as error:
        message = str(error)
    with open(f"{folder}/rank{rank}.json", "w") as file:
        json.dump([batches, message], file)
    dist.destroy_process_group()


def test_all_ranks_end_at_the_same_batch_even_if_one_has_more(data, tmp_path):
    """Seven documents on two ranks: one rank has one more."""
    write_dataset(data / "odd", [f"odd{number}" for number in range(7)])
    mix = write(data / "odd.yaml", {"blend": [entry("odd", 3)]})
    started = [
        processes.start(train_rank, (rank, 2, str(mix), str(tmp_path)), tmp_path / f"stderr{rank}")
        for rank in range(2)
    ]
    assert processes.finish(started) == [0, 0]
    ranks = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert [batches for batches, _ in ranks] == [9, 9]
    assert sorted("this data-parallel rank" in message for _, message in ranks) == [False, True]
    assert sorted("another data-parallel rank" in message for _, message in ranks) == [False, True]


# Errors and warnings -----------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["blend", "interleave"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "2x", [2]])
def test_an_invalid_max_epochs_is_refused_with_its_place(data, rule, value):
    path = write(
        data / "wrong.yaml", {rule: [entry("web"), {**entry("code"), "max_epochs": value}]}
    )
    place = rf"wrong.yaml: {rule}\[1\] \(code\).max_epochs: .* an integer >= 1"
    with pytest.raises(ConfigError, match=place):
        load(path)


def test_repeat_false_and_a_limit_contradict_each_other(data):
    path = write(data / "limited.yaml", {"blend": [entry("web", 2), entry("code")]})
    with pytest.raises(ConfigError, match=r"blend\[0\] .*max_epochs: 2 with repeat=False"):
        load(path, repeat=False)


def test_an_epochized_blend_takes_repetitions_not_max_epochs(data):
    epochized = [{"path": "web", "repetitions": 2, "max_epochs": 2}]
    path = write(data / "epochized.yaml", {"blend_epochized": epochized})
    with pytest.raises(
        ConfigError, match=r"blend_epochized\[0\]: no field 'max_epochs' .* repetitions"
    ):
        load(path)


def test_validation_reads_a_limited_source_once(data):
    path = write(data / "limited.yaml", {"blend": [entry("web", 2), entry("code")]})
    found = get_val_datasets(
        path, worker_config=config(), batch_size=2, task_encoder=Encoder(), split_part="train"
    )
    assert len(found) >= 1


def warnings_for(data, entries):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(write(data / "warned.yaml", {"blend": entries}))
    return [str(w.message) for w in caught if issubclass(w.category, BlendWarning)]


def test_a_step_with_only_limited_sources_is_warned_about(data):
    late = {"step": {0: 0, 50: 1}}
    (message,) = warnings_for(data, [entry("web", 2), entry("code", weight=late)])
    assert message.startswith("At step 0 only sources with a max_epochs have a weight > 0 ({'web:")
    assert "{'web:train': 2}" in message
    assert warnings_for(data, [entry("web", 2), entry("code", 1, weight=late)]) == []
    assert warnings_for(data, [entry("web", 2), entry("code")]) == []


def test_a_gap_after_an_exhausted_source_is_an_error(data):
    late = {"step": {0: 0, 50: 1}}
    path = write(data / "gap.yaml", {"blend": [entry("web", 2), entry("code", weight=late)]})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader = loader_for(load(path))
    take(loader, 12)
    expected = r"0 at step 12 .* samples left: code:train\. Give one"
    with pytest.raises(ConfigError, match=expected):
        take(loader, 1)
