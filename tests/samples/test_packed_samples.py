# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples of a custom TaskEncoder packed into full rows by lengths measured once."""

import json
import logging
import os
import re
import shutil
from collections import Counter

import numpy as np
import pytest
from megatron.energon import Sample, SampleDecoder, stateless
from megatron.energon.edataclass import edataclass

from energon_ext.data_files import DEFAULT_CACHE
from energon_ext.errors import ConfigError, WrongCodeError
from energon_ext.state.schema import seal
from tests.cli.command import energon_ext, error_line
from tests.samples.test_planned_samples import ROWS, dataset_of, run, write
from tests.samples.vision import (
    CRUDE,
    Packed,
    PackedCaptions,
    PlannedCaptions,
    length_of_number,
    write_images,
)
from tests.saves import save_cursor
from tests.support import loader_for, prepare_shards, take


@pytest.fixture
def data(data, tmp_path):
    """A copy in which nothing has been measured."""
    return shutil.copytree(data, tmp_path, dirs_exist_ok=True)


def mix(folder, rule="interleave"):
    entries = [{"path": "photos", "weight": {"linear": {0: 1, 6: 3}}}, {"path": "charts"}]
    return write(folder / "mix.yaml", {rule: entries})


def alone(folder, **fields):
    return write(folder / "alone.yaml", {"blend": [{"path": "photos", **fields}]})


class OwnPacker(PackedCaptions):
    """Packs the longest samples first and leaves the last one for later."""

    def select_samples_to_pack(self, samples):
        rows = []
        for sample in sorted(samples[:-1], key=lambda each: -each.total_len):
            for row in rows:
                if sum(each.total_len for each in row) + sample.total_len <= self.seq_len:
                    row.append(sample)
                    break
            else:
                rows.append([sample])
        return rows


class OfDictionaries(PackedCaptions):
    """Packs as OwnPacker does, if samples were dictionaries."""

    def select_samples_to_pack(self, samples):
        rows = []
        for sample in sorted(samples[:-1], key=lambda each: -each["total_len"]):
            for row in rows:
                if sum(each["num_tokens"] for each in row) + sample["length"] <= self.seq_len:
                    row.append(sample)
                    break
            else:
                rows.append([sample])
        return rows


@pytest.mark.parametrize(
    "encoder", [pytest.param(PackedCaptions, marks=pytest.mark.nightly), OwnPacker]
)
def test_rows_and_states_are_the_same_on_any_ranks_and_workers_and_over_resumes(data, encoder):
    path = mix(data)
    expected = run(path, 7, encoder=encoder())
    assert run(path, 7, 2, 1, encoder=encoder()) == expected
    read, state = [], None
    for steps, ranks, workers in ((2, 4, 0), (2, 1, 2), (3, 2, 0)):
        found, state = run(path, steps, ranks, workers, state, encoder=encoder())
        read += found
    assert read == expected[0]


@pytest.mark.parametrize("encoder", [PackedCaptions, OwnPacker])
def test_every_sample_is_in_one_row_per_epoch_and_no_row_overflows(data, encoder):
    loader = loader_for(dataset_of(alone(data, max_epochs=5), encoder=encoder()))
    rows = [row for step in loader for row in step]
    assert all(sum(length for _, length, _ in row) <= 40 for row in rows)
    samples = [sample for row in rows for sample in row]
    assert all(length == length_of_number(number) for number, length, _ in samples)
    counts = Counter(number for number, *_ in samples)
    assert set(counts) == set(range(50)) and max(counts.values()) <= 5
    left = 5 * 50 - len(samples)  # in the last rows, which do not fill a step
    assert left < ROWS * 8
    tokens = sum(length for _, length, _ in samples)
    assert tokens / (40 * len(rows)) > (0.9 if encoder is OwnPacker else 0.97)


