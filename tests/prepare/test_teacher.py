# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Words of a teacher as columns, against a teacher whose words can be worked out by hand."""

import contextlib
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from energon_ext.errors import ConfigError
from energon_ext.losses import Distillation, distillation_loss
from energon_ext.prepare.teacher import CausalLM, most_probable, teacher_columns, write_teacher
from energon_ext.storage.claim import Part
from energon_ext.tokens.column_folder import ColumnFolder
from tests.support import take, write_tokens
from tests.tokens.test_column_folder import mix_with
from tests.tokens.test_columns import documents, loader_of

K = 3
TEXTS = [[5, 6, 7], [9], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21], [30, 31, 32, 33]]


class SumTeacher:
    """The next word is 1, 2 or 3 more than all tokens that it sees together."""

    words = 2000

    def __init__(self, context=None, base=0.0):
        self.context, self.base = context, base
        self.lengths = []

    def next_words(self, texts, k):
        self.lengths += map(len, texts)
        log_probs = np.log([0.5, 0.25, 0.125]) - self.base
        return [
            (
                np.add.outer(np.cumsum(text), np.arange(1, k + 1)),
                np.tile(log_probs[:k], (len(text), 1)),
            )
            for text in texts
        ]


def read(folder, name="teacher"):
    found = ColumnFolder.open(folder)
    numbers, lengths = range(len(TEXTS)), [len(text) for text in TEXTS]
    columns = (f"{name}_ids", f"{name}_log_probs")
    return [found.read(column, numbers, [0] * len(TEXTS), lengths) for column in columns]


def test_words_belong_to_the_label_that_they_predict(tmp_path):
    write_tokens(tmp_path / "web", TEXTS)
    write_teacher(tmp_path / "web", tmp_path / "said", SumTeacher(), k=K, made_by="sums")
    ids, log_probs = read(tmp_path / "said")
    assert ids[0].tolist() == [[-1, -1, -1], [6, 7, 8], [12, 13, 14]]
    assert ids[1].tolist() == [[-1, -1, -1]]
    assert log_probs[0].tolist()[0] == [-10000.0] * 3
    np.testing.assert_allclose(
        np.exp(log_probs[3][1:].astype(float)), [[0.5, 0.25, 0.125]] * 3, 1e-3
    )


def test_long_documents_are_read_in_windows_that_overlap_by_half(tmp_path):
    write_tokens(tmp_path / "web", TEXTS)
    teacher = SumTeacher(context=4)
    write_teacher(tmp_path / "web", tmp_path / "said", teacher, k=1, made_by="sums", name="sum")
    ids, _ = read(tmp_path / "said", "sum")
    text = TEXTS[2]
    # Windows begin at 0, 2, 4 and 6; each has the labels that the one before does not have.
    starts = [0, 0, 0, 0, 2, 2, 4, 4, 6, 6]
    expected = [sum(text[start:label]) + 1 for label, start in enumerate(starts, 1)]
    assert ids[2].ravel().tolist() == [-1, *expected]
    assert max(teacher.lengths) == 4


def test_a_shorter_context_is_used_and_a_longer_one_refused(tmp_path):
    write_tokens(tmp_path / "web", TEXTS)
    teacher = SumTeacher(context=8)
    with pytest.raises(ConfigError, match="context: 9 found, sums reads 8 tokens"):
        write_teacher(tmp_path / "web", tmp_path / "a", teacher, k=1, made_by="sums", context=9)
    write_teacher(tmp_path / "web", tmp_path / "a", teacher, k=1, made_by="sums", context=2)
    assert max(teacher.lengths) == 2


def test_parts_of_several_processes_and_one_that_another_teacher_continues(tmp_path):
    write_tokens(tmp_path / "web", TEXTS)
    given = tmp_path / "web", tmp_path / "said", SumTeacher()
    write_teacher(*given, k=K, made_by="sums", part=Part(1, 2), unit_documents=1)
    for other in ({"made_by": "others"}, {"made_by": "sums", "context": 8}):
        with pytest.raises(ConfigError, match="made_by"):
            write_teacher(*given, k=K, part=Part(0, 2), unit_documents=1, **other)
    write_teacher(*given, k=K, made_by="sums", part=Part(0, 2), unit_documents=1)
    ids, _ = read(tmp_path / "said")
    assert ids[3][1:, 0].tolist() == [31, 62, 94]


