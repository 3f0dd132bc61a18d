# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The launch script inside the real Megatron-LM: it trains, evaluates, is saved and resumed."""

import importlib.util
import json
import os
import re
import subprocess
import sys
import typing
from collections import Counter, defaultdict
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from energon_ext.batch.collate import BatchAssembler
from energon_ext.batch.rows import Row
from energon_ext.cli.main import main
from energon_ext.cli.report import write_report
from energon_ext.megatron.context_parallel import document_ends
from energon_ext.metrics.document_losses import RECORD, DocumentLosses
from energon_ext.metrics.file import Run
from energon_ext.state.checkpoint_folder import read_megatron_lm_state
from tests import support
from tests.megatron import processes
from tests.megatron.small_gpt import MTP_NEEDS_TRANSFORMER_ENGINE

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        importlib.util.find_spec("megatron.training") is None,
        reason="wheels of megatron-core hold Megatron-LM's training loop from 0.17 on",
    ),
    pytest.mark.skipif(
        version("megatron-core") >= "0.18" and not hasattr(typing, "override"),
        reason="Megatron-LM of megatron-core 0.18 and later asks for Python 3.12",
    ),
]

#: To hang is to take longer than this; a busy machine takes minutes for a run of seconds.
SECONDS = 1200

RUNNER = Path(__file__).with_name("megatron_lm_on_cpu.py")
MODEL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --seq-length 64 --max-position-embeddings 64 --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 383 --micro-batch-size 1
    --lr 1e-3 --log-interval 1
    --dataloader-type external --calculate-per-token-loss --num-workers 0
    --eval-iters 1 --eval-interval 3 --save-interval 3
"""
EXPERTS = """
    --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 32 --qk-layernorm
    --moe-token-dispatcher-type allgather --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 0.01 --expert-model-parallel-size 2
"""
WITHOUT_CUDA = """
    --distributed-backend gloo --transformer-impl local --use-cpu-initialization
    --no-rope-fusion --no-gradient-accumulation-fusion --no-masked-softmax-fusion
    --no-persist-layer-norm --no-bias-swiglu-fusion --no-bias-dropout-fusion
    --inference-rng-tracker --no-load-rng
