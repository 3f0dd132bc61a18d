# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Batch to model to loss, by hand; and the loss of a step against one loss over all of it."""

import dataclasses
import functools
import math
import sys
import types

import numpy as np
import pytest
import torch
from megatron.core import parallel_state

from energon_ext import ConfigError
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.errors import SampleError
from energon_ext.losses import unified_loss
from energon_ext.megatron import (
    build_packed_seq_params,
    check_losses,
    forward_step,
    get_batch,
    make_loss_func,
    mean_losses,
    step,
)
from energon_ext.megatron.lm.loop import adapt_loop, save_for_all_stages
from tests.megatron.pretend_gpu import PretendGpu
from tests.megatron.small_gpt import (
    VOCABULARY,
    run_packed,
    small_config,
    small_model,
    synthetic_batch,
)
from tests.megatron.small_training import run_schedule

pytestmark = pytest.mark.usefixtures("one_rank")


def batch_with_weights(code, web):
    """Two rows of three positions, the last of each padding, with the weights of the others."""
    rows = [Row([np.array([5, 6])], source=source) for source in ("code", "web")]
    batch = BatchAssembler(3)(rows, ("code", "empty", "web"))
    batch.token_weights.copy_(torch.tensor([*code, 0, *web, 0]))
    return batch


LOSSES = torch.tensor([[1.0, 2.0, 9.0, 3.0, 4.0, 9.0]])


def test_sum_count_and_report_by_hand():
    loss_func = make_loss_func(batch_with_weights(code=[1, 0], web=[1, 1]))
    loss, count, report = loss_func(LOSSES)
    assert loss.item() == 1 + 3 + 4
    assert count.item() == 3
    assert count.dtype == torch.int32
    assert count.dim() == 0
    assert report["lm loss"].tolist() == [8, 3]
    assert report["lm loss/code"].tolist() == [1, 1]
    assert report["lm loss/web"].tolist() == [7, 2]
    assert list(report) == ["lm loss", "lm loss/code", "lm loss/empty", "lm loss/web"]


def test_importance_weights_and_their_report_by_hand():
    """nll 1 2 and 3 4 against log-probabilities of -1.5 -1 and -2 -5: log rho .5 -1 and -1 1."""
    batch = batch_with_weights(code=[1, 2], web=[0, -1])
    batch.log_probs = torch.tensor([-1.5, -1.0, 0.0, -2.0, -5.0, 0.0])
    losses = LOSSES.clone().requires_grad_()
    loss, count, report = make_loss_func(batch, ratio_limit=2.0)(losses)
    rho = [math.exp(0.5), math.exp(-1), 2.0]
    assert loss.item() == pytest.approx(1 * rho[0] * 1 + 2 * rho[1] * 2 - rho[2] * 4)
    assert count.item() == 4
    loss.backward()
    assert losses.grad[0].tolist() == pytest.approx([rho[0], 2 * rho[1], 0, 0, -rho[2], 0])
    assert report["lm loss"].tolist() == pytest.approx([loss.item(), 4])
    # log mu - log pi: -.5, 1 and -1
    assert report["log_prob_gap"].tolist() == [-0.5, 3]
    assert report["ratios_truncated"].tolist() == [1, 3]
    found = mean_losses([report, report])
    assert found["log_prob_gap"] == pytest.approx(-0.5 / 3)
    assert found["ratios_truncated"] == pytest.approx(1 / 3)
    assert found["loss"] == pytest.approx(loss.item() / 4)
    assert set(found["loss_by_source"]) == {"code", "web"}
    plain, _, told = make_loss_func(batch)(LOSSES)
    assert plain.item() == 1 + 4 - 4
    assert "log_prob_gap" in told and "ratios_truncated" not in told
    with pytest.raises(ConfigError, match="ratio_limit: 2.0 found, but no sampler_log_probs"):
        make_loss_func(batch_with_weights(code=[1, 2], web=[0, -1]), ratio_limit=2.0)


