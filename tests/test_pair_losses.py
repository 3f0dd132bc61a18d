# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Losses on pairs: by hand, against a slow model, and in the parts of context parallelism."""

import math

import numpy as np
import pytest
import torch

from energon_ext.batch.rows import Row
from energon_ext.errors import ConfigError, SampleError
from energon_ext.losses import dpo_loss, preference_margins
from energon_ext.megatron import make_loss_func
from tests.pair_rows import batch_of, random_pair, row_of, slow_losses


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


@pytest.fixture
def batch():
    """Two pairs in a row of 12 positions, the second after the first; then a row of padding.

    Prompt 5 6, answers 7 8 and 9; prompt 5, answers 6 and 7 8 (chosen first).
    """
    slices = [np.array(ids) for ids in ([5, 6, 7, 8], [5, 6, 9], [5, 6], [5, 7, 8])]
    weights = [[0, 0, 1, 1], [0, 0, -1], [0, 1], [0, -1, -1]]
    columns = [[0, 0, -1, -2], [0, 0, -3], [0, -1.5], [0, -0.5, -2.5]]
    row = Row(
        slices,
        source="web",
        documents=2,
        label_weights=[np.array(each, np.float32) for each in weights],
        pairs=[0, 0, 1, 1],
        columns={"ref_log_probs": [np.array(each, np.float32) for each in columns]},
    )
    return batch_of([row, Row([], slice_sources=[])], 12)


#: Log-probabilities at the labels of the batch: of answers, and infinite where nothing is trained.
ANSWERS = {1: -0.5, 2: -1.0, 5: -4.0, 7: -2.5, 9: -0.25, 10: -1.25}
#: With the reference: .5 + 1 and -1 of the first pair; -1 and .25 + 1.25 of the second.
MARGINS = [1.5 + 1.0, -1.0 - 1.5]


def policy(batch):
    values = torch.full((batch.num_tokens,), -torch.inf)
    values[list(ANSWERS)] = torch.tensor([*ANSWERS.values()])
    return values.requires_grad_()


def test_pair_ids_and_starts_by_hand(batch):
    assert batch.pair_ids.tolist() == [0, 0, 1, 1, -1]
    assert batch.pair_starts().nonzero().flatten().tolist() == [0, 7]
    assert batch.source_documents.tolist() == [0, 2]
    assert set(batch.token_weights.nonzero().flatten().tolist()) == set(ANSWERS)


def test_pairs_of_several_rows_are_numbered_on(batch):
    row = row_of([random_pair(np.random.default_rng(0)) for _ in range(2)])
    assert batch_of([row, row], 64).pair_ids.tolist() == [0, 0, 1, 1, -1, 2, 2, 3, 3, -1]


def test_margins_and_their_loss_by_hand(batch):
    log_probs = policy(batch)
    assert preference_margins(batch, log_probs).tolist() == [*MARGINS, 0, 0, 0]
    loss = dpo_loss(batch, log_probs, 0.4)
    expected = [-log_sigmoid(0.4 * margin) for margin in MARGINS]
    assert loss.nonzero().flatten().tolist() == [0, 7]
    assert loss[[0, 7]].tolist() == pytest.approx(expected, abs=1e-6)
    loss.sum().backward()
    first, second = (0.4 * (1 - 1 / (1 + math.exp(-0.4 * margin))) for margin in MARGINS)
    found = log_probs.grad[list(ANSWERS)].tolist()
    assert found == pytest.approx([-first, -first, first, -second, second, second], abs=1e-6)
    assert log_probs.grad.count_nonzero() == len(ANSWERS)


def test_label_smoothing_by_hand(batch):
    loss = dpo_loss(batch, policy(batch), 0.4, label_smoothing=0.1)
    expected = [-0.9 * log_sigmoid(0.4 * m) - 0.1 * log_sigmoid(-0.4 * m) for m in MARGINS]
    assert loss[[0, 7]].tolist() == pytest.approx(expected, abs=1e-6)


def test_ipo_compares_means_by_hand(batch):
    loss = dpo_loss(batch, policy(batch), 0.4, kind="ipo")
    expected = [(0.75 + 1.0 - 1.25) ** 2, (-1.0 - 0.75 - 1.25) ** 2]
    assert loss[[0, 7]].tolist() == pytest.approx(expected, abs=1e-6)


