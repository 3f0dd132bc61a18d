# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Samples that fail for a passing reason: never lost, reported at each start, tried again."""

import json
import logging

import numpy as np
import pytest
from megatron.energon import Cooker, SkipSample, stateless

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.data_files import DEFAULT_CACHE
from energon_ext.encoders.text import Document, cook_text
from energon_ext.errors import ConfigError, SampleError, WrongCodeError
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext, error_line
from tests.samples.test_planned_samples import dataset_of, write
from tests.samples.vision import PackedCaptions, PlannedCaptions, cook, write_images
from tests.support import config, loader_for, take, write_mix


class Moody(PackedCaptions):
    """Every second sample needs a package that is missing; every tenth is never wanted."""

    is_mended = False
    encoded = []

    @stateless
    def encode_sample(self, sample):
        number = int(sample.caption.split()[1])
        Moody.encoded.append(number)
        if number % 10 == 0:
            raise SkipSample
        if number % 2 and not self.is_mended:
            raise ImportError("No module named 'rare_codec'")
        return super().encode_sample(sample)


@pytest.fixture
def mix(tmp_path, monkeypatch):
    write_images(tmp_path / "photos", 40)
    (tmp_path / "own_captions.py").write_text(
        "from tests.samples.test_failures import Moody\ndef encoder(): return Moody()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Moody, "encoded", [])
    return write(tmp_path / "mix.yaml", {"blend": [{"path": "photos", "max_epochs": 3}]})


def measure(mix, *options):
    return energon_ext("measure", mix, "--encoder", "own_captions:encoder", *options)


def read(mix):
    dataset = dataset_of(mix, encoder=Moody())
    return {number for step in loader_for(dataset) for row in step for number, *_ in row}


WANTED = {number for number in range(40) if number % 10}


@pytest.mark.parametrize("part", [(), ("--part", "0/2")])
def test_failures_are_reported_at_each_start_and_measured_again(mix, monkeypatch, caplog, part):
    assert measure(mix).exit_code == 0
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "energon_ext"):
            assert read(mix) == {number for number in WANTED if number % 2 == 0}
        (line,) = [each for each in caplog.messages if "measured" in each]
        assert "photos: 24 of 40 samples cannot be measured: 20, the first: Sample 000001" in line
        assert "; 4, the first: Sample 000000: SkipSample. They" in line
        assert f"left out; `energon-ext measure {mix} --encoder MODULE:FUNCTION` tries them" in line
    files = mix.parent.glob(f"{DEFAULT_CACHE}/photos-*/tokens/part-*.failures.jsonl")
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    reasons = [each["reason"].partition(": ")[2] for each in lines]
    assert sorted(set(reasons)) == ["ImportError (No module named 'rare_codec').", "SkipSample."]
    assert len(reasons) == 24
    monkeypatch.setattr(Moody, "is_mended", True)
    caplog.clear()
    assert measure(mix, *part).exit_code == 0
    if part:
        assert read(mix) < WANTED  # the other part has not been tried
        assert measure(mix, "--part", "1/2").exit_code == 0
    caplog.clear()
    assert read(mix) == WANTED
    assert (
        "4 of 40 samples cannot be measured, the first: Sample 000000: SkipSample." in caplog.text
    )


def test_only_what_failed_is_tried_again_while_nothing_is_mended(mix):
    measure(mix)
    (table,) = (mix.parent / DEFAULT_CACHE).glob("photos-*")
    before = {path: path.stat().st_mtime_ns for path in table.rglob("*")}
    Moody.encoded.clear()
    measure(mix)
    assert sorted(Moody.encoded) == [n for n in range(40) if n % 2 or n % 10 == 0]
    assert {path: path.stat().st_mtime_ns for path in table.rglob("*")} == before


def test_a_source_of_which_everything_fails_is_an_error_with_the_reason(mix, monkeypatch):
    class Unlucky(Moody):
        @stateless
        def encode_sample(self, sample):
            raise OSError("the store is down")

    message = "photos: none of its 40 samples could be measured, the first: Sample 000000: OSError"
    monkeypatch.setattr(Moody, "encode_sample", Unlucky.encode_sample)
    for _ in range(2):
        result = measure(mix)
        assert result.exit_code == 2 and message in error_line(result)
        assert "(the store is down)" in error_line(result)
        with pytest.raises(ConfigError, match=message):
            dataset_of(mix, encoder=Unlucky())
    monkeypatch.undo()
    assert list((mix.parent / DEFAULT_CACHE).glob("photos-*")) == []


# Text ---------------------------------------------------------------------------------------------


class Flaky(PackedTaskEncoder):
    """Cannot read every third text until it is mended."""

    encoding_fingerprint = {"version": 1}
    is_mended = False

    @stateless
    def encode_document(self, sample):
        if int(sample.text.split()[0]) % 3 == 0 and not self.is_mended:
            raise KeyError("lexicon")
        return super().encode_document(sample)


@pytest.fixture
def texts(tmp_path, monkeypatch):
    lines = [json.dumps({"text": f"{number} text"}) for number in range(30)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "own_text.py").write_text(
        "from tests.samples.test_failures import Flaky, ByteTokenizer\n"
        "def encoder(): return Flaky(ByteTokenizer(), 64)\n"
    )
    monkeypatch.chdir(tmp_path)
    return write_mix(tmp_path / "mix.yaml", [("lines.jsonl", 1)])


def read_texts(mix, encoder=Flaky):
    dataset = get_train_dataset(
        mix,
        worker_config=config(),
        batch_size=1,
        task_encoder=encoder(ByteTokenizer(), 64),
        repeat=False,
    )
    text = "".join(ByteTokenizer().decode(batch.tokens) for batch in loader_for(dataset))
    return {int(each) for each in text.replace("text", " ").split() if each.isdigit()}