@pytest.mark.parametrize("encoder", [PackedCaptions, OwnPacker])
def test_no_row_has_a_sample_twice_over_epochs_and_resumes(data, encoder):
    path, rows, state = alone(data), [], None
    for steps, ranks in ((5, 1), (4, 2), (6, 4)):
        found, state = run(path, steps, ranks, state=state, encoder=encoder())
        rows += [[number for number, *_ in row] for step in found for row in step]
    assert min(Counter(number for row in rows for number in row).values()) >= 5
    assert all(len(set(row)) == len(row) for row in rows)


def test_an_interleave_counts_the_tokens_of_the_rows(data):
    path = write(data / "even.yaml", {"interleave": [{"path": "photos"}, {"path": "charts"}]})
    loader = loader_for(dataset_of(path, encoder=PackedCaptions()))
    take(loader, 20)
    sources = loader.state_dict()["plan"]["sources"]
    photos, charts = (counts["tokens"] for counts in sources.values())
    assert photos + charts > 0.97 * 20 * ROWS * 40
    assert abs(photos - charts) <= 2 * 40


def test_breakpoints_may_count_the_tokens_of_rows(data):
    entries = [
        {"path": "photos", "weight": {"step": {0: 1, 2 * ROWS * 40: 0}}},
        {"path": "charts", "weight": {"step": {0: 0, 2 * ROWS * 40: 1}}},
    ]
    path = write(data / "tokens.yaml", {"blend": entries})
    path.write_text(json.dumps({**json.loads(path.read_text()), "schedule_axis": "tokens"}))
    loader = loader_for(dataset_of(path, encoder=PackedCaptions()))
    read = []
    for _ in range(2):
        take(loader, 2)
        sources = loader.state_dict()["plan"]["sources"]
        read.append([counts["tokens"] for counts in sources.values()])
    (charts, photos), (more_charts, more_photos) = read
    assert charts == 0 < photos == more_photos and more_charts > 0


def test_lengths_are_measured_once(data, monkeypatch):
    path = alone(data)
    run(path, 1, encoder=PackedCaptions())
    (table,) = (data / DEFAULT_CACHE).iterdir()
    assert sum(file.stat().st_size for file in table.glob("*/*")) == 6 * 128 + 8 * 50
    before = {file: file.stat().st_mtime_ns for file in table.rglob("*")}
    run(path, 1, 2, 1, encoder=PackedCaptions())
    assert {file: file.stat().st_mtime_ns for file in table.rglob("*")} == before


def test_another_encoder_version_measures_again(data):
    class Longer(PackedCaptions):
        encoding_fingerprint = {"version": 2}

    path = alone(data)
    run(path, 1, encoder=PackedCaptions())
    run(path, 1, encoder=Longer())
    assert len(list((data / DEFAULT_CACHE).iterdir())) == 2


def test_only_appended_shards_are_measured(data):
    path = alone(data)
    run(path, 1, encoder=PackedCaptions())
    (table,) = (data / DEFAULT_CACHE).iterdir()
    before = {file.name: file.stat().st_ino for file in table.glob("*/part-*")}
    assert len(before) == 6
    write_images(data / "more", 80)
    shutil.copy(data / "more" / "shard_003.tar", data / "photos" / "shard_003.tar")
    prepare_shards(data / "photos", CRUDE)
    run(path, 1, encoder=PackedCaptions())
    after = {file.name: file.stat().st_ino for file in table.glob("*/part-*")}
    assert len(after) == 8 and before.items() <= after.items()
    write_images(data / "other", 80, images=lambda number: 1)
    shutil.copy(data / "other" / "shard_001.tar", data / "photos" / "shard_001.tar")
    (data / "photos" / "shard_001.tar.idx").unlink()
    prepare_shards(data / "photos", CRUDE)
    run(path, 1, encoder=PackedCaptions())
    changed = {file.name: file.stat().st_ino for file in table.glob("*/part-*")}
    assert {name for name in after if changed[name] != after[name]} == {
        "part-00001.lengths.npy",
        "part-00001.costs.npy",
    }