def test_the_mean_of_a_source_without_tokens_is_zero_and_not_nan():
    _, _, report = make_loss_func(batch_with_weights(code=[0, 0], web=[1, 1]))(LOSSES)
    for key in ("lm loss/empty", "lm loss/code"):
        total, count = report[key]
        assert (total / count).item() == 0
        assert count < 1e-20


def test_negative_weights_push_away_and_count_as_positive():
    loss, count, report = make_loss_func(batch_with_weights(code=[-1, 1], web=[-1, 0]))(LOSSES)
    assert loss.item() == -1 + 2 - 3
    assert count.item() == 3
    assert report["lm loss"].tolist() == [-2, 3]
    assert report["lm loss/web"].tolist() == [-3, 1]


def test_fractional_weights_need_a_scale_which_keeps_the_mean():
    batch = batch_with_weights(code=[1.5, -0.5], web=[-0.5, -0.5])
    with pytest.raises(SampleError, match="pass weight_scale"):
        make_loss_func(batch)
    loss, count, report = make_loss_func(batch, weight_scale=1024)(LOSSES)
    assert count.item() == 3 * 1024
    assert loss.item() / count.item() == pytest.approx((1.5 - 1 - 1.5 - 2) / 3)
    assert report["lm loss"].tolist() == [-3, 3]


def test_denominator_tokens_counts_positions_and_needs_no_scale():
    batch = batch_with_weights(code=[1.5, -0.5], web=[0, -0.5])
    loss, count, report = make_loss_func(batch, denominator="tokens")(LOSSES)
    assert count.item() == 3
    assert loss.item() == pytest.approx(1.5 - 1 - 2)
    assert report["lm loss/code"].tolist() == [0.5, 2]


def test_the_loss_is_in_float32_and_carries_a_gradient():
    output = LOSSES.to(torch.bfloat16).requires_grad_()
    loss, _, report = make_loss_func(batch_with_weights(code=[1, 0], web=[1, 1]))(output)
    loss.backward()
    assert loss.dtype == torch.float32
    assert output.grad.tolist() == [[1, 0, 0, 1, 1, 0]]
    assert not report["lm loss"].requires_grad


@pytest.mark.parametrize(
    ("options", "message"),
    [({"denominator": "mean"}, "denominator"), ({"weight_scale": 0}, "weight_scale")],
)
def test_bad_loss_options_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_loss_func(synthetic_batch(0), **options)


def test_a_scale_whose_counts_would_overflow_is_refused(monkeypatch):
    batch = batch_with_weights(code=[1.5, -0.5], web=[-0.5, -0.5])  # 3 in all
    scale = 2**31 // 3
    assert make_loss_func(batch, weight_scale=scale)(LOSSES)[1].item() == 3 * scale
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda **_: 2)
    with pytest.raises(ConfigError, match="in one micro-batch, 2 times that over"):
        make_loss_func(batch, weight_scale=scale)