"""
SIX_STEPS = "--global-batch-size 4 --train-iters 6 --lr-warmup-iters 1"
LAYOUTS = {
    "data parallel": "",
    "tensor parallel": "--tensor-model-parallel-size 2",
    "pipeline parallel": "--pipeline-model-parallel-size 2",
    "expert parallel": EXPERTS,
    "virtual stages": "--pipeline-model-parallel-size 2 --num-layers 4 "
    "--num-layers-per-virtual-pipeline-stage 1",
    "later tokens": "--mtp-num-layers 1 --pipeline-model-parallel-size 2",
}


@pytest.fixture(scope="module")
def mix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    texts = [f"The {animal} sat on the mat. " * 5 for animal in ("cat", "dog", "cow", "hen")] * 10
    parts = [("train", "shard_00[0-2].tar"), ("val", "shard_003.tar")]
    for name in ("a", "b"):
        support.write_dataset(folder / name, texts, split_parts=parts, shard_size=10)
    train = [
        {"path": "./a", "weight": {"linear": {0: 3, 8: 1}}, "max_epochs": 50},
        {"path": "./b", "weight": 1},
    ]
    content = {
        "__module__": "energon_ext",
        "__class__": "ScheduledMetadataset",
        "splits": {
            "train": {"blend": train},
            "val": {"blend": [{"path": "./a"}, {"path": "./b"}]},
        },
    }
    path = folder / "mix.yaml"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture(autouse=True)
def launcher(monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def run(
    mix,
    folder,
    *options,
    ranks=2,
    nan_at=0,
    code=0,
    length=SIX_STEPS,
    script="pretrain_gpt.py",
    runner=RUNNER,
):
    """Training losses by iteration and the validation losses, of some ranks."""
    out, stderr = folder / "stdout", folder / "stderr"
    for rank in range(ranks):
        Path(f"{out}.{rank}.drawn").unlink(missing_ok=True)
    arguments = [script, out, nan_at, *" ".join((MODEL, WITHOUT_CUDA, length, *options)).split()]
    started = processes.start_script(runner, [*arguments, "--data-path", mix], stderr, ranks=ranks)
    codes = processes.finish(started, SECONDS)
    assert codes == [code] * ranks, stderr.read_text()[-3000:]
    text = Path(f"{out}.{ranks - 1}").read_text()  # the last rank logs
    losses = re.findall(r"iteration +(\d+)/.*?lm loss: (\S+)", text)
    evaluations = re.findall(r"validation loss at iteration (\d+) \| lm loss value: (\S+)", text)
    return dict(losses), dict(evaluations)


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(name, marks=[MTP_NEEDS_TRANSFORMER_ENGINE] if "--mtp" in LAYOUTS[name] else [])
        for name in LAYOUTS
    ],
)
def test_a_stopped_run_continues_like_an_uninterrupted_one(layout, mix, tmp_path):
    parallelism = LAYOUTS[layout]
    losses, evaluations = run(mix, tmp_path, parallelism)
    assert list(losses) == ["1", "2", "3", "4", "5", "6"]
    assert list(evaluations) == ["3", "6"]
    assert float(losses["6"]) < float(losses["1"]) - 0.1
    assert float(evaluations["6"]) < float(evaluations["3"])

    saved = f"--save {tmp_path}/model --dataloader-save {tmp_path}/data"
    run(mix, tmp_path, parallelism, saved, "--exit-interval 3")
    assert sorted(path.name for path in (tmp_path / "data").rglob("*.pt")) == [
        f"train_dataloader_dprank{rank:03d}.pt"
        for rank in range(2 if layout in ("data parallel", "expert parallel") else 1)
    ]
    resumed, resumed_evaluations = run(
        mix, tmp_path, parallelism, saved, f"--load {tmp_path}/model"
    )
    assert list(resumed) == ["4", "5", "6"]
    # Megatron-LM logs the mean of the first two iterations of a process as the second.
    for iteration in ("4", "6"):
        assert resumed[iteration] == losses[iteration]
    assert resumed_evaluations == {"6": evaluations["6"]}
    assert os.listdir(tmp_path / "model")


@pytest.mark.parametrize("layout", ["data parallel", "tensor parallel", "virtual stages"])
def test_losses_of_documents_add_up_to_the_loss_of_each_step(layout, mix, tmp_path):
    saved = f"--save {tmp_path}/model --dataloader-save {tmp_path}/data"
    written = f"--energon-run-dir {tmp_path}/run --energon-document-losses"
    options = (LAYOUTS[layout], saved, written)
    run(mix, tmp_path, *options, "--exit-interval 4")  # saved at 3 and at 4
    (tmp_path / "model/latest_checkpointed_iteration.txt").write_text("3")
    run(mix, tmp_path, *options, f"--load {tmp_path}/model")
    losses, labels = [np.zeros(7) for _ in range(2)]
    files = sorted((tmp_path / "run/document_losses").rglob("rank-*.bin"))
    starts = ["start-000001-after-0000000000", "start-000002-after-0000000003"]
    assert {path.parent.name for path in files} == set(starts)
    assert len(files) == 2 * (2 if layout == "data parallel" else 1)
    for path in files:
        records = np.frombuffer(path.read_bytes().partition(b"\n")[2], RECORD)
        is_first = path.parent.name == starts[0]
        assert {*records["step"].tolist()} == ({1, 2, 3, 4} if is_first else {4, 5, 6})
        kept = records[records["step"] <= 3] if is_first else records
        np.add.at(losses, kept["step"], kept["loss"])
        np.add.at(labels, kept["step"], kept["tokens"])
    np.testing.assert_allclose(losses[1:] / labels[1:], Run.load(tmp_path / "run").loss, rtol=1e-5)
    documents = DocumentLosses(tmp_path / "run").highest(10**6)
    assert sum(each.tokens for each in documents) == labels.sum()


def test_context_parallel_ranks_train_like_one_rank(mix, tmp_path):
    script = RUNNER.with_name("pretrain_gathered.py")
    alone = run(mix, tmp_path, ranks=1, script=script)
    losses, evaluations = run(mix, tmp_path, "--context-parallel-size 2", script=script)
    assert (losses, evaluations) == alone
    assert list(losses) == ["1", "2", "3", "4", "5", "6"]
    assert float(losses["6"]) < float(losses["1"]) - 0.1


def test_logged_flops_count_attention_within_documents():
    """By the sums that Megatron-LM's own function makes of what the step tells it."""
    training = pytest.importorskip("megatron.training.training")
    if not hasattr(training, "update_seqlen_stats_from_cu_seqlens"):
        pytest.skip("megatron-core before 0.18 counts attention over whole rows")
    rows = [Row([np.arange(5), np.arange(3)], source="a"), Row([np.arange(6)], source="a")]
    ends = document_ends(BatchAssembler(12)(rows, ["a"]))
    training.update_seqlen_stats_from_cu_seqlens(ends)
    assert training.consume_seqlen_stats_in_iteration() == (5 + 3 + 6, 25 + 9 + 36)


