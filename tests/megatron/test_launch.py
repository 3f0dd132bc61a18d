# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""The launch scripts: sizes that fit, models of the published size, whole commands."""

import ast
import dataclasses
import importlib.util
import inspect
import json
import math
import os
import runpy
import subprocess
import sys
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer.transformer_config import TransformerConfig

from energon_ext import ConfigError, PreferenceTaskEncoder, SFTTaskEncoder, get_train_dataset
from energon_ext.megatron import add_energon_args, data_parallel_worker_config
from energon_ext.plan.cost import AttentionCost
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron.small_gpt import run_packed, small_config, small_model
from tests.samples.vision import write_images
from tests.support import batch_hash, loader_for, take, write_mix, write_tokens

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
CHECKOUT = str(Path(__file__).parents[2])
GPUS = {"llama3_8b": 16, "qwen3_30b_a3b": 32}


@pytest.fixture(scope="module")
def check(one_rank):
    """The functions of check.py and of the two modules that it uses."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(LAUNCH)
        names = ("launch_options", "meta_model", "check")
        modules = [vars(importlib.import_module(name)) for name in names]
        yield types.SimpleNamespace(**{k: v for module in modules for k, v in module.items()})


def options_of(check, model):
    return check.read_options(LAUNCH / f"{model}.args")


def parameters_by_hand(layers, hidden, heads, groups, channels, vocabulary, mlp):
    attention = 2 * hidden * heads * channels + 2 * hidden * groups * channels
    norms = 2 * hidden
    return layers * (attention + norms + mlp) + hidden + 2 * vocabulary * hidden


def test_the_dense_model_has_8_billion_parameters(check):
    options = options_of(check, "llama3_8b")
    model = check.build_model(options)
    found = sum(parameter.numel() for parameter in model.parameters())
    expected = parameters_by_hand(32, 4096, 32, 8, 128, 128256, mlp=3 * 4096 * 14336)
    assert found == expected == 8_030_261_248  # as published for Llama 3 8B
    assert check.active_parameters(model) == found
    assert all(parameter.is_meta for parameter in model.parameters())


def test_the_mixture_has_30_billion_parameters_of_which_3_are_active(check):
    options = options_of(check, "qwen3_30b_a3b")
    assert check.padded_vocab_size(options) == 152064  # 151936, to a multiple of 2 x 128
    model = check.build_model(options)
    found = sum(parameter.numel() for parameter in model.parameters())
    experts, router, qk_norms = 128 * 3 * 2048 * 768, 128 * 2048, 2 * 128
    expected = parameters_by_hand(48, 2048, 32, 4, 128, 152064, mlp=experts + router + qk_norms)
    assert found == expected
    assert found - 2 * 128 * 2048 == 30_532_122_624  # without padding, as published
    assert check.active_parameters(model) == expected - 48 * experts * 120 // 128


@pytest.mark.parametrize("model", GPUS)
def test_configs_with_their_parallelism_are_built(check, model):
    options = options_of(check, model)
    config = check.build_config(options)
    assert config.tensor_model_parallel_size == 2
    assert config.sequence_parallel
    assert config.calculate_per_token_loss
    assert config.moe_aux_loss_coeff == (1e-3 if model.startswith("qwen3") else 0)
    assert check.check_parallelism(options, GPUS[model]) == 8


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"gpus": 12}, "--gpus 12 is not a multiple of 16."),  # 8 expert parallel x 2 stages
        ({"num_experts": 100}, "--num-experts 100 is not a multiple of 8."),
        ({"num_layers": 47}, "--num-layers 47 is not a multiple of 2."),
        ({"num_query_groups": 12}, "--num-attention-heads 32 is not a multiple of 12."),
        ({"num_query_groups": 1}, "--num-query-groups 1 is not a multiple of 2."),
        ({"seq_length": 4095}, "--seq-length 4095 is not a multiple of 2."),
        (
            {"context_parallel_size": 2, "seq_length": 4092},
            "--seq-length 4092 is not a multiple of 8.",
        ),
        ({"global_batch_size": 12}, "--global-batch-size 12 is not a multiple of 8."),
    ],
)
def test_sizes_that_do_not_fit_are_refused(check, changed, message):
    gpus = changed.pop("gpus", 32)
    with pytest.raises(ConfigError) as error:
        check.check_parallelism({**options_of(check, "qwen3_30b_a3b"), **changed}, gpus)
    assert str(error.value) == message


SMALL = (
    "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 2048 "
    "--max-position-embeddings 2048 --vocab-size 50256 --micro-batch-size 1 --bf16 "
)


def small_options(check, tmp_path, *more):
    path = tmp_path / "small.args"
    path.write_text(SMALL)
    return check.read_options(path, " ".join(more).split())


def test_a_script_like_gpt_3s_has_megatron_lms_defaults(check, tmp_path):
    """Without --num-query-groups each head has its own keys; positions are learned."""
    options = small_options(check, tmp_path, "--tensor-model-parallel-size 2")
    assert check.check_parallelism(options, 8) == 4
    attention = 4 * 512 * 512 + 4 * 512
    mlp = 2 * 512 * 2048 + 2048 + 512
    norm = 2 * 512
    vocabulary = 50432  # 50256 and one special token, to a multiple of 2 x 128
    expected = 4 * (attention + mlp + 2 * norm) + norm + (vocabulary + 2048) * 512
    said = check.describe_model(options, 4)
    assert f"parameters: {expected:,} (" in said and "tensor 2, pipeline 1, context 1" in said


def test_a_script_like_mixtrals_switches_sequence_parallelism_off(check, tmp_path):
    """Megatron-LM ignores it without tensor parallelism; experts split by it by default."""
    more = "--sequence-parallel --group-query-attention --num-query-groups 8 --swiglu"
    options = small_options(check, tmp_path, more, "--num-experts 8 --expert-model-parallel-size 4")
    assert options["sequence_parallel"] is False
    assert options["ffn_hidden_size"] == 1344  # 2/3 of 4 x 512, down to a multiple of 64
    assert check.check_parallelism(options, 8) == 8
    assert "parameters: " in check.describe_model(options, 8)
    with pytest.raises(ConfigError, match="--gpus 6 is not a multiple of 4"):
        check.check_parallelism(options, 6)


def test_a_script_like_deepseeks_has_lists_and_uneven_stages(check, tmp_path):
    options = small_options(
        *(check, tmp_path),
        "--recompute-granularity selective --recompute-modules mlp moe --num-experts 4",
        "--moe-layer-freq ([0]*1+[1]*3) --pipeline-model-parallel-size 3",
        "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 1",
        "--position-embedding-type rope --disable-bias-linear --mtp-num-layers 1",
    )
    assert options["recompute_modules"] == ["mlp", "moe"]
    assert options["moe_layer_freq"] == [0, 1, 1, 1]
    assert check.check_parallelism(options, 12) == 4
    said = check.describe_model(options, 4)
    assert said.endswith("B active, without its MTP layers")
    one = small_options(check, tmp_path, "--recompute-modules moe --moe-layer-freq ([0,1]*2)")
    assert check.build_config({**one, "num_experts": 4}).recompute_modules == ["moe"]
    assert one["moe_layer_freq"] == [0, 1, 0, 1]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("--hidden-size $HIDDEN", "--hidden-size: '$HIDDEN' found, one integer is needed."),
        ("--num-layers 2 4", "--num-layers: [2, 4] found, one integer is needed."),
        ("--seq-length", "--seq-length: True found, one integer is needed."),
        ("--hybrid-override-pattern M*-", "--hybrid-override-pattern: this script builds only GPT"),
        ("--multi-latent-attention --q-lora-rank 64", "is built only with Transformer Engine"),
        ("--recompute-granularity selective --recompute-modules all", "Megatron-core rejects the"),
        ("--softmax-type learnable", "softmax_type='learnable' needs Transformer Engine"),
    ],
)
def test_options_that_cannot_be_counted_are_one_line(check, tmp_path, more, words):
    with pytest.raises(ConfigError) as error:
        check.describe_model(small_options(check, tmp_path, more), 1)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["num-layers", "hidden-size", "num-attention-heads", "seq-length"])
def test_a_missing_size_is_named(check, tmp_path, name):
    (tmp_path / "x.args").write_text(SMALL.replace(f"--{name} ", "--unknown-option "))
    with pytest.raises(ConfigError, match=f"--{name} is missing."):
        check.read_options(tmp_path / "x.args")


def test_a_missing_vocabulary_is_named(check, tmp_path):
    options = small_options(check, tmp_path)
    del options["vocab_size"]
    with pytest.raises(ConfigError, match="--vocab-size is missing"):
        check.describe_model(options, 1)


def test_the_first_batches_of_a_users_encoder_are_described(check, tmp_path):
    write_images(tmp_path / "photos", 8)
    mix = write_mix(tmp_path / "mix.yaml", [("photos", 1)])
    options = small_options(check, tmp_path)
    own = "tests.samples.vision:PlannedCaptions"
    said = check.first_batch(options, mix, own, 1, 2)
    assert said == "data: rank 1 of 2 reads a batch of type list first"


@pytest.mark.parametrize(
    ("model", "script"),
    [*((model, None) for model in GPUS), ("llava_small", "pretrain_vlm.py")],
)
def test_the_command_has_every_option_and_those_of_the_caller(model, script, tmp_path):
    """Bash runs the script; torchrun is replaced by a program that prints its arguments."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    torchrun.chmod(0o755)
    run = subprocess.run(
        ["bash", LAUNCH / "torchrun.sh", "--train-iters", "7"],
        env={
            **os.environ,
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            **{"MODEL": model, "DATA": "mix.yaml", "TOKENIZER": "bytes", "RUN": "/runs/a"},
            "NNODES": "2",
            **({"SCRIPT": script} if script else {}),
        },
        capture_output=True,
        text=True,
        check=True,
    )
    arguments = run.stdout.split("\n")
    assert arguments[arguments.index("--nnodes") + 1] == "2"
    begin = arguments.index(str(LAUNCH / (script or "pretrain_gpt.py")))
    command = " ".join(arguments[begin:])
    for file in (f"{model}.args", "energon.args"):
        for line in (LAUNCH / file).read_text().splitlines():
            assert line.startswith("#") or line in command
    assert "--data-path mix.yaml --energon-tokenizer bytes" in command
    assert "--dataloader-save /runs/a/data" in command
    assert command.rstrip().endswith("--train-iters 7")


