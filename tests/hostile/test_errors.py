# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Any library exception on hostile input becomes one typed error that names the place."""

import json

import pytest
from megatron.energon import Cooker, DefaultTaskEncoder

from energon_ext import (
    ConfigError,
    DynamicBlendMixin,
    PackedTaskEncoder,
    PromptTaskEncoder,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.encoders.text import TextDecoder, cook_text
from energon_ext.errors import EnergonExtError
from energon_ext.tokenizers.tokenizers import ByteTokenizer, HFTokenizer
from tests.cli.command import energon_ext, error_line
from tests.support import TEXT_SAMPLE, config, loader_for, write_dataset, write_mix, write_tokens


class Streamed(DynamicBlendMixin, DefaultTaskEncoder):
    plan_samples = False
    decoder = TextDecoder()
    cookers = [Cooker(cook_text)]


ENCODERS = {
    "planned": lambda: PackedTaskEncoder(ByteTokenizer(), 16, packing_buffer_docs=4),
    "streamed": Streamed,
    "prompts": lambda: PromptTaskEncoder(ByteTokenizer()),
}


def read(path, encoder, **options):
    defaults = {"worker_config": config(), "batch_size": 2, "task_encoder": ENCODERS[encoder]()}
    return next(iter(loader_for(get_train_dataset(path, **{**defaults, **options}))))


DEEP = '{"text": "a", "prompt": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}\n"
LONG = '{"text": "a", "prompt": "a", "x": ' + "1" * 5000 + "}\n"


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize(("line", "message"), [(DEEP, "recursion"), (LONG, "4300 digits")])
def test_a_line_no_parser_accepts_is_an_error_of_its_file(line, message, encoder, tmp_path):
    (tmp_path / "a.jsonl").write_text(line * 3)
    with pytest.raises(EnergonExtError, match=f"a.jsonl: .*{message}"):
        read(tmp_path / "a.jsonl", encoder)


@pytest.mark.parametrize("encoder", ["planned", "streamed"])
@pytest.mark.parametrize("member", ["jpg", "txt[a][b]"])
def test_a_field_from_a_missing_member_is_an_error(member, encoder, tmp_path):
    fields = {"sample_type": TEXT_SAMPLE, "field_map": {"text": member}}
    write_dataset(tmp_path / "d", ["x"] * 9, dataset_config=fields)
    with pytest.raises(EnergonExtError, match=r"\bd(:train.*)?: .*FieldAccessError.*Cannot access"):
        read(tmp_path / "d", encoder)


@pytest.mark.parametrize("inside", [False, True])
def test_aux_with_token_files_is_refused(inside, tmp_path):
    write_tokens(tmp_path / "a", [[5, 6, 7]] * 9)
    node = {"path": "a", "aux": {"pictures": "d"}}
    content = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    content["splits"] = {"train": {"blend": [node]} if inside else node}
    (tmp_path / "mix.yaml").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="/a: token files have no .aux.; remove it"):
        read(tmp_path / "mix.yaml", "planned")


@pytest.mark.parametrize("seed", ["x", 1.5, None, True])
def test_a_seed_must_be_an_integer(seed, tmp_path):
    write_tokens(tmp_path / "a", [[5, 6, 7]] * 9)
    mix = write_mix(tmp_path / "mix.yaml", [("a", 1)])
    options = {"worker_config": config(seed=seed), "batch_size": 2}
    for load in (get_train_dataset, get_val_datasets):
        with pytest.raises(ConfigError, match="worker_config.seed_offset: .* an integer"):
            load(mix, task_encoder=ENCODERS["planned"](), **options)


def test_a_document_number_with_thousands_of_digits_is_refused(tmp_path):
    write_tokens(tmp_path / "a", [[5, 6, 7]] * 9)
    mix = write_mix(tmp_path / "mix.yaml", [("a", 1)])
    dataset = get_train_dataset(
        mix, worker_config=config(), batch_size=2, task_encoder=ENCODERS["planned"]()
    )
    loader = loader_for(dataset)
    next(iter(loader))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "data.json").write_text(json.dumps(loader.state_dict()))
    command = ("trace", tmp_path / "run", mix, "--step", 3, "--document")
    for number in ("9" * 5000, "٣"):
        assert "SOURCE:NUMBER is needed" in error_line(energon_ext(*command, f"a:{number}"))


@pytest.mark.parametrize("file", [False, True], ids=["when it encodes", "when it is loaded"])
def test_a_panic_in_the_tokenizers_library_is_an_error(file, tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.BPE(vocab={"a": 0, "</s>": 1}, merges=[])
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(model).save(str(path))
    content = json.loads(path.read_text())
    if file:
        content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "CAAAAA=="}
    else:
        pattern = {"Regex": "(a|aa)+$|(a+)+b"}
        content["pre_tokenizer"] = {"type": "Split", "pattern": pattern} | {
            "behavior": "Isolated",
            "invert": False,
        }
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="tokenizer.json"):
        HFTokenizer(path).encode("a" * 200 + "c")