def test_text_that_failed_is_tokenized_when_the_command_runs_again(texts, monkeypatch, caplog):
    some = {number for number in range(30) if number % 3}
    for _ in range(2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "energon_ext"):
            assert read_texts(texts) == some
        assert "10 of 30 samples cannot be tokenized, the first: Sample 0: KeyError" in caplog.text
    monkeypatch.setattr(Flaky, "is_mended", True)
    assert energon_ext("tokenize", texts, "--encoder", "own_text:encoder").exit_code == 0
    caplog.clear()
    assert read_texts(texts) == set(range(30))
    assert "cannot be tokenized" not in caplog.text


class Augmented(PackedTaskEncoder):
    """Leaves out each word at random."""

    encoding_fingerprint = {"version": 1}

    @stateless(restore_seeds=True)
    def encode_document(self, sample):
        tokens = self.tokenizer.encode_array(sample.text)
        return Document.derive_from(sample, tokens=tokens[np.random.rand(len(tokens)) < 0.8])


@stateless
def cook_at_random(sample):
    cooked = cook_text(sample)
    cooked.text = cooked.text[int(np.random.randint(0, 3)) :]
    return cooked


class Cropped(PackedTaskEncoder):
    encoding_fingerprint = {"version": 1}
    cookers = [Cooker(cook_at_random)]


@pytest.mark.parametrize(
    ("encoder", "name"), [(Augmented, "Augmented.encode_document"), (Cropped, "cook_at_random")]
)
def test_tokens_that_are_random_are_not_frozen_by_the_cache(texts, encoder, name):
    with pytest.raises(ConfigError, match=rf"lines.jsonl: .*{name} encodes sample 0 differently"):
        read_texts(texts, encoder)
    assert list(texts.parent.glob(f"{DEFAULT_CACHE}/lines*")) == []


# What a bad sample is -----------------------------------------------------------------------------


def has_no_caption(number):
    return number % 4 == 1


@stateless
def cook_some(sample):
    cooked = cook(sample)
    if has_no_caption(int(cooked.caption.split()[1])):
        return {}["caption"]
    return cooked


COOKERS = [Cooker(cook_some, has_subflavors={"caption": True})]
PLANNED = type("Planned", (PlannedCaptions,), {"cookers": COOKERS})
PACKED = type("PackedSome", (PackedCaptions,), {"cookers": COOKERS})
STREAMED = type("Streamed", (PlannedCaptions,), {"cookers": COOKERS, "plan_samples": False})


@pytest.mark.parametrize("encoder", [PLANNED, PACKED, STREAMED])
def test_a_cooker_may_fail_for_some_samples_however_they_are_read(mix, encoder, caplog):
    with caplog.at_level(logging.WARNING, "energon_ext"):
        dataset = dataset_of(mix, encoder=encoder())
        batches = [*loader_for(dataset)]
    rows = [row if encoder is PACKED else [row[1:]] for batch in batches for row in batch]
    numbers = {sample[0] for row in rows for sample in row}
    assert len(numbers) > 20 and not any(map(has_no_caption, numbers))
    assert "KeyError ('caption')" in caplog.text and "Traceback" not in caplog.text


class Wrong(PlannedCaptions):
    plan_samples = False

    @stateless
    def encode_sample(self, sample):
        return sample.captoin


class SometimesWrong(Wrong):
    @stateless
    def encode_sample(self, sample):
        if int(sample.caption.split()[1]) % 2:
            return sample.captoin
        return PlannedCaptions.encode_sample(self, sample)


def test_wrong_code_ends_a_stream_and_bad_samples_do_not(mix, capfd, caplog):
    with pytest.raises(WrongCodeError, match="Wrong: the first 10 samples all fail: .*captoin"):
        take(loader_for(dataset_of(mix, encoder=Wrong())), 1)
    batches = take(loader_for(dataset_of(mix, encoder=SometimesWrong())), 6)
    assert all(row[1] % 2 == 0 for batch in batches for row in batch)
    assert "SometimesWrong: sample skipped (10 so far): Sample 0000" in caplog.text
    assert "Traceback" not in capfd.readouterr().err


def test_bad_samples_in_a_row_end_a_stream(mix):
    class Never(Wrong):
        @stateless(failure_tolerance=12)
        def encode_sample(self, sample):
            raise ValueError("no")

    with pytest.raises(Exception, match="12 times in a row"):
        take(loader_for(dataset_of(mix, encoder=Never())), 1)


# A fingerprint that did not change ----------------------------------------------------------------


class Options(PackedCaptions):
    extra = 0

    def length_of(self, encoded):
        return super().length_of(encoded) + self.extra


def test_a_start_refuses_lengths_of_another_option(mix):
    dataset_of(mix, encoder=Options())
    dataset_of(mix, encoder=Options())
    other = Options()
    other.extra = 2
    with pytest.raises(ConfigError, match="photos.*: sample [0-9]+ has [0-9]+ tokens, but had"):
        dataset_of(mix, encoder=other)
    other.encoding_fingerprint = {"version": 2}
    dataset_of(mix, encoder=other)


def test_a_start_does_not_compare_lengths_of_random_numbers_of_its_own(mix):
    class Own(PackedCaptions):
        generator = np.random.default_rng()

        def length_of(self, encoded):
            return super().length_of(encoded) + int(self.generator.integers(0, 12))

    for _ in range(2):
        dataset_of(mix, encoder=Own())


def test_a_sample_error_is_named_once():
    from energon_ext.samples.bad_samples import BadSamples

    bad = BadSamples("web", None)
    assert str(bad.judge(SampleError("Sample 7: no text."), "7")) == "Sample 7: no text."
    assert str(bad.judge(SampleError("no text."), "7")) == "Sample 7: no text."