def test_a_run_on_other_ranks_follows_the_folder_of_another_teacher(tmp_path):
    texts = documents(1)
    write_tokens(tmp_path / "web", texts)
    for base in (0.0, 1.0):
        teacher = SumTeacher(context=4, base=base)
        write_teacher(tmp_path / "web", tmp_path / f"said{base:g}", teacher, k=K, made_by="sums")
    loader = loader_of(teacher_mix(tmp_path, "said0"))
    take(loader, 2)
    state = loader.state_dict()
    losses = {}
    for folder in ("said0", "said1"):
        found = []
        for rank in range(2):
            resumed = loader_of(teacher_mix(tmp_path, folder), rank=rank, ranks=2)
            resumed.load_state_dict(state)
            (batch,) = take(resumed, 1)
            logits = torch.zeros(batch.num_tokens, 2000)
            found.append(distillation_loss(batch, logits, Distillation(alpha=1)).item())
        losses[folder] = found
        words = np.array([0.5, 0.25, 0.125]) * np.exp(-float(folder[-1]))
        outcomes = np.array([*words, 1 - words.sum()])
        uniform = np.array([1, 1, 1, 1997]) / 2000
        expected = (outcomes * np.log(outcomes / uniform)).sum()
        assert found == pytest.approx([expected] * 2, rel=1e-3)
    assert min(losses["said0"]) > max(losses["said1"]) + 1
    write_tokens(tmp_path / "web", documents(2))
    with pytest.raises(ConfigError, match="has columns of 60 other documents"):
        loader_of(teacher_mix(tmp_path, "said1"))


def teacher_mix(tmp_path, folder):
    columns = {"teacher_ids": folder, "teacher_log_probs": folder}
    return mix_with(tmp_path / f"{folder}.yaml", columns)


# Models -----------------------------------------------------------------------------------------


class BagModel(torch.nn.Module):
    """Logits of each token are a function of all tokens before; padding would be seen."""

    def __init__(self, words=40):
        super().__init__()
        self.table = torch.nn.Embedding(words, words)
        self.config = SimpleNamespace(max_position_embeddings=16, vocab_size=words)

    def forward(self, input_ids, attention_mask):
        assert not self.training
        seen = self.table(input_ids) * attention_mask[..., None]
        return SimpleNamespace(logits=seen.cumsum(1))


@pytest.mark.parametrize("tokens_at_once", [1, 8, 1000])
def test_a_causal_model_is_read_in_padded_groups(tokens_at_once):
    torch.manual_seed(0)
    model = BagModel()
    texts = [np.array(text) for text in TEXTS]
    found = CausalLM(model, tokens_at_once).next_words(texts, K)
    assert model.training
    for text, (ids, log_probs) in zip(texts, found, strict=True):
        logits = model.table.weight.detach().double()[text].cumsum(0)
        expected = logits.log_softmax(1).topk(K)
        assert ids.tolist() == expected.indices.tolist()
        np.testing.assert_allclose(log_probs, expected.values, atol=1e-5)


@pytest.mark.nightly  # the import alone takes seconds
def test_a_model_of_transformers_reads_documents_alone(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=40,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=16,
        initializer_range=1.0,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    write_tokens(tmp_path / "web", TEXTS)
    write_teacher(
        tmp_path / "web", tmp_path / "said", CausalLM(model), k=K, made_by="llama", dtype="float32"
    )
    ids, log_probs = read(tmp_path / "said")
    for text, found, values in zip(TEXTS, ids, log_probs):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([text])).logits[0, :-1]
        expected = logits.log_softmax(1).topk(K)
        assert found[1:].tolist() == expected.indices.tolist()
        np.testing.assert_allclose(values[1:], expected.values, atol=1e-5)


def test_words_without_probability_are_stored(tmp_path):
    logits = torch.tensor([[0.0, -torch.inf, -torch.inf]])
    assert most_probable(logits, 2)[1].tolist() == [[0.0, -np.inf]]
    teacher = SumTeacher()
    teacher.next_words = lambda texts, k: [
        (np.ones((len(text), 2), int), np.full((len(text), 2), -np.inf)) for text in texts
    ]
    write_tokens(tmp_path / "web", TEXTS)
    write_teacher(tmp_path / "web", tmp_path / "said", teacher, k=2, made_by="none")
    assert read(tmp_path / "said")[1][0].tolist() == [[-10000.0] * 2] * 3


