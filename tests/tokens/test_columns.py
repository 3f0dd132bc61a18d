# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Columns beside tokens, from their files to the batch, against a function of each token's id."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from energon_ext import (
    ExactDataLoader,
    PackedTaskEncoder,
    get_train_dataset,
    get_val_datasets,
)
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.columns import RESERVED, Column
from energon_ext.batch.packed_batch import PackedBatch
from energon_ext.batch.rows import Row
from energon_ext.errors import ConfigError, EnergonExtError, SampleError
from energon_ext.megatron.context_parallel import slice_for_context_parallel
from energon_ext.prepare.token_writer import TokenWriter
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from energon_ext.tokens.documents import Documents
from energon_ext.tokens.formats import FORMATS, open_documents, register_documents
from tests.support import config, take, write_mix, write_tokens

PAD = ByteTokenizer().pad_id

#: Router choices belong to inputs, a teacher's log-probability to labels, a topic to documents.
COLUMNS = {
    "experts": Column("int16", (2, 3), at="input", fill=-1),
    "teacher": Column("float32", fill=0.5),
    "topic": Column("int64", (2,), per="document", fill=-7),
}


def experts(tokens):
    return np.asarray(tokens)[:, None, None] * 10 + np.arange(6).reshape(2, 3)


def teacher(tokens):
    return -np.asarray(tokens, np.float32) / 8


def write_columns_of(prefix, documents):
    """Write documents whose columns are functions of their tokens; the topic is the first one."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    tokenizer = ByteTokenizer()
    writer = TokenWriter(prefix, tokenizer.vocab_size, COLUMNS)
    for tokens in documents:
        tokens = np.array(tokens)
        topic = [tokens[0], len(tokens)] if len(tokens) else None
        columns = {"experts": experts(tokens), "teacher": teacher(tokens), "topic": topic}
        writer.write(tokens, columns=columns)
    writer.close({"tokenizer": tokenizer.fingerprint(), **describe(COLUMNS)})


def describe(columns):
    return {"columns": {name: column.to_json() for name, column in columns.items()}}


def documents(seed, count=60):
    """Return documents of ids 3 to 250, so that none is the padding or an end of text."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, 250, rng.integers(1, 90)).tolist() for _ in range(count)]


def loader_of(mix, workers=0, rank=0, ranks=1, **options):
    encoder = PackedTaskEncoder(ByteTokenizer(), 64, packing_buffer_docs=16, **options)
    return ExactDataLoader(
        get_train_dataset(
            mix,
            worker_config=config(workers, rank, ranks),
            batch_size=4 // ranks,
            task_encoder=encoder,
        )
    )


def check_columns(batch, has_columns=lambda key: True):
    """Compare each value with the function of its token; return the positions that have some."""
    batch.validate()
    keys = [batch.sources[index] if index >= 0 else "" for index in batch.source_ids.tolist()]
    carries = [bool(key) and has_columns(key) for key in keys]
    lengths = batch.segment_lengths()
    at_input = torch.repeat_interleave(torch.tensor(carries), lengths)
    inputs, labels = batch.tokens.numpy(), batch.labels.numpy()
    expected = np.where(at_input.numpy()[:, None, None], experts(inputs), -1)
    assert batch.columns["experts"].dtype == torch.int16
    assert batch.columns["experts"].numpy().tolist() == expected.tolist()
    # The label of the last position of a segment is the first token of the next one in the row.
    rows = batch.tokens.view(-1, 64)
    of_label = at_input.view(rows.shape).roll(-1, 1).flatten().numpy()
    of_label[63::64] = batch.columns["teacher"].numpy()[63::64] != 0.5
    values = np.where(of_label, teacher(labels), np.float32(0.5))
    assert batch.columns["teacher"].numpy().tolist() == values.tolist()
    topics = batch.segments["topic"].tolist()
    assert len(topics) == len(keys)
    for carried, topic in zip(carries, topics):
        assert (topic != [-7, -7]) == carried
    return int(at_input.sum())


