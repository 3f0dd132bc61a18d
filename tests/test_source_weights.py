# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``loss_weight`` of an entry: a factor in the loss that no row depends on."""

import json
import logging

import numpy as np
import pytest
import torch
from megatron.energon import DefaultTaskEncoder, stateless

from energon_ext import ConfigError, DynamicBlendMixin, PackedTaskEncoder, get_train_dataset
from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.loader.data_loader import ExactDataLoader
from energon_ext.losses import dpo_loss, unified_loss
from energon_ext.losses.pairs import preference_margins
from energon_ext.losses.sources import separate_weights, weigh_sources
from energon_ext.megatron import make_loss_func
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.cli.command import energon_ext
from tests.saves import save_cursor
from tests.support import config, write_dataset, write_tokens

SEQ_LEN = 8

#: The weight of the source ``web`` in each step, by hand.
LINEAR = {"linear": {0: 1, 4: 0.2}}
OF_STEP = [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]


def write_mix(folder, **options):
    """Write two sources, of which ``web`` has options; return the metadataset."""
    for name, token in (("code", 100), ("web", 200)):
        if not (folder / f"{name}.idx").exists():
            write_tokens(folder / name, [[token + n % 50] * (5 + n % 4) for n in range(40)])
    entries = [{"path": "code"}, {"path": "web", **options}]
    fields = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    axis = options.pop("axis", None)
    entries[1].pop("axis", None)
    if axis:
        fields["schedule_axis"] = axis
    path = folder / "mix.yaml"
    path.write_text(json.dumps({**fields, "splits": {"train": {"blend": entries}}}))
    return path


def loader_of(path, rank=0, ranks=1, workers=0, rows=1, encoder=None, **options):
    dataset = get_train_dataset(
        path,
        worker_config=config(workers, rank, ranks),
        batch_size=rows,
        rows_per_step=4,
        task_encoder=encoder or PackedTaskEncoder(ByteTokenizer(), SEQ_LEN),
        **options,
    )
    return ExactDataLoader(dataset)


