# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""What a process asks the file system at a second start does not grow with the pairs of a source.

The calls are those that strace sees with a path, and listings: a file system with its metadata on
a server answers each of them over the network.
"""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from energon_ext.tokens.index import write_index
from tests.support import write_mix

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace"),
]

PAIRS = 2000

START = """
import os, sys
from megatron.energon import WorkerConfig
import energon_ext.encoders.pretrain, energon_ext.loader.data_loader
from energon_ext import ExactDataLoader, PackedTaskEncoder, get_train_dataset
from energon_ext.tokenizers.tokenizers import ByteTokenizer

def begin(ranks):
    dataset = get_train_dataset(
        sys.argv[1],
        worker_config=WorkerConfig(rank=0, world_size=ranks, num_workers=0),
        batch_size=1,
        task_encoder=PackedTaskEncoder(ByteTokenizer(), seq_len=512),
    )
    loader = ExactDataLoader(dataset)
    next(iter(loader))
    loader.state_dict()  # computes the fingerprint

begin(1)  # loads the modules, and checks the files if no process has yet
os.path.exists("/BEGIN")
begin(int(sys.argv[2]))
os.path.exists("/END")
"""


@pytest.fixture(scope="module")
def mixes(tmp_path_factory):
    """Return metadatasets of one source with 20 and with 2 000 pairs."""
    folder, rng = tmp_path_factory.mktemp("many"), np.random.default_rng(0)
    for count in (20, PAIRS):
        (folder / str(count)).mkdir()
        for number in range(count):
            prefix = f"{folder}/{count}/part-{number:04}"
            lengths = rng.integers(1, 100, 100, dtype=np.int32)
            write_index(f"{prefix}.idx", np.dtype("<u2"), lengths)
            rng.integers(0, 250, lengths.sum()).astype("<u2").tofile(f"{prefix}.bin")
        write_mix(folder / f"{count}.yaml", [(str(count), 1)])
    return {count: folder / f"{count}.yaml" for count in (20, PAIRS)}


def calls_of(mix, ranks, folder):
    """Return the calls of a second start, up to its first batch and state."""
    log = folder / "strace"
    command = ["strace", "-f", "-e", "trace=%file,getdents64", "-o", log, sys.executable, "-c"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*command, START, mix, str(ranks)], check=True, env=environment)
    lines = log.read_text(errors="replace").split('"/BEGIN"')[1].split('"/END"')[0].splitlines()
    calls = [line for line in lines if re.match(r"\d+ +\w+\(", line)]
    return [call for call in calls if '""' not in call]  # of a descriptor, not of a path


@pytest.mark.parametrize("ranks", [1, 64])
def test_calls_of_a_second_start_do_not_grow_with_the_pairs(mixes, ranks, tmp_path):
    many = calls_of(mixes[PAIRS], ranks, tmp_path)
    few = calls_of(mixes[20], ranks, tmp_path)
    indices = [call for call in many if ".idx" in call and "openat" in call]
    assert len(indices) < 300, "only documents of the fingerprint and of the first batch"
    if ranks == 64:
        assert len(many) - len(few) <= 300
        assert sum("newfstatat" in call and "/part-" in call for call in many) <= 40
    else:
        assert len(many) <= 2500