def test_the_timer_of_batches_is_logged(mix, tmp_path):
    run(mix, tmp_path, "--timing-log-level 2 --log-straggler --train-iters 2 --eval-iters 0")
    assert len(re.findall(r"batch-generator \.+: \(", (tmp_path / "stdout.1").read_text())) == 2


@pytest.mark.parametrize("layout", ["data parallel", "pipeline parallel", "virtual stages"])
def test_rows_that_grow_by_schedule_train_like_a_run_resumed_with_longer_rows(
    layout, mix, tmp_path
):
    """Shapes stay those of ``--seq-length``, so that stages of a pipeline notice nothing."""
    # The rate would otherwise follow the samples that Megatron-LM counts, which are shorter rows.
    parallelism = f"{LAYOUTS[layout]} --lr-warmup-iters 0 --lr-decay-style constant"
    schedule = {"row_tokens": {"step": {0: 32, 2: 64}}}
    scheduled = mix.with_name("scheduled.yaml")
    scheduled.write_text(json.dumps({**json.loads(mix.read_text()), **schedule}))
    run(scheduled, tmp_path, parallelism, f"--energon-run-dir {tmp_path}/run --eval-iters 0")
    saved = f"--save {tmp_path}/model --dataloader-save {tmp_path}/data --eval-iters 0"
    options = parallelism, saved, f"--energon-run-dir {tmp_path}/joined"
    loaded = f"--load {tmp_path}/model --override-opt-param-scheduler"
    # Megatron-LM's own start draws random numbers by --seq-length, so both begin with the same.
    run(scheduled, tmp_path, *options, "--exit-interval 1")
    short = "--seq-length 32 --global-batch-size 8 --exit-interval 2"
    run(mix, tmp_path, *options, loaded, short)
    run(mix, tmp_path, *options, loaded)
    found, expected = Run.load(tmp_path / "run"), Run.load(tmp_path / "joined")
    assert found.batch_hash == expected.batch_hash and len({*found.batch_hash}) == 6
    np.testing.assert_allclose(found.loss, expected.loss, rtol=1e-4)


def drawn(folder, ranks=2):
    """Hashes of the batches of each rank by iteration, as often as they went through the model."""
    found = []
    for rank in range(ranks):
        by_iteration = defaultdict(list)
        for line in (folder / f"stdout.{rank}.drawn").read_text().splitlines():
            iteration, batch = line.split()
            by_iteration[iteration].append(batch)
        found.append(by_iteration)
    return found