def test_sample_length_avoids_encoding(data):
    class BySize(PackedCaptions):
        encoded = 0

        @stateless
        def encode_sample(self, sample):
            BySize.encoded += 1
            return super().encode_sample(sample)

        def sample_length(self, sample):
            return length_of_number(int(sample.caption.split()[1]))

    dataset = dataset_of(alone(data), encoder=BySize())
    assert BySize.encoded == 0
    rows = [row for step in take(loader_for(dataset), 3) for row in step]
    assert BySize.encoded == sum(map(len, rows))
    assert rows == [
        row for step in run(alone(data), 3, encoder=PackedCaptions())[0] for row in step
    ]


# What does not fit ------------------------------------------------------------------------------


def test_samples_longer_than_a_row_are_skipped_and_counted(data, caplog):
    encoder = PackedCaptions()
    encoder.seq_len = 20
    with caplog.at_level(logging.WARNING, "energon_ext"):
        loader = loader_for(dataset_of(alone(data, max_epochs=2), encoder=encoder))
    too_long = {number for number in range(50) if length_of_number(number) > 20}
    assert f"{len(too_long)} of 50 samples are longer than a row of 20 tokens" in caplog.text
    read = {number for step in loader for row in step for number, *_ in row}
    assert not read & too_long and read


class Growing(PackedCaptions):
    """Gives lengths by which samples are packed, and notes all that it encodes."""

    encoded = []

    def sample_length(self, sample):
        return length_of_number(int(sample.caption.split()[1]))

    @stateless
    def encode_sample(self, sample):
        encoded = super().encode_sample(sample)
        Growing.encoded.append((encoded.number, encoded.total_len, encoded.greys))
        return encoded


def kept(samples, seq_len=40):
    """Slow model: the samples of a planned row that still fit, one after the other."""
    row = []
    for sample in samples:
        if sum(length for _, length, _ in [*row, sample]) <= seq_len:
            row.append(sample)
    return row


def test_a_row_keeps_the_samples_of_random_length_that_fit(data, caplog):
    path = alone(data)
    encoder = Growing()
    planned = [row for step in run(path, 6, encoder=encoder)[0] for row in step]
    encoder.longest_extra = 3  # tokens more than measured
    Growing.encoded.clear()
    with caplog.at_level(logging.WARNING, "energon_ext"):
        expected = run(path, 6, encoder=encoder)
    found = iter(Growing.encoded)
    read = [[next(found) for _ in row] for row in planned]
    assert [[n for n, *_ in row] for row in read] == [[n for n, *_ in row] for row in planned]
    rows = [row for step in expected[0] for row in step]
    assert rows == [kept(row) for row in read]
    grown = [length > length_of_number(n) for row in rows for n, length, _ in row]
    assert any(grown) and len(grown) < sum(map(len, planned))
    tenth = re.search(
        r":(\d+): sample left out of its row .10 so far.: Sample (\d+): ", caplog.text
    )
    assert int(tenth[1]) == int(tenth[2])
    assert "let length_of return the largest one" in caplog.text
    assert run(path, 6, 2, 1, encoder=encoder) == expected


def test_a_sample_that_has_outgrown_a_row_of_its_own_is_replaced(data, caplog):
    encoder = Growing()
    encoder.seq_len = 25  # as long as the longest sample
    run(alone(data), 1, encoder=encoder)
    encoder.longest_extra = 10
    with caplog.at_level(logging.WARNING, "energon_ext"):
        expected = run(alone(data), 6, encoder=encoder)
    assert "25 when measured, and the row has 25 left" in caplog.text
    assert all(
        0 < sum(length for _, length, _ in row) <= 25 for step in expected[0] for row in step
    )
    assert run(alone(data), 6, 2, 1, encoder=encoder) == expected


