# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Columns that an encoder gives with its documents, from JSON Lines to batches."""

import json

import numpy as np
import pytest
from megatron.energon import Cooker, TextSample, stateless
from megatron.energon.edataclass import edataclass
from megatron.energon.task_encoder.cooking import basic_sample_keys

from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.batch.columns import Column
from energon_ext.encoders.text import Document
from energon_ext.errors import ConfigError, EnergonExtError
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.tokens.formats import open_documents
from tests.cli.command import energon_ext, error_line
from tests.support import config, take
from tests.test_sft import prepare_jsonl


@edataclass
class RatedText(TextSample):
    rating: float


@stateless
def cook_rated(sample):
    record = sample["json"]
    return RatedText(**basic_sample_keys(sample), text=record["text"], rating=record["rating"])


class RatedEncoder(PackedTaskEncoder):
    """Gives each token its place, and each document its rating."""

    cookers = [Cooker(cook_rated)]
    encoding_fingerprint = {"version": 1}
    columns = {
        "place": Column("int32", at="input", fill=-1),
        "rating": Column("float32", per="document", fill=-1),
    }

    @stateless
    def encode_document(self, sample):
        tokens = self.tokenizer.encode_array(sample.text)
        columns = {"place": np.arange(len(tokens)), "rating": sample.rating}
        return Document.derive_from(sample, tokens=tokens, columns=self.change(columns))

    def change(self, columns):
        return columns


class ForgetfulEncoder(RatedEncoder):
    encoding_fingerprint = {"version": 2}

    def change(self, columns):
        return {"place": columns["place"]}


class LyingEncoder(RatedEncoder):
    encoding_fingerprint = {"version": 3}

    def change(self, columns):
        return {**columns, "place": columns["place"][1:]}


class SilentEncoder(PackedTaskEncoder):
    columns = RatedEncoder.columns


def make_encoder():
    return RatedEncoder(ByteTokenizer(), 64)


RATED = [{"text": f"text {n} " * (n % 7 + 1), "rating": n / 4} for n in range(40)]


def load(path, encoder):
    return get_train_dataset(path, worker_config=config(), batch_size=2, task_encoder=encoder)


def test_columns_of_an_encoder_reach_the_batch_through_the_cache(tmp_path):
    path = prepare_jsonl(tmp_path / "web.jsonl", RATED)
    ratings = {record["text"]: record["rating"] for record in RATED}
    for _ in range(2):  # tokenized, then cached
        seen = set()
        for batch in take(ExactDataLoader(load(path, make_encoder())), 8):
            batch.validate()
            ends = batch.cu_seqlens.tolist()
            for number, (first, end) in enumerate(zip(ends, ends[1:])):
                if batch.source_ids[number] < 0:
                    assert batch.segments["rating"][number] == -1
                    assert (batch.columns["place"][first:end] == -1).all()
                    continue
                places = batch.columns["place"][first:end].tolist()
                assert places == [*range(end - first)]
                text = ByteTokenizer().decode(batch.tokens[first:end].numpy())
                rating = ratings[text]
                assert batch.segments["rating"][number] == rating
                seen.add(rating)
        assert len(seen) > 20


@pytest.mark.parametrize(
    ("encoder", "reason"),
    [
        (ForgetfulEncoder, r"has the columns \['place'\], but the `columns` of the encoder are"),
        (LyingEncoder, r"column place: int64 \[\d+\] found, int32 \[\d+\] is needed"),
    ],
)
def test_records_whose_columns_are_not_the_declared_ones_are_refused(tmp_path, encoder, reason):
    path = prepare_jsonl(tmp_path / "web.jsonl", RATED)
    with pytest.raises(EnergonExtError, match=reason):
        load(path, encoder(ByteTokenizer(), 64))


def test_declared_columns_that_nothing_gives_are_refused(tmp_path):
    path = prepare_jsonl(tmp_path / "web.jsonl", RATED)
    with pytest.raises(ConfigError, match=r"SilentEncoder.columns: .* its encode_document returns"):
        load(path, SilentEncoder(ByteTokenizer(), 64))


# Fields of records that prepare keeps -----------------------------------------------------------


