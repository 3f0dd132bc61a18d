# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""``energon checkpoint redist``: another number of ranks, the same number of workers in all."""

import torch
from click.testing import CliRunner
from megatron.energon.epathlib import EPath
from megatron.energon.tools.checkpoint import command_redist

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.state_file import read_state_file
from energon_ext.tokenizers import ByteTokenizer
from tests.support import batch_hash, config, loader_for, take, write_dataset, write_mix


def test_four_workers_continue_their_streams_on_two_ranks_and_on_four(tmp_path):
    for source in ("a", "b"):
        write_dataset(tmp_path / source, [f"{source}{n} " * (n % 7 + 1) for n in range(80)])
    mix = write_mix(tmp_path / "mix.yaml", [("a", 2), ("b", 1)])

    def loader(rank, world_size, num_workers):
        encoder = PackedTaskEncoder(ByteTokenizer(), 24, packing_buffer_docs=6)
        return loader_for(
            get_train_dataset(
                mix,
                worker_config=config(num_workers, rank, world_size),
                batch_size=2,
                task_encoder=encoder,
            )
        )

    saved, expected = [], set()
    for rank in range(2):
        running = loader(rank, 2, 2)
        take(running, 6)
        path = tmp_path / f"data_rank{rank:05d}.pt"
        torch.save(running.save_state_rank(), path)
        saved.append(EPath(path))
        expected |= {batch_hash(batch) for batch in take(running, 8)}
    output = tmp_path / "redistributed"
    output.mkdir()
    result = CliRunner().invoke(
        command_redist, [*map(str, saved), str(output), "--new-world-size", "4"]
    )
    assert result.exit_code == 0, result.output
    continued = set()
    for rank in range(4):
        resumed = loader(rank, 4, 1)
        resumed.restore_state_rank(read_state_file(output / f"data_rank{rank:05d}.pt", None))
        continued |= {batch_hash(batch) for batch in take(resumed, 4)}
    assert continued == expected