def test_a_damaged_sample_is_never_packed(tmp_path, caplog):
    write_images(tmp_path / "photos", 50, damaged=range(0, 50, 5))
    with caplog.at_level(logging.WARNING, "energon_ext"):
        loader = loader_for(dataset_of(alone(tmp_path, max_epochs=3), encoder=PackedCaptions()))
    assert "6 of 50 samples cannot be measured: 3, the first: Sample 0000" in caplog.text
    assert caplog.text.count("the first: Sample 0000") == 2  # kinds of errors
    read = {number for step in loader for row in step for number, *_ in row}
    assert read == {n for n in range(50) if n % 5 or not n % 3}


def test_samples_that_cannot_be_measured_name_the_decoder(data, caplog):
    encoder = PackedCaptions()
    encoder.decoder = None  # then cook() cannot read the caption in the bytes of the JSON
    with pytest.raises(WrongCodeError, match="samples all fail: .* not decoded.*TypeError"):
        dataset_of(alone(data), encoder=encoder)

    class NeedsPillow(PackedCaptions):
        decoder = SampleDecoder(image_decode="rgb8")

        @stateless
        def encode_sample(self, sample):
            sample.images = [image.convert("RGB") for image in sample.images]
            return super().encode_sample(sample)

    dataset_of(alone(data), encoder=NeedsPillow())
    assert "has no attribute 'convert'); the files of a sample are decoded by Sample" in caplog.text


class OwnName(OwnPacker):
    """Reads the length from another attribute."""

    def select_samples_to_pack(self, samples):
        return [[sample] for sample in samples if sample.num_patches]


def test_a_packer_of_dictionaries_reads_lengths_as_items(data):
    assert (
        run(mix(data), 4, encoder=OfDictionaries())[0] == run(mix(data), 4, encoder=OwnPacker())[0]
    )

    class OfTokens(OwnPacker):
        def select_samples_to_pack(self, samples):
            return [[sample] for sample in samples if sample["tokens"]]

    with pytest.raises(ConfigError, match="no item 'tokens'. Samples only have their length, as"):
        take(loader_for(dataset_of(alone(data), encoder=OfTokens())), 1)


def test_a_packer_can_set_its_own_length_attribute(data):
    with pytest.raises(
        ConfigError, match="no attribute 'num_patches'. Samples only have their length"
    ):
        take(loader_for(dataset_of(alone(data), encoder=OwnName())), 1)
    named = OwnName()
    named.length_attribute = "num_patches"
    (batch,) = take(loader_for(dataset_of(alone(data), encoder=named)), 1)
    assert [len(row) for row in batch] == [1] * ROWS


class NoFingerprint(PackedCaptions):
    encoding_fingerprint = None


class NoPacker(PlannedCaptions):
    seq_len, encoding_fingerprint = 40, {"version": 1}

    def length_of(self, encoded):
        return encoded.total_len


class WrongLength(PackedCaptions):
    def length_of(self, encoded):
        return 0.5


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (NoFingerprint(), "NoFingerprint: has length_of but no encoding_fingerprint"),
        (NoPacker(), "NoPacker: has length_of but no pack_selected_samples"),
        (WrongLength(), "WrongLength.length_of: 0.5 found, a number of tokens >= 1"),
    ],
)
def test_an_incomplete_encoder_is_refused(data, encoder, message):
    with pytest.raises(ConfigError, match=message):
        dataset_of(alone(data), encoder=encoder)


def test_a_large_unmeasured_source_is_refused_with_the_command(data, monkeypatch):
    monkeypatch.setattr("energon_ext.encoders.measured.SECONDS_BY_ENCODING", 2.0)
    path = alone(data)
    with pytest.raises(
        ConfigError,
        match=f"photos: samples have not been measured yet .about 100 s of work.. Run `energon-ext "
        f"measure {path} --encoder MODULE:FUNCTION` first",
    ):
        dataset_of(path, encoder=PackedCaptions())


