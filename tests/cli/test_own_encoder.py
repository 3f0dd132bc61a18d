# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Commands on samples that only a user's encoder can read."""

import json
import shutil

import pytest
from megatron.energon import stateless

from energon_ext import PackedTaskEncoder
from energon_ext.data_files import DEFAULT_CACHE
from energon_ext.state.files import write_file
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.tokens.formats import FORMATS
from tests.cli.command import energon_ext, error_line
from tests.samples.test_planned_samples import dataset_of, run, write
from tests.samples.vision import PackedCaptions, write_images
from tests.support import loader_for, take, write_dataset, write_mix
from tests.tokens.stores import STORES, register_own


class OneEach(PackedCaptions):
    """Packs by a rule of its own, which a state does not contain."""

    @stateless
    def select_samples_to_pack(self, samples):
        return [[sample] for sample in samples]


def one_each():
    return OneEach()


def registers_documents():
    register_own()
    return PackedTaskEncoder(ByteTokenizer(), seq_len=32)


OWN = ("--encoder", "tests.samples.vision:PackedCaptions")
ONE_EACH = ("--encoder", "tests.cli.test_own_encoder:one_each")


@pytest.fixture
def photos(tmp_path):
    write_images(tmp_path / "photos", 40)
    return write(tmp_path / "mix.yaml", {"blend": [{"path": "photos"}]})


def save(mix, encoder, steps=2):
    """Save a run after some steps of 8 rows; return its folder."""
    folder = mix.parent / "run" / "checkpoints" / f"iter_{steps:07d}"
    folder.mkdir(parents=True)
    _, state = run(mix, steps, encoder=encoder)
    write_file(folder / "data.json", json.dumps(state).encode())
    return mix.parent / "run"


def forget(mix):
    """Remove everything that was measured or tokenized."""
    shutil.rmtree(mix.parent / DEFAULT_CACHE)


@pytest.mark.parametrize("command", ["diff", "forecast", "trace"])
def test_a_command_without_measured_lengths_asks_for_them_and_writes_none(photos, command):
    saved = save(photos, PackedCaptions())
    arguments = {
        "diff": ("checkpoint", "diff", saved, photos),
        "forecast": ("checkpoint", "forecast", saved, photos, "--steps", 1),
        "trace": ("trace", saved, photos, "--step", 2),
    }[command]
    known = energon_ext(*arguments)
    assert known.exit_code == 0, known.output
    forget(photos)
    line = error_line(energon_ext(*arguments)).removeprefix("Step 2: ")
    measure = f"`energon-ext measure {photos} --encoder MODULE:FUNCTION`"
    assert line == (
        f"{photos.parent}/photos: not measured, and a state does not contain the encoder; run "
        f"{measure} first, or give --encoder."
    )
    assert not (photos.parent / DEFAULT_CACHE).exists()
    assert energon_ext(*arguments, *OWN).stdout == known.stdout


def test_an_encoder_that_packs_by_its_own_rule_is_given_to_commands(photos):
    saved = save(photos, OneEach())
    for arguments in (
        ("checkpoint", "diff", saved, photos),
        ("checkpoint", "forecast", saved, photos, "--steps", 1),
        ("trace", saved, photos, "--step", 2),
    ):
        line = error_line(energon_ext(*arguments))
        assert "packer 'select_samples_to_pack', which is not registered here; give --mod" in line
        result = energon_ext(*arguments, *ONE_EACH)
        assert result.exit_code == 0, result.output
    traced = energon_ext("trace", saved, photos, "--step", 2, "--json", *ONE_EACH)
    rows = [json.loads(line) for line in traced.stdout.splitlines()]
    expected, _ = run(photos, 3, encoder=OneEach())
    found = [sorted(each["number"] for each in row["files"]) for row in rows]
    assert sorted(found) == sorted(sorted(number for number, *_ in row) for row in expected[2])


def test_options_of_the_saved_encoder_conflict_with_a_given_one(photos):
    saved = save(photos, PackedCaptions())
    line = error_line(energon_ext("checkpoint", "diff", saved, photos, *OWN, "--seq-length", 80))
    assert line == "--seq-length: is set by --encoder; remove it."