def with_rejected_results(folder, iterations):
    """The option that skips what another run has found wrong twice on one rank."""
    line = "ts=0 node=n device=0 jobID=7 rank=0 iteration={} status=RERUN_DISABLED result=nan"
    lines = [f"{line.format(iteration)} message='NaN'\n" for iteration in iterations] * 2
    (folder / "rejected").write_text("".join(lines))
    return f"--result-rejected-tracker-filename {folder}/rejected"


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (2, ""),
        (2, "--tensor-model-parallel-size 2"),
        (3, "--pipeline-model-parallel-size 3 --num-layers 3"),
        (2, LAYOUTS["virtual stages"]),
    ],
    ids=["data parallel", "tensor parallel", "three stages", "virtual stages"],
)
def test_skipped_iterations_skip_their_rows_and_no_others(ranks, layout, mix, tmp_path):
    run(mix, tmp_path, layout, ranks=ranks)
    whole = drawn(tmp_path, ranks)
    skips = "--iterations-to-skip 3 4" if layout else with_rejected_results(tmp_path, (3, 4))
    losses, _ = run(mix, tmp_path, layout, skips, ranks=ranks)
    assert list(losses) == ["1", "2", "5", "6"]
    for batches, skipped in zip(whole, drawn(tmp_path, ranks)):
        assert list(batches) == ["1", "2", "3", "4", "5", "6"]
        assert skipped == {key: own for key, own in batches.items() if key not in "34"}


@pytest.mark.parametrize("layout", ["data parallel", "expert parallel"])
def test_a_step_rerun_in_another_process_sees_the_same_data(layout, mix, tmp_path):
    """Megatron-LM runs a step with NaN twice, saves the model before it, and exits with 16."""
    parallelism = LAYOUTS[layout]
    losses, _ = run(mix, tmp_path, parallelism)
    whole = drawn(tmp_path)
    saved = f"--save {tmp_path}/model --dataloader-save {tmp_path}/data"
    loaded = f"--load {tmp_path}/model"
    run(mix, tmp_path, parallelism, saved, nan_at=5, code=16)
    assert [found["5"] for found in drawn(tmp_path)] == [2 * found["5"] for found in whole]
    run(mix, tmp_path, parallelism, saved, loaded, nan_at=5, code=16)
    assert drawn(tmp_path) == [{"5": found["5"]} for found in whole]
    resumed, _ = run(mix, tmp_path, parallelism, saved, loaded, "--rerun-mode disabled")
    assert drawn(tmp_path) == [{key: found[key] for key in "56"} for found in whole]
    assert resumed["5"] == losses["5"]


@pytest.mark.parametrize("layout", ["tensor parallel", "pipeline parallel", "virtual stages"])
def test_a_run_that_restarts_in_its_processes_reads_what_an_undisturbed_one_reads(
    layout, mix, tmp_path
):
    losses, evaluations = run(mix, tmp_path, LAYOUTS[layout])
    whole = drawn(tmp_path)
    runner = RUNNER.with_name("megatron_lm_restarted.py")
    found = run(mix, tmp_path, LAYOUTS[layout], runner=runner)
    assert drawn(tmp_path) == whole
    # What the failed run printed comes first.
    assert found == (losses, evaluations)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--check-for-spiky-loss", "--check-for-spiky-loss must be left out"),
        ("--eod-mask-loss", "--eod-mask-loss must be left out"),
        ("--logits-load-dir missing", "--logits-load-dir must be left out"),
        ("--record-memory-history", "--record-memory-history must be left out"),
        ("--global-batch-size 2", "1 micro-batches, too few for 2 validation sources"),
        (
            "--train-samples 16 --rampup-batch-size 2 2 8",
            "--rampup-batch-size must be left out",
        ),
        (
            "--eval-micro-batch-size 2 --pipeline-model-parallel-size 2",
            "--eval-micro-batch-size must be 1",
        ),
        ("--vocab-size 200 --tensor-model-parallel-size 2", "set --vocab-size 260"),
    ],
)
def test_unsupported_options_are_refused_on_every_rank(options, words, mix, tmp_path):
    if re.search("eval-micro|rampup", options) and version("megatron-core") < "0.18":
        pytest.skip("since megatron-core 0.18 Megatron-LM has the one and ignores the other")
    if "logits" in options and version("megatron-core") < "0.19":
        pytest.skip("Megatron-LM distils from stored logits since megatron-core 0.19")
    length = "--global-batch-size 4" if "samples" in options else SIX_STEPS
    run(mix, tmp_path, options, code=70, length=length)
    for name in ("stderr", "stderr.1"):
        last = (tmp_path / name).read_text().strip().splitlines()[-1]
        assert last.startswith("energon_ext.errors.ConfigError: "), last
        assert words in last