def fractional(batch):
    """The batch with advantages -0.7, 0.9, ... for weights."""
    signs = torch.tensor([-0.7, 0.9, 1.3]).repeat(batch.num_tokens // 3 + 1)[: batch.num_tokens]
    return dataclasses.replace(batch, token_weights=batch.token_weights * signs)


@pytest.mark.parametrize(
    ("weights", "options"),
    [
        ("whole", {}),
        ("fractions", {"weight_scale": 1 << 14}),
        ("fractions", {"denominator": "tokens"}),
    ],
)
def test_micro_batches_have_the_loss_and_gradient_of_one_large_batch(weights, options, place):
    batches = [synthetic_batch(seed, rows=1 + seed) for seed in range(3)]
    if weights == "fractions":
        batches = [fractional(batch) for batch in batches]
    model = place.model()
    counts = []
    model.config.finalize_model_grads_func = lambda model, count, **_: counts.append(count)
    reports = run_schedule(model, batches, functools.partial(forward_step, **options))
    by_schedule = [p.grad / counts[0] for p in model.parameters()]

    model.zero_grad()
    batches = [batch.to(place.device) for batch in batches]
    logits = [run_packed(model, batch) for batch in batches]
    loss = unified_loss(
        torch.cat(logits),
        torch.cat([batch.labels for batch in batches]),
        torch.cat([batch.token_weights for batch in batches]),
        options.get("denominator", "weights"),
    )
    loss.backward()
    found = mean_losses(reports)["loss"]
    assert found == pytest.approx(loss.item(), abs=1e-5, rel=place.rounding)
    place.check_close(by_schedule, [p.grad for p in model.parameters()], rtol=1e-4, atol=1e-6)


def test_losses_by_source_are_means_over_their_own_tokens():
    def report(code, web):
        return make_loss_func(batch_with_weights(code=code, web=web))(LOSSES)[2]

    losses = mean_losses([report(code=[1, 1], web=[1, 0]), report(code=[1, 0], web=[0, 0])])
    assert losses["loss"] == pytest.approx((1 + 2 + 3 + 1) / 4)
    assert losses["loss_by_source"] == pytest.approx({"code": 4 / 3, "web": 3.0})


def test_a_step_without_trained_tokens_has_loss_zero():
    report = make_loss_func(batch_with_weights(code=[0, 0], web=[0, 0]))(LOSSES)[2]
    assert mean_losses([report]) == {"loss": 0.0, "loss_by_source": {}}


def test_stages_without_a_loss_have_no_report():
    assert mean_losses([]) == {}
    check_losses({}, 1)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_or_infinite_loss_is_refused_with_step_and_sources(value):
    losses = LOSSES.clone()
    check_losses(mean_losses([make_loss_func(batch_with_weights([1, 1], [1, 1]))(losses)[2]]), 6)
    losses[losses == 4] = value
    found = mean_losses([make_loss_func(batch_with_weights(code=[1, 1], web=[1, 1]))(losses)[2]])
    with pytest.raises(
        SampleError, match=rf"^Step 7: the loss is {value} \(code 1.5, web {value}\)"
    ):
        check_losses(found, 7)


def test_in_megatron_lm_the_losses_of_all_sources_are_reduced_together(monkeypatch):
    """Its own step and evaluation sum each report that they see, here that of the whole batch."""

    def two_micro_batches(forward_step_func):
        batches = batch_with_weights(code=[1, 1], web=[1, 0]), batch_with_weights([1, 0], [0, 0])
        reports = [make_loss_func(batch)(LOSSES)[2] for batch in batches]
        assert [list(report) for report in reports] == [["lm loss"]] * 2
        return {"lm loss": torch.tensor(1.75)}, "skipped", "exit"

    training = types.ModuleType("megatron.training.training")
    training.train_step = training.evaluate = two_micro_batches
    training.dummy_train_step = lambda data_iterator: None
    monkeypatch.setitem(sys.modules, "megatron.training", types.SimpleNamespace(training=training))
    monkeypatch.setitem(sys.modules, "megatron.training.training", training)
    adapt_loop(None)
    adapt_loop(None)  # started again in the same process
    for function in (training.train_step, training.evaluate):
        with PretendGpu() as counts:
            losses, *others = function(forward_step)
        assert {key: float(loss) for key, loss in losses.items()} == pytest.approx(
            {"lm loss": 1.75, "lm loss/code": 4 / 3, "lm loss/empty": 0, "lm loss/web": 3}
        )
        assert others == ["skipped", "exit"]
        assert counts.collectives == {"c10d::allreduce_": 1}
    assert len(make_loss_func(batch_with_weights([1, 1], [1, 0]))(LOSSES)[2]) == 4


@pytest.fixture
def loop(monkeypatch):
    """The functions of Megatron-LM's training loop that are replaced."""
    names = ("training", "checkpointing")
    training, checkpointing = (types.ModuleType(f"megatron.training.{name}") for name in names)
    training.dummy_train_step = lambda data_iterator: None
    training.train_step = lambda forward_step_func, data_iterator, model: ({}, 0, False)
    training.evaluate = lambda forward_step_func, data_iterator, eval_iters=None: (None, None, True)
    training.training_log = lambda loss_dict, total_loss_dict: None
    checkpointing.maybe_save_dataloader_state = lambda train_iterator, iteration: None
    package = types.SimpleNamespace(training=training, checkpointing=checkpointing)
    for module in (training, checkpointing):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "megatron.training", package)
    return package