def test_text_that_is_not_tokenized_asks_for_it(tmp_path):
    write_dataset(tmp_path / "web", ["some text"] * 40)
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)])
    encoder = PackedTaskEncoder(ByteTokenizer(), 16)
    folder = tmp_path / "run" / "checkpoints" / "iter_0000002"
    folder.mkdir(parents=True)
    loader = loader_for(dataset_of(mix, encoder=encoder))
    take(loader, 2)
    write_file(folder / "data.json", json.dumps(loader.state_dict()).encode())
    forget(mix)
    diff = ("checkpoint", "diff", tmp_path / "run", mix)
    line = error_line(energon_ext(*diff))
    assert f"{tmp_path}/web: not tokenized, and a state does not contain the encoder; run" in line
    assert not (tmp_path / DEFAULT_CACHE).exists()
    assert "energon-ext tokenize" in line and "--tokenizer NAME` first, or give --encoder" in line
    assert energon_ext("tokenize", mix, "--tokenizer", "bytes").exit_code == 0
    assert energon_ext(*diff).exit_code == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("tokenize", "MIX", *OWN, "--tokenizer", "x"), "--tokenizer: is set by --encoder; remove"),
        (("tokenize", "MIX", *OWN, "--task", "text"), "--task: is set by --encoder; remove it"),
        (("plan", "MIX", *OWN, "--eos-token", "x"), "--eos-token: is set by --encoder; remove it"),
        (("plan", "MIX", "--answers", "last"), "--answers: is for chat, not for text"),
        (
            ("prepare", "OUT", "--tokenizer", "bytes", "--jsonl", "x.jsonl", "--answers", "last"),
            "--answers: is for chat, not for text",
        ),
        (
            ("peek", "MIX", "--task", "prompts", "--answer-end", "eos"),
            "--answer-end: is for chat or preferences, not for prompts",
        ),
    ],
)
def test_an_option_without_effect_is_refused(photos, call, message):
    places = {"MIX": photos, "OUT": photos.parent / "out"}
    assert message in error_line(energon_ext(*(places.get(each, each) for each in call)))


def test_shares_need_neither_encoder_nor_lengths(photos):
    """30 : 10 at step 0, 10 : 10 at 100."""
    write_images(photos.parent / "charts", 10)
    entries = [
        {"path": "photos", "weight": {"linear": {0: 30, 100: 10}}},
        {"path": "charts", "weight": 10},
    ]
    path = write(photos.parent / "two.yaml", {"blend": entries})
    for options in ((), OWN):
        result = energon_ext("plan", path, *options)
        assert result.exit_code == 0, result.output
        shares = {line.split(":")[0]: line.split()[-2:] for line in result.stdout.splitlines()[1:]}
        assert shares == {"photos": ["75.00%", "50.00%"], "charts": ["25.00%", "50.00%"]}
    assert not (photos.parent / DEFAULT_CACHE).exists()


def test_a_forecast_of_samples_without_an_encoder_says_what_failed(photos):
    line = error_line(energon_ext("plan", photos, "--steps", 3))
    assert "none of its 40 samples could be tokenized, the first: Sample " in line
    assert "need your own TaskEncoder; pass it to commands with --encoder" in line


def test_a_plan_without_an_encoder_still_checks_weights(photos):
    path = write(photos.parent / "zero.yaml", {"blend": [{"path": "photos", "weight": 0}]})
    assert "Every weight is 0" in error_line(energon_ext("plan", path))


@pytest.mark.parametrize("options", [(), ("--steps", 2), ("--balance",)])
def test_plan_shows_documents_that_the_module_of_an_encoder_registers(tmp_path, options):
    STORES["own"](tmp_path / "web", [[5, 6, 7], [8, 9]])
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)])
    before = list(FORMATS)
    encoder = "tests.cli.test_own_encoder:registers_documents"
    try:
        result = energon_ext("plan", mix, "--encoder", encoder, *options)
    finally:
        FORMATS[:] = before
    assert result.exit_code == 0 and "100.00%" in result.stdout, result.output