@pytest.mark.parametrize("change", ["cut", "removed", "zero"])
def test_a_damaged_length_table_is_named_and_measured_again(data, change):
    path = alone(data)
    expected = run(path, 1, encoder=PackedCaptions())
    file = next((data / DEFAULT_CACHE).glob("*/*/part-00001.lengths.npy"))
    whole = file.read_bytes()
    if change == "removed":
        file.unlink()
    else:
        file.write_bytes(whole[:-4] if change == "cut" else whole[:-4] + bytes(4))
        message = f"the table of lengths is damaged.*removed, the first: tokens/{file.name}; the"
        with pytest.raises(ConfigError, match=message):
            dataset_of(path, encoder=PackedCaptions())
    assert run(path, 1, encoder=PackedCaptions()) == expected
    assert file.read_bytes() == whole


# Commands ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", [PlannedCaptions, PackedCaptions])
def test_trace_names_the_samples_of_a_step_without_user_code(data, encoder):
    path = mix(data, "blend")
    loader = loader_for(dataset_of(path, encoder=encoder()))
    read = take(loader, 5)[4]
    state = loader_for(dataset_of(path, encoder=encoder())).state_dict()
    save_cursor(data / "run", 0, state)
    result = energon_ext("trace", data / "run", path, "--step", 4, "--json")
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    keys = [[file["origin"] for file in row["files"]] for row in rows]
    if encoder is PackedCaptions:
        assert keys == [[f"{number:06d}" for number, *_ in row] for row in read]
    else:
        assert keys == [[key] for key, *_ in read]
    assert all(file["file"].startswith("shard_00") for row in rows for file in row["files"])


def test_checkpoint_diff_works_without_user_code(data):
    path = mix(data)
    loader = loader_for(dataset_of(path, encoder=PackedCaptions()))
    take(loader, 3)
    save_cursor(data / "run", 3, loader.state_dict())
    write(path, {"interleave": [{"path": "charts"}]})
    result = energon_ext("checkpoint", "diff", data / "run", path)
    assert result.exit_code == 0, result.output
    assert "photos" in result.stdout and "charts" in result.stdout


def test_a_run_with_a_custom_packer_cannot_be_traced(data):
    path = mix(data)
    loader = loader_for(dataset_of(path, encoder=OwnPacker()))
    save_cursor(data / "run", 0, loader.state_dict())
    line = error_line(energon_ext("trace", data / "run", path, "--step", 0))
    assert "packed by a packer 'select_samples_to_pack', which is not registered here" in line


def test_a_state_with_a_damaged_spec_is_refused(data):
    path = mix(data)
    state = loader_for(dataset_of(path, encoder=PackedCaptions())).state_dict()
    del state["energon_ext_digest"]
    kind = state["spec"]["kinds"]["samples"]
    damages = {
        "own": {"own": 7},
        "kinds": {"kinds": {"samples": {**kind, "block": -1}}},
        "packer": {"kinds": {"samples": {**kind, "packer": {**kind["packer"], "more": 1}}}},
    }
    for name, damage in damages.items():
        save_cursor(data / name, 0, seal({**state, "spec": {**state["spec"], **damage}}))
        line = error_line(energon_ext("trace", data / name, path, "--step", 0))
        assert f"{name}" in line and "the state is damaged" in line


def test_all_samples_of_a_batch_are_prefetched_before_reading(data, monkeypatch):
    calls, advise, read = [], os.posix_fadvise, os.pread

    def announced(file, begin, size, advice):
        calls.append(("announced", begin, size))
        return advise(file, begin, size, advice)

    def read_at(file, size, begin):
        calls.append(("read", begin, size))
        return read(file, size, begin)

    loader = loader_for(dataset_of(alone(data), encoder=PackedCaptions()))
    take(loader, 1)  # measures the samples and opens the shards
    monkeypatch.setattr(os, "posix_fadvise", announced)
    monkeypatch.setattr(os, "pread", read_at)
    (batch,) = take(loader, 1)
    half = len(calls) // 2
    assert half == sum(map(len, batch)) > ROWS
    assert [name for name, *_ in calls] == ["announced"] * half + ["read"] * half
    assert [place for _, *place in calls[:half]] == [place for _, *place in calls[half:]]