@pytest.mark.parametrize(("packing", "alignment"), [("bin", 1), ("bin", 8), ("sequential", 1)])
def test_values_stay_with_their_tokens_in_every_packing(tmp_path, packing, alignment):
    write_columns_of(tmp_path / "web", documents(1))
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)])
    loader = loader_of(mix, packing=packing, alignment=alignment)
    found = sum(check_columns(batch) for batch in take(loader, 12))
    assert found > 12 * 4 * 64 * 0.6


def test_a_source_without_columns_gets_fill_values(tmp_path):
    write_columns_of(tmp_path / "web", documents(1))
    write_tokens(tmp_path / "code", documents(2))
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1), ("code", 1)])
    batches = take(loader_of(mix), 12)
    for batch in batches:
        check_columns(batch, lambda key: key.endswith("web"))
    assert {key for batch in batches for key in batch.tokens_per_source()} == {"web", "code"}


def test_a_document_cut_over_rows_has_its_topic_in_each(tmp_path):
    write_columns_of(tmp_path / "web", [list(range(3, 203))] * 4)
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)])
    (batch,) = take(loader_of(mix, packing="sequential"), 1)
    assert {tuple(topic) for topic in batch.segments["topic"].tolist()} == {(3, 200)}


def test_workers_and_other_ranks_after_a_resume_get_the_same_values(tmp_path):
    write_columns_of(tmp_path / "web", documents(1))
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)])
    whole = loader_of(mix)
    take(whole, 3)
    state = whole.state_dict()
    expected = take(whole, 4)
    parts = []
    for rank in range(2):
        loader = loader_of(mix, workers=1, rank=rank, ranks=2)
        loader.load_state_dict(state)
        parts.append(take(loader, 4))
        loader.close()
    for whole_batch, *both in zip(expected, *parts):
        for batch in both:
            check_columns(batch)
        # Rows go to the ranks in turn.
        rows = torch.stack([b.columns["experts"].view(2, 64, 2, 3) for b in both], 1).flatten(0, 1)
        by_value = sorted(rows.flatten(1).tolist())
        assert by_value == sorted(whole_batch.columns["experts"].view(4, -1).tolist())


def test_context_parallelism_cuts_values_with_their_tokens(tmp_path):
    write_columns_of(tmp_path / "web", documents(1))
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)])
    (batch,) = take(loader_of(mix, alignment=4), 1)
    for rank in range(2):
        part = slice_for_context_parallel(batch, 2, rank).validate()
        carried = part.segment_sources().numpy() >= 0
        expected = np.where(carried[:, None, None], experts(part.tokens.numpy()), -1)
        assert part.columns["experts"].numpy().tolist() == expected.tolist()
        of_documents = part.segments["topic"][part.source_ids >= 0]
        whole = batch.segments["topic"][batch.source_ids >= 0]
        assert {*map(tuple, of_documents.tolist())} == {*map(tuple, whole.tolist())}


def test_columns_are_what_numpy_reads_and_writes(tmp_path):
    texts = documents(1, 5)
    write_columns_of(tmp_path / "web", texts)
    stored = np.load(tmp_path / "web.experts.npy")
    assert stored.tolist() == experts(sum(texts, [])).tolist() and stored.dtype == np.int16
    np.save(tmp_path / "web.experts.npy", stored + 1)
    files = open_documents(tmp_path / "web")
    read = files.read([2, 4], [0, 1], [1, 1 + min(1, len(texts[4]) - 1)])["experts"]
    assert read[0].tolist() == (experts(texts[2][:1]) + 1).tolist()


def test_validation_and_a_pass_that_is_padded_have_every_column(tmp_path):
    write_columns_of(tmp_path / "web", documents(1, 7))
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1)], split="val")
    for rank in range(4):
        ((dataset, _),) = get_val_datasets(
            mix,
            worker_config=config(0, rank, 4),
            batch_size=2,
            task_encoder=PackedTaskEncoder(ByteTokenizer(), 64),
        )
        for batch in ExactDataLoader(dataset):
            check_columns(batch)


