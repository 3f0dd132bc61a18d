# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Runs megatron_lm_on_cpu.py with a fault in its second step, and begins again in the process.

Megatron-LM restarts in process by nvidia-resiliency-ext, which needs a GPU. What it does to a
process is done here: it ends the groups, destroys Megatron-LM's state by Megatron-LM's own function
and calls ``pretrain`` again with another part of the store.

    megatron_lm_restarted.py SCRIPT OUT NAN_AT ARGUMENTS...
"""

import itertools
import os
import sys
from importlib.metadata import version
from pathlib import Path

import torch.distributed as dist
from megatron.core import parallel_state

import energon_ext.megatron
from energon_ext.megatron import step
from tests.megatron import megatron_lm_on_cpu


class Failure(Exception):
    """A fault of the machine in the middle of a step."""


def fail_once(drawn_path):
    """Fail in the second iteration: virtual stages then wait for micro-batches drawn already."""
    from megatron.training import get_args

    get_batch, drawn, has_failed = step.get_batch, [], []

    def get_or_fail(data_iterator, check=None, **options):
        batch = get_batch(data_iterator, check, **options)
        if not has_failed and get_args().curr_iteration == 1:
            drawn.append(batch)
            # The first stage has sent its first micro-batch and drawn the second one.
            if len(drawn) == (1 if parallel_state.is_pipeline_last_stage() else 2):
                has_failed.append(True)
                Path(drawn_path).unlink(missing_ok=True)
                raise Failure
        return batch

    step.get_batch = energon_ext.megatron.get_batch = get_or_fail


def restart(pretrain):
    from megatron.training import get_args
    from megatron.training.global_vars import set_global_variables
    from megatron.training.inprocess_restart import destroy_state

    def pretrain_again(*arguments, **options):
        try:
            return pretrain(*arguments, **options)
        except Failure:
            args = get_args()
            dist.destroy_process_group()
            destroy_state()
        if version("megatron-core") >= "0.18":  # its `pretrain` parses no options
            set_global_variables(args)
        return pretrain(*arguments, **options)

    return pretrain_again, None


def main():
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore(address, port, ranks, rank == 0)
    numbers, init = itertools.count(), dist.init_process_group

    def init_with_a_part_of_the_store(backend):
        part = dist.PrefixStore(str(next(numbers)), store)
        init(backend, store=part, rank=rank, world_size=ranks)

    dist.init_process_group = init_with_a_part_of_the_store
    record_batches = megatron_lm_on_cpu.record_batches

    def record_and_fail(path, nan_at):
        from megatron.training import inprocess_restart

        record_batches(path, nan_at)
        fail_once(path)
        inprocess_restart.maybe_wrap_for_inprocess_restart = restart

    megatron_lm_on_cpu.record_batches = record_and_fail
    megatron_lm_on_cpu.main()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))
    main()
