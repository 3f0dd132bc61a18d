# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The mean over documents of the mean loss of each, against documents that are read alone."""

import numpy as np
import pytest
import torch

from energon_ext import ConfigError, PackedTaskEncoder, SFTTaskEncoder, get_train_dataset
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.loader.data_loader import ExactDataLoader
from energon_ext.losses import document_mean
from energon_ext.megatron import make_loss_func, slice_for_context_parallel
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.support import config, write_mix, write_tokens, write_weights

LENGTHS = [3, 50, 7, 2, 33, 12, 1, 16, 17, 18, 85, 6]
SEQ_LEN = 16
EOS = 2


def documents():
    """Documents of distinct ids, of which every seventh one is the end of a text."""
    ends = np.cumsum(LENGTHS)
    ids = 4 + np.arange(ends[-1])
    ids[6::7] = EOS
    return np.split(ids, ends[:-1])


def weights_of(number, length):
    """Label weights of a document: masked, whole and fractional ones."""
    return np.array([1, 0, 0.5, 1, 2, 1, 0])[(number + np.arange(length)) % 7]


def log_probs(tokens, labels):
    """What a model says of a label depends on the token before it, wherever the two are."""
    return -((tokens * 131 + labels * 29) % 97) / 10


def mean_alone(has_weights=False, train_on_eos=True):
    """Return the mean over documents, each read alone, in double precision."""
    means = []
    for number, tokens in enumerate(documents()):
        weights = weights_of(number, len(tokens)) if has_weights else np.ones(len(tokens))
        weights = np.where((tokens == EOS) & (not train_on_eos), 0, weights)[1:]
        losses = -weights * log_probs(tokens[:-1], tokens[1:])
        if weights.any():
            means.append(losses.sum() / np.count_nonzero(weights))
    return sum(means) / len(means)


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "weighted"])
def data(request, tmp_path_factory):
    """A metadataset over the documents, and whether they have label weights."""
    folder = tmp_path_factory.mktemp("data")
    prefix = write_tokens(folder / "docs", [each.tolist() for each in documents()])
    if request.param:
        weights = [weights_of(number, length) for number, length in enumerate(LENGTHS)]
        write_weights(prefix, weights, "float32")
    return write_mix(folder / "mix.yaml", [(prefix, 1)]), request.param


def batches_of(path, ranks, batch_size, encoder):
    """Yield the micro-batches of all ranks in one epoch."""
    for rank in range(ranks):
        dataset = get_train_dataset(
            path,
            worker_config=config(rank=rank, world_size=ranks),
            batch_size=batch_size,
            task_encoder=encoder,
            repeat=False,
        )
        yield from ExactDataLoader(dataset)


def total_of(batches, **options):
    """Return the loss that Megatron makes of micro-batches, and the documents it counts."""
    found = [
        make_loss_func(batch, "documents", **options)(
            -torch.from_numpy(log_probs(batch.tokens.numpy(), batch.labels.numpy()))[None]
        )
        for batch in batches
    ]
    assert len(found) > 1
    loss, count = (sum(each[index].double().item() for each in found) for index in (0, 1))
    return loss / count, count


@pytest.mark.parametrize("train_on_eos", [True, False])
@pytest.mark.parametrize("packing", ["bin", "sequential"])
@pytest.mark.parametrize(("ranks", "batch_size"), [(1, 1), (2, 2), (1, 3)])
def test_cut_documents_count_as_if_read_alone(data, packing, train_on_eos, ranks, batch_size):
    path, has_weights = data
    encoder = PackedTaskEncoder(
        ByteTokenizer(),
        SEQ_LEN,
        packing=packing,
        mask_boundary_loss=True,
        train_on_eos=train_on_eos,
        document_means=True,
    )
    loss, count = total_of(batches_of(path, ranks, batch_size, encoder))
    assert loss == pytest.approx(mean_alone(has_weights, train_on_eos), rel=1e-6)
    assert count == 4096 * (len(LENGTHS) - 1)  # one document has no label


@pytest.mark.parametrize("size", [2, 4])
def test_context_parallel_ranks_have_parts_that_add_up(data, size):
    path, has_weights = data
    encoder = PackedTaskEncoder(ByteTokenizer(), SEQ_LEN, alignment=2 * size, document_means=True)
    parts = [
        slice_for_context_parallel(batch, size, rank)
        for batch in batches_of(path, 1, 2, encoder)
        for rank in range(size)
    ]
    loss, count = total_of(parts)
    assert loss == pytest.approx(mean_alone(has_weights), rel=1e-6)
    assert count == 4096 * (len(LENGTHS) - 1)


