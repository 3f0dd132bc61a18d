# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon-ext measure`` writes the lengths that a run uses, with several processes."""

import re
import shutil

import pytest

from energon_ext.data_files import DEFAULT_CACHE
from tests.cli.command import energon_ext, error_line
from tests.samples.test_planned_samples import run, write
from tests.samples.vision import PackedCaptions, length_of_number, write_images


@pytest.fixture
def mix(tmp_path, monkeypatch):
    write_images(tmp_path / "photos", 50)
    (tmp_path / "own_vision.py").write_text(
        "from tests.samples.vision import PackedCaptions, PlannedCaptions, length_of_number\n"
        "class Longer(PackedCaptions):\n"
        "    def length_of(self, encoded): return super().length_of(encoded) + 1\n"
        "Longer.__qualname__ = 'PackedCaptions'\n"
        "class Random(PackedCaptions):\n"
        "    encoding_fingerprint = {'version': 2}\n"
        "    longest_extra = 3\n"
        "class Bounded(Random):\n"
        "    def sample_length(self, sample):\n"
        "        return length_of_number(int(sample.caption.split()[1])) + 3\n"
        "class Broken(Bounded):\n"
        "    longest_extra = 0\n"
        "    def sample_length(self, sample): return super().sample_length(sample) - 3\n"
        "    def length_of(self, encoded):\n"
        "        return super().length_of(encoded) if encoded.number % 5 else 1 / 0\n"
        "random, bounded, broken = Random, Bounded, Broken\n"
        "def encoder(): return PackedCaptions()\n"
        "def plain(): return PlannedCaptions()\n"
        "def longer(): return Longer()\n"
    )
    monkeypatch.chdir(tmp_path)
    return write(tmp_path / "mix.yaml", {"blend": [{"path": "photos"}]})


def measure(mix, function="encoder", *options):
    return energon_ext("measure", mix, "--encoder", f"own_vision:{function}", *options)


def test_a_run_uses_lengths_measured_by_several_processes(mix, monkeypatch):
    result = measure(mix, "encoder", "--jobs", 2)
    assert result.exit_code == 0, result.stderr
    lengths = [length_of_number(number) for number in range(50)]
    tokens, mean = sum(lengths), sum(lengths) / 50
    expected = f"photos: 50 samples, {tokens} tokens, {mean:.1f} on average, 25 at most in "
    assert expected in result.stdout
    monkeypatch.setattr("energon_ext.encoders.measured.SECONDS_BY_ENCODING", 1000)
    run(mix, 1, encoder=PackedCaptions())
    assert len(list((mix.parent / DEFAULT_CACHE).iterdir())) == 1
    assert measure(mix).stdout == result.stdout


def test_parts_from_several_processes_give_the_table_of_one(mix):
    def files():
        (folder,) = (mix.parent / DEFAULT_CACHE).glob("photos-*")
        return {path.name: path.read_bytes() for path in folder.glob("tokens/*")}

    alone = measure(mix).stdout
    expected = files()
    shutil.rmtree(mix.parent / DEFAULT_CACHE)
    for number in (2, 0):
        output = measure(mix, "encoder", "--part", f"{number}/3").stdout
        assert output.endswith(f"photos: part {number}/3 is measured, other parts are not.\n")
    assert measure(mix, "encoder", "--part", "1/3").stdout == alone
    assert files() == expected
    assert "R/N with 0 <= R < N" in error_line(measure(mix, "encoder", "--part", "3/3"))


def test_check_measures_some_samples_again(mix):
    result = measure(mix, "encoder", "--check", 20)
    assert result.stdout.endswith("20 samples measured again: no changes\n")
    line = error_line(measure(mix, "longer", "--check", 7))
    assert "photos" in line and "7 of 7 samples have changed" in line
    assert "Change the encoding_fingerprint" in line


def test_check_finds_lengths_that_depend_on_random_choices(mix):
    """With 0 to 3 tokens more at random, about 3 in 8 samples are longer the second time."""
    lines = measure(mix, "random", "--check", 50).stdout.splitlines()
    assert lines[-3] == "  50 samples measured again: no changes"
    longer, shorter = (
        int(re.search("random numbers, ([0-9]+) are", line)[1]) for line in lines[-2:]
    )
    assert 8 < longer < 30 and 8 < shorter < 30
    assert "are longer than measured, by up to 3 tokens: full rows will leave out" in lines[-2]
    assert "are shorter than measured, by" in lines[-1]


def test_check_finds_the_space_that_a_bound_of_random_lengths_costs(mix):
    """The bound is 0 to 3 tokens more than needed: 2 on average, where it is more."""
    *_, unchanged, shorter = measure(mix, "bounded", "--check", 50).stdout.splitlines()
    assert unchanged == "  50 samples measured again: no changes"
    count, mean = re.search(
        "([0-9]+) are shorter than measured, by ([0-9.]+) tokens", shorter
    ).groups()
    assert 25 < int(count) < 50 and 1.5 < float(mean) < 2.5


def test_check_finds_samples_whose_length_is_known_but_that_cannot_be_encoded(mix):
    *_, unchanged, failed = measure(mix, "broken", "--check", 50).stdout.splitlines()
    assert unchanged == "  50 samples measured again: no changes"
    assert failed == "  10 of them cannot be encoded, so a run skips them"


def test_an_encoder_that_does_not_pack_is_refused(mix):
    assert "own_vision:plain: has no length_of" in error_line(measure(mix, "plain"))
    assert "MODULE:FUNCTION is needed" in error_line(measure(mix, "absent"))