def test_a_list_that_is_filled_up_with_a_word_without_probability_has_each_word_once(tmp_path):
    """Otherwise the student's probability of word 7 would be counted twice."""
    ids, log_probs = np.array([7, 7, 5]), np.array([-0.5, -np.inf, -np.inf])
    teacher = SumTeacher()
    teacher.next_words = lambda texts, k: [
        [np.tile(each, (len(text), 1)) for each in (ids, log_probs)] for text in texts
    ]
    write_tokens(tmp_path / "web", TEXTS)
    write_teacher(tmp_path / "web", tmp_path / "said", teacher, k=3, made_by="filled")
    assert read(tmp_path / "said")[0][0].tolist() == [[-1] * 3, [7, -1, -1], [7, -1, -1]]


# Refused ----------------------------------------------------------------------------------------


def test_values_that_are_not_log_probabilities_are_refused(tmp_path):
    write_tokens(tmp_path / "web", TEXTS)
    for base, found in ((np.nan, "nan"), (-9, "8.3")):
        with pytest.raises(ConfigError, match=f"sums has a log-probability of {found}"):
            write_teacher(
                tmp_path / "web", tmp_path / "said", SumTeacher(base=base), k=K, made_by="sums"
            )


@pytest.mark.parametrize(
    ("ids", "probabilities", "message"),
    [
        (
            [5, 5],
            [0.5, 0.5],
            r"the words \[5, 5\] for one label; different integers from 0 to 1999",
        ),
        ([5, 2000], [0.5, 0.5], r"the words \[5, 2000\]"),
        ([2**32 + 5, 6], [0.5, 0.5], r"the words \[4294967301, 6\]"),
        ([5, -1], [0.5, 0.5], r"the words \[5, -1\]"),
        ([5, -3], [0.5, 0.0], r"the words \[5, -3\]"),
        ([5.5, 6.0], [0.5, 0.5], r"the words \[5.5, 6.0\]"),
        ([5, 6], [0.9, 0.9], "the probabilities of 2 words of sums add up to 1.8"),
        ([5, -1], [0.5, 0.0], None),  # it has one word only
    ],
)
def test_words_of_a_label_are_different_ones_of_the_vocabulary(
    tmp_path, ids, probabilities, message
):
    write_tokens(tmp_path / "web", TEXTS)
    teacher = SumTeacher()
    with np.errstate(divide="ignore"):
        log_probs = np.log(probabilities)
    teacher.next_words = lambda texts, k: [
        (np.tile(ids, (len(text), 1)), np.tile(log_probs, (len(text), 1))) for text in texts
    ]
    call = functools.partial(
        write_teacher, tmp_path / "web", tmp_path / "said", teacher, k=2, made_by="sums"
    )
    with pytest.raises(ConfigError, match=message) if message else contextlib.nullcontext():
        call()


def test_a_teacher_is_not_asked_about_documents_without_labels(tmp_path):
    write_tokens(tmp_path / "web", [[5], [6], [7, 8, 9]])
    teacher, asked = SumTeacher(), []
    say = teacher.next_words
    teacher.next_words = lambda texts, k: asked.append(len(texts)) or say(texts, k)
    write_teacher(
        tmp_path / "web", tmp_path / "said", teacher, k=1, made_by="sums", unit_documents=2
    )
    assert asked == [1]


def test_values_of_other_shapes_are_refused(tmp_path):
    write_tokens(tmp_path / "web", TEXTS)
    message = r"sums returned \[3, 4\] ids and \[3, 3\] log-probabilities for 3 tokens, \[3, 4\]"
    with pytest.raises(ConfigError, match=message):
        write_teacher(tmp_path / "web", tmp_path / "said", SumTeacher(), k=4, made_by="sums")


def test_other_vocabularies_are_refused(tmp_path):
    write_tokens(tmp_path / "web", TEXTS)
    given = tmp_path / "web", tmp_path / "said", CausalLM(BagModel(words=33))
    with pytest.raises(ConfigError, match="k: 34 found, bag has 33 words"):
        write_teacher(*given, k=34, made_by="bag")
    with pytest.raises(ConfigError, match="token 33 found, bag has 33 words; both must have the"):
        write_teacher(*given, k=K, made_by="bag")


def test_options_of_columns_are_refused():
    with pytest.raises(ConfigError, match="dtype: 'float64' found, one of float16, float32"):
        teacher_columns(4, dtype="float64")
    with pytest.raises(ConfigError, match="k: 0 found"):
        teacher_columns(0)
