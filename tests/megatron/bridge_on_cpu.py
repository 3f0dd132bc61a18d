# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs examples/launch/bridge_recipe.py inside the real Megatron-Bridge, without CUDA.

Configuration, model, schedules, optimizer, evaluation and checkpoints are Bridge's own. Packages
that need a GPU are replaced if they are missing, and so are questions to the GPU.

    bridge_on_cpu.py OUT MIX TENSOR STAGES EXIT CHECKPOINTS [PRETRAINED]

Trains up to iteration EXIT of six, and continues from CHECKPOINTS if there are any. TENSOR is the
size of tensor parallelism; of several STAGES of the pipeline, each has two virtual ones. With a
folder of PRETRAINED weights, it fine-tunes adapters (LoRA) on chats. Writes the batch of each
micro-batch to OUT.RANK, as "kind iteration hash".
"""

import importlib.machinery
import importlib.util
import os
import sys
import types
from pathlib import Path
from unittest import mock

import torch

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"
GPU_PACKAGES = ("modelopt", "nvidia_resiliency_ext", "triton", "transformer_engine")

#: What Megatron-core imports before Bridge: it would use a substitute of Transformer Engine.
CORE = (
    *("distributed", "optimizer", "dist_checkpointing", "pipeline_parallel.schedules"),
    *("models.gpt", "models.gpt.gpt_layer_specs", "transformer.transformer_block", "ssm"),
)


class Substitute(types.ModuleType):
    """A module with any name: classes if it begins with a capital, else functions."""

    __path__ = []
    __version__ = "0.0.0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        accept = {"__init__": lambda self, *args, **options: None}
        found = type(name, (), accept) if name[0].isupper() else mock.MagicMock()
        setattr(self, name, found)
        return found


class Substitutes:
    """Finds the packages that are missing."""

    def __init__(self, *names):
        self.names = {name for name in names if importlib.util.find_spec(name) is None}

    def find_spec(self, name, path=None, target=None):
        if name.startswith("nvidia_resiliency_ext.checkpointing"):
            raise ModuleNotFoundError(name)  # Megatron-core then saves by itself
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return Substitute(spec.name)

    def exec_module(self, module):
        pass


def start_on_gloo():
    """Let Bridge initialize its groups on gloo, on a machine where it finds no GPU."""
    from megatron.bridge.training import eval, initialize, train

    for module in (eval, train):  # of a missing package
        module.get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None
    original = initialize.initialize_megatron
    setup = sys.modules["megatron.bridge.training.setup"]
    setup.initialize_megatron = lambda cfg, **options: original(
        cfg, **{**options, "allow_no_cuda": True}
    )
    initialize.compile_helpers = lambda: None


def record_batches(path):
    """Write down what every step draws, on top of the package's own step; return the step."""
    from bridge_recipe import bridge_forward_step

    from energon_ext.megatron import step
    from tests.support import batch_hash

    get_batch = step.get_batch

    def recorded(data_iterator, check, **options):
        batch = get_batch(data_iterator, check, **options)
        with open(path, "a") as file:
            kind = "train" if torch.is_grad_enabled() else "val"
            file.write(f"{kind} {iteration} {batch_hash(batch)}\n")
        return batch

    def forward_step(state, data_iterator, model, return_schedule_plan=False):
        nonlocal iteration
        iteration = state.train_state.step + 1
        return bridge_forward_step(state, data_iterator, model, return_schedule_plan)

    iteration, step.get_batch = 0, recorded
    return forward_step


def configuration(tensor, stages, last, checkpoints):
    from megatron.bridge.models.gpt_provider import GPTModelProvider
    from megatron.bridge.training import config
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    from energon_ext.megatron import gpt_layer_spec

    model = GPTModelProvider(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=4,
        seq_length=64,
        vocab_size=384,
        position_embedding_type="rope",
        transformer_layer_spec=gpt_layer_spec,  # its attention works without a GPU
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=2 if stages > 1 else None,
        pipeline_dtype=torch.float32,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        use_cpu_initialization=True,
        deallocate_pipeline_outputs=False,
        share_embeddings_and_output_weights=False,
        cuda_graph_impl="local",  # as recipes have it
    )
    return config.ConfigContainer(
        train=config.TrainingConfig(
            train_iters=6, exit_interval=last, global_batch_size=4, micro_batch_size=2
        ),
        validation=config.ValidationConfig(eval_interval=3, eval_iters=1),
        model=model,
        optimizer=OptimizerConfig(lr=1e-3, min_lr=1e-4, optimizer="adam"),
        scheduler=config.SchedulerConfig(
            lr_warmup_iters=1, lr_decay_iters=6, start_weight_decay=0.1, end_weight_decay=0.1
        ),
        ddp=DistributedDataParallelConfig(average_in_collective=True),
        dataset=None,
        logger=config.LoggerConfig(log_interval=1, tensorboard_dir=None),
        tokenizer=config.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=384),
        checkpoint=config.CheckpointConfig(
            save=checkpoints, load=checkpoints, save_interval=3, load_rng=False
        ),
        dist=config.DistributedInitConfig(distributed_backend="gloo"),
        rng=config.RNGConfig(seed=1234, inference_rng_tracker=True),
    )


def main():
    out, mix, tensor, stages, last, checkpoints, *pretrained = sys.argv[1:]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        os.environ.setdefault(name, value)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    *others, transformer_engine = GPU_PACKAGES
    sys.meta_path.append(Substitutes(*others))
    for name in CORE:
        importlib.import_module(f"megatron.core.{name}")
    sys.meta_path.append(Substitutes(transformer_engine))
    sys.path.insert(0, str(LAUNCH))
    from energon_ext.megatron import enable_cpu
    from tests.megatron.megatron_lm_on_cpu import answer_for_the_gpu, keep_outputs_of_stages

    enable_cpu()
    torch._dynamo.config.disable = True
    answer_for_the_gpu()
    torch.cuda.device_count = lambda: 1  # otherwise Bridge does not seed the random states
    torch.cuda.set_stream = lambda stream: None
    keep_outputs_of_stages()
    from bridge_recipe import use_energon
    from megatron.bridge.training.finetune import finetune
    from megatron.bridge.training.pretrain import pretrain

    from energon_ext import SFTTaskEncoder

    start_on_gloo()
    config = configuration(int(tensor), int(stages), int(last), checkpoints)
    task = {}
    if pretrained:
        from megatron.bridge.peft import utils
        from megatron.bridge.peft.lora import LoRA

        utils.HAVE_TE = False  # the model has none of its layers
        config.peft = LoRA(dim=4, alpha=8)
        config.checkpoint.pretrained_checkpoint = pretrained[0]
        task = {"task_encoder": SFTTaskEncoder, "balance": "attention"}
    use_energon(config, path=mix, tokenizer="bytes", **task)
    config.dataset.num_workers = 0
    step = record_batches(f"{out}.{os.environ['RANK']}")
    (finetune if pretrained else pretrain)(config, forward_step_func=step)


if __name__ == "__main__":
    main()