def test_a_missing_setting_is_named():
    run = subprocess.run(["bash", LAUNCH / "torchrun.sh"], env={}, capture_output=True, text=True)
    assert run.returncode != 0
    assert "MODEL: llama3_8b or qwen3_30b_a3b" in run.stderr


@pytest.mark.nightly
def test_a_dry_run_draws_the_first_batches_of_the_data(tmp_path):
    write_tokens(tmp_path / "tokens", [[5, 6, 7, 8] * 40] * 2000)
    write_mix(tmp_path / "mix.yaml", [("tokens", 1)])
    settings = {"MODEL": "llama3_8b", "DATA": str(tmp_path / "mix.yaml"), "TOKENIZER": "bytes"}
    this_python = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    python = {"PATH": this_python, "PYTHONPATH": CHECKOUT}
    done = subprocess.run(
        ["bash", LAUNCH / "torchrun.sh", "--dry-run"],
        env={**os.environ, **settings, **python, "RUN": "none", "NNODES": "2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # A row of 8192 has room for 51 documents of 160.
    assert "data: rank 0 of 8 reads 8,160 tokens of tokens first" in done.stdout
    assert "data: rank 7 of 8 reads" in done.stdout
    assert "parameters: 8,030,261,248" in done.stdout


@pytest.mark.parametrize("script", ["torchrun.sh", "slurm.sh"])
def test_shell_scripts_parse(script):
    subprocess.run(["bash", "-n", LAUNCH / script], check=True)


@pytest.mark.parametrize("parses_before", [False, True])
def test_the_script_calls_megatron_lm_as_its_version_requires(monkeypatch, parses_before):
    """Since megatron-core 0.18 pretrain() takes a configuration and no extra_args_provider."""
    calls = []
    modules = {name: types.ModuleType(f"megatron.training{name}") for name in ("", ".arguments")}
    modules[""].get_args = modules[".arguments"].core_transformer_config_from_args = None
    modules[""].pretrain = lambda *args, **kwargs: calls.append((args, kwargs))
    modules[""].set_startup_timestamps = lambda *, program_start, main_entry: None
    modules[""].inprocess_restart = types.SimpleNamespace(
        maybe_wrap_for_inprocess_restart=lambda pretrain: (pretrain, "store")
    )
    modules[".argument_utils"] = None  # not importable
    if parses_before:
        modules[".argument_utils"] = types.ModuleType("megatron.training.argument_utils")
        modules[".argument_utils"].pretrain_cfg_container_from_args = lambda args: ["config", args]
        modules[".arguments"].parse_and_validate_args = lambda extra_args_provider: (
            extra_args_provider
        )
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, f"megatron.training{name}", module)
    runpy.run_path(str(LAUNCH / "pretrain_gpt.py"), run_name="__main__")
    ((args, kwargs),) = calls
    parser = kwargs.pop("extra_args_provider", None) or args[0][1]
    assert parser is add_energon_args
    assert args == ((["config", parser],) if parses_before else ())
    assert kwargs["store"] == "store"
    assert list(kwargs) == [
        *("store", "get_embedding_ranks"),
        *("train_valid_test_dataset_provider", "model_provider"),
        *("model_type", "forward_step_func"),
    ]


def test_the_script_scales_rope_as_its_arguments_say(check, monkeypatch):
    """Llama 3.1 divides the frequencies of waves longer than 8192 positions by 8."""
    arguments = types.ModuleType("megatron.training.arguments")
    training = types.ModuleType("megatron.training")
    training.pretrain = arguments.core_transformer_config_from_args = None
    training.inprocess_restart = training.set_startup_timestamps = None
    for module in (training, arguments):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    small = {"num_layers": 1, "hidden_size": 256, "ffn_hidden_size": 64}
    heads = {"num_attention_heads": 2, "num_query_groups": 1}  # of 128 channels, as in the 8B model
    options = {**check.read_options(LAUNCH / "llama3_8b.args"), **small, **heads}
    config = check.build_config(options, tensor_model_parallel_size=1, sequence_parallel=False)
    frequencies = {}
    for scaling in (False, True):
        training.get_args = lambda scaling=scaling: types.SimpleNamespace(
            padded_vocab_size=128,
            max_position_embeddings=64,
            untie_embeddings_and_output_weights=True,
            position_embedding_type="rope",
            rotary_percent=1.0,
            rotary_base=500000,
            use_rope_scaling=scaling,
            rope_scaling_factor=8.0,
            rotary_seq_len_interpolation_factor=None,
            fp16_lm_cross_entropy=False,
        )
        script = runpy.run_path(str(LAUNCH / "pretrain_gpt.py"))
        with torch.device("meta"):
            model = script["model_provider"](config=config)
        frequencies[scaling] = model.rotary_pos_emb.inv_freq
    factors = frequencies[False] / frequencies[True]
    longest = 2 * math.pi / frequencies[False] > 8192
    assert 0 < longest.sum() < len(longest)
    assert factors[longest].tolist() == pytest.approx([8.0] * int(longest.sum()))
    assert factors[0] == 1


@pytest.fixture
def bridge_recipe(monkeypatch, tmp_path):
    """A recipe of Megatron-Bridge that averages in its collective and reads packed rows."""
    bridge = types.ModuleType("megatron.bridge.training.config")
    bridge.DatasetBuildContext = object
    bridge.DatasetProvider = dataclasses.make_dataclass(
        "DatasetProvider",
        [("num_workers", int, 0)],
        kw_only=True,
        namespace={"finalize": lambda self: None},
    )
    monkeypatch.setitem(sys.modules, bridge.__name__, bridge)
    recipe = types.SimpleNamespace(
        model=TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1),
        ddp=DistributedDataParallelConfig(average_in_collective=True),
        train=types.SimpleNamespace(micro_batch_size=2, global_batch_size=32),
        validation=types.SimpleNamespace(
            eval_iters=0, eval_micro_batch_size=2, eval_global_batch_size=None
        ),
        dist=types.SimpleNamespace(distributed_timeout_minutes=30, use_decentralized_pg=False),
        comm_overlap=types.SimpleNamespace(overlap_moe_expert_parallel_comm=True),
    )
    recipe.model.seq_length = 64
    recipe.model.cuda_graph_impl = "transformer_engine"
    recipe.model.vocab_size = 384
    write_tokens(tmp_path / "tokens", [[5 + n % 50, 6, 7, 8, 9] * 3 for n in range(500)])
    mix = write_mix(tmp_path / "mix.yaml", [("tokens", 1)])
    validation = '"val": {"blend": [{"path": "tokens"}]}'
    mix.write_text(mix.read_text().replace('"splits": {', f'"splits": {{{validation}, '))
    # A test may read other data for another task.
    recipe.functions = types.SimpleNamespace(**runpy.run_path(str(LAUNCH / "bridge_recipe.py")))
    recipe.functions.use_energon(recipe, str(mix), "bytes")
    return recipe


