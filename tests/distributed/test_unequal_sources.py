# Copyright (c) 2026, energon_ext contributors.
# SPDX-License-Identifier: BSD-3-Clause
"""Ranks under gloo with sources that are unequal, late, or empty for some: all end together."""

import datetime
import json
import random
import warnings

import pytest
import torch.distributed as dist

from energon_ext import PackedTaskEncoder, get_train_dataset
from energon_ext.errors import EnergonExtError
from energon_ext.megatron import MegatronEnergonLoader
from energon_ext.tokenizers.tokenizers import ByteTokenizer
from tests.megatron import processes
from tests.support import config, write_dataset, write_tokens

SIZES = [1, 2, 3, 5, 8, 13]
MAX_BATCHES = 200


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("unequal")
    for size in SIZES:
        write_dataset(folder / f"web{size}", [f"text {n} of {size}" for n in range(size)])
        write_tokens(folder / f"pair{size}", [[size] * (3 + 5 * n) for n in range(size)])
    return folder


def write_case(folder, seed):
    """Write a mix of up to four limited sources; some have no weight before or after a step."""
    rng = random.Random(seed)
    kinds = rng.choice([["web"], ["pair"], ["web", "pair"]])
    entries = []
    for size in rng.sample(SIZES, rng.randint(1, 4)):
        weight = rng.choice(
            [1, 2, {"step": {0: 0, rng.randint(1, 9): 1}}, {"linear": {0: 2, 9: 0}}]
        )
        path = f"{rng.choice(kinds)}{size}"
        entries.append({"path": path, "weight": weight, "max_epochs": rng.randint(1, 3)})
    head = {"__module__": "energon_ext", "__class__": "ScheduledMetadataset"}
    path = folder / f"mix{seed}.yaml"
    rule = rng.choice(["blend", "interleave"])
    path.write_text(json.dumps({**head, "splits": {"train": {rule: entries}}}))
    return path


def read_to_the_end(path, rank, ranks, workers):
    """Return the number of batches on this rank, and the error that ended them."""
    batches, loader = 0, None
    try:
        dataset = get_train_dataset(
            path,
            worker_config=config(workers, rank, ranks),
            batch_size=1,
            task_encoder=PackedTaskEncoder(ByteTokenizer(), 16, packing_buffer_docs=2),
        )
        loader = MegatronEnergonLoader(dataset)
        for _ in loader:
            batches += 1
            dist.barrier()  # as a training step would
            assert batches < MAX_BATCHES
    except (EnergonExtError, RuntimeError) as error:
        return batches, type(error).__name__, str(error)
    finally:
        if loader is not None:
            loader.close()


def run_rank(rank, ranks, paths, max_workers, folder):
    """Read each case; a rank that raises leaves its group, as if its process had ended."""
    warnings.simplefilter("ignore")
    patience, found = datetime.timedelta(seconds=60), []
    for number, path in enumerate(paths):
        store = dist.FileStore(str(folder / f"store{number}"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=patience)
        found.append(read_to_the_end(path, rank, ranks, number % (1 + max_workers)))
        dist.destroy_process_group()
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


def check_cases(data, folder, ranks, seeds, max_workers=0):
    """Return how many cases ended because all sources were exhausted."""
    paths = [write_case(data, seed) for seed in seeds]
    started = [
        processes.start(run_rank, (rank, ranks, paths, max_workers, folder), folder / f"err{rank}")
        for rank in range(ranks)
    ]
    codes = processes.finish(started)
    assert codes == [0] * ranks, (folder / "err0").read_text()[-3000:]
    found = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    ended = 0
    for path, *of_ranks in zip(paths, *found):
        where = f"{path.name}: {path.read_text()}: {of_ranks}"
        counts, types, _ = zip(*of_ranks)
        assert len(set(counts)) == 1, where
        if set(types) == {"DataExhaustedError"}:
            ended += 1
        else:  # one rank names the problem; the others may only notice that it has left
            assert "ZeroWeightsError" in types, where
            assert set(types) <= {"ZeroWeightsError", "RuntimeError"}, where
    return ended


@pytest.mark.parametrize(("ranks", "seeds"), [(2, range(6)), (4, range(6, 10))])
def test_ranks_with_unequal_sources_make_equally_many_steps(data, tmp_path, ranks, seeds):
    assert check_cases(data, tmp_path, ranks, seeds) >= 2


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(100, 200, 10))
def test_ranks_with_many_unequal_sources_make_equally_many_steps(data, tmp_path, first):
    ranks = 2 + first // 10 % 2 * 2
    assert check_cases(data, tmp_path, ranks, range(first, first + 10), max_workers=1) >= 2
