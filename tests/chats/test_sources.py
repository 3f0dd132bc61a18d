# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The same conversations through every source give the same tokens and weights."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from energon_ext import SFTTaskEncoder
from energon_ext.chats.encoding import ConversationEncoder
from energon_ext.chats.records import read_conversation
from energon_ext.chats.templates import HFChatTemplate
from energon_ext.encoders.sft import cook_dialogue
from energon_ext.encoders.text_sources import ensure_tokenized, load_split
from energon_ext.tokens.file_set import open_token_files
from tests.chats.conversations import CONVERSATIONS
from tests.chats.refusals import TEMPLATES, reasons_to_refuse
from tests.cli.command import energon_ext
from tests.support import write_mix, write_records

#: Arrow has one type a column, so it cannot hold texts beside parts, or objects beside texts.
NAMES = [
    name
    for name in CONVERSATIONS
    if name not in ("text parts", "arguments as text") and not reasons_to_refuse("Qwen 3", name)
]
RECORDS = [CONVERSATIONS[name] for name in NAMES]
#: As columns, all of which each row has.
ROWS = [{"tools": None, "chat_template_kwargs": None, **record} for record in RECORDS]


@pytest.fixture(scope="module")
def model(tokenized, tmp_path_factory):
    """A folder with a tokenizer and a template that uses tools, reasoning and variables."""
    tokenizer = tokenized("byte BPE")
    tokenizer.theirs.chat_template = TEMPLATES["Qwen 3"]
    folder = tmp_path_factory.mktemp("model")
    tokenizer.theirs.save_pretrained(folder)
    tokenizer.theirs.chat_template = None
    return tokenizer, folder


@pytest.fixture(scope="module")
def expected(model):
    tokenizer, _ = model
    template = HFChatTemplate(tokenizer.theirs, template=TEMPLATES["Qwen 3"])
    encoder = ConversationEncoder(tokenizer.ours, template)
    found = encoder.encode([read_conversation(record) for record in RECORDS])
    return [(t.tolist(), w.tolist()) for each in found for t, w in each.samples]


def documents(files):
    found = []
    for index in range(len(files)):
        tokens = files.document(index)
        weights = files.label_weights(index, 0, len(tokens))
        found.append((tokens.tolist(), weights.tolist()))
    return found


def write_lines(path):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in RECORDS))
    return path


def write_parquet(path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


def write_saved(path):
    pytest.importorskip("datasets").Dataset.from_list(ROWS).save_to_disk(path)
    return path


@pytest.mark.parametrize(
    ("option", "write"),
    [
        ("--jsonl", write_lines),
        ("--parquet", write_parquet),
        ("--hf-dataset", write_saved),
        ("--dataset", lambda path: write_records(path, RECORDS)),
    ],
)
def test_what_prepare_reads_from_each_kind_of_input_is_equal(
    option, write, model, expected, tmp_path
):
    source = write(tmp_path / "source")
    split = ["--split", "train"] if option == "--dataset" else []
    command = ("prepare", tmp_path / "out", "--chat", option, source, "--val", 0, *split)
    result = energon_ext(*command, "--tokenizer", model[1])
    assert result.exit_code == 0, result.output
    assert documents(open_token_files(tmp_path / "out" / "train")) == expected
    assert f"format: OpenAI messages: {len(RECORDS)}" in result.stdout
    assert "chat_template_kwargs that the template does not read" not in result.stdout


@pytest.mark.parametrize("kind", ["lines", "webdataset"])
def test_a_source_of_a_run_gives_the_same_and_so_does_each_sample(kind, model, expected, tmp_path):
    tokenizer, folder = model
    encoder = SFTTaskEncoder(type(tokenizer.ours)(folder), 64)
    if kind == "lines":
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

        CrudeJsonlDatasetFactory.prepare_dataset(EPath(write_lines(tmp_path / "chats.jsonl")))
    else:
        write_records(tmp_path / "chats.jsonl", RECORDS)
    mix = write_mix(tmp_path / "mix.yaml", [("chats.jsonl", 1)])
    (files,) = ensure_tokenized(encoder, load_split(mix, "train", encoder.decoder)).values()
    assert documents(files) == expected
    identity = {"__key__": "7", "__restore_key__": (), "__subflavors__": None}
    samples = [cook_dialogue({**identity, "json": record}) for record in RECORDS]
    found = [sample for each in encoder.encode_samples(samples) for sample in each.samples]
    assert [(t.tolist(), w.tolist()) for t, w in found] == expected