@pytest.mark.parametrize(
    ("model", "more", "words"),
    [
        ("llama3_8b", "--tp-comm-overlap --fp8-format hybrid --fp8-recipe blockwise", None),
        ("qwen3_30b_a3b", "--train-iters 7", None),
        ("llama3_8b", "--trian-iters 7", "rejects the options: unrecognized arguments: --trian-"),
        ("llama3_8b", "--train-iters many", "argument --train-iters: invalid int value: 'many'"),
        ("llama3_8b", "--spec a b", "--spec must be left out (the model_provider of this script"),
        ("llama3_8b", "--expert-model-parallel-size 2", "Megatron-LM rejects the options: "),
        ("llama3_8b", "--micro-batch-size 2", "--micro-batch-size must be 1 with energon_ext"),
        ("qwen3_30b_a3b", "--num-layers-per-virtual-pipeline-stage 12", None),
    ],
)
def test_a_dry_run_parses_and_checks_the_whole_command(model, more, words):
    launch = RUNNER.parents[2] / "examples" / "launch"
    command = ["check.py", f"{model}.args", "--gpus", "32", *more.split()]
    python = [sys.executable, "-W", "ignore"]
    done = subprocess.run([*python, *command], cwd=launch, capture_output=True, text=True)
    assert done.returncode == (words is not None), done.stderr[-2000:]
    if words is None:
        assert "options: accepted by Megatron-LM" in done.stdout
    else:
        assert "usage:" not in done.stderr
        (line,) = [each for each in done.stderr.splitlines() if each.startswith("ConfigError")]
        assert line.startswith(f"ConfigError: {model}.args: ") and words in line


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """Token files for training and for validation."""
    folder = tmp_path_factory.mktemp("planned")
    texts = [
        f"The {animal} sat on the mat. " * n for n, animal in enumerate(["cat", "dog"] * 20, 1)
    ]
    for name in ("a", "b"):
        support.write_texts(folder / name, texts)
    splits = {
        split: {"blend": [{"path": f"./a/{split}"}, {"path": f"./b/{split}"}]}
        for split in ("train", "val")
    }
    content = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset", "splits": splits}
    path = folder / "planned.yaml"
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("layout", ["tensor parallel", "virtual stages"])
def test_the_test_split_is_evaluated_at_the_end_and_without_training(layout, planned, tmp_path):
    """Its text is that of validation, so a model has one loss on both."""
    content = json.loads(planned.read_text())
    content["splits"]["test"] = content["splits"]["val"]
    tested = planned.with_name("tested.yaml")
    tested.write_text(json.dumps(content))
    saved = f"{LAYOUTS[layout]} --save {tmp_path}/model --load {tmp_path}/model"
    saved += f" --dataloader-save {tmp_path}/data"
    for more in ("", "--skip-train"):
        losses, evaluations = run(tested, tmp_path, saved, more)
        assert len(losses) == (0 if more else 6)
        at_the_end = re.findall(
            r"loss at iteration 6 on (\w+) set \| lm loss value: (\S+)",
            (tmp_path / "stdout.1").read_text(),
        )
        assert [name for name, _ in at_the_end] == ["validation", "test"]
        assert len({loss for _, loss in at_the_end}) == 1
        if not more:
            trained = at_the_end
            assert evaluations["6"] == trained[0][1]
    assert at_the_end == trained


def test_ranks_on_nodes_with_other_data_all_raise_one_error(tmp_path):
    """The data of rank 1 has the same sizes, but the documents of a source in another order."""
    animals = ["cat", "dog", "cow", "hen"] * 10
    for rank in range(2):
        folder = tmp_path / f"node{rank}"
        for name in ("a", "b"):
            texts = [f"The {animal} sat on the mat. " * 3 for animal in animals]
            support.write_texts(folder / name, texts[::-1] if (name, rank) == ("b", 1) else texts)
        support.write_mix(folder / "mix.yaml", [("a/train", 1), ("b/train", 1)])
    run(tmp_path / "node{RANK}" / "mix.yaml", tmp_path, "--eval-iters 0", code=70)
    errors = []
    for name in ("stderr", "stderr.1"):
        errors.append((tmp_path / name).read_text().strip().splitlines()[-1])
    start = "energon_ext.errors.RankError: Rank 1 would read other rows than rank 0, which differs "
    assert errors[0].startswith(f"{start}in data: b/train: sample ")
    assert errors[1] == errors[0]
    assert not [path for path in tmp_path.glob("*.drawn") if path.read_text()]


