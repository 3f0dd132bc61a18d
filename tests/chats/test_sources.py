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
from energon_ext.encoders.load import load_split
from energon_ext.encoders.sft import cook_dialogue
from energon_ext.encoders.text_sources import ensure_tokenized
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
NATIVE = [CONVERSATIONS[name] for name in NAMES]


def stored(record, name):
    """Return a record with its lists as JSON text, as people store them in columns of Arrow."""
    texts = {key: json.dumps(value, ensure_ascii=False) for key, value in record.items()}
    return {name: texts.pop("messages"), **texts}


def answered(record):
    """Return a record of one answer as a prompt and a completion, both as JSON text."""
    *asked, said = record["messages"]
    return stored({**record, "messages": asked}, "prompt") | {"completion": json.dumps([said])}


ONE_ANSWER = [
    record
    for record in NATIVE
    if [message["role"] for message in record["messages"]].count("assistant") == 1
    and record["messages"][-1]["role"] == "assistant"
]
#: What files contain, and the same records in OpenAI's format.
FILES = {
    "lists": (NATIVE, NATIVE),
    "JSON text": (
        [
            *(stored(record, "messages") for record in NATIVE),
            *(stored(record, "conversations") for record in NATIVE[:6]),
            *map(answered, ONE_ANSWER),
            *({"prompt": "[1, 2", "response": f"{text}, 3]"} for text in ("", "{}")),
        ],
        [
            *NATIVE,
            *NATIVE[:6],
            *ONE_ANSWER,
            *({"prompt": "[1, 2", "response": f"{text}, 3]"} for text in ("", "{}")),
        ],
    ),
}


@pytest.fixture(scope="module")
def model(tokenized, tmp_path_factory):
    """A folder with a tokenizer and a template that uses tools, reasoning and variables."""
    tokenizer = tokenized("byte BPE")
    tokenizer.theirs.chat_template = TEMPLATES["Qwen 3"]
    folder = tmp_path_factory.mktemp("model")
    tokenizer.theirs.save_pretrained(folder)
    tokenizer.theirs.chat_template = None
    return tokenizer, folder


@pytest.fixture(scope="module", params=FILES)
def data(request, model):
    """Records, and the tokens and weights of the same ones in OpenAI's format."""
    tokenizer, _ = model
    records, plain = FILES[request.param]
    template = HFChatTemplate(tokenizer.theirs, template=TEMPLATES["Qwen 3"])
    encoder = ConversationEncoder(tokenizer.ours, template)
    found = encoder.encode([read_conversation(record) for record in plain])
    return records, [(t.tolist(), w.tolist()) for each in found for t, w in each.samples]


def documents(files):
    found = []
    for index in range(len(files)):
        tokens = files.document(index)
        weights = files.label_weights(index, 0, len(tokens))
        found.append((tokens.tolist(), weights.tolist()))
    return found


def write_lines(path, records):
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
    return path


def as_rows(records):
    """Return records with the same columns, as Arrow has them."""
    empty = dict.fromkeys(name for record in records for name in record)
    return [{**empty, **record} for record in records]


def write_parquet(path, records):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(as_rows(records)), path)
    return path


def write_saved(path, records):
    pytest.importorskip("datasets").Dataset.from_list(as_rows(records)).save_to_disk(path)
    return path


@pytest.mark.parametrize(
    ("option", "write"),
    [
        ("--jsonl", write_lines),
        ("--parquet", write_parquet),
        ("--hf-dataset", write_saved),
        ("--dataset", write_records),
    ],
)
def test_what_prepare_reads_from_each_kind_of_input_is_equal(option, write, model, data, tmp_path):
    records, expected = data
    source = write(tmp_path / "source", records)
    split = ["--split", "train"] if option == "--dataset" else []
    command = ("prepare", tmp_path / "out", "--chat", option, source, "--val", 0, *split)
    result = energon_ext(*command, "--tokenizer", model[1])
    assert result.exit_code == 0, result.output
    assert documents(open_token_files(tmp_path / "out" / "train")) == expected
    lists = sum("messages" in each or "conversations" in each for each in records)
    assert f"format: OpenAI messages: {lists}" in result.stdout
    texts = sum(isinstance(each.get("messages"), str) for each in records)
    assert ("messages given as JSON text: messages" in result.stdout) == bool(texts)
    assert "chat_template_kwargs that the template does not read" not in result.stdout


@pytest.mark.parametrize("kind", ["lines", "webdataset"])
def test_a_source_of_a_run_gives_the_same_and_so_does_each_sample(kind, model, data, tmp_path):
    (tokenizer, folder), (records, expected) = model, data
    encoder = SFTTaskEncoder(type(tokenizer.ours)(folder), 64)
    if kind == "lines":
        from megatron.energon.epathlib import EPath
        from megatron.energon.flavors.jsonl.crude_jsonl_dataset import CrudeJsonlDatasetFactory

        CrudeJsonlDatasetFactory.prepare_dataset(
            EPath(write_lines(tmp_path / "chats.jsonl", records))
        )
    else:
        write_records(tmp_path / "chats.jsonl", records)
    mix = write_mix(tmp_path / "mix.yaml", [("chats.jsonl", 1)])
    (files,) = ensure_tokenized(encoder, load_split(mix, "train", encoder.decoder)).values()
    assert documents(files) == expected
    identity = {"__key__": "7", "__restore_key__": (), "__subflavors__": None}
    samples = [cook_dialogue({**identity, "json": record}) for record in records]
    found = [sample for each in encoder.encode_samples(samples) for sample in each.samples]
    assert [(t.tolist(), w.tolist()) for t, w in found] == expected


def test_thirty_records_are_compared():
    assert len(FILES["JSON text"][0]) >= 30