def test_a_meta_file_may_describe_columns_and_no_tokenizer(tmp_path):
    texts = documents(1)
    write_tokens(tmp_path / "web", texts)
    np.save(tmp_path / "web.double.npy", np.array(sum(texts, []), np.int32) * 2)
    described = {"columns": {"double": {"dtype": "int32"}}}
    (tmp_path / "web.meta.json").write_text(json.dumps(described))
    (found,) = open_documents(tmp_path / "web").read([7], [0], [1])["double"]
    assert found.tolist() == [texts[7][0] * 2]


# Files that do not fit --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), "web.experts.npy: does not exist; "),
        (lambda path: path.write_bytes(path.read_bytes()[:-2]), "web.experts.npy: has "),
        (lambda path: shutil.copy(path, path.with_name("web.more.npy")), "web.more.npy: would be"),
    ],
)
def test_a_column_that_is_missing_cut_or_not_described_is_named_at_the_start(
    tmp_path, change, message
):
    write_columns_of(tmp_path / "data" / "web", documents(1))
    change(tmp_path / "data" / "web.experts.npy")
    with pytest.raises(ConfigError, match=message):
        open_documents(tmp_path / "data")


def test_a_header_of_another_type_of_equal_size_is_refused(tmp_path):
    texts = documents(1)
    write_columns_of(tmp_path / "web", texts)
    np.save(tmp_path / "web.experts.npy", experts(sum(texts, [])).astype(np.uint16))
    files = open_documents(tmp_path / "web")
    with pytest.raises(ConfigError, match=r"web.experts.npy: its header is .*<u2.*implies .*<i2"):
        files.read([0], [0], [1])


def test_pairs_of_one_source_must_have_the_same_columns(tmp_path):
    write_columns_of(tmp_path / "data" / "a", documents(1))
    write_tokens(tmp_path / "data" / "b", documents(2))
    with pytest.raises(ConfigError, match="give all pairs of a source the same"):
        open_documents(tmp_path / "data").read([0], [0], [1])


def test_sources_with_other_columns_of_one_name_are_refused(tmp_path):
    write_columns_of(tmp_path / "web", documents(1))
    other = {"teacher": Column("float16")}
    writer = TokenWriter(tmp_path / "code", 300, other)
    writer.write(np.arange(3, 99))
    writer.close({"tokenizer": ByteTokenizer().fingerprint(), **describe(other)})
    mix = write_mix(tmp_path / "mix.yaml", [("web", 1), ("code", 1)])
    with pytest.raises(ConfigError, match="its column teacher is .*float.*; rename one"):
        loader_of(mix)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ([], "columns: .* found, an object is needed"),
        ({"tokens": {"dtype": "int8"}}, "'tokens' found as the name of a column"),
        ({"log_probs": {"dtype": "int8"}}, "'log_probs' found as the name of a column, which"),
        ({"a.b": {"dtype": "int8"}}, "'a.b' found as the name of a column"),
        ({"x": {"dtype": "O"}}, "dtype object found"),
        ({"x": {"dtype": None}}, "dtype None found, a number of at most 8 bytes"),
        ({"x": {"dtype": "(2,"}}, r"dtype '\(2,' found, a number of at most 8 bytes"),
        ({"x": {"dtype": "int8", "item": [2**40]}}, "a shape of up to 4 dimensions"),
        ({"x": {"dtype": "int8", "fill": 300}}, "fill 300 found, a int8 is needed"),
        # It would become infinite, in silence.
        ({"x": {"dtype": "float16", "fill": 70000}}, "fill 70000 found, a float16 is needed"),
        ({"x": {"dtype": "float32", "fill": -1e300}}, "fill -1e[+]300 found, a float32 is needed"),
        ({"x": {"dtype": "int8", "per": "row"}}, "per 'row' found, token or document"),
        ({"x": {"dtype": "int8", "more": 1}}, "an object with dtype and any of"),
        ({"x": 3}, "an object with dtype and any of"),
    ],
)
def test_a_meta_file_that_describes_no_columns_is_refused(tmp_path, value, reason):
    write_tokens(tmp_path / "web", documents(1))
    meta = {"tokenizer": ByteTokenizer().fingerprint(), "columns": value}
    (tmp_path / "web.meta.json").write_text(json.dumps(meta))
    with pytest.raises(ConfigError, match=rf"web\.meta\.json: .*{reason}"):
        open_documents(tmp_path / "web")


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (np.zeros((3, 2)), r"float64 \[3, 2\] found, int16 \[4, 2, 3\] is needed"),
        (np.full((4, 2, 3), 40000), "40000 does not fit int16"),
        (np.full((4, 2, 3), 0.5), "0.5 does not fit int16"),
        ([[1], [1, 2]], "a list found, an array is needed"),
        (torch.zeros(4, 2, 3, requires_grad=True), "a Tensor found, an array is needed .*detach"),
        (torch.zeros(4, 2, 3, dtype=torch.bfloat16), "a Tensor found, an array is needed"),
        (np.ma.masked_equal(np.zeros((4, 2, 3), int), 0), "a masked value found"),
        ("text", "is needed"),
    ],
)
def test_a_writer_refuses_values_of_another_shape_or_range(tmp_path, values, reason):
    writer = TokenWriter(tmp_path / "web", 300, {"experts": COLUMNS["experts"]})
    with pytest.raises(SampleError, match=f"a.txt: column experts: .*{reason}"):
        writer.write(np.arange(4), columns={"experts": values}, origin="a.txt")
    writer.abandon()