def batches_by_step(path, steps, ranks=1, rows=1, **options):
    """Return the batches of all ranks, by step."""
    found = [[] for _ in range(steps)]
    for rank in range(ranks):
        loader = loader_of(path, rank, ranks, rows=rows, **options)
        batches = iter(loader)
        for step in range(steps):
            found[step] += [next(batches) for _ in range(4 // ranks // rows)]
        loader.close()
    return found


def loss_of(batches, denominator="tokens", **options):
    """Return the losses that Megatron makes of micro-batches; the loss of a label is its id."""
    found = []
    for batch in batches:
        nll = batch.labels.float()[None] / 100
        found.append(make_loss_func(batch, denominator, **options)(nll))
    loss, count = (sum(each[index].double().item() for each in found) for index in (0, 1))
    sums = {
        key: sum(each[2].get(key, torch.zeros(2)).double() for each in found)
        for key in {key for each in found for key in each[2]}
    }
    return loss / count, {key: (a / b).item() for key, (a, b) in sums.items() if b > 1e-20}


def expected_of(batches, weight, denominator):
    """Return the loss and those of each source, label by label in double precision."""
    terms, counts, own = 0.0, 0.0, {}
    for batch in batches:
        for label, token in zip(batch.labels.tolist(), batch.tokens.tolist()):
            if not token or label != token:  # padding, or the first token of the next document
                continue
            source = "web" if label >= 200 else "code"
            factor = weight if source == "web" else 1.0
            terms += factor * label / 100
            counts += factor if denominator == "weights" else 1
            own.setdefault(source, []).append(label / 100)
    return terms / counts, {key: np.mean(each) for key, each in own.items()}


@pytest.mark.parametrize("cluster", [{}, {"ranks": 2}, {"ranks": 2, "rows": 2}, {"workers": 2}])
@pytest.mark.parametrize("denominator", ["weights", "tokens"])
def test_losses_of_every_step_follow_the_schedule_on_any_cluster(tmp_path, cluster, denominator):
    path = write_mix(tmp_path, loss_weight=LINEAR)
    plain = batches_by_step(write_mix(tmp_path), len(OF_STEP))
    path = write_mix(tmp_path, loss_weight=LINEAR)
    steps = batches_by_step(path, len(OF_STEP), **cluster)
    scale = {"weight_scale": 1 << 20} if denominator == "weights" else {}
    for step, (batches, weight) in enumerate(zip(steps, OF_STEP)):
        rows = sorted(row.tolist() for each in batches for row in each.tokens.view(-1, SEQ_LEN))
        assert rows == sorted(row for each in plain[step] for row in [each.tokens.tolist()])
        loss, by_source = loss_of(batches, denominator, **scale)
        wanted, own = expected_of(batches, weight, denominator)
        assert loss == pytest.approx(wanted, rel=1e-6)
        assert by_source.pop("lm loss") == pytest.approx(wanted, rel=1e-6)
        assert by_source == {f"lm loss/{key}": pytest.approx(each) for key, each in own.items()}


def test_means_of_documents_are_weighted_and_their_number_is_not():
    """Mean losses of 2 and 6; the second one counts a quarter."""
    rows = [Row([np.array([5, 6, 7])], source="web"), Row([np.array([8, 9])], source="code")]
    batch = BatchAssembler(3, document_means=True)(rows, sources=["code", "web"])
    nll = torch.tensor([[1.0, 3, 9, 6, 9, 9]])
    loss, count, report = make_loss_func(weigh_sources(batch, {"code": 0.25}), "documents")(nll)
    assert (loss / count).item() == pytest.approx((2 + 0.25 * 6) / 2)
    assert report["lm loss/code"].tolist() == [6.0, 1.0]


def test_a_loop_without_megatron_uses_the_weights_of_the_batch(tmp_path):
    (batches,) = batches_by_step(write_mix(tmp_path, loss_weight=0.5), 1, rows=4)
    (batch,) = batches
    logits = torch.randn(batch.num_tokens, 260, generator=torch.Generator().manual_seed(0))
    nll = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="none")
    weights = torch.where(batch.labels >= 200, 0.5, 1.0)
    weights *= (batch.labels == batch.tokens) & (batch.tokens > 0)
    for denominator, count in (("weights", weights.sum()), ("tokens", (weights > 0).sum())):
        found = unified_loss(logits, batch.labels, batch.token_weights, denominator)
        assert found.item() == pytest.approx(((weights * nll).sum() / count).item())


def test_breakpoints_count_the_unit_of_the_axis(tmp_path):
    """A step has 4 rows of 8 tokens, so the weight changes with step 2."""
    path = write_mix(tmp_path, axis="tokens", loss_weight={"step": {0: 1, 64: 0.25}})
    for step, batches in enumerate(batches_by_step(path, 3)):
        factors = {
            float(weight)
            for batch in batches
            for weight in batch.columns.get("loss_weight", torch.ones(1)).unique()
        }
        assert factors - {1.0} == ({0.25} if step == 2 else set())


def test_a_source_of_weight_zero_is_not_trained_and_keeps_its_own_loss(tmp_path):
    (batches,) = batches_by_step(write_mix(tmp_path, loss_weight=0), 1)
    assert not any(batch.token_weights[batch.labels >= 200].any() for batch in batches)
    loss, by_source = loss_of(batches, "weights")
    wanted, own = expected_of(batches, 0.0, "weights")
    assert loss == pytest.approx(wanted)
    assert by_source["lm loss/web"] == pytest.approx(own["web"])


def test_megatron_is_told_to_count_fractions(tmp_path):
    (batches,) = batches_by_step(write_mix(tmp_path, loss_weight=0.5), 1, rows=4)
    with pytest.raises(Exception, match="pass weight_scale .* or denominator='tokens'"):
        make_loss_func(batches[0])


def test_weights_of_pairs_do_not_change_their_margins():
    weights = [np.array([0, 1.0]), np.array([0, -1.0])]
    row = Row([np.array([5, 6]), np.array([5, 7])], "web", label_weights=weights, pairs=[0, 0])
    batch = BatchAssembler(4)([row], sources=["web"])
    weighted = weigh_sources(batch, {"web": 0.25})
    given = {"log_probs": torch.tensor([-1.0, 0, -3.0, 0]), "reference": torch.zeros(4)}
    assert preference_margins(weighted, **given).tolist() == [2.0, 0.0]
    plain = dpo_loss(batch, **given)
    assert dpo_loss(weighted, **given).tolist() == (0.25 * plain).tolist()
    losses = make_loss_func(
        weighted, "pairs", position_losses=lambda b, lp: dpo_loss(b, lp, reference=torch.zeros(4))
    )(torch.tensor([[1.0, 0, 3.0, 0]]))
    assert losses[0].item() == pytest.approx(0.25 * plain.sum().item())
    assert mean_losses_alone(losses[2])["lm loss/web"] == pytest.approx(plain.sum().item())


def mean_losses_alone(report):
    return {key: (total / count).item() for key, (total, count) in report.items()}


def test_separating_undoes_weighing():
    row = Row([np.array([5, 6, 7])], "web", label_weights=[np.array([0, 1, 0.5])])
    batch = BatchAssembler(3)([row], sources=["code", "web"])
    restored, each = separate_weights(weigh_sources(batch, {"web": 0.0}))
    assert restored.token_weights.tolist() == batch.token_weights.tolist()
    assert not restored.columns and each.tolist() == [0.0] * 3
    assert separate_weights(batch)[0] is batch


def test_a_resume_with_other_weights_continues_the_plan_and_names_them(tmp_path, caplog):
    path = write_mix(tmp_path, loss_weight=0.5)
    loader = loader_of(path)
    batches = iter(loader)
    for _ in range(4):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    plain = [next(batches).tokens.tolist() for _ in range(8)]
    digest = loader.dataset.run.data_digest
    loader.close()
    save_cursor(tmp_path / "run", 1, state)
    for now in (2, LINEAR, None):
        options = {} if now is None else {"loss_weight": now}
        other = loader_of(write_mix(tmp_path, **options))
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            other.load_state_dict(state)
        text = 1.0 if now is None else {"linear": [[0, 1.0], [4, 0.2]]} if now == LINEAR else 2.0
        line = f"loss_weight of web: was 0.5 and is now {text}."
        assert line in caplog.text
        assert (
            line
            in energon_ext("checkpoint", "diff", tmp_path / "run", tmp_path / "mix.yaml").stdout
        )
        assert other.dataset.run.data_digest == digest
        batches = iter(other)
        assert [next(batches).tokens.tolist() for _ in range(8)] == plain
        other.close()


def test_a_step_is_finished_with_its_weights(tmp_path):
    loader = loader_of(write_mix(tmp_path, loss_weight=0.5))
    next(iter(loader))  # one of four rows
    state = loader.state_dict()
    loader.close()
    other = loader_of(write_mix(tmp_path, loss_weight=0.75))
    with pytest.raises(Exception, match="loss_weights"):
        other.load_state_dict(state)


def test_a_run_without_weights_has_neither_columns_nor_a_field_in_its_state(tmp_path):
    loader = loader_of(write_mix(tmp_path))
    batch = next(iter(loader))
    assert batch.columns == {}
    assert "loss_weights" not in loader.state_dict()
    loader.close()


def test_plan_shows_weights_at_all_breakpoints_and_peek_at_each_row(tmp_path):
    path = write_mix(tmp_path, loss_weight={"step": {0: 1, 3: 0.25}}, name="Web")
    result = energon_ext("plan", path)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert ["weight", "in", "the", "loss", "0", "3"] in lines
    assert ["Web", "1", "0.25"] in lines
    result = energon_ext("peek", path, "--seq-length", 8, "--source", "Web", "--rows", 3)
    assert result.exit_code == 0, result.output
    shown = [line for line in result.stdout.splitlines() if line.startswith("row ")]
    for line in shown:
        number = int(line.split()[1].rstrip(":"))
        assert line.endswith(f"weight {1 if number < 3 else 0.25} in the loss")


def test_an_inner_entry_takes_precedence(tmp_path):
    write_mix(tmp_path, loss_weight=0.5)
    outer = tmp_path / "outer.yaml"
    entry = {"path": "mix.yaml", "loss_weight": 4}
    fields = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    outer.write_text(json.dumps({**fields, "splits": {"train": {"blend": [entry]}}}))
    loader = loader_of(outer)
    assert {k: w.evaluate(0) for k, w in loader.dataset.run.loss_weights.items()} == {
        "code": 4.0,
        "web": 0.5,
    }


def test_every_document_of_a_splice_has_the_weight_of_its_source(tmp_path):
    splice = {"num_docs": 2, "content_length": 4}
    loader = loader_of(write_mix(tmp_path, loss_weight=0.5, splice=splice), rows=4)
    batch = next(iter(loader))
    loader.close()
    keys = [batch.sources[number] for number in batch.source_ids.tolist() if number >= 0]
    assert "code" in keys and any(key.startswith("web/doc") for key in keys)
    trained = batch.token_weights > 0
    expected = torch.where(batch.labels >= 200, 0.5, 1.0)
    assert torch.equal(batch.token_weights[trained], expected[trained])


class Streaming(DynamicBlendMixin, DefaultTaskEncoder):
    plan_samples = False


class Numbers(DynamicBlendMixin, DefaultTaskEncoder):
    """Makes batches of its own kind."""

    @stateless
    def encode_sample(self, sample):
        return sample

    def batch(self, samples):
        return [sample.text for sample in samples]


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (Streaming(), "loss_weight: web:train is streamed"),
        (Numbers(), "loss_weight: a source has one, but the encoder makes batches of type list"),
        (DefaultTaskEncoder(), "loss_weight: this TaskEncoder does not support"),
    ],
)
def test_who_cannot_use_a_weight_refuses_it(tmp_path, encoder, message):
    write_dataset(tmp_path / "web", [f"text {n}" for n in range(30)])
    entry = {"path": "web", "loss_weight": 0.5}
    fields = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path = tmp_path / "mix.yaml"
    path.write_text(json.dumps({**fields, "splits": {"train": {"blend": [entry]}}}))
    with pytest.raises(ConfigError, match=message):
        dataset = get_train_dataset(
            path, worker_config=config(), batch_size=2, task_encoder=encoder
        )
        next(iter(ExactDataLoader(dataset)))


@pytest.mark.parametrize(
    ("value", "message"),
    [(-1, "loss_weight: -1 is not a finite number"), ({"stair": {0: 1}}, "'stair' found")],
)
def test_a_bad_weight_is_refused_with_its_place(tmp_path, value, message):
    with pytest.raises(ConfigError, match=rf"blend\[1\] \(web\)\.loss_weight.*|{message}"):
        loader_of(write_mix(tmp_path, loss_weight=value))
