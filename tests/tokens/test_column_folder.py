# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Columns in folders of others, against a function of each token's id."""

import json
import multiprocessing
import os
import shutil
import signal

import numpy as np
import pytest
import torch

from energon_ext.batch.columns import Column
from energon_ext.errors import ConfigError, EnergonExtError, SampleError
from energon_ext.prepare.columns import write_columns
from energon_ext.storage.claim import Part
from energon_ext.tokens.column_folder import ColumnFolder
from tests.support import take, write_mix, write_tokens
from tests.tokens.test_columns import documents, loader_of, write_columns_of

COLUMNS = {
    "ids": Column("int32", (2,), fill=-1),
    "score": Column("float32", per="document"),
}


def produce(texts):
    return {
        "ids": [np.stack([tokens, tokens + 1], 1) for tokens in texts],
        "score": [tokens.sum() for tokens in texts],
    }


def mix_with(path, columns, name="web"):
    write_mix(path, [(name, 1)])
    content = json.loads(path.read_text())
    content["splits"]["train"]["blend"][0]["columns"] = columns
    path.write_text(json.dumps(content))
    return path


def check_batch(batch):
    batch.validate()
    carried = batch.segment_sources() >= 0
    labels, ids = batch.labels, batch.columns["ids"]
    is_label = labels != 0
    assert torch.equal(ids[is_label], torch.stack([labels, labels + 1], 1)[is_label].int())
    assert (ids[~is_label] == -1).all()
    return int(carried.sum())


@pytest.mark.parametrize("unit_documents", [7, 1000])
def test_values_of_others_reach_the_batch_with_their_tokens(tmp_path, unit_documents):
    write_tokens(tmp_path / "web", documents(1))
    write_columns(
        tmp_path / "web", tmp_path / "teacher", COLUMNS, produce, unit_documents=unit_documents
    )
    mix = mix_with(tmp_path / "mix.yaml", {"ids": "teacher", "score": "./teacher"})
    for batch in take(loader_of(mix), 12):
        assert check_batch(batch)
        scores = batch.segments["score"][batch.source_ids >= 0]
        sums = {float(sum(each)) for each in documents(1)}
        assert {*scores.tolist()} <= sums


def test_a_chosen_column_of_a_folder_is_read_alone(tmp_path):
    write_tokens(tmp_path / "web", documents(1))
    write_columns(tmp_path / "web", tmp_path / "teacher", COLUMNS, produce)
    mix = mix_with(tmp_path / "mix.yaml", {"score": "teacher"})
    (batch,) = take(loader_of(mix), 1)
    assert ({*batch.columns}, {*batch.segments}) == (set(), {"score"})


def test_columns_belong_to_documents_and_not_to_their_division_into_files(tmp_path):
    texts = documents(1)
    write_tokens(tmp_path / "web", texts)
    write_columns(tmp_path / "web", tmp_path / "teacher", COLUMNS, produce)
    write_tokens(tmp_path / "divided" / "a", texts[:23])
    write_tokens(tmp_path / "divided" / "b", texts[23:])
    mix = mix_with(tmp_path / "mix.yaml", {"ids": "teacher"}, "divided")
    assert all(map(check_batch, take(loader_of(mix), 6)))


def test_parts_by_several_processes_equal_one(tmp_path):
    write_tokens(tmp_path / "web", documents(1))
    write_columns(tmp_path / "web", tmp_path / "one", COLUMNS, produce, unit_documents=9)
    for number in (2, 0, 1):
        write_columns(
            tmp_path / "web",
            tmp_path / "three",
            COLUMNS,
            produce,
            unit_documents=9,
            part=Part(number, 3),
        )
    files = {path.name for path in (tmp_path / "one").rglob("*.npy")}
    assert len(files) == 7 * 4  # two columns, ends and digests
    for path in (tmp_path / "one").rglob("*"):
        if path.is_file():
            same = tmp_path / "three" / path.relative_to(tmp_path / "one")
            assert same.read_bytes() == path.read_bytes()


def write_and_die(web, folder):
    calls = []

    def dying(texts):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return produce(texts)

    write_columns(web, folder, COLUMNS, dying, unit_documents=9)


def test_a_killed_call_continues_with_the_units_that_are_missing(tmp_path):
    write_tokens(tmp_path / "web", documents(1))
    process = multiprocessing.get_context("fork").Process(
        target=write_and_die, args=(tmp_path / "web", tmp_path / "teacher")
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL and not (tmp_path / "teacher").exists()
    asked = []

    def count(texts):
        asked.extend(texts)
        return produce(texts)

    write_columns(tmp_path / "web", tmp_path / "teacher", COLUMNS, count, unit_documents=9)
    assert len(asked) == 60 - 2 * 9
    write_columns(tmp_path / "web", tmp_path / "teacher", COLUMNS, count, unit_documents=9)
    assert len(asked) == 60 - 2 * 9
    folder = ColumnFolder.open(tmp_path / "teacher")
    texts = documents(1)
    assert folder.read("score", [0, 59], [0, 0], [1, 1]) == [sum(texts[0]), sum(texts[59])]


# Refused ----------------------------------------------------------------------------------------


def test_columns_of_other_documents_are_refused(tmp_path):
    write_tokens(tmp_path / "code", documents(2))
    write_columns(tmp_path / "code", tmp_path / "teacher", COLUMNS, produce)
    write_tokens(tmp_path / "web", documents(1))
    mix = mix_with(tmp_path / "mix.yaml", {"ids": "teacher"})
    with pytest.raises(ConfigError, match=r"columns: .*teacher has columns of 60 other documents"):
        loader_of(mix)


def test_two_documents_in_each_others_place_are_refused_when_they_are_read(tmp_path):
    """They have equal lengths, and no sample of a fingerprint need contain them."""
    texts = [[3 + n % 200, 5, 6, 7] for n in range(500)]
    write_tokens(tmp_path / "web", texts)
    write_columns(tmp_path / "web", tmp_path / "teacher", COLUMNS, produce)
    texts[100], texts[101] = texts[101], texts[100]
    write_tokens(tmp_path / "web", texts)
    mix = mix_with(tmp_path / "mix.yaml", {"ids": "teacher"})
    loader = loader_of(mix)
    message = r"teacher: its columns were made of other tokens of document 10[01]"
    with pytest.raises(EnergonExtError, match=message):
        take(loader, 40)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"idz": "teacher"}, "has no column 'idz'; it has ids, score; did you mean ids"),
        ({"ids": "nowhere"}, "nowhere: has no prepared.json"),
        ({"ids": "web"}, "web: has no prepared.json"),
        (["teacher"], "a folder for each name is needed"),
        ({"ids": 3}, "a folder for each name is needed"),
        ({"tokens": "teacher"}, "'tokens' found as the name of a column"),
    ],
)
def test_an_entry_that_names_no_column_is_refused(tmp_path, columns, reason):
    write_tokens(tmp_path / "web", documents(1))
    write_columns(tmp_path / "web", tmp_path / "teacher", COLUMNS, produce)
    mix = mix_with(tmp_path / "mix.yaml", columns)
    with pytest.raises(ConfigError, match=reason):
        loader_of(mix)