def read_records(recipe, folder, records, monkeypatch, **options):
    """Make a recipe read records; return the training loader."""
    (folder / "records.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    mix = write_mix(folder / "records.yaml", [("records.jsonl", 1)])
    recipe.functions.use_energon(recipe, str(mix), "bytes", **options)
    build = recipe.dataset.build_datasets
    monkeypatch.setitem(build.__globals__, "get_current_global_batch_size", lambda: 32)
    return build(None)[0]


def test_megatron_wraps_a_bridge_model_that_averages_in_its_collective(one_rank, bridge_recipe):
    """Megatron's DDP refuses to average with a loss per token."""
    DistributedDataParallel(bridge_recipe.model, bridge_recipe.ddp, torch.nn.Linear(4, 4))
    assert bridge_recipe.model.calculate_per_token_loss
    assert bridge_recipe.train.micro_batch_size == 1
    assert bridge_recipe.dataset.rows_per_step == 32
    assert bridge_recipe.dataset.timeout_minutes == 30


def test_bridge_data_fits_context_parallelism_and_the_global_batch(
    one_rank, bridge_recipe, monkeypatch
):
    build = bridge_recipe.dataset.build_datasets
    known = build.__globals__
    monkeypatch.setattr(parallel_state, "get_context_parallel_world_size", lambda: 2)
    monkeypatch.setitem(known, "get_current_global_batch_size", lambda: 32)
    ends = next(build(None)[0]).cu_seqlens_padded
    assert len(ends) > 2
    assert not (ends % 4).any()
    monkeypatch.setitem(known, "get_current_global_batch_size", lambda: 16)
    with pytest.raises(ConfigError, match="train.global_batch_size: 16 found, but .* with 32"):
        build(None)


def test_chats_fine_tune_through_a_bridge_recipe_in_balanced_steps(
    one_rank, bridge_recipe, tmp_path, monkeypatch
):
    chats = [{"prompt": f"{n} + 1 =" * (n % 3 + 1), "response": f" {n + 1}."} for n in range(60)]
    options = {"task_encoder": SFTTaskEncoder, "balance": "attention", "packing_buffer_docs": 40}
    loader = read_records(bridge_recipe, tmp_path, chats, monkeypatch, **options)
    tokenizer, cost = ByteTokenizer(), AttentionCost.of_model(bridge_recipe.model, 384)
    encoder = SFTTaskEncoder(tokenizer, 64, balance="attention", cost=cost, packing_buffer_docs=40)
    worker = data_parallel_worker_config(0, seed=1234)
    path, plan = tmp_path / "records.yaml", {"batch_size": 1, "rows_per_step": 32}
    dataset = get_train_dataset(path, worker_config=worker, task_encoder=encoder, **plan)
    batches = take(loader, 32)
    assert list(map(batch_hash, batches)) == list(map(batch_hash, take(loader_for(dataset), 32)))
    answers = "".join(tokenizer.decode(each.labels[each.token_weights > 0]) for each in batches)
    found = Counter(each + "." for each in answers.split(".")[:-1])
    assert found.keys() <= {chat["response"] for chat in chats} and len(found) > 40


def test_pairs_fine_tune_through_a_bridge_recipe(one_rank, bridge_recipe, tmp_path, monkeypatch):
    pairs = [{"prompt": f"{n} =", "chosen": f" {n}", "rejected": " ?"} for n in range(40)]
    options = {"task_encoder": PreferenceTaskEncoder}
    loader = read_records(bridge_recipe, tmp_path, pairs, monkeypatch, **options)
    step = bridge_recipe.functions.make_bridge_step(
        position_losses=lambda batch, log_probs: -batch.token_weights * log_probs,
        denominator="pairs",
    )
    # Bridge looks at the names to pass its own state.
    assert [*inspect.signature(step).parameters][:3] == ["state", "data_iterator", "model"]
    model, batch = small_model(small_config(), vocabulary=320), next(loader)
    output, loss_func = step(None, iter([batch]), model)
    loss, count, _ = loss_func(output)
    with torch.no_grad():
        logits = run_packed(model, batch)
    log_probs = logits.log_softmax(-1).gather(1, batch.labels[:, None])[:, 0]
    assert loss.item() == pytest.approx(-(batch.token_weights * log_probs).sum().item(), rel=1e-5)
    assert count == (batch.pair_starts() > 0).sum() > 1


def test_a_recipe_that_averages_captures_and_overlaps_is_made_to_fit(bridge_recipe):
    bridge_recipe.dataset.finalize()  # as Bridge does before it starts
    assert bridge_recipe.model.cuda_graph_impl == "none"
    assert bridge_recipe.validation.eval_micro_batch_size == 1
    assert not bridge_recipe.comm_overlap.overlap_moe_expert_parallel_comm
    # Bridge's setup writes its own tokenizer to a field of this name.
    assert not hasattr(bridge_recipe.dataset, "tokenizer")


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model", "seq_length", 128),
        ("train", "micro_batch_size", 2),
        ("train", "num_epochs", 2),
        ("validation", "eval_micro_batch_size", 2),
        ("model", "cuda_graph_impl", "transformer_engine"),
        ("model", "overlap_moe_expert_parallel_comm", True),
        ("comm_overlap", "overlap_moe_expert_parallel_comm", True),
        ("model", "dynamic_context_parallel", True),
        ("dist", "use_decentralized_pg", True),
    ],
)
def test_a_bridge_recipe_changed_afterwards_is_refused(bridge_recipe, part, name, value):
    setattr(getattr(bridge_recipe, part), name, value)
    for check in (
        bridge_recipe.dataset.finalize,
        lambda: bridge_recipe.dataset.build_datasets(None),
    ):
        with pytest.raises(ConfigError, match=rf"{name}: {value!r} found, .*[.]$"):
            check()