def test_balanced_steps_train_the_same(planned, tmp_path):
    natural, evaluations = run(planned, tmp_path)
    balanced, evaluations_too = run(planned, tmp_path, "--energon-balance attention")
    assert evaluations_too.keys() == evaluations.keys()
    for iteration, loss in natural.items():
        assert float(balanced[iteration]) == pytest.approx(float(loss), abs=2e-6)


def in_plan_order(found):
    """Batches by iteration: a round of micro-batches gives a row to each rank in turn."""
    return {
        key: [b for turn in zip(*(own[key] for own in found)) for b in turn] for key in found[0]
    }


def test_a_planned_run_continues_on_other_ranks_with_another_global_batch(planned, tmp_path):
    """Two ranks save three steps of 4 rows; the run goes on alone, and in steps of 8."""
    losses, _ = run(planned, tmp_path)
    rows = in_plan_order(drawn(tmp_path))
    saved = f"--save {tmp_path}/model --dataloader-save {tmp_path}/data --eval-iters 0"
    run(planned, tmp_path, saved, "--exit-interval 3")
    loaded = f"--load {tmp_path}/model --dataloader-load {tmp_path}/data --eval-iters 0"
    resumed, _ = run(planned, tmp_path, loaded, ranks=1)
    assert drawn(tmp_path, 1) == [{key: rows[key] for key in "456"}]
    assert resumed["4"] == losses["4"]
    larger = "--global-batch-size 8 --train-iters 4 --override-opt-param-scheduler"
    run(planned, tmp_path, loaded, larger)
    assert in_plan_order(drawn(tmp_path)) == {"4": rows["4"] + rows["5"]}


def test_a_planned_run_continues_with_rows_twice_as_long(planned, tmp_path):
    """Three steps of 4 rows of 64, then of 2 rows of 128 on other ranks: the same on each."""
    saved = f"--save {tmp_path}/model --dataloader-save {tmp_path}/data --eval-iters 0"
    run(planned, tmp_path, saved, "--exit-interval 3")
    loaded = f"--load {tmp_path}/model --dataloader-load {tmp_path}/data --eval-iters 0"
    longer = "--seq-length 128 --max-position-embeddings 128 --global-batch-size 2"
    longer += " --override-opt-param-scheduler"
    losses, _ = run(planned, tmp_path, loaded, longer)
    rows = in_plan_order(drawn(tmp_path))
    assert list(losses) == ["4", "5", "6"] and [len(rows[key]) for key in "456"] == [2, 2, 2]
    alone, _ = run(planned, tmp_path, loaded, longer, ranks=1)
    assert drawn(tmp_path, 1) == [rows]
    assert [float(x) for x in alone.values()] == pytest.approx([*map(float, losses.values())])


def test_a_run_with_a_growing_global_batch_resumes_exactly(planned, tmp_path):
    """Two rows a step until 8 are consumed, then four. Where that changes it is saved as well."""
    options = f"--eval-iters 0 {LAYOUTS['expert parallel']}"
    grows = "--global-batch-size 4 --rampup-batch-size 2 2 8"
    if version("megatron-core") >= "0.18":
        grows = f"--step-batch-size-schedule 0:2,{8 * 64}:4"
    six_steps = f"{grows} --train-samples 16 --lr-warmup-samples 2"
    losses, _ = run(planned, tmp_path, options, length=six_steps)
    whole = drawn(tmp_path)
    assert [len(whole[0][key]) for key in "123456"] == [1, 1, 1, 1, 2, 2]
    saved = f"--save {tmp_path}/model --dataloader-save {tmp_path}/data --exit-interval 5"
    run(planned, tmp_path, options, saved, length=six_steps)
    states = sorted(path.name for path in (tmp_path / "data").iterdir())
    assert states == [f"iter_000000{iteration}" for iteration in (3, 4, 5)]
    loaded = f"--load {tmp_path}/model --dataloader-load {tmp_path}/data"
    for iteration in ("3", "4", "5"):
        (tmp_path / "model" / "latest_checkpointed_iteration.txt").write_text(iteration)
        resumed, _ = run(planned, tmp_path, options, loaded, length=six_steps)
        left = [key for key in "456" if key > iteration]
        assert drawn(tmp_path) == [{key: own[key] for key in left} for own in whole]
        assert resumed[left[0]] == losses[left[0]]