# A mix that changes -----------------------------------------------------------------------------


def test_sources_come_and_go_and_every_sample_keeps_its_epoch_limit(data):
    photos, charts = ({"path": name, "max_epochs": 2} for name in ("photos", "charts"))
    path, read, state = data / "changing.yaml", [], None
    for entries, steps, ranks, workers in (
        ([photos, charts], 2, 1, 0),
        ([photos], 2, 2, 1),
        ([{**charts, "weight": 3}, photos], 1, 4, 0),
        ([charts, {**photos, "weight": {"linear": {0: 1, 9: 4}}}], None, 1, 2),
    ):
        write(path, {"blend": entries})
        if steps is not None:
            found, state = run(path, steps, ranks, workers, state, encoder=PackedCaptions())
            read += found
            continue
        loader = loader_for(dataset_of(path, ranks, workers, encoder=PackedCaptions()))
        loader.load_state_dict(state)
        read += loader
    counts = Counter(number for step in read for row in step for number, *_ in row)
    allowed = {number: 4 if number < 30 else 2 for number in range(50)}  # charts has 30
    assert all(counts[number] <= times for number, times in allowed.items())
    missing = sum(allowed.values()) - counts.total()
    assert missing < ROWS * 8  # in the last rows, which do not fill a step


def test_skipped_steps_are_planned_but_not_read(data):
    expected = run(alone(data), 6, encoder=PackedCaptions())[0]
    path = alone(data)
    path.write_text(json.dumps({**json.loads(path.read_text()), "skip": [[1, 3]]}))
    assert run(path, 3, encoder=PackedCaptions())[0] == [expected[0], *expected[3:5]]


class Misspelt(PackedCaptions):
    """Cannot measure any sample until its code is corrected."""

    def length_of(self, encoded):
        return encoded.total_lenght


def test_wrong_code_ends_measuring_and_leaves_no_table(data, monkeypatch):
    message = (
        r"photos: the first 10 samples all fail: the files of a sample are decoded by .* Sample "
        rf"000009: AttributeError \(.* 'total_lenght'\), raised at {__file__}:[0-9]+\.$"
    )
    with pytest.raises(WrongCodeError, match=message):
        dataset_of(alone(data), encoder=Misspelt())
    monkeypatch.setattr(Misspelt, "length_of", PackedCaptions.length_of)
    assert take(loader_for(dataset_of(alone(data), encoder=Misspelt())), 1)


# Random numbers -----------------------------------------------------------------------------------


@edataclass
class Drawn(Sample):
    number: int
    drawn: int
    total_len: int


class DrawingCaptions(PackedCaptions):
    """Gives every sample a random number of its own."""

    @stateless
    def encode_sample(self, sample):
        number = int(sample.caption.split()[1])
        drawn = int(np.random.randint(2**62))
        return Drawn.derive_from(
            sample, number=number, drawn=drawn, total_len=length_of_number(number)
        )

    @stateless
    def pack_selected_samples(self, samples):
        pairs = [(each.number, each.drawn) for each in samples]
        return Packed.derive_from(samples[0], samples=pairs)


def test_no_visit_of_a_sample_repeats_the_random_numbers_of_another(data):
    """Samples that wait over the end of an epoch included."""
    path = write(data / "drawn.yaml", {"blend": [{"path": "photos", "max_epochs": 25}]})
    read = [
        pair for step in run(path, 40, encoder=DrawingCaptions())[0] for row in step for pair in row
    ]
    times = Counter(number for number, _ in read)
    assert max(times.values()) > 10 and len({drawn for _, drawn in read}) == len(read)


def test_carried_samples_keep_their_visit_over_a_resume(data):
    path = alone(data)
    encoder = DrawingCaptions()
    whole, _ = run(path, 12, encoder=encoder)
    for steps in (3, 5, 9):
        _, state = run(path, steps, encoder=encoder)
        assert run(path, 12 - steps, 2, state=state, encoder=encoder)[0] == whole[steps:]