def adapt_all():
    adapt_loop(types.SimpleNamespace(step=lambda *_: None, documents=None))
    save_for_all_stages()


def test_a_known_loop_is_adapted_as_often_as_it_starts(loop):
    adapt_all()
    adapt_all()
    assert loop.training.train_step(forward_step, None, model=None) == ({}, 0, False)
    assert loop.training.evaluate(forward_step, None) == (None, None, True)
    loop.training.train_step = lambda *args, **kwargs: ({}, 1)  # somebody else has wrapped it
    adapt_all()
    assert loop.training.train_step(forward_step) == ({}, 1)


@pytest.mark.parametrize(
    ("module", "name", "changed", "found"),
    [
        (
            "training",
            "dummy_train_step",
            lambda data_iterator, args: None,
            r"\(data_iterator, args",
        ),
        ("training", "train_step", lambda state, data_iterator: None, r"\(state, data_iterator\)"),
        ("training", "evaluate", lambda: None, r"parameters \(\)"),
        ("training", "training_log", lambda args, loss_dict: None, r"parameters \(args, loss_dict"),
        ("training", "training_log", None, "megatron.training.training has no training_log"),
        ("checkpointing", "maybe_save_dataloader_state", lambda step: None, r"\(step\)"),
    ],
)
def test_a_loop_with_another_function_is_refused_at_the_start(loop, module, name, changed, found):
    setattr(getattr(loop, module), name, changed)
    with pytest.raises(ConfigError, match=found) as error:
        adapt_all()
    assert name in str(error.value) and str(error.value).endswith(" of megatron-core 0.15 to 0.20.")


@pytest.mark.parametrize("name", ["train_step", "evaluate"])
@pytest.mark.parametrize("returned", [(False, {}), {"lm loss": 1.0}, None])
def test_a_step_that_returns_no_losses_first_is_refused(loop, name, returned):
    setattr(loop.training, name, lambda forward_step_func: returned)
    adapt_all()
    with pytest.raises(ConfigError, match=r"returned .*, and not losses first: .* 0.15 to 0.20.$"):
        getattr(loop.training, name)(forward_step)


def test_segments_become_packed_sequence_parameters():
    batch = batch_with_weights(code=[1, 1], web=[1, 1])
    params = build_packed_seq_params(batch)
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q.tolist() == params.cu_seqlens_kv.tolist() == [0, 2, 3, 5, 6]
    assert params.cu_seqlens_q.dtype == torch.int32
    assert params.max_seqlen_q == params.max_seqlen_kv == 2
    # From megatron-core 0.19 on; padding is a segment of its own, so that there is no gap.
    assert getattr(params, "pad_between_seqs", False) is False


def test_one_rank_gets_the_batch_of_its_iterator():
    batch = synthetic_batch(0)
    found = get_batch(iter([batch])).validate()
    assert torch.equal(found.tokens, batch.tokens)
    assert found.sources == batch.sources


def test_a_loading_rank_without_an_iterator_is_an_error():
    with pytest.raises(ConfigError, match="is_distributed = True"):
        get_batch(None)