def test_a_column_that_the_documents_have_themselves_is_refused(tmp_path):
    write_columns_of(tmp_path / "web", documents(1))
    columns = {"teacher": Column("float32")}
    write_columns(
        tmp_path / "web",
        tmp_path / "other",
        columns,
        lambda texts: {"teacher": [each / 2 for each in texts]},
    )
    mix = mix_with(tmp_path / "mix.yaml", {"teacher": "other"})
    with pytest.raises(ConfigError, match="the documents have a column teacher themselves"):
        loader_of(mix)


def test_a_folder_with_a_missing_or_cut_file_is_named_at_the_start(tmp_path):
    write_tokens(tmp_path / "web", documents(1))
    write_columns(tmp_path / "web", tmp_path / "teacher", COLUMNS, produce)
    mix = mix_with(tmp_path / "mix.yaml", {"ids": "teacher"})
    file = tmp_path / "teacher" / "columns" / "part-00000.ids.npy"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(ConfigError, match=r"part-00000\.ids\.npy: has .* bytes; "):
        loader_of(mix)
    file.unlink()
    with pytest.raises(ConfigError, match=r"part-00000\.ids\.npy: does not exist"):
        loader_of(mix)


@pytest.mark.parametrize(
    ("found", "error", "reason"),
    [
        ({"ids": []}, ConfigError, "60 of each of"),
        ({"ids": [np.zeros((3, 2), int)] * 60, "score": [1.0] * 60}, SampleError, "column ids"),
        ({"ids": None, "score": [1.0] * 60}, ConfigError, "60 of each of"),
        (None, ConfigError, "returned a NoneType, the values of .* by column are needed"),
    ],
)
def test_what_produce_returns_wrongly_is_named(tmp_path, found, error, reason):
    write_tokens(tmp_path / "web", documents(1))
    with pytest.raises(error, match=reason):
        write_columns(tmp_path / "web", tmp_path / "teacher", COLUMNS, lambda texts: found)
    assert not (tmp_path / "teacher").exists()


def test_what_produce_does_to_its_tokens_does_not_change_their_checksums(tmp_path):
    def mask_first(texts):
        values = produce(texts)
        for tokens in texts:
            tokens[0] = 0
        return values

    write_tokens(tmp_path / "web", documents(1))
    write_columns(tmp_path / "web", tmp_path / "teacher", COLUMNS, mask_first)
    mix = mix_with(tmp_path / "mix.yaml", {"ids": "teacher"})
    (batch,) = take(loader_of(mix), 1)
    assert check_batch(batch)


@pytest.mark.parametrize(("number", "count"), [(2, 2), (-1, 2), (0, 0)])
def test_a_part_that_does_not_exist_is_refused(number, count):
    with pytest.raises(ConfigError, match="Part"):
        Part(number, count)


def test_a_folder_begun_with_another_teacher_is_refused(tmp_path):
    write_tokens(tmp_path / "web", documents(1))
    write_columns(tmp_path / "web", tmp_path / "teacher", COLUMNS, produce, made_by="one")
    with pytest.raises(ConfigError, match='started with made_by "one", now "two"'):
        write_columns(tmp_path / "web", tmp_path / "teacher", COLUMNS, produce, made_by="two")


def test_a_resume_goes_on_with_the_values_of_another_teacher(tmp_path):
    write_tokens(tmp_path / "web", documents(1))
    write_columns(tmp_path / "web", tmp_path / "teacher", COLUMNS, produce)
    mix = mix_with(tmp_path / "mix.yaml", {"ids": "teacher"})
    loader = loader_of(mix)
    take(loader, 3)
    state = loader.state_dict()
    expected = take(loader, 3)
    shutil.rmtree(tmp_path / "teacher")

    def other(texts):
        return {"ids": [each[:, None] * [3, 4] for each in texts], "score": [0.0] * len(texts)}

    write_columns(tmp_path / "web", tmp_path / "teacher", COLUMNS, other)
    resumed = loader_of(mix)
    resumed.load_state_dict(state)
    for before, after in zip(expected, take(resumed, 3)):
        assert torch.equal(before.labels, after.labels)
        is_label = after.labels != 0
        expected_ids = (after.labels[:, None] * torch.tensor([3, 4])).int()
        assert torch.equal(after.columns["ids"][is_label], expected_ids[is_label])