def test_weights_of_messages_scale_their_part(batch):
    batch.token_weights[2] = 0.5  # of the second token of the first chosen answer
    assert preference_margins(batch, policy(batch))[0].item() == 0.5 + 0.5 * 1.0 + 1.0
    by_mean = preference_margins(batch, policy(batch), by_mean=True)
    assert by_mean[0].item() == pytest.approx((0.5 + 0.5 * 1.0) / 1.5 + 1.0)


def test_a_given_reference_replaces_the_column(batch):
    margins = preference_margins(batch, policy(batch), reference=torch.zeros(batch.num_tokens))
    assert margins[:2].tolist() == [-1.5 + 4.0, -2.5 + 1.5]


@pytest.mark.parametrize(("kind", "smoothing"), [("sigmoid", 0.0), ("sigmoid", 0.2), ("ipo", 0.0)])
@pytest.mark.parametrize("alignment", [1, 4])
def test_random_rows_match_a_slow_model(kind, smoothing, alignment):
    random = np.random.default_rng(3)
    rows = [row_of([random_pair(random) for _ in range(n)], "code") for n in (3, 1, 4)]
    batch = batch_of(rows, 96, alignment=alignment)
    start = torch.from_numpy(random.random(batch.num_tokens).astype(np.float32)) - 4.5
    gradients, values = [], []
    for by in ("slow", "fast"):
        log_probs = start.clone().requires_grad_()
        if by == "slow":
            losses = torch.stack(slow_losses(batch, log_probs, 0.7, kind, smoothing))
        else:
            found = dpo_loss(batch, log_probs, 0.7, kind=kind, label_smoothing=smoothing)
            losses = found[batch.pair_starts() > 0]
        assert len(losses) == 8
        losses.sum().backward()
        values.append(losses.detach())
        gradients.append(log_probs.grad)
    assert torch.allclose(*values, atol=1e-5)
    assert torch.allclose(*gradients, atol=1e-6) and gradients[0].abs().max() > 0.1


def test_the_loss_of_a_step_is_the_mean_over_pairs_and_sources(batch):
    def losses(batch, log_probs):
        return dpo_loss(batch, log_probs, 0.4)

    loss_func = make_loss_func(batch, "pairs", position_losses=losses)
    total, count, report = loss_func(-policy(batch)[None])
    expected = sum(-log_sigmoid(0.4 * margin) for margin in MARGINS)
    assert (total.item(), count.item()) == (pytest.approx(expected, abs=1e-6), 2)
    assert report["lm loss/web"].tolist() == pytest.approx([expected, 2], abs=1e-6)
    assert report["lm loss/code"][0] == 0


def test_a_batch_without_pairs_is_refused_and_one_of_padding_has_no_loss(batch):
    padding = batch_of([Row([], slice_sources=[])], 8)
    with pytest.raises(SampleError, match="has no pair_ids; a PreferenceTaskEncoder makes them"):
        dpo_loss(padding, torch.zeros(8), reference=torch.zeros(8))
    padding.pair_ids = torch.tensor([-1], dtype=torch.int32)
    assert dpo_loss(padding.validate(), torch.zeros(8), reference=torch.zeros(8)).sum() == 0
    with pytest.raises(SampleError, match="no pair has more than two segments"):
        batch.pair_ids[2] = 0
        batch.validate()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beta": 0}, "beta: 0 found"),
        ({"kind": "hinge"}, "kind: 'hinge' found, one of sigmoid, ipo is needed"),
        ({"label_smoothing": 0.6}, "label_smoothing: 0.6 found"),
        ({"label_smoothing": 0.1, "kind": "ipo"}, "has no meaning for kind 'ipo'"),
    ],
)
def test_bad_options_are_refused(batch, options, message):
    with pytest.raises(ConfigError, match=message):
        dpo_loss(batch, policy(batch), **options)


def test_a_missing_reference_is_named(batch):
    batch.columns = {"values": torch.zeros(batch.num_tokens)}
    with pytest.raises(ConfigError, match=r"has the columns \['values'\], ref_log_probs is needed"):
        dpo_loss(batch, policy(batch))
