# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Token files and images in one plan."""

import json

import pytest

from energon_ext.errors import ConfigError
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext
from tests.samples.test_planned_samples import ROWS, dataset_of, run, write
from tests.samples.vision import Packed, PackedCaptions, PlannedCaptions
from tests.saves import save_cursor
from tests.support import loader_for


class CaptionsAndText(PackedCaptions):
    """Packs rows of text as their bytes."""

    tokenizer = ByteTokenizer()

    def pack_tokens(self, row):
        texts = [self.tokenizer.decode(each) for each in row.slices]
        return Packed(
            __key__=row.source, __restore_key__=(), samples=[(text, row.source) for text in texts]
        )

    def pack_selected_samples(self, samples):
        packed = super().pack_selected_samples(samples)
        packed.samples = [(*each, self.source_key) for each in packed.samples]
        return packed

    def encode_batch(self, batch):
        return [(self.source_keys, each.samples) for each in batch]


def mix(folder, **fields):
    write(folder / "images.yaml", {"interleave": [{"path": "photos"}, {"path": "charts"}]})
    images = {"path": "images.yaml", "weight": 1}
    text = {"path": "text/train", "name": "text", **fields}
    return write(folder / "mix.yaml", {"blend": [images, text]})


def test_steps_and_states_match_on_any_topology_and_after_resumes(data):
    path = mix(data, weight={"linear": {0: 0, 6: 4}})
    expected = run(path, 7, encoder=CaptionsAndText())
    assert run(path, 7, 2, 2, encoder=CaptionsAndText()) == expected
    read, state = [], None
    for steps, ranks, workers in ((2, 4, 0), (2, 1, 1), (3, 2, 0)):
        found, state = run(path, steps, ranks, workers, state, encoder=CaptionsAndText())
        read += found
    assert read == expected[0]


def test_every_row_has_one_source_and_weights_act_on_its_step(data):
    path = mix(data, weight={"step": {0: 0, 2: 9}})
    steps, state = run(path, 12, encoder=CaptionsAndText())
    sources = sorted(state["plan"]["sources"])
    for number, step in enumerate(steps):
        of_text = 0
        for keys, samples in step:
            assert list(keys) == sources
            (key,) = {sample[-1] for sample in samples}
            of_text += key.startswith("text")
        assert of_text == 0 if number < 2 else of_text >= ROWS // 2
    texts = [sample[0] for step in steps for _, samples in step for sample in samples]
    words = {text.split()[1] for text in texts if str(text).startswith("Text ")}
    assert words <= {str(number) for number in range(80) if number % 4} and len(words) > 40


def test_trace_names_documents_and_samples_without_user_code(data):
    path = mix(data, weight=1)
    state = loader_for(dataset_of(path, encoder=CaptionsAndText())).state_dict()
    save_cursor(data / "run", 0, state)
    result = energon_ext("trace", data / "run", path, "--step", 3, "--json")
    assert result.exit_code == 0, result.stderr
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    named = {file["file"].split("/")[-1] for row in rows for file in row["files"]}
    assert any(name.startswith("shard_00") for name in named)
    assert any(name.startswith("train") for name in named)


@pytest.mark.parametrize("encoder", [PlannedCaptions, PackedCaptions])
def test_an_encoder_without_pack_tokens_is_refused(data, encoder):
    with pytest.raises(ConfigError, match="implements length_of and pack_tokens"):
        dataset_of(mix(data), encoder=encoder())


def test_token_files_of_another_tokenizer_are_refused(data):
    class Other(CaptionsAndText):
        class tokenizer(ByteTokenizer):
            def fingerprint(self):
                return {"other": True}

        tokenizer = tokenizer()

    prefix = data / "text" / "train"
    (data / "text" / "train.meta.json").write_text(
        json.dumps({"tokenizer": ByteTokenizer().fingerprint()})
    )
    with pytest.raises(ConfigError, match="tokenizer"):
        dataset_of(mix(data), encoder=Other())
    prefix.with_suffix(".meta.json").unlink()

    class Without(CaptionsAndText):
        tokenizer = None

    with pytest.raises(ConfigError, match="a NoneType has no"):
        dataset_of(mix(data), encoder=Without())