@pytest.mark.parametrize("name", ["tokens", "labels"])
def test_ids_that_the_model_does_not_have_are_refused(name):
    """Megatron's cross-entropy gives such a label a loss, as a split embedding does a token."""
    model = small_model(small_config())
    batch = synthetic_batch(0)
    trained = batch.token_weights.nonzero()[3]
    getattr(batch, name)[trained] = VOCABULARY
    with pytest.raises(ConfigError, match=f"{name[:-1]} 64 found, but the model has 64 words"):
        forward_step(iter([batch]), model)
    batch = synthetic_batch(0)
    batch.labels[trained] = -100
    with pytest.raises(ConfigError, match="trained label -100 found"):
        forward_step(iter([batch]), model)
    batch.token_weights[trained] = 0
    forward_step(iter([batch]), model)


def test_a_model_that_expects_other_parts_of_rows_is_refused(monkeypatch):
    model = small_model(small_config())
    model.config.cp_partition_mode = "contiguous"
    forward_step(iter([synthetic_batch(0)]), model)  # one rank has all positions
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    with pytest.raises(ConfigError, match="cp_partition_mode='contiguous': context parallelism"):
        forward_step(iter([synthetic_batch(0)]), model)


def test_dense_models_are_given_no_padding_mask():
    model = small_model(small_config())
    seen = {}
    model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(kwargs), with_kwargs=True
    )
    output, _ = forward_step(iter([synthetic_batch(0)]), model)
    assert "padding_mask" not in seen
    assert output.shape == (1, synthetic_batch(0).num_tokens)
    assert output.mean().item() > math.log(2)


def test_megatron_lm_gets_document_lengths_once_per_training_row(monkeypatch):
    """Its sums of lengths and of their squares; two documents of two tokens and no padding."""
    told = []
    training = types.SimpleNamespace(update_seqlen_stats_from_cu_seqlens=told.append)
    monkeypatch.setitem(sys.modules, "megatron.training.training", training)
    model = small_model(small_config())
    batch = batch_with_weights(code=[1, 1], web=[1, 1])
    forward_step(iter([batch]), model)
    assert [ends.tolist() for ends in told] == [[0, 2, 2, 4, 4]]
    with torch.no_grad():
        forward_step(iter([batch]), model)  # an evaluation
    model.vp_stage = 1  # of the same rank as stage 0, which has told it
    forward_step(iter([batch]), model)
    assert len(told) == 1


def test_batch_and_forward_pass_are_measured_as_by_megatron_lms_script(monkeypatch):
    """By the timer for batches, and by Megatron-core's detector of slow ranks."""
    events, detector = [], step._straggler_detector
    model = small_model(small_config())
    model.register_forward_pre_hook(lambda *_: events.append("model"))

    def timers(name, log_level=None):
        def note(what):
            return lambda: events.append(f"{name} {what}")

        return types.SimpleNamespace(start=note("start"), stop=note("stop"))

    def drawing():
        events.append("draw")
        yield synthetic_batch(0)

    monkeypatch.setattr(model.config, "timers", timers)
    for name in ("start", "stop"):
        note = functools.partial(lambda n: events.append((n, detector.bdata)), name)
        monkeypatch.setattr(detector, name, note)
    forward_step(drawing(), model)
    detector.bdata = False  # as the detector's own start() leaves it
    batch = ["batch-generator start", ("start", True), "draw", ("stop", True)]
    assert events[:5] == [*batch, "batch-generator stop"]
    assert [event if event == "model" else event[0] for event in events[5:]] == [
        *("start", "model", "stop")
    ]


@pytest.mark.parametrize(
    ("lengths", "found"),
    [
        ([3, 3], 4),  # a power of two, of which there are few
        ([5, 2, 1], 7),  # less than the row, which would mean one angle for each position
        ([8], 8),
    ],
)
def test_the_longest_segment_is_rounded_up(lengths, found):
    rows = [Row([np.arange(length) for length in lengths])]
    params = build_packed_seq_params(BatchAssembler(sum(lengths))(rows, ("",)))
    assert params.max_seqlen_q == params.max_seqlen_kv == found
