# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs a script of examples/launch inside the real Megatron-LM, on a machine without CUDA.

Megatron-LM asks the GPU for its memory and random state, and starts NCCL. Those questions are
answered here; arguments, model, data, schedules, optimizer, evaluation and checkpoints are its own.

    megatron_lm_on_cpu.py SCRIPT OUT NAN_AT ARGUMENTS...

Prints to OUT.RANK and writes the batch of each micro-batch of the training, as "iteration hash", to
OUT.RANK.drawn, and what goes to Weights & Biases to OUT.RANK.wandb. The losses of the training at
iteration NAN_AT are no numbers, if the script uses the package's forward step. {RANK} in an
argument stands for the rank.
"""

import collections
import functools
import importlib.machinery
import json
import os
import runpy
import sys
import types
from pathlib import Path
from unittest import mock

import torch

import energon_ext.megatron
from energon_ext.megatron import enable_cpu, step
from tests import support

LAUNCH = Path(__file__).parents[2] / "examples" / "launch"


def answer_for_the_gpu():
    gpu = types.SimpleNamespace(major=9, minor=0, name="cpu", total_memory=1)
    answers = {
        "get_device_properties": gpu,
        "get_device_capability": (9, 0),
        "memory_stats": collections.defaultdict(int),
        "get_rng_state": torch.zeros(1, dtype=torch.uint8),
        "set_rng_state": None,
        **dict.fromkeys(
            (
                *("set_device", "empty_cache", "reset_peak_memory_stats"),
                *("memory_allocated", "max_memory_allocated"),
                *("memory_reserved", "max_memory_reserved"),
            ),
            0,
        ),
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)


def start_on_gloo(*_, **__):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.training import get_args

    args = get_args()
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        expert_model_parallel_size=args.expert_model_parallel_size,
    )
    # Megatron-LM seeds only where there is a GPU, but attention without packed rows wants a state.
    model_parallel_cuda_manual_seed(args.seed, inference_rng_tracker=True)


def keep_outputs_of_stages():
    """Gloo may still send an output when Megatron frees it; NCCL sends in the order of a stream."""
    from megatron.core.model_parallel_config import ModelParallelConfig

    check = ModelParallelConfig.__post_init__

    def check_and_keep(config):
        config.deallocate_pipeline_outputs = False
        check(config)

    ModelParallelConfig.__post_init__ = check_and_keep


def record_batches(path, nan_at):
    """Write down what the training draws, on top of the package's own step."""
    from megatron.training import get_args

    get_batch, forward_step = step.get_batch, step.forward_step

    def recorded(data_iterator, check=None, **options):
        batch = get_batch(data_iterator, check, **options)
        if torch.is_grad_enabled():
            with open(path, "a") as file:
                file.write(f"{get_args().curr_iteration + 1} {support.batch_hash(batch)}\n")
        return batch

    def perhaps_nan(data_iterator, model):
        output, loss_func = forward_step(data_iterator, model)
        is_bad = torch.is_grad_enabled() and get_args().curr_iteration + 1 == nan_at
        return output * float("nan") if is_bad else output, loss_func

    step.get_batch = energon_ext.megatron.get_batch = recorded
    energon_ext.megatron.forward_step = perhaps_nan


def stand_in_for_wandb(path):
    def log(values, step):
        with open(path, "a") as file:
            file.write(json.dumps([step, {name: float(value) for name, value in values.items()}]))
            file.write("\n")

    # Libraries that look for the package read its specification.
    spec = importlib.machinery.ModuleSpec("wandb", None)
    sys.modules["wandb"] = mock.MagicMock(log=log, __spec__=spec)


#: Of a run that is started without torchrun.
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def main():
    for name, value in ALONE.items():
        os.environ.setdefault(name, value)
    # Not of the test: the server that forks this process may be older than its environment.
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    script = LAUNCH / sys.argv.pop(1)
    out = f"{sys.argv.pop(1)}.{os.environ['RANK']}"
    nan_at = int(sys.argv.pop(1))
    sys.argv = [argument.replace("{RANK}", os.environ["RANK"]) for argument in sys.argv]
    sys.stdout = open(out, "w")  # noqa: SIM115
    enable_cpu()
    record_batches(f"{out}.drawn", nan_at)
    stand_in_for_wandb(f"{out}.wandb")
    torch._dynamo.config.disable = True
    answer_for_the_gpu()
    keep_outputs_of_stages()
    import megatron.training.initialize
    import megatron.training.training

    megatron.training.initialize._initialize_distributed = start_on_gloo
    megatron.training.initialize._compile_dependencies = lambda: None
    megatron.training.training.initialize_megatron = functools.partial(
        megatron.training.training.initialize_megatron, allow_no_cuda=True
    )
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.stdout.flush()


if __name__ == "__main__":
    main()