def ratings_by_text(folder):
    files = open_documents(folder)
    numbers = list(range(len(files)))
    lengths = files.lengths(np.arange(len(files))).tolist()
    found = files.read(numbers, [0] * len(files), lengths)
    texts = [ByteTokenizer().decode(tokens) for tokens in found["tokens"]]
    return dict(zip(texts, map(float, found["rating"])))


@pytest.mark.parametrize("shuffle", [(), ("--shuffle", "3")])
def test_a_number_of_each_record_is_kept_beside_its_document(tmp_path, shuffle):
    lines = "".join(json.dumps({**record, "id": 7}) + "\n" for record in RATED)
    (tmp_path / "in.jsonl").write_text(lines)
    words = ["prepare", tmp_path / "out", "--jsonl", tmp_path / "in.jsonl", "--column", "rating"]
    words += ["--tokenizer", "bytes", "--val", "0.3", *shuffle]
    assert energon_ext(*words).exit_code == 0
    found = {**ratings_by_text(tmp_path / "out" / "train"), **ratings_by_text(tmp_path / "out/val")}
    assert found == {record["text"]: record["rating"] for record in RATED}


def test_numbers_of_parquet_rows_are_kept_in_their_type(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    arrow = pytest.importorskip("pyarrow")
    rows = [{"text": record["text"], "rating": n, "more": "x"} for n, record in enumerate(RATED)]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "in.parquet")
    words = ["prepare", tmp_path / "out", "--parquet", tmp_path / "in.parquet", "--val", "0"]
    result = energon_ext(*words, "--column", "rating:int16", "--tokenizer", "bytes")
    assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "out" / "train" / "part-00000.rating.npy").dtype == np.int16
    assert ratings_by_text(tmp_path / "out" / "train") == {
        record["text"]: n for n, record in enumerate(RATED)
    }


@pytest.mark.parametrize(
    ("column", "record", "reason"),
    [
        ("rating", {"text": "a"}, "in.jsonl:1: 'rating': missing, a number is needed"),
        ("rating", {"text": "a", "rating": "high"}, "in.jsonl:1: 'rating': 'high' found, a number"),
        (
            "rating:int8",
            {"text": "a", "rating": 300},
            "column rating: 300 does not fit int8",
        ),
        ("rating", {"text": "a", "rating": 2**24 + 1}, "16777217 does not fit float32"),
        ("rating:float64", {"text": "a", "rating": 2**53 + 1}, "993 does not fit float64"),
        ("rating:uint8", {"text": "a", "rating": -1}, "column rating: -1 does not fit uint8"),
        ("rating:text", {"text": "a", "rating": 3}, "--column rating:text: Column: dtype 'text'"),
        ("ends", {"text": "a", "ends": 3}, "--column: 'ends' found as the name of a column"),
    ],
)
def test_a_record_or_option_without_a_number_is_named(tmp_path, column, record, reason):
    (tmp_path / "in.jsonl").write_text(json.dumps(record) + "\n")
    words = ["prepare", tmp_path / "out", "--jsonl", tmp_path / "in.jsonl", "--column", column]
    assert reason in error_line(energon_ext(*words, "--tokenizer", "bytes"))


def test_a_column_that_is_named_twice_is_refused(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"text": "a", "rating": 3}\n')
    words = ["prepare", tmp_path / "out", "--jsonl", tmp_path / "in.jsonl", "--tokenizer", "bytes"]
    result = energon_ext(*words, "--column", "rating", "--column", "rating:int8")
    assert "--column: 'rating' found twice" in error_line(result)


def test_a_field_that_is_kept_is_no_unknown_field_of_a_conversation(tmp_path):
    messages = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    record = {"messages": messages, "level": 3}
    (tmp_path / "in.jsonl").write_text(json.dumps(record) + "\n")
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    words = ["prepare", tmp_path / "out", "--jsonl", tmp_path / "in.jsonl", "--chat", "--val", "0"]
    words += ["--chat-template", template, "--tokenizer", "bytes", "--column", "level:int8"]
    result = energon_ext(*words)
    assert result.exit_code == 0, result.output
    assert np.load(tmp_path / "out" / "train" / "part-00000.level.npy").tolist() == [3]