def test_a_step_without_a_whole_document_is_the_mean_over_its_labels():
    """A document of nine labels in three pieces: the middle one has the labels 3 to 5."""
    row = Row([np.array([13, 14, 15, 16])], source="web", parts=[(3, 9)])
    batch = BatchAssembler(4, document_means=True)([row], sources=["web"])
    assert batch.columns["document_share"].tolist() == pytest.approx([1 / 9, 1 / 9, 1 / 9, 0])
    assert batch.columns["document_parts"].sum().item() == (2731 - 1365) / 4096
    found = document_mean(batch, torch.tensor([-1.0, -2.0, -6.0, -100.0]))
    assert found.item() == pytest.approx(3.0, rel=1e-3)  # a part of a document is counted in 1/4096


def test_a_sample_weight_is_the_weight_of_the_mean_of_its_document():
    """Two documents with mean losses 2 and 6, of which the second has weight 1/2."""
    weights = [np.array([0, 1, 1]), np.array([0, 0.5])]
    row = Row([np.array([5, 6, 7]), np.array([8, 9])], source="web", label_weights=weights)
    batch = BatchAssembler(5, document_means=True)([row], sources=["web"])
    log_prob = torch.tensor([-1.0, -3.0, -torch.inf, -6.0, -torch.inf])
    assert document_mean(batch, log_prob).item() == pytest.approx((2 + 0.5 * 6) / 2)
    report = make_loss_func(batch, "documents")(-log_prob.nan_to_num()[None])[2]
    assert report["lm loss/web"].tolist() == pytest.approx([5, 2])


def test_answers_without_an_advantage_count_where_the_batch_has_a_mask():
    masks = [np.array([0, 1, 1]), np.array([0, 1, 0, 1])]
    weights = [np.array([0, 2.0, 2.0]), np.zeros(4)]
    slices = [np.array([5, 6, 7]), np.array([5, 8, 9, 4])]
    row = Row(slices, label_weights=weights, columns={"response_mask": masks})
    batch = BatchAssembler(7, document_means=True)([row], sources=[""])
    loss = document_mean(batch, torch.full((7,), -3.0))
    assert loss.item() == pytest.approx((2 * 3 + 0) / 2)


def test_position_losses_are_averaged_by_document_as_well():
    row = Row([np.array([5, 6, 7]), np.array([8, 9])])
    batch = BatchAssembler(5, document_means=True)([row], sources=[""])
    loss, count, _ = make_loss_func(
        batch, "documents", position_losses=lambda batch, log_probs: log_probs**2
    )(torch.tensor([[1.0, 2.0, 9.0, 3.0, 9.0]]))
    assert (loss / count).item() == pytest.approx(((1 + 4) / 2 + 9) / 2)


def test_a_chat_that_is_cut_to_a_row_is_a_whole_document(tmp_path):
    tokens = [list(range(10, 10 + 40)), list(range(60, 70))]
    prefix = write_tokens(tmp_path / "chats", tokens)
    write_weights(prefix, [[0] * 20 + [1] * 20, [0] * 5 + [1] * 5])
    path = write_mix(tmp_path / "mix.yaml", [(prefix, 1)])
    encoder = SFTTaskEncoder(ByteTokenizer(), 32, document_means=True)
    (batch,) = batches_of(path, 1, 2, encoder)
    assert batch.columns["document_parts"].sum() == 2
    shares = batch.columns["document_share"]
    assert sorted(set(shares.tolist())) == pytest.approx([0, 1 / 13, 1 / 5])  # labels 20 to 32


def test_the_mean_of_each_source_is_over_its_documents():
    rows = [Row([np.array([5, 6, 7])], source="web"), Row([np.array([8, 9])] * 2, source="code")]
    batch = BatchAssembler(4, document_means=True)(rows, sources=["code", "web"])
    nll = torch.tensor([[1.0, 2, 0, 0, 5, 0, 7, 0]])
    report = make_loss_func(batch, "documents")(nll)[2]
    assert {key: each.tolist() for key, each in report.items()} == {
        "lm loss": pytest.approx([13.5, 3]),
        "lm loss/code": pytest.approx([12, 2]),
        "lm loss/web": pytest.approx([1.5, 1]),
    }


def test_what_cannot_be_known_is_refused_by_name():
    row = Row([np.array([5, 6, 7])])
    batch = BatchAssembler(4)([row], sources=[""])
    with pytest.raises(ConfigError, match="'documents': the batch does not have the sizes"):
        make_loss_func(batch, "documents")
    with pytest.raises(ConfigError, match="document_means: the first token.*mask_boundary_loss"):
        PackedTaskEncoder(ByteTokenizer(), 4, packing="sequential", document_means=True)