# Stores of users --------------------------------------------------------------------------------


class Computed(Documents):
    """A store with a column in one class."""

    columns = {"double": Column("int32", at="input")}

    def __len__(self):
        return 20

    def lengths(self, numbers):
        return 5 + np.asarray(numbers) % 7

    def tokens(self, number, start, stop):
        return np.arange(3 + number, 20 + number)[start:stop]

    def values(self, name, number, start, stop):
        return self.tokens(number, start, stop) * 2


class Wrong(Computed):
    def values(self, name, number, start, stop):
        return np.zeros(1, np.int32)


@pytest.fixture
def formats():
    before = FORMATS.copy()
    yield
    FORMATS[:] = before


def test_a_store_of_a_user_has_a_column_with_one_class(tmp_path, formats):
    register_documents(".computed", lambda path: Computed())
    (tmp_path / "web.computed").touch()
    mix = write_mix(tmp_path / "mix.yaml", [("web.computed", 1)])
    (batch,) = take(loader_of(mix), 1)
    carried = batch.segment_sources() >= 0
    assert batch.columns["double"].tolist() == torch.where(carried, batch.tokens * 2, 0).tolist()


def test_a_store_that_returns_other_values_is_named(tmp_path, formats):
    register_documents(".computed", lambda path: Wrong())
    (tmp_path / "web.computed").touch()
    mix = write_mix(tmp_path / "mix.yaml", [("web.computed", 1)])
    with pytest.raises(EnergonExtError, match=r"column double: int32 \[1\] found"):
        take(loader_of(mix), 1)


def test_names_that_a_batch_uses_itself_are_reserved():
    assert {field.name for field in dataclasses.fields(PackedBatch)} < RESERVED


# Assembly ---------------------------------------------------------------------------------------


def test_a_token_that_is_only_a_label_has_its_label_values_and_no_segment():
    columns = {
        "at_input": Column("int32", at="input", fill=-1),
        "at_label": Column("int32", fill=-1),
        "of_document": Column("int32", per="document", fill=-1),
    }
    slices = [np.array([5, 6, 7]), np.array([8])]
    values = [np.array([50, 60, 70]), np.array([80])]
    row = Row(
        slices,
        "web",
        columns={
            "at_input": values,
            "at_label": values,
            "of_document": [np.array(1), np.array(2)],
        },
    )
    batch = BatchAssembler(3, mask_boundary_loss=False)([row], ["web"], columns).validate()
    assert batch.columns["at_input"].tolist() == [50, 60, 70]
    assert batch.columns["at_label"].tolist() == [60, 70, 80]
    assert batch.segments["of_document"].tolist() == [1]