@pytest.mark.parametrize("layout", ["data parallel", "tensor parallel", "pipeline parallel"])
@pytest.mark.parametrize("kind", ["text", "planned"])
def test_the_log_counts_what_was_read_of_each_source(kind, layout, mix, planned, tmp_path):
    """Of a run that skips a step, is stopped after the third, and goes on."""
    options = f"{LAYOUTS[layout]} --save {tmp_path}/model --dataloader-save {tmp_path}/data"
    options += f" --energon-run-dir {tmp_path}/run --tensorboard-dir {tmp_path}/boards"
    options += " --iterations-to-skip 2 --wandb-project p --wandb-exp-name e"
    path = mix if kind == "text" else planned
    losses, _ = run(path, tmp_path, options, "--exit-interval 3")
    more, _ = run(path, tmp_path, options, f"--load {tmp_path}/model")
    log = Run.load(tmp_path / "run")
    assert log.sources == (("a:train", "b:train") if kind == "text" else ("a/train", "b/train"))
    assert log.resumed_after == (3,)
    assert list(log.step) == [1, 2, 3, 4, 5, 6]
    # Megatron-LM logs the mean of the first two iterations of a process as the second.
    assert log.loss[0] == pytest.approx(float(losses["1"]), abs=1e-5)
    assert log.loss[3] == pytest.approx(float(more["4"]), abs=1e-5)
    assert np.isnan(log.loss[1])
    weights = [3 - step / 4 for step in range(6)] if kind == "text" else [1] * 6
    for shares, weight in zip(log.planned_share, weights):
        assert shares == pytest.approx([weight / (weight + 1), 1 / (weight + 1)])
    drawn_in_state = counts_in_states(tmp_path / "data" / "iter_0000006")
    assert log.tokens.sum(0).tolist() == [drawn_in_state[key][1] for key in log.sources]
    assert log.documents.sum(0).tolist() == [drawn_in_state[key][0] for key in log.sources]
    boards = EventAccumulator(str(tmp_path / "boards")).Reload()
    lines = map(json.loads, (tmp_path / "stdout.1.wandb").read_text().splitlines())
    in_wandb = {name: (step, value) for step, values in lines for name, value in values.items()}
    for number, key in enumerate(log.sources):
        (*_, last) = boards.Scalars(f"data/tokens/{key}")
        assert (last.step, last.value) == (6, log.tokens[:, number].sum())
        assert boards.Scalars(f"lm loss/{key}")
        assert in_wandb[f"data/tokens/{key}"] == (6, last.value)
        assert in_wandb[f"lm loss/{key}"][0] == 6
    limited = [name for name in boards.Tags()["scalars"] if "epochs_left" in name]
    assert limited == (["data/epochs_left/a:train"] if kind == "text" else [])
    for name in limited:
        assert boards.Scalars(name)[-1].value == pytest.approx(50 - log.epochs[0])
    assert write_report(log, tmp_path / "report")[-1].name == "report.html"
    if kind == "planned":
        arguments = ["trace", tmp_path, path, "--step", "4", "--json", "--global-batch-size", "4"]
        traced = CliRunner().invoke(main, list(map(str, arguments)))
        rows = Counter(json.loads(line)["source"] for line in traced.stdout.splitlines())
        assert [64 * rows[key] for key in log.sources] == log.tokens[4].tolist()  # full ones


def counts_in_states(folder):
    """Documents and tokens of each source in the cursor that every rank saved at an iteration."""
    states = [read_megatron_lm_state(path) for path in folder.rglob("*.pt")]
    assert all(state == states[0] for state in states)
    sources = states[0]["plan"]["sources"]
    return {key: (own["documents"], own["tokens"]) for key, own in sources.items()}