def test_a_bridge_evaluation_has_eval_iters_times_its_batch_size(
    one_rank, bridge_recipe, monkeypatch
):
    provider = bridge_recipe.dataset
    monkeypatch.setitem(
        provider.build_datasets.__globals__, "get_current_global_batch_size", lambda: 32
    )
    assert provider.build_datasets(None)[1] is None
    bridge_recipe.validation.eval_iters = 3
    for rows, batches in ((None, 3 * 32), (2, 3 * 2)):
        bridge_recipe.validation.eval_global_batch_size = rows
        validation = provider.build_datasets(None)[1]
        hashes = [batch_hash(next(validation)) for _ in range(2 * batches)]
        repeats = [n for n in range(1, batches + 1) if hashes[n:] == hashes[:-n]]
        assert repeats == [batches]


@pytest.mark.parametrize("script", ["pretrain_gpt.py", "bridge_recipe.py"])
def test_names_imported_by_the_launch_scripts_exist(script):
    """They cannot be imported without Megatron-LM or Megatron-Bridge."""
    tree = ast.parse((LAUNCH / script).read_text())
    imports = [
        node
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module.startswith("energon_ext")
    ]
    assert imports
    for node in imports:
        module = importlib.import_module(node.module)
        assert all(hasattr(module, alias.name) for alias in node.names)
